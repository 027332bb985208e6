"""The reductions of NCCL's ranks, run over gloo: narrow terms by an all-to-all have the bits of messages, and the
formulas' bytes; wide ones and `reduce_scatter="native"` are the backend's. Ranks choose alike, whatever each is told of
its host.
"""

import os
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, build, loss_of

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.distributed import collectives
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.engine.foundation import Axes
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.tools.sim.group import FakeAxis
from zero3d.zero.tokens import count_gathers

SHARD = 64


@contextmanager
def as_on_nccl():
    """Axes choose their algorithms as if gloo were NCCL."""
    rule = collectives.choose_algorithm
    with mock.patch.object(collectives, "choose_algorithm", lambda backend, *rest: rule("nccl", *rest)):
        yield


def terms_of(rank, world):
    """[world, SHARD] bf16 values of so many magnitudes that sums of them in fp32 are rounded."""
    generator = torch.Generator().manual_seed(rank)
    size = world, SHARD
    return (torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 7, size, generator=generator)).bfloat16()


def summed(kept, added):
    """This rank's shard of a sum, what its terms moved and what is left on the arena's account, on NCCL and gloo."""
    mesh, outcome = zero3d.Mesh(), []
    for rule in (as_on_nccl, None):
        arena, ledger = Arena(torch.device("cpu")), Ledger()
        with rule() if rule else nullcontext():
            comm = Comm(mesh.data, arena, ledger, reduce_scatter="auto")
        full = terms_of(comm.rank, comm.size).to(kept).view(-1)
        in_place = kept == torch.float32 and not added
        shard = full.view(comm.size, -1)[comm.rank] if in_place else torch.full((SHARD,), float(added))
        comm.reduce_scatter(full, shard, "unit", torch.bfloat16, added).wait()
        [entry] = ledger
        outcome.append((comm.algorithm, shard.clone(), entry.op, entry.bytes, float(arena.live("wire"))))
    return outcome


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kept", "added"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
def test_narrow_terms_are_added_in_rank_order(ranks, world, kept, added):
    every = [terms_of(rank, world).float() for rank in range(world)]
    differ = 0
    for rank, outcome in enumerate(ranks(world, summed, kept, added)):
        wanted = sum(term[rank] for term in every) + float(added)
        differ += int((sum(term[rank] for term in every[::-1]) + float(added) != wanted).sum())
        for name, (algorithm, shard, op, moved, left) in zip(("all-to-all", "pairwise"), outcome, strict=True):
            assert (algorithm, op, moved, left) == (name, "reduce_scatter", 2 * SHARD * (world - 1), 0)
            assert torch.equal(shard, wanted)
    assert differ > 0 or world == 2  # another order would have been seen


def stepped(stage, micro_batches, precision, reduce_scatter, nccl):
    """Two steps: algorithm, fingerprint, formula and ledger of the second one, bytes of buffers that travelled."""
    rank, begun = dist.get_rank(), []
    with as_on_nccl() if nccl else nullcontext():
        engine = zero3d.Engine(
            build("net"), stage=stage, precision=precision, accumulate=micro_batches, optimizer=adamw, clip_norm=0.05,
            reduce_scatter=reduce_scatter,
        )  # fmt: skip
    borrow = engine.arena.borrow

    def seen(category, elements, dtype, **more):
        begun.append((category, elements, dtype))
        return borrow(category, elements, dtype, **more)

    engine.arena.borrow = seen
    for step in range(2):
        engine.traffic.reset()
        engine.gathers.events = []
        begun.clear()
        for m in range(micro_batches):
            engine.backward(loss_of(engine, batch(step * 10 + m, rank)))
        wire = sum(elements * dtype.itemsize for category, elements, dtype in begun if category == "wire")
        engine.step()  # has scratch of its own
    planned = step_traffic(
        stage, engine.traffic_units, engine.dp.size, count_gathers(engine.gathers.events), micro_batches
    )
    measured = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    assert engine.arena.live("wire") == 0
    units = {unit.name: unit.layout.total for unit in engine.units}
    return engine.dp.algorithm, engine.fingerprint(), {k: tuple(v) for k, v in planned.items()}, measured, wire, units


CASES = [
    (4, 1, 1, "bf16"), (2, 0, 1, "fp16"), (2, 3, 2, "bf16"),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in [(4, 3, 2, "bf16"), (4, 0, 1, "bf16"), (4, 2, 2, "bf16"), (4, 3, 1, "fp16")]),
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage", "micro_batches", "precision"), CASES)
def test_a_step_has_the_bits_of_messages_and_the_bytes_of_its_formula(ranks, world, stage, micro_batches, precision):
    given = stage, micro_batches, precision, "auto"
    ours, messages = ranks(world, stepped, *given, True), ranks(world, stepped, *given, False)
    for (algorithm, fingerprint, planned, measured, wire, units), other in zip(ours, messages, strict=True):
        assert (algorithm, other[0]) == ("all-to-all", "pairwise")
        assert fingerprint == other[1]
        assert measured == planned
        moved = {unit: figures for (op, unit), figures in measured.items() if op == "reduce_scatter"}
        assert {unit: figures[1] * 2 for unit, figures in moved.items()} == {u: f[2] for u, f in moved.items()}
        received = 2 * sum(units.values()) * micro_batches
        cast = received if stage == 0 else 0
        added = sum(units.values()) // world * 4 if micro_batches > 1 else 0
        assert wire == received + cast + added


@pytest.mark.parametrize(
    ("stage", "micro_batches", "precision", "reduce_scatter"),
    [
        (1, 2, "bf16", "auto"),
        (3, 1, "fp32", "auto"),
        (3, 1, "bf16", "native"),
        pytest.param(3, 1, "fp32", "all-to-all", marks=pytest.mark.long),
    ],
)
def test_sums_wide_terms_and_what_is_asked_for_are_the_backends(ranks, stage, micro_batches, precision, reduce_scatter):
    for nccl in (True, False):
        for algorithm, _, planned, measured, _, _ in ranks(
            2, stepped, stage, micro_batches, precision, reduce_scatter, nccl
        ):
            expected = reduce_scatter if reduce_scatter != "auto" else "all-to-all" if nccl else "pairwise"
            assert algorithm == expected
            assert measured == planned
            assert all(f[2] == 4 * f[1] for (op, _), f in measured.items() if op == "reduce_scatter")


def refused():
    with pytest.raises(ConfigError, match="reduce_scatter='ring' is unknown: type one of auto, native, all-to-all"):
        zero3d.Engine(build("net"), reduce_scatter="ring")


def test_other_ways_of_reducing_are_refused(ranks):
    ranks(1, refused)


# --- which way, on several hosts ----------------------------------------------------------------


class MeshOnNccl(zero3d.Mesh):
    """Its axes say that they are NCCL's, and gloo carries them."""

    def open_axis(self, name):
        axis = super().open_axis(name)
        if axis.size == 1:
            return axis
        meet = self._through_the_store(name, self._ranks(name))
        return FakeAxis(name, axis.rank, axis.size, axis.gathers, axis.reductions, meet=meet)


def chosen(tp, said):
    """The algorithm of an engine's data axis, a fingerprint, and what opening axes sent, on NCCL's ranks and gloo's."""
    local = {} if said[dist.get_rank()] is None else {"LOCAL_WORLD_SIZE": str(said[dist.get_rank()])}
    with mock.patch.dict("os.environ", local):
        if not local:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        sent = [Axes.of(kind(tp=tp), "auto").ledger for kind in (MeshOnNccl, zero3d.Mesh)]
        engine = zero3d.Engine(build("net"), mesh=MeshOnNccl(tp=1), stage=2, optimizer=adamw)
    traffic = [entry.op for entry in engine.traffic]
    engine.backward(loss_of(engine, batch(0, dist.get_rank())))
    engine.step()
    return engine.dp.algorithm, [[(e.op, e.axis, e.calls) for e in ledger] for ledger in sent], traffic


@pytest.mark.parametrize(("said", "algorithm"), [
    ((1, 3, None, 1), "native"), ((1, 1, 2, None), "all-to-all"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ((3, 3, 3, 1), "native"), ((2, 2, 2, 2), "all-to-all"), ((4, 1, 1, 1), "all-to-all"), ((None,) * 4, "all-to-all"),
    )),
])  # fmt: skip
def test_ranks_that_are_told_different_numbers_choose_alike(ranks, said, algorithm):
    for found, sent, traffic in ranks(4, chosen, 1, said):
        assert found == algorithm
        assert sent == [[("exchange", "dp", 1)], []]  # nothing on gloo
        assert traffic == []  # construction does not count


def test_they_tell_each_other_over_all_axes(ranks):
    assert all(sent == [[("exchange", "world", 1)], []] for _, sent, _ in ranks(4, chosen, 2, (4,) * 4))
