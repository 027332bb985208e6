"""Both algorithms against a plain sum: reductions of several micro-batches, in place and not, wide and narrow."""

import os
import re
import time
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import batch, build, loss_of

import zero3d
from zero3d.distributed import choice, collectives
from zero3d.distributed.algorithms import Native, Pairwise
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.shared_buffer import NAME, SharedBuffer, attach
from zero3d.memory.arena import Arena
from zero3d.precision import DTYPES, to_compute

ALGORITHMS = ("pairwise", "native")
MICRO_BATCHES, SHARD = 3, 48


def whole_numbers(rank, micro_batch, total):
    """Small ones: every sum of them is exact, in bf16 too, in whatever order."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    return torch.randint(-8, 9, (total,), generator=generator)


def reduced(algorithm):
    """(local dtype, wire dtype, in place) -> this rank's shard after every micro-batch; what is left in the arena."""
    arena, mesh = Arena(torch.device("cpu")), zero3d.Mesh()
    comm, outcome = Comm(mesh.data, arena, Ledger()), {}
    comm._algorithm = {"pairwise": Pairwise, "native": Native}[algorithm](mesh.data, arena)
    total = SHARD * comm.size
    for local, wire, in_place in product((torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16), (0, 1)):
        if in_place and local != torch.float32:
            continue
        full, shard, seen = torch.empty(total, dtype=local), torch.zeros(SHARD), []
        for m in range(MICRO_BATCHES):
            full.copy_(whole_numbers(comm.rank, m, total))
            shard = full.view(comm.size, -1)[comm.rank] if in_place else shard
            comm.reduce_scatter(full, shard, "unit", wire, add=m > 0 and not in_place).wait()
            seen.append(shard.tolist())
        outcome[str(local), str(wire), in_place] = seen
    return outcome, float(arena.live("wire"))


@pytest.mark.parametrize(("world", "algorithm"), [(2, "pairwise"), (4, "pairwise"), (2, "native"), (4, "native")])
def test_a_reduction_is_the_plain_sum_over_ranks_and_is_added_to_what_was_there(ranks, world, algorithm):
    for rank, (outcome, left) in enumerate(ranks(world, reduced, algorithm)):
        sums = torch.stack(
            [sum(whole_numbers(r, m, SHARD * world) for r in range(world)) for m in range(MICRO_BATCHES)]
        ).view(MICRO_BATCHES, world, SHARD)[:, rank]
        assert len(outcome) == 6
        for (_, _, in_place), seen in outcome.items():
            assert seen == (sums if in_place else sums.cumsum(0)).tolist()
        assert left == 0


def gathered_by_the_first(far):
    """What rank 0 has of shards of two dtypes, with ranks that have no memory of its; who wrote, the bytes sent."""
    ledger, mesh = Ledger(), zero3d.Mesh()
    comm, found = Comm(mesh.data, Arena(torch.device("cpu")), ledger), []
    own = SharedBuffer(8 * SHARD * comm.size, torch.device("cpu")) if comm.rank == 0 else None
    with mock.patch.object(collectives, "attach", (lambda *_: None) if comm.rank in far else attach):
        with comm.receiving(own, 8 * SHARD * comm.size):
            if own:
                own.close()
            for turn, dtype in enumerate((torch.float32, torch.float64)):
                shard = (torch.arange(SHARD) + 100 * comm.rank + 1000 * turn).to(dtype)
                if comm.rank:
                    time.sleep(0.01)  # for which the first one must wait
                full = comm.gather_to_first(shard, "unit")
                found += [] if full is None else [full.tolist()]
                dist.barrier()
            near = sorted(comm._near)
    own = full = None
    return found, near, sum(entry.bytes for entry in ledger if entry.op == "gather"), held_buffers()


def held_buffers():
    """Open files and mappings of receive buffers in this process."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [text for text in (*files, *Path("/proc/self/maps").read_text().splitlines()) if NAME in text]


@pytest.mark.parametrize(("world", "far"), [(3, ()), (3, (2,)), (2, (1,)), (1, ())])
def test_the_first_rank_alone_gathers_shards_of_all_whether_they_write_or_send(ranks, world, far):
    (found, near, sent, left), *others = ranks(world, gathered_by_the_first, far)
    shards = [i + 100 * rank for rank in range(world) for i in range(SHARD)]
    assert found == [shards, [1000 + value for value in shards]]
    assert near == [rank for rank in range(1, world) if rank not in far]
    assert (sent, left) == (0, [])
    assert others == [([], near, (4 + 8) * SHARD, [])] * (world - 1)


def left_in_a_gather(who):
    """One of two ranks goes away before it writes, or says that there is room; what the other one says."""
    comm = Comm(zero3d.Mesh().data, Arena(torch.device("cpu")), Ledger())
    own = None if comm.rank else SharedBuffer(8 * SHARD, torch.device("cpu"))
    with comm.receiving(own, 8 * SHARD):
        if comm.rank == who:
            return None
        with pytest.raises(zero3d.Zero3dError) as lost:
            comm.gather_to_first(torch.zeros(SHARD), "unit")
    return str(lost.value)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_goes_away_in_a_gather_to_the_first_is_named(ranks, who):
    said = ranks(2, left_in_a_gather, who, group_timeout=3.0)[1 - who]
    assert re.match(rf"rank {1 - who} of axis dp waited .* for rank {who} of that axis in gather of unit 'unit'", said)


CASES = [(0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"), (3, "every_step")]


def gradients(algorithm, precision):
    """Of a step of three micro-batches in each of CASES: this rank's pieces by (case, name)."""
    choice.PAIRWISE_MAX_RANKS = 8 if algorithm == "pairwise" else 0
    try:
        outcome = {}
        for stage, reduce in CASES:
            engine = zero3d.Engine(build("net", width=96), stage=stage, reduce=reduce, precision=precision,
                                   accumulate=MICRO_BATCHES, clip_norm=None)  # fmt: skip
            assert engine.dp.algorithm == algorithm
            for m in range(MICRO_BATCHES):
                engine.backward(loss_of(engine, batch(m, dist.get_rank())))
            engine.reductions.catch_up()
            for owned, grad in engine.optimizer.shard_grads():
                start = {p.slot: p for p in owned.unit.layout.pieces(engine.dp.rank)}[owned.piece.slot].start
                outcome[stage, reduce, owned.name] = start, grad.clone()
        return outcome
    finally:
        choice.PAIRWISE_MAX_RANKS = 8


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_native_and_pairwise_gradients_of_several_micro_batches_are_those_of_a_plain_sum(ranks, precision):
    pairwise, native = (ranks(2, gradients, algorithm, precision) for algorithm in ALGORITHMS)
    plain = build("net", width=96)
    for p in plain.parameters():
        p.data = to_compute(p.data, DTYPES[precision])  # torch's own cast rounds ties otherwise
    wanted = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in plain.named_parameters()}
    for m, rank in product(range(MICRO_BATCHES), range(2)):
        plain.zero_grad()
        loss_of(plain, batch(m, rank)).backward()
        for name, p in plain.named_parameters():
            wanted[name] += p.grad.flatten().double()
    for one, other in zip(pairwise, native, strict=True):
        assert one.keys() == other.keys()
        assert {(stage, reduce) for stage, reduce, _ in one} == set(CASES)
        for (stage, reduce, name), (start, values) in one.items():
            same = other[stage, reduce, name]
            assert same[0] == start
            assert torch.equal(same[1], values), (stage, reduce, name)  # two ranks: a sum has but one order
            whole = wanted[name][start : start + values.numel()]
            assert float((values - whole).norm()) <= 1e-6 * float(wanted[name].norm()), (stage, reduce, name)
