"""Masters in halves (master="split"): the bits of fp32 masters, whatever else an engine does, and checkpoints of either."""

import pytest
import torch
import torch.distributed as dist
from buckets import buckets_of
from meshes import engine_of as mesh_engine_of, mesh_of, step, world_of
from models import adamw, batch, bits, build, loss_of
from pipelines import covering
from tensors import tiny

import zero3d

BOTH = ("fp32", "split")
STEPS, OVERFLOW = 3, 1  # the second step's gradients are infinite


def foreach_adam(params):
    return torch.optim.Adam(params, lr=1e-2, foreach=True)


def momentum(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1)


def as_it_is(model):
    """One group, nothing frozen."""


def frozen_blocks(model):
    """Half of the blocks as an adapter leaves them: matrices are frozen, vectors are trained."""
    for name, p in model.named_parameters():
        p.requires_grad_(not (name.startswith(("layers.0", "layers.2", "embed")) and p.dim() > 1))


def grouped(model):
    return [{"match": "*norm*|*.bias", "weight_decay": 0.0, "lr": 3e-2}]


DP = (1, 2, 4)
STAGES = ((0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"), (3, "every_step"))  # stage, release
MOMENTS = ((1, "auto"), (2, "auto"), (2, "every_step"))  # micro-batches, reduce
KINDS = (
    ("net", adamw, as_it_is), ("net", foreach_adam, frozen_blocks), ("net", momentum, grouped),
    ("tied", adamw, grouped),
)  # fmt: skip
SETTINGS = (DP, STAGES, MOMENTS, (0.05, None), (False, True), KINDS)  # clip, exact
FEW = [
    (1, (0, "auto"), (2, "auto"), 0.05, False, KINDS[0]), (2, (3, "auto"), (1, "auto"), 0.05, True, KINDS[3]),
    (2, (2, "auto"), (2, "every_step"), None, False, KINDS[1]), (2, (1, "auto"), (1, "auto"), 0.05, False, KINDS[2]),
    (4, (0, "auto"), (1, "auto"), None, True, KINDS[1]), (4, (3, "every_step"), (2, "auto"), 0.05, False, KINDS[2]),
]  # fmt: skip


def trained(case, master):
    """Losses, norms and outcomes of some steps, the fingerprint and the weights, then once more after a write."""
    _, (stage, release), (micro_batches, reduce), clip, exact, (name, optimizer, changed) = case
    rank, found = dist.get_rank(), []
    model = build(name, width=40)
    groups = changed(model)
    with buckets_of(528 if exact else 1024):
        engine = zero3d.Engine(
            model, stage=stage, release=release, reduce=reduce, accumulate=micro_batches, clip_norm=clip, exact=exact,
            optimizer=optimizer, param_groups=groups, master=master,
        )  # fmt: skip
        for number in range(STEPS):
            for m in range(micro_batches):
                loss = loss_of(engine, batch(10 * number + m, rank))
                engine.backward(loss * float("inf") if number == OVERFLOW and m == 0 else loss)
                found.append(float(loss.detach()))
                result = engine.step()
            found += [repr(float(result.grad_norm)), result.reason]
    with engine.full_params():
        found.append(bits(engine.module.parameters()))
    planned = {entry.category: (entry.planned, entry.measured) for entry in engine.memory if entry.planned is not None}
    return [*found, engine.fingerprint()], planned


def both(cases):
    return [[trained(case, master) for master in BOTH] for case in cases]


def check(ranks, cases):
    for world in DP:
        of_world = [case for case in cases if case[0] == world]
        for of_rank in ranks(world, both, of_world):
            for case, ((stored, _), (split, bytes_)) in zip(of_world, of_rank, strict=True):
                assert split == stored, case
                assert "overflow" in split
                assert split.count("applied") == STEPS - 1
                for category, (planned, measured) in bytes_.items():
                    assert planned == measured, (category, case)


@pytest.mark.long
@pytest.mark.parametrize("dp", [dp if dp == 2 else pytest.param(dp, marks=pytest.mark.long) for dp in DP])
def test_whatever_else_an_engine_does_the_bits_are_those_of_fp32_masters(ranks, dp):
    check(ranks, [case for case in FEW if case[0] == dp])


@pytest.mark.long
def test_all_pairs_of_settings_have_the_bits_of_fp32_masters(ranks):
    check(ranks, covering(SETTINGS))


# --- tensor parallel, pipelines -------------------------------------------------------------------


def on_mesh(family, shape, stage, schedule, folder):
    """Losses, norms, what was written into parameters, and the fingerprint before and after a resume with the other."""
    found = {}
    for master in BOTH:
        torch.manual_seed(dist.get_rank())
        with buckets_of(1024):
            engine = mesh_engine_of(
                tiny(family, kv_heads=4, layers=4), mesh_of(shape), stage=stage, schedule=schedule, precision="bf16",
                optimizer=adamw, master=master,
            )  # fmt: skip
            record = found[master] = [step(engine, 0), engine.fingerprint()]
            with engine.full_params(), torch.no_grad():
                for chunk in engine.chunks.values():
                    for p in chunk.parameters():
                        p.view(-1)[::3].mul_(1.5)
            record += [engine.fingerprint(), step(engine, 1), engine.fingerprint()]
            engine.save(f"{folder}/{master}")
            engine.load(f"{folder}/{BOTH[1 - BOTH.index(master)] if master == 'split' else master}")
            record += [step(engine, 2), engine.fingerprint()]
    return found


MESHES = [("qwen3", (1, 1, 2), 3, "1f1b"), ("llama", (1, 2, 1), 1, None)]


def check_mesh(ranks, tmp_path, family, shape, stage, schedule):
    for found in ranks(world_of(shape), on_mesh, family, shape, stage, schedule, str(tmp_path)):
        assert found["split"] == found["fp32"]
        before, written, *_ = found["split"][1:]
        assert written != before


@pytest.mark.long
@pytest.mark.parametrize(("family", "shape", "stage", "schedule"), [
    MESHES[0], pytest.param(*MESHES[1], marks=pytest.mark.long),
])  # fmt: skip
def test_on_a_mesh_the_bits_are_those_of_fp32_masters(ranks, tmp_path, family, shape, stage, schedule):
    check_mesh(ranks, tmp_path, family, shape, stage, schedule)


@pytest.mark.long
@pytest.mark.parametrize(("family", "shape", "stage", "schedule"), [
    ("qwen3", (2, 1, 2), 0, "gpipe"), ("gpt2", (1, 1, 2), 1, "zbv"), ("qwen3", (2, 1, 2), 2, "interleaved"),
    ("qwen3", (1, 2, 2), 3, "zero-bubble"), ("llama", (2, 2, 1), 0, None), ("gpt2", (2, 2, 1), 3, None),
])  # fmt: skip
def test_on_more_meshes_the_bits_are_those_of_fp32_masters(ranks, tmp_path, family, shape, stage, schedule):
    check_mesh(ranks, tmp_path, family, shape, stage, schedule)


# --- checkpoints ----------------------------------------------------------------------------------


def resumed(stages, masters, folder):
    """Three steps, and the same with a checkpoint after the second that goes on in another form at another stage."""
    rank, found = dist.get_rank(), []

    def train(engine, numbers):
        for number in numbers:
            engine.train_batch([batch(number, rank)], wait=False)

    with buckets_of(1024):
        engines = [
            zero3d.Engine(
                build("tied", width=40), stage=stage, optimizer=adamw, master=master, loss=loss, reduce="every_step"
            )
            for stage, master in zip(stages, masters, strict=True)
        ]
        train(engines[0], range(2))
        saved = engines[0].save(folder)  # new weights may be on their way
        train(engines[0], [2])
        found.append(engines[0].fingerprint())
        engines[1].load(saved)
        train(engines[1], [2])
        found.append(engines[1].fingerprint())
        engines[1].load(saved)
        return found, engines[1].save(f"{folder}-again"), saved


def loss(output, ids):
    return loss_of(lambda _: output, ids) * 3.0, 3.0


@pytest.mark.parametrize(("world", "stages", "masters"), [
    (2, (1, 1), ("split", "fp32")),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (2, (1, 3), ("fp32", "split")), (2, (3, 0), ("split", "split")),
    )),
])  # fmt: skip
def test_checkpoints_hold_fp32_masters_and_go_on_in_either_form(ranks, tmp_path, world, stages, masters):
    for (straight, again), _, _ in ranks(world, resumed, stages, masters, str(tmp_path / "saved")):
        assert again == straight


# --- writes ---------------------------------------------------------------------------------------


def written_apart(stage, master):
    """Weights after every rank has written other values, and after a step; the fingerprint."""
    rank, found = dist.get_rank(), []
    engine = zero3d.Engine(build("net", width=96), stage=stage, optimizer=adamw, master=master)
    for number in range(2):
        engine.backward(loss_of(engine, batch(number, rank)))
        engine.step()
        with engine.full_params(), torch.no_grad():
            found.append(bits(engine.module.parameters()))
            for p in engine.module.parameters():
                p.view(-1)[rank::3].mul_(1.5 + rank)
    with engine.full_params():
        found.append(bits(engine.module.parameters()))
    return [*found, engine.fingerprint()]


@pytest.mark.parametrize("forms", [
    [(0, "fp32"), (1, "split"), (3, "split")],
    pytest.param([(stage, master) for stage in (0, 1, 3) for master in BOTH], marks=pytest.mark.long),
], ids=len)  # fmt: skip
def test_of_what_ranks_write_apart_the_owner_of_each_slice_wins_at_all_stages(ranks, forms):
    """The second step begins from what is stored: masters that differed between ranks would show."""
    found = [ranks(2, written_apart, stage, master) for stage, master in forms]
    assert all(of_rank == found[0][0] for of_all in found for of_rank in of_all)
