"""A rank that fails, comes late or stops at any operation of a step: the others end with what it was, or wait for it."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

LONG = pytest.mark.long
REASON = "asked to fail"
STEPS = 2


def train(engine, step, rank, count):
    """One step of a chain, or of a pipeline of `count` micro-batches."""
    from instruments import unequal

    if engine.pipeline is None:
        engine.backward(unequal.loss_of(engine, unequal.rows_of(step, rank)))
        engine.step()
    else:
        ids = torch.arange(step, step + 8).view(2, 4)
        engine.train_batch([{"input_ids": ids + 8 * place} for place in range(count)])


def left_behind(engine):
    """What an engine still has of a step that died: (micro-batches, whether gradients wait, memory of its buckets)."""
    engine.zero_grad()
    return engine.accumulation.count, engine.reductions.pending, float(engine.arena.live("bucket"))


def end_with(error, engine, mesh):
    """What a process does that ends by an error: it leaves a note; (error, what is left) of a rank that lost a peer."""
    from zero3d.distributed.axis import leave_note

    error.steps = engine.steps
    leave_note(f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1))
    if REASON not in str(error) or "rank" in str(error):
        error.left = left_behind(engine)
    mesh.close()  # waits for nobody
    raise error


def run(shape, plan):
    """Results of two ranks, and what each asked of its groups; shape: "stage 3", "stage 2" or the name of a schedule."""
    from instruments import groups, rendezvous, unequal

    import zero3d

    pipeline = not shape.startswith("stage")
    models = [unequal.Tokens(4) if pipeline else unequal.Chain(3) for _ in range(2)]
    options = {"precision": "fp64", "optimizer": unequal.sgd, "clip_norm": None}
    if pipeline:
        options |= {"stage": 1, "schedule": shape, "accumulate": 3, "blocks": "blocks"}
        options["loss"] = lambda output, given: (output.square().sum(), float(len(output)))
    else:
        options |= {"stage": int(shape[-1]), "units": [unequal.Block]}

    def case():
        mesh = zero3d.Mesh(pp=2) if pipeline else zero3d.Mesh(dp=2)
        engine = zero3d.Engine(models[mesh.rank], mesh=mesh, **options)
        try:
            for step in range(STEPS):
                rendezvous.mark()
                train(engine, step, mesh.rank, 3)
            rendezvous.mark()
        except Exception as error:
            end_with(error, engine, mesh)
        with engine.full_params():
            chunks = engine.chunks.values() if pipeline else [engine.module]
            return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]

    return groups.each_on_a_thread(2, case, plan)


def fail(fabric):
    raise ValueError(REASON)


def at(rank, place, how, fabric, who, count):
    """Do something on one rank before it asks for an operation, by its number among all of its."""
    if (who, count) == (rank, place):
        how(fabric)


def outcomes(shape, every):
    """(kind, rank, operation, what the rank did, what the other one did) at each operation of the second step."""
    from instruments import groups

    usual, logs = run(shape, lambda *_: None)
    kinds = {"fails": fail, "comes late": groups.Fabric.come_late, "stops": groups.Fabric.stop}
    found = []
    for rank, log in enumerate(logs):
        asked = [entry for entry in log if isinstance(entry, groups.Operation)]
        _, start, stop = (place for place, entry in enumerate(asked) if entry.op == "mark")
        for number, place in enumerate(range(start + 1, stop)):
            for kind, how in kinds.items():
                if every or (number + rank) % 7 == 0:
                    results, _ = run(shape, partial(at, rank, place, how))
                    found.append((kind, rank, asked[place], *described(results, rank, usual)))
    return found


def described(results, rank, usual):
    """What the rank did, and the other one: "trained as usual", or an error in words, and what it has left behind."""
    told = []
    for who in (rank, 1 - rank):
        result = results[who]
        if isinstance(result, BaseException):
            told.append(
                (f"{type(result).__name__}: {result}", *(getattr(result, name, None) for name in ("steps", "left")))
            )
        else:
            same = all(torch.equal(a, b) for a, b in zip(result, usual[who], strict=True))
            told.append(("trained as usual" if same else "trained otherwise", STEPS, None))
    return told


CASES = [
    ("stage 3", False), ("1f1b", False),
    *(pytest.param(shape, True, marks=LONG) for shape in ("stage 3", "stage 2", "1f1b")),
]  # fmt: skip
TRAINED = ("trained as usual", STEPS, None)
NOTHING = (0, False, 0.0)


@pytest.mark.parametrize(("shape", "every"), CASES)
def test_at_each_operation_of_a_step_the_others_end_with_the_name_or_wait(alone, shape, every):
    found = alone(outcomes, shape, every)
    assert {kind for kind, *_ in found} == {"fails", "comes late", "stops"}
    assert {rank for _, rank, *_ in found} == {0, 1}
    for kind, rank, operation, own, other in found:
        case = kind, rank, operation
        if kind == "comes late":
            assert (case, own, other) == (case, TRAINED, TRAINED)
            continue
        said, steps, left = other
        assert (case, own[0].partition(":")[0]) == (case, "Stopped" if kind == "stops" else "ValueError")
        if other == TRAINED:  # it had all that it needed of this rank
            continue
        axes = ["dp"] if shape.startswith("stage") else ["pp", "world"]
        assert any(f"rank {1 - rank} of axis {axis} waited" in said for axis in axes), (case, said)
        sends_new_weights = shape == "stage 2" and operation.op == "all_gather"
        assert (case, left) == (case, NOTHING)
        assert steps == (STEPS if sends_new_weights and steps == STEPS else STEPS - 1), case
        if kind == "fails":
            assert f"ValueError: {REASON}" in said, (case, said)
            assert f"rank {rank}" in said, (case, said)
        else:
            assert said.startswith("OrderError: "), (case, said)
            assert "no peer came" in said, (case, said)
