"""What ranks ask of their groups fits NCCL: groups begin with all ranks, messages meet their own, nobody waits for ever."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from meshes import mesh_of, micro_batches, own, world_of
from tensors import tiny

from zero3d.pipeline.schedules import SCHEDULES, Schedule


def run(family, mesh, schedule, count, stage=2, exact=False):
    """What all ranks ask of their groups in three steps, an evaluation and a write into whole parameters."""
    from instruments import groups, rendezvous

    import zero3d

    layers = max(2, Schedule.of(schedule).chunks_per_rank * mesh[2])
    models = [tiny(family, kv_heads=4, layers=layers) for _ in range(world_of(mesh))]  # threads may not import at once

    def case():
        made = mesh_of(mesh)
        engine = zero3d.Engine(
            models[made.rank], stage=stage, mesh=made, precision="fp32", clip_norm=0.1, accumulate=count, exact=exact,
            schedule=schedule, loss=None,
        )  # fmt: skip
        losses = []
        for number in range(3 if stage == 3 else 2):  # the second and the third prefetch
            given = own(micro_batches(number, count * made.dp), made.place.dp, made.dp)
            losses.append(float(engine.train_batch(given, wait=False)))
        losses.append(float(engine.evaluate(given)))
        with engine.full_params():
            for chunk in [engine.module] if made.pp == 1 else engine.chunks.values():
                for p in chunk.parameters():
                    p.data.mul_(1.0)
        return losses

    with rendezvous.labelled():
        losses, logs = groups.on_threads(world_of(mesh), case)
    assert len(set(map(tuple, losses))) == 1
    assert all(torch.tensor(losses[0]).isfinite())
    return logs


def faults_of(cases):
    """(first operations, replays) of every case."""
    from instruments import first_operations, rendezvous

    found = []
    for case in cases:
        logs = run(*case)
        replays = rendezvous.replay(logs), rendezvous.replay(logs, eager=True)
        found.append((first_operations.first_operation_faults(logs), *replays))
    return found


# --- meshes -------------------------------------------------------------------------------------

# dp, tp, pp: a step on all three axes, with tied embeddings on the first and the last pipeline stage
SMALL = [("qwen3", (2, 2, 2), "1f1b", 2)]
# The same on three and four pipeline stages; without pipelines; exact
LARGE = [
    ("qwen3", (2, 2, 3), "1f1b", 3),
    ("gpt2", (1, 1, 4), "zbv", 4),
    ("llama", (4, 2, 1), None, 1, 3),
    ("qwen3", (2, 1, 3), "interleaved", 4, 1, True),
]


@pytest.fixture(scope="module", params=[SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"])
def faults(pool, request):
    """(case, its faults) of every case."""
    return list(zip(request.param, pool.alone(faults_of, request.param), strict=True))


def test_every_group_begins_with_all_its_ranks(faults):
    for case, (first, replayed, _) in faults:
        assert (case, first, replayed) == (case, [], [])


def test_the_ranks_of_a_group_call_the_same_collectives_and_nobody_waits_for_ever(faults):
    for case, (*_, replayed) in faults:
        assert (case, replayed) == (case, [])


# --- schedules ----------------------------------------------------------------------------------


def counts(schedule, ranks):
    """Numbers of micro-batches that a schedule takes: few and many, and one that its ranks do not divide."""
    order = Schedule.of(schedule)
    found = []
    for count in (1, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
        try:
            order.check(count, ranks)
        except ValueError:
            continue
        found.append(count)
    return found


ALL = [
    ("llama", (1, 1, ranks), schedule, count) for ranks in (2, 3, 4) for schedule in SCHEDULES for count in counts(schedule, ranks)
]  # fmt: skip
SHORT = [
    ("llama", (1, 1, ranks), schedule, count)
    for ranks, schedule, count in (
        (2, "gpipe", 3), (3, "1f1b", 4), (2, "interleaved", 4), (2, "zero-bubble", 3), (2, "zbv", 3),
    )
]  # fmt: skip


def check_schedules(cases, alone):
    for case, (_, *replays) in zip(cases, alone(faults_of, cases), strict=True):
        assert (case, *replays) == (case, [], [])


def test_messages_of_every_schedule_meet_their_own_without_buffers(alone):
    assert {schedule for *_, schedule, _ in SHORT} == set(SCHEDULES)
    check_schedules(SHORT, alone)


@pytest.mark.long
def test_messages_of_every_schedule_with_two_to_four_ranks_and_few_and_many_micro_batches(alone):
    assert len(ALL) >= 5 * 3 * 3
    check_schedules([case for case in ALL if case not in SHORT], alone)


def faults_of_a_swap(case):
    """What is found where a pipeline's first rank sends its first two hidden states in the other order."""
    from instruments import rendezvous

    logs = run(*case)
    sends = [i for i, entry in enumerate(logs[0]) if "forward" in (getattr(entry, "label", None) or ())]
    first, second = sends[:2]
    logs[0][first], logs[0][second] = (
        logs[0][i]._replace(label=logs[0][j].label) for i, j in ((first, second), (second, first))
    )
    return [rendezvous.replay(logs, eager) for eager in (False, True)]


def test_a_pipeline_that_sends_in_another_order_is_found(alone):
    for faults in alone(faults_of_a_swap, ("llama", (1, 1, 2), "gpipe", 3)):
        assert len(faults) == 2
        assert all("meets another's receiver" in fault for fault in faults)


# --- what the replay finds ----------------------------------------------------------------------


def log_of(*entries):
    """A rank's log: (op, peer, batch, label, group) of one element each, of ranks 0, 1, 2; "wait" is for the last."""
    from instruments.groups import Operation, Read, Wait

    found = []
    for entry in entries:
        if entry == "wait":
            found.append(Wait(len(found) - 1))
        elif entry == "read":
            found.append(Read())
        else:
            op, peer, batch, label, group = entry + (None, None, None, None, "g")[len(entry) :]
            name = f"batched {op}" if batch is not None else op
            found.append(Operation(group, (0, 1, 2), name, (1,), torch.float32, peer, batch, label))
    return found


def test_a_group_that_begins_with_messages_of_a_few_is_found():
    from instruments.first_operations import first_operation_faults
    from instruments.rendezvous import replay

    def logs(*before):
        trade = [[("send", peer, peer), ("receive", peer, peer), "wait", "read"] for peer in (2, 0)]
        both = ("all_gather", None, None, None, "h")
        later = ("all_gather",)
        return [
            log_of(*before, *trade[0], both, later),
            log_of(*before, both, "wait", "read", later),
            log_of(*before, *trade[1], both, later),
        ]

    assert len(first_operation_faults(logs())) == 2
    assert len(replay(logs())) == 3  # rank 1 does not come to the group before ranks 0 and 2 come to the other
    assert replay(logs(), eager=True) == []
    assert first_operation_faults(logs(("all_gather",))) == replay(logs(("all_gather",))) == []


def test_collectives_in_another_order_or_of_other_sizes_are_found():
    from instruments.rendezvous import replay

    logs = [log_of(("all_gather",), ("all_reduce",))] * 2 + [log_of(("all_reduce",), ("all_gather",))]
    assert "different collectives meet" in replay(logs)[0]
    fewer = [log_of(("all_gather",))] * 2 + [log_of(("all_gather",), ("all_gather",))]
    assert len(replay(fewer)) == 1


def test_swapped_messages_are_found_though_their_sizes_agree():
    from instruments.rendezvous import replay

    begin = ("all_gather",)
    sent = log_of(begin, ("send", 1, None, ("forward", 1, 0)), ("send", 1, None, ("forward", 1, 1)))
    taken = log_of(begin, ("receive", 0, None, ("forward", 1, 0)), ("receive", 0, None, ("forward", 1, 1)))
    swapped = log_of(begin, ("receive", 0, None, ("forward", 1, 1)), ("receive", 0, None, ("forward", 1, 0)))
    assert replay([sent, taken, log_of(begin)]) == []
    assert len(replay([sent, swapped, log_of(begin)])) == 2


def test_two_that_send_first_wait_for_ever_unless_they_send_and_receive_as_one():
    from instruments.rendezvous import replay

    begin = ("all_gather",)
    apart = [log_of(begin, ("send", 1), ("receive", 1)), log_of(begin, ("send", 0), ("receive", 0)), log_of(begin)]
    assert len(replay(apart)) == 2
    as_one = [
        log_of(begin, ("send", 1, 7), ("receive", 1, 7)),
        log_of(begin, ("send", 0, 8), ("receive", 0, 8)),
        log_of(begin),
    ]
    assert replay(as_one) == []
    mixed = [
        log_of(begin, ("send", 1, 7), ("receive", 1, 7)),
        log_of(begin, ("receive", 0), ("send", 0)),
        log_of(begin),
    ]
    assert len(replay(mixed)) == 2  # a batch takes the group's communicator, a message alone the pair's
    assert replay(mixed, eager=True) == []


def test_what_waits_for_a_message_that_comes_later_on_another_communicator_is_found():
    from instruments.rendezvous import replay

    begin = ("all_gather",)
    ring = [
        log_of(begin, ("receive", 1), "wait", ("send", 2)),
        log_of(begin, ("receive", 2), "wait", ("send", 0)),
        log_of(begin, ("receive", 0), "wait", ("send", 1)),
    ]
    assert len(replay(ring)) == 3
    unwaited = [(("receive", 1), ("send", 2)), (("receive", 2), ("send", 0)), (("receive", 0), ("send", 1))]
    assert len(replay([log_of(begin, *rest) for rest in unwaited])) == 3  # each host waits to meet another
    met = [(("send", 1), ("send", 2)), (("receive", 0), ("send", 2)), (("receive", 1), ("receive", 0))]
    assert replay([log_of(begin, *first, *rest) for first, rest in zip(met, unwaited, strict=True)]) == []
    assert len(replay([log_of(begin, *rest) for rest in unwaited], eager=True)) == 3
