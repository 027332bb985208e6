"""When a sent gradient is known to have arrived: never before it has, and not much later."""

import pytest

from zero3d.pipeline.acknowledgements import Work, acknowledgements, work_of
from zero3d.pipeline.schedules import Schedule
from zero3d.tools.plan.in_flight import _under_way, actions_of_rank

CASES = [("interleaved", 2, 8), ("interleaved", 4, 12), ("zero-bubble", 2, 6), ("zero-bubble", 4, 16), ("zbv", 2, 8),
         ("zbv", 3, 12), ("gpipe", 3, 5)]  # fmt: skip


def orders(name, pp, count):
    owners = [Schedule.of(name).rank_of(chunk, pp) for chunk in range(pp * Schedule.of(name).chunks_per_rank)]
    return {rank: actions_of_rank(name, pp, count, rank) for rank in range(pp)}, owners


def causes(order, last):
    """Work -> all work that is over before it can begin: what a rank did before, and what made its messages."""
    did = {work_of(action): None for actions in order.values() for action in actions if action.kind != "W"}
    before = {}
    for actions in order.values():
        row = [work_of(action) for action in actions if action.kind != "W"]
        for earlier, work in zip([None, *row], row, strict=False):
            chunk = work.chunk + 1 if work.backward else work.chunk - 1
            message = work._replace(chunk=chunk) if 0 <= chunk <= last else work._replace(backward=False)
            before[work] = {each for each in (earlier, message) if each in did and each != work}
    predecessors = {}

    def all_of(work):
        if work not in predecessors:
            predecessors[work] = set()
            for earlier in before[work]:
                predecessors[work] |= {earlier} | all_of(earlier)
        return predecessors[work]

    return {work: all_of(work) for work in sorted(did, key=lambda work: (work.micro_batch, work.backward))}


@pytest.mark.parametrize(("name", "pp", "count"), CASES)
def test_an_acknowledgement_proves_that_the_gradient_has_been_used(name, pp, count):
    order, owners = orders(name, pp, count)
    over = causes(order, len(owners) - 1)
    for rank in range(pp):
        found = acknowledgements(order, rank, owners)
        assert bool(found) == (name != "gpipe")  # whose backwards no forward follows
        for sent, acknowledgement in found.items():
            assert owners[sent.chunk] == owners[acknowledgement.chunk] == rank
            assert owners[sent.chunk - 1] != rank
            assert Work(True, sent.chunk - 1, sent.micro_batch) in over[acknowledgement], (sent, acknowledgement)


@pytest.mark.parametrize(("name", "pp", "count"), CASES)
def test_few_gradients_are_under_way_however_many_micro_batches_there_are(name, pp, count):
    schedule = Schedule.of(name)
    for rank in range(pp):
        most = [max(_under_way(schedule, pp, n, rank)) for n in (4 * count, 8 * count)]
        if name == "gpipe":
            assert most == [0, 0] if rank == 0 else [4 * count - 1, 8 * count - 1]
        else:
            assert most[0] == most[1] <= 4 * pp


def test_without_an_order_nothing_is_known():
    assert acknowledgements({}, 0, [0, 1]) == {}
