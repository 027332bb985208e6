"""The event simulation of pipelines against the bubble formulas, against pipeline/actions.py, and its closed form."""

from fractions import Fraction

import pytest

from zero3d.pipeline import actions as bubble
from zero3d.tools.plan.timeline import closed_form, order, pipeline_seconds, simulate


def simulated(schedule, forward, backward, micro_batches, ranks, hop=0.0):
    virtual = len(forward) // ranks
    orders = [order(schedule, rank, ranks, micro_batches, virtual) for rank in range(ranks)]
    return simulate(orders, forward, backward, hop)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 24)])
def test_the_bubble_over_ideal_time_is_p_minus_1_over_m(schedule, p, m):
    assert simulated(schedule, [1.0] * p, [2.0] * p, m, p) / (3 * m) - 1 == pytest.approx((p - 1) / m)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks_per_rank(p, m, v):
    end = simulated("interleaved", [1.0] * (p * v), [2.0] * (p * v), m, p)
    assert end / (3 * m * v) - 1 == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_it_agrees_with_the_exact_count_of_action_lists(schedule, v):
    p, m = 4, 8
    actions = {rank: [bubble.Action(*event) for event in order(schedule, rank, p, m, v)] for rank in range(p)}
    end = simulated(schedule, [1.0] * (p * v), [2.0] * (p * v), m, p)
    assert bubble.bubble(actions) == Fraction(end) / (3 * m * v) - 1


@pytest.mark.parametrize("hop", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("last", [1.0, 1.6])
@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_closed_form_is_within_three_percent(schedule, v, last, hop):
    p, m = 6, 48
    forward = [1.0] * (p * v - 1) + [last]
    backward = [2 * seconds for seconds in forward]
    exact = simulated(schedule, forward, backward, m, p, hop)
    assert closed_form(schedule, forward, backward, m, p, hop) == pytest.approx(exact, rel=0.03)


def test_split_backwards_leave_less_of_the_bubble():
    forward, backward = [1.0] * 8, [2.0] * 8
    ends = [pipeline_seconds(name, forward, backward, 16, 4) for name in ("interleaved", "zero-bubble", "zbv")]
    assert ends[0] > ends[1] > ends[2] == 16 * 6


def test_a_hop_counts_once_each_way_with_one_micro_batch():
    assert pipeline_seconds("1f1b", [1.0] * 3, [2.0] * 3, 1, 3, hop=0.5) == 9 + 4 * 0.5
