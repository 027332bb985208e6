"""What is advised where a plan does not fit: settings in order, as a command line takes them, and nothing that rounds."""

from dataclasses import replace

from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.relief import device_bytes, host_bytes, reliefs
from zero3d.tools.plan.search import Row
from zero3d.tools.plan.shapes import of_params
from zero3d.tools.plan.spec import ParallelPlan

MODEL, A100 = of_params(7e9, 2048), cluster("a100-80", 8)
PLAN = ParallelPlan(dp=8, stage=2, micro_batch=4, accumulate=2)


def advised(plan, missing, bytes_of=device_bytes, place=A100):
    row = Row(plan, evaluate(MODEL, place, plan))
    return row, reliefs(row, MODEL, place, evaluate, missing, bytes_of)


def test_enough_comes_first_and_of_that_what_costs_least_time():
    _, found = advised(PLAN, 1e9)
    enough = [each.enough for each in found]
    assert enough == sorted(enough, reverse=True)
    assert enough[0]
    slower = [each.slower for each in found if each.enough]
    assert slower == sorted(slower)
    assert all(each.saved > 0 for each in found)


def test_what_is_saved_is_the_difference_of_two_plans():
    row, found = advised(PLAN, 1e9)
    assert found
    for each in found:
        again = evaluate(MODEL, A100, each.plan)
        assert each.saved == row.estimate.memory.allocated - again.memory.allocated
        assert each.slower == again.seconds.mid / row.estimate.seconds.mid - 1


def test_a_smaller_micro_batch_keeps_the_sequences_of_a_step():
    _, found = advised(PLAN, 1e9)
    (smaller,) = [each for each in found if "train.micro_batch=2" in each.settings and len(each.settings) == 2]
    assert smaller.settings == ("train.micro_batch=2", "train.accumulate=4")
    assert smaller.plan == PLAN.replace(micro_batch=2, accumulate=4)


def test_where_none_is_enough_alone_several_are_together():
    row, single = advised(PLAN, 0)
    most = max(each.saved for each in single)
    _, found = advised(PLAN, most + 1e9)
    assert found[0].enough
    assert len({word.split("=")[0] for word in found[0].settings}) == len(found[0].settings) > 1
    assert found[0].saved > most
    _, hopeless = advised(PLAN, 2 * row.estimate.memory.allocated)
    assert not any(each.enough for each in hopeless)
    assert len(hopeless[0].settings) > 1
    assert hopeless[0].saved == max(each.saved for each in hopeless)


def test_nothing_that_rounds_more_or_needs_what_is_not_there():
    _, found = advised(PLAN, 1e9)
    words = [word for each in found for word in each.settings]
    assert not any(word.startswith(("offload.moments", "zero.reduce")) for word in words)
    sharded = PLAN.replace(stage=3)
    _, found = advised(sharded, 1e9)
    assert any("offload.optimizer=host" in each.settings for each in found)
    small = replace(A100, host_memory=1e9)
    _, on_small = advised(sharded, 1e9, place=small)
    assert not any("offload.optimizer=host" in each.settings for each in on_small)


def test_a_hosts_memory_is_relieved_by_what_leaves_it():
    away = PLAN.replace(offload="host")
    row, found = advised(away, 1e9, host_bytes(8, on_cpu=False))
    assert ("offload.optimizer=none",) in [each.settings for each in found]
    assert found[0].saved == row.estimate.memory.host - evaluate(MODEL, A100, found[0].plan).memory.host
    on_cpu = host_bytes(8, on_cpu=True)
    assert on_cpu(row.estimate.memory) == row.estimate.memory.host + 8 * row.estimate.memory.allocated


def test_states_of_cast_weights_are_advised_to_leave_with_weights_that_are_kept():
    small = {"micro_batch": 1, "activations": "full"}
    row, found = advised(PLAN.replace(stage=3, weights="cast", **small), 1e9)
    (away,) = [each for each in found if "offload.optimizer=host" in each.settings]
    assert away.settings == ("offload.optimizer=host", "zero.weights=kept")
    assert away.plan == row.plan.replace(offload="host", weights="kept")
