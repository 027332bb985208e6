"""Ranks that do not do the same train as one process does, and no machine lets them wait for each other for ever."""

import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from tensors import tiny

LONG = pytest.mark.long


def machines():
    """What every engine survives, by name."""
    from instruments.rendezvous import Machine

    return {
        "two communicators": Machine(), "one communicator": Machine(together=True),
        "one hardware queue": Machine(one_queue=True), "one launch order": Machine(in_order=True),
        "a host that waits before it allocates": Machine(pauses=True),
    }  # fmt: skip


def stops_on(logs):
    """Machines on which ranks with these logs come to no end, or do not fit."""
    from instruments.rendezvous import replay

    return [name for name, machine in machines().items() if replay(logs, machine=machine)]


# --- ranks on threads ---------------------------------------------------------------------------


def two_sums(waits_first):
    """Two ranks sum numbers over two groups in other orders; they wait for the first sum before the second, or after."""
    import torch.distributed as dist
    from instruments import groups

    def case():
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        rank = dist.get_rank()
        numbers = [torch.full((1,), 10.0 ** (2 * place + rank)) for place in range(2)]
        works = []
        for place in (0, 1) if rank == 0 else (1, 0):
            works.append(dist.all_reduce(numbers[place], group=(one, two)[place], async_op=True))
            unread = numbers[place].isnan().all()
            if waits_first:
                works[-1].wait()
        for work in works:
            work.wait()
        return [float(number) for number in numbers], bool(unread)

    stuck = []
    found, _ = groups.on_threads(2, case, stuck=stuck)
    if waits_first:
        with pytest.raises(groups.Lost, match="all ranks stood still: "):
            groups.on_threads(2, case)
    return found, stuck


def test_ranks_may_call_two_groups_in_other_orders_unless_they_wait_between(alone):
    found, stuck = alone(two_sums, False)
    assert (found, stuck) == ([([11.0, 1100.0], True)] * 2, [])
    found, stuck = alone(two_sums, True)
    assert len(stuck) == 2
    assert any(numbers != [11.0, 1100.0] for numbers, _ in found)


# --- a hole in each block, on one rank, in one step ---------------------------------------------


def holes(cases, plant=None, options=None, depth=10):
    """(whether equal to one process, where ranks stood still, machines on which they stop, a cycle) of every hole."""
    from instruments import planted_between_ranks, rendezvous, unequal

    found = []
    for case in cases:
        hole = None if case is None else unequal.Hole(*case)
        with getattr(planted_between_ranks, plant or "NONE")():
            ran = unequal.run(hole, depth=depth, **options or {})
        right = ran.equals(unequal.expected(hole, depth=depth))
        found.append((right, ran.stuck, stops_on(ran.logs), rendezvous.cycle(ran.logs)))
    return found


def test_the_chains_are_deeper_than_what_runs_ahead_hides():
    from instruments import unequal

    from zero3d.distributed.unit_order import AHEAD

    assert unequal.DEPTH > 2 * AHEAD + 2


SOME = [None, (5, 0, (0,)), (3, 1, (1,))]
EVERY = [(block, rank, (step,)) for block in range(10) for rank in (0, 1) for step in (0, 1)]


@pytest.mark.parametrize("cases", [SOME, pytest.param(EVERY, marks=LONG)], ids=["some", "every"])
def test_a_hole_on_one_rank_trains_as_one_process_on_every_machine(alone, cases):
    for case, found in zip(cases, alone(holes, cases), strict=True):
        assert (case, *found) == (case, True, [], [], [])


@LONG
@pytest.mark.parametrize("options", [
    {"stage": 2}, {"stage": 0}, {"release": "every_step"}, {"exact": True, "precision": "fp32"},
], ids=str)  # fmt: skip
def test_a_hole_trains_so_at_other_stages_and_releases(alone, options):
    cases = [(block, 0, (step,)) for block in (0, 4, 9) for step in (0, 1)]
    for case, (right, *found) in zip(cases, alone(holes, cases, None, options), strict=True):
        assert (case, *found) == (case, [], [], [])
        assert right or options.get("precision") == "fp32"  # `expected` is in fp64


def test_a_unit_that_is_held_up_by_its_hole_stops_both_ranks_and_the_cycle_is_printed(alone):
    """In the first step from block 3 on, later from block 5: those before are behind all gathers."""
    cases = [(2, 0, (0,)), (3, 0, (0,)), (4, 0, (1,)), (5, 0, (1,))]
    found = alone(holes, cases, "hole_until_the_end")
    assert [bool(cycle) for *_, cycle in found] == [False, True, False, True]
    for _, stuck, stops, cycle in (found[1], found[3]):
        assert stuck
        assert stops == list(machines())
        words = "\n".join(cycle)
        for rank in (0, 1):
            assert f"rank {rank}, gather: all_gather " in words
            assert f"rank {rank}, reduce: reduce_scatter " in words
        assert words.count("waits for rank ") == words.count("waits, as its stream does, for") == 2
        assert len({line.split(" on group ")[1].partition(" of ")[0] for line in cycle}) == 2
        assert cycle[-1].endswith("of 0, 1: the cycle is closed")


def test_a_reduction_behind_the_next_gather_needs_two_communicators(alone):
    [(right, stuck, stops, cycle)] = alone(holes, [(5, 0, (0,))], "late_reduction")
    assert (right, stuck, cycle) == (True, [], [])  # on two, none waits for the other
    assert stops == ["one communicator", "a host that waits before it allocates"]


@LONG
def test_a_gradient_that_did_not_come_and_is_not_zero_is_found_by_values_alone(alone):
    assert [found[0] for found in alone(holes, [None, (5, 0, (0,))], "stale_gradients")] == [True, False]
    assert [found[1:] for found in alone(holes, [(5, 0, (0,))], "stale_gradients")] == [([], [], [])]


@LONG
def test_a_gather_that_nobody_waits_for_is_found_by_values(alone):
    [(right, *found)] = alone(holes, [None], "dropped_wait")
    assert not right
    assert found == [[], [], []]


# --- every order ---------------------------------------------------------------------------------


def explored(world, how, plant=None, all_steps=False, depth=3, options=None):
    """(states, number of ends, faults, cycle) of every order in which the second step of a chain with a hole can come."""
    from instruments import interleavings, planted_between_ranks, rendezvous, unequal

    with getattr(planted_between_ranks, plant or "NONE")():
        logs = unequal.run(unequal.Hole(depth // 2, steps=(1,)), depth=depth, world=world, **options or {}).logs
    step = rendezvous.step_of(logs, 1)
    found = []
    for options in how:
        machine = rendezvous.Machine(eager=True, **options)
        states, ends, faults, cycle = interleavings.explore(step, machine)
        if all_steps:
            whole = interleavings.explore(step, machine, reduced=False)
            assert whole.ends == ends
            assert bool(whole.cycle) == bool(cycle)
            assert whole.states > 5 * states
        found.append((states, len(ends), faults, cycle))
    return found


HARD = [{}, {"together": True}, {"one_queue": True}, {"in_order": True}, {"pauses": True}]
ROOM = [{"resident": 2}, {"resident": 1, "together": True}]


ONE = {"communicators": 1}


@pytest.mark.parametrize("cases", [SOME[1:2], pytest.param(EVERY, marks=LONG)], ids=["some", "every"])
def test_so_it_does_with_one_communicator(alone, cases):
    for case, found in zip(cases, alone(holes, cases, None, ONE), strict=True):
        assert (case, *found) == (case, True, [], [], [])


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=LONG)])
def test_no_order_of_hosts_and_operations_stops_a_step(alone, world):
    for how, (states, ends, faults, cycle) in zip(HARD + ROOM, alone(explored, world, HARD + ROOM), strict=True):
        assert (how, ends, faults, cycle) == (how, 1, [], [])
        assert states > 50 * world


def test_with_room_for_one_collective_two_communicators_stop_in_some_order_and_one_does_not(alone):
    [two] = alone(explored, 2, [{"resident": 1}])
    [one] = alone(explored, 2, [{"resident": 1}], None, False, 3, ONE)
    assert two[1] > 1  # most orders come to their end
    assert "waits for the room of" in "\n".join(two[3])
    assert (one[1], one[2]) == (1, [])


@LONG
def test_a_third_communicator_wants_room_for_three_collectives(alone):
    how = [{"resident": 2}, {"resident": 3}]
    [two, three] = alone(explored, 3, how, "third_communicator")
    assert two[1] > 1
    assert "waits for the room of" in "\n".join(two[3])
    assert (three[1], three[2]) == (1, [])


@pytest.mark.parametrize(("how", "depth"), [
    ([{"resident": 1}], 1), pytest.param([*HARD, *ROOM, {"resident": 1}], 3, marks=LONG),
], ids=["one block", "three blocks"])  # fmt: skip
def test_steps_that_are_left_out_of_the_search_lead_nowhere_else(alone, how, depth):
    assert len(alone(explored, 2, how, None, True, depth)) == len(how)


# --- every axis and option, with unlike batches --------------------------------------------------

# degrees, model, options of the engine
AXES = {
    "int4 between copies of shards": ({"dp": 4, "shard": 2}, "llama", {"slow_wire": "int4"}),
    "experts without tokens": ({"dp": 2, "ep": 2}, "moe", {}),
    "copies of shards": ({"dp": 4, "shard": 2}, "llama", {}),
    "int8 between copies of shards": ({"dp": 4, "shard": 2}, "llama", {"slow_wire": "int8"}),
    "exact over copies of shards": ({"dp": 4, "shard": 2}, "llama", {"exact": True}),
    "second shards": ({"dp": 4}, "llama", {"second_shard": 2}),
    "int8 gathers": ({"dp": 2}, "llama", {"gather_wire": "int8"}),
    "int8 gathers of second shards": ({"dp": 4}, "llama", {"gather_wire": "int8", "second_shard": 2}),
    "fast experts": ({"dp": 4, "ep": 2}, "moe", {"experts": "fast"}),
    "sequences": ({"dp": 2, "sp": 2}, "llama", {}),
    "sequences by gathers": ({"dp": 4, "sp": 2}, "llama", {"sp_kind": "gather"}),
    "experts and sequences": ({"dp": 2, "ep": 2, "sp": 2}, "moe", {}),
    "adapters": ({"dp": 2}, "adapted", {}),
    "replay": ({"dp": 2}, "llama", {"replay": 1}),
    "tiles": ({"dp": 2}, "llama", {"gather_budget": 8192}),
    "an average": ({"dp": 2}, "llama", {"ema": 0.9}),
}
SHORT = ["experts without tokens"]


def unlike_batches(engine, step, count=2):
    """Row r has r + 1 sequences of 4 + 4 r tokens; the first one's are so few that experts go without."""
    row, found = engine.mesh.row, []
    for place in range(count):
        made = torch.Generator().manual_seed(100 * step + 10 * row + place)
        ids = torch.randint(3, 61, (1 + row, 4 + 4 * row), generator=made)
        found.append({"input_ids": ids, "labels": ids})
    return found


def trained_on(name):
    """(losses of all ranks, logs, where they stood still) of three steps, an evaluation and a stream of weights."""
    from instruments import groups, rendezvous

    import zero3d
    from zero3d.sequence import group

    degrees, family, options = AXES[name]
    models = [tiny("llama" if family == "adapted" else family, lora=family == "adapted") for _ in range(degrees["dp"])]
    stuck, one_at_a_time, tried = [], threading.Lock(), group.try_rows

    def alone_tried(decoder):  # it registers an attention function for the whole process
        with one_at_a_time:
            return tried(decoder)

    def case():
        mesh = zero3d.Mesh(**degrees)
        model = models[mesh.rank]
        if family == "moe":
            model.config.output_router_logits = False
        made = {"stage": 3, "precision": "fp32", "accumulate": 2, "clip_norm": 0.1} | options
        engine = zero3d.Engine(model, mesh=mesh, **made)
        losses = [float(engine.train_batch(unlike_batches(engine, step))) for step in range(3)]
        losses.append(float(engine.evaluate(unlike_batches(engine, 3))))
        parts = sum(1 for _ in engine.stream_weights(bucket_bytes=8192))
        return losses, parts

    with rendezvous.labelled(), groups.on_streams(), mock.patch.object(group, "try_rows", alone_tried):
        found, logs = groups.on_threads(degrees["dp"], case, stuck=stuck)
    return found, logs, stuck


def on_axes(names):
    from instruments.first_operations import first_operation_faults

    answers = []
    for name in names:
        found, logs, stuck = trained_on(name)
        assert all(torch.tensor(losses).isfinite().all() and parts > 1 for losses, parts in found)
        uneven = sum(bool(getattr(entry, "splits", None)) and len(set(entry.splits[0])) > 1 for entry in logs[0])
        answers.append(
            (len({tuple(losses) for losses, _ in found}), stuck, first_operation_faults(logs), stops_on(logs), uneven)
        )
    return answers  # fmt: skip


@pytest.mark.parametrize(
    "names", [SHORT, pytest.param([name for name in AXES if name not in SHORT], marks=LONG)], ids=["some", "others"]
)
def test_on_every_axis_ranks_with_unlike_batches_fit_each_other_on_every_machine(alone, names):
    for name, (losses, stuck, first, stops, uneven) in zip(names, alone(on_axes, names), strict=True):
        assert (name, losses, stuck, first, stops) == (name, 1, [], [], [])
        assert bool(uneven) == ("experts" in name), name


# --- pipelines ----------------------------------------------------------------------------------


def in_pipelines(shapes):
    from instruments import unequal

    return [(ran.errors, ran.stuck, stops_on(ran.logs)) for ran in (unequal.run_pipeline(*shape) for shape in shapes)]


PIPELINES = [(stages, 2 * stages, schedule) for stages in (2, 3) for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")]  # fmt: skip


@pytest.mark.parametrize("shapes", [PIPELINES[1:2], pytest.param(PIPELINES, marks=LONG)], ids=["one", "all"])
def test_pipelines_of_every_schedule_stop_on_no_machine(alone, shapes):
    for shape, found in zip(shapes, alone(in_pipelines, shapes), strict=True):
        assert (shape, *found) == (shape, [], [], [])


# --- threads on one device ----------------------------------------------------------------------


def on_stand_in(holes_of_worlds):
    """(whether equal to one process, errors, where ranks stood still, what does not fit) on the stand-in accelerator."""
    from instruments import accelerator, rendezvous, unequal

    device, found = accelerator.register().type, []
    for world, case, options in holes_of_worlds:
        hole = None if case is None else unequal.Hole(*case)
        ran = unequal.run(hole, 3, world, device=device, **options)
        found.append((ran.equals(unequal.expected(hole, 3, world)), ran.errors, ran.stuck, rendezvous.replay(ran.logs)))
    return found


SHARING = [
    (2, (1, 0, (1,)), {}), (2, None, {"offload": {"optimizer": "host", "executor": "device"}}), (2, (1,), {"stage": 2}),
    (4, (2, 3), {"second_shard": 2}), (2, (1,), {"communicators": 1}),
]  # fmt: skip


@pytest.mark.parametrize("cases", [SHARING[:1], pytest.param(SHARING, marks=LONG)], ids=["a hole", "others"])
def test_ranks_that_share_an_accelerator_train_as_one_process(alone, cases):
    for case, found in zip(cases, alone(on_stand_in, cases), strict=True):
        assert (case, *found) == (case, True, [], [], [])
