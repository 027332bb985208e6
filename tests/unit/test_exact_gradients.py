"""Gradients of exact mode on two ranks in one process: the written-out tree, whatever a step's length, and its memory."""

from types import SimpleNamespace

import pytest
import torch
from blueprints import unit_plan

from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.stages import counter_buffers
from zero3d.distributed.axis import Pending
from zero3d.distributed.collectives import same_memory
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.precision import torch_dtype
from zero3d.zero.exact.gradients import ExactGradients
from zero3d.zero.exact.summands import Summands
from zero3d.zero.unit_parts import UnitParts

N, SHAPES = 2, [("a", (3, 2), 0), ("b", (20_000,), 0)]
NUMEL = 20_006
DTYPE, WIDE = torch.bfloat16, torch.float32


class Paired:
    """One of two ranks that trade slots when both have sent and one of them waits."""

    size = N

    def __init__(self, rank, sent):
        self.rank, self._sent = rank, sent

    def travels(self, local, wire):
        return local

    def all_to_all(self, full, unit, take):
        slots = list(full.view(N, -1))
        self._sent[self.rank] = [slot.clone() for slot in slots]
        self.travelled = full.dtype

        def finish():
            parts = [self._sent[rank][self.rank] for rank in range(N)]
            parts[self.rank] = slots[self.rank]
            take(parts)

        return Pending(finish)


class Rank:
    def __init__(self, rank, sent, stage, reduce, planned):
        self.arena, self.comm = Arena(torch.device("cpu")), Paired(rank, sent)
        plan = unit_plan(stage, N, exact=True, reduce=reduce, accumulate=planned)
        self.parts = UnitParts(plan, self.comm, self.arena, SimpleNamespace(size=1))
        self.summands = Summands(self.comm, reduce == "every_step", planned, 0)
        self.layout = UnitLayout(SHAPES, N)
        self.grads = ExactGradients(self.summands, "unit", self.layout, self.parts)


def halves(values):
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return halves(values[:half]) + halves(values[half:])


def summand(step, number):
    """A micro-batch's gradients; every third has none for the second parameter."""
    generator = torch.Generator().manual_seed(100 * step + number)
    grads = [torch.randn(shape, generator=generator).to(DTYPE) for _, shape, _ in SHAPES]
    return grads[:1] if number % 3 == 1 else grads


def summed(step, count, layout):
    """The sum of so many summands in the tree, as a unit's storage."""
    whole = []
    for number in range(count):
        whole.append(torch.zeros(layout.total))
        for slot, grad in zip(layout.slots, summand(step, number), strict=False):
            whole[-1][slot.start : slot.start + slot.numel] = grad.flatten().float()
    return halves(whole)


def is_sum(rank, wanted):
    """Whether the shard is this rank's part of a storage, padding apart."""
    slot, shard = rank.parts.slot(wanted), rank.grads.shard
    cells = [slice(p.offset, p.offset + p.stop - p.start) for p in rank.layout.pieces(rank.comm.rank)]
    return bool(cells) and all(torch.equal(shard[cell], slot[cell]) for cell in cells)


def run(ranks, step, micro_batches):
    """Gradients of a step, from its first backward to the end of its last reduction."""
    for rank in ranks:
        rank.summands.begin(micro_batches)
    for k in range(micro_batches):
        reduces = k == micro_batches - 1 or not ranks[0].summands.per_step
        for rank in ranks:
            for index, grad in enumerate(summand(step, rank.summands.number(k))):
                rank.grads.hold(index, grad)
            if reduces:
                rank.grads.fill_up()
                rank.grads.reduce(single=True)
            else:
                rank.grads.close()
                assert rank.arena.live("bucket") == 0
        for rank in ranks if reduces else ():
            rank.grads.finish()
    for rank in ranks:
        rank.grads.complete()


def check_memory(rank, most, alone):
    """As `account.states.unit_bytes` and the arena have it, and nothing on its way."""
    layout, sharded = rank.layout, alone or not rank.summands.per_step
    assert rank.grads.unit_plan.policy.summands == most
    assert len(rank.grads.buffers) == counter_buffers(most)
    elements = counter_buffers(most) * (layout.shard if sharded else layout.total)
    assert rank.arena.held("gradients") + rank.arena.held("padding") == 4 * elements
    assert rank.arena.held("gradients") * layout.total == 4 * elements * NUMEL
    assert rank.arena.live("bucket") == rank.arena.live("wire") == 0


@pytest.mark.parametrize(("stage", "reduce", "steps"), [
    (3, "every_micro_batch", (1, 3, 2, 1)), (1, "every_step", (1, 1, 2, 4, 1)), (0, "every_step", (1, 4, 2)),
    (2, "every_step", (2, 1, 2)),
])  # fmt: skip
def test_steps_of_any_length_are_summed_in_the_tree_in_the_planned_memory(stage, reduce, steps):
    sent = [None] * N
    ranks = [Rank(rank, sent, stage, reduce, steps[0]) for rank in range(N)]
    most = 0
    for step, micro_batches in enumerate(steps):
        most = max(most, micro_batches)
        run(ranks, step, micro_batches)
        wanted = summed(step, N * micro_batches, ranks[0].layout)
        alone = most == 1 and reduce == "every_step" and stage > 0
        for rank in ranks:
            assert is_sum(rank, wanted)
            wide = reduce == "every_step" and micro_batches > 1
            assert rank.comm.travelled == (WIDE if wide else DTYPE)
            assert torch_dtype(rank.grads.plan.travels) == (WIDE if reduce == "every_step" and most > 1 else DTYPE)
            if stage == 0:  # where all ranks' are gathered next
                assert same_memory(rank.grads.shard, rank.parts.slot(rank.grads.reduced.whole))
            check_memory(rank, most, alone)
            rank.grads.reset()


def test_what_is_closed_already_is_no_summand_once_more():
    """Where no root forward announced that this is the last one, the step's end reduces what was closed."""
    sent = [None] * N
    ranks = [Rank(rank, sent, 1, "every_step", 2) for rank in range(N)]
    for rank in ranks:
        for k in range(2):
            for index, grad in enumerate(summand(0, rank.summands.number(k))):
                rank.grads.hold(index, grad)
            rank.grads.close()
        rank.grads.fill_up()
        rank.grads.reduce(single=False)
    for rank in ranks:
        rank.grads.complete()
        assert is_sum(rank, summed(0, 4, rank.layout))
        check_memory(rank, 2, alone=False)
        with pytest.raises(ConfigError, match="a backward came after the last one of its step"):
            rank.grads.hold(0, summand(0, 0)[0])
