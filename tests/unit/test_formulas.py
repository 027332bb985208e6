"""The formulas against the paper's printed figures and the textbook's counts."""

from fractions import Fraction
from random import Random

import pytest
from blueprints import unit_plan

from zero3d.account.states import engine_bytes, paper_bytes, per_parameter
from zero3d.account.traffic import UnitTraffic, step_traffic, traffic_elements
from zero3d.blueprint.stages import resolve_policies, stage_row
from zero3d.errors import ConfigError
from zero3d.pipeline.actions import Action
from zero3d.pipeline.traffic import ChunkUnits, pipeline_gathers
from zero3d.zero.tokens import (
    ROOT_TURN,
    TURN,
    TokenEvent,
    backward_gathers,
    backward_tokens,
    count_gathers,
    forward_gathers,
    forward_tokens,
    left_by,
    token_order,
)


def test_paper_figures_for_7_5b_on_64_gpus():
    totals = [float(paper_bytes(stage, 7_500_000_000, 64).total) / 1e9 for stage in range(4)]
    assert [round(t, 1) for t in totals] == [120.0, 31.4, 16.6, 1.9]
    assert [round(100 * t / totals[0], 2) for t in totals[1:]] == [26.17, 13.87, 1.56]


def test_mixed_precision_costs_16_bytes_per_parameter():
    states = paper_bytes(0, 7_000_000_000, 1)
    assert [float(part) / 1e9 for part in states] == [14, 14, 84]
    assert float(paper_bytes(0, 1_500_000_000, 1).total) / 1e9 == 24


@pytest.mark.parametrize(("stage", "arguments", "expected"), [
    # w, a, g, k = 2, 4, 2, 12 in bf16; N = 4
    (0, {}, 2 + 4 + 12), (1, {}, 2 + 2 + 1 + 3), (1, {"accumulate": 2}, 2 + 4 + 3), (2, {}, 2 + (4 + 12) / 4),
    (3, {}, (2 + 4 + 12) / 4), (2, {"reduce": "every_step"}, 2 + 2 + 1 + 3),
    (3, {"reduce": "every_step", "accumulate": 2}, 0.5 + 4 + 3), (3, {"release": "every_step"}, 2 + 4),
    # fp32: w, a, g, k = 4, 4, 4, 8; fp64: 8, 8, 8, 16
    (0, {"precision": "fp32"}, 16), (1, {"precision": "fp32"}, 4 + 4 + 2), (3, {"precision": "fp64"}, 8),
    (3, {"optimizer": 4}, (2 + 4 + 4) / 4),
])  # fmt: skip
def test_engine_bytes_per_parameter(stage, arguments, expected):
    assert engine_bytes(stage, 4, **arguments).total == Fraction(expected)


def test_frozen_parameters_cost_their_weight():
    def held(stage, **settings):
        return per_parameter(unit_plan(stage, trainable=False, **settings), 0).total

    assert [held(stage) for stage in range(4)] == [2, 2, 2, Fraction(1, 2)]
    assert held(3, release="every_step") == 2


def test_traffic_of_the_paper_and_with_micro_batches():
    ring = Fraction(3, 4)
    for stage, reduce, gather in ((0, 1, 1), (1, 1, 1), (2, 5, 1), (3, 5, 10)):
        elements = traffic_elements(stage, 1, 4, micro_batches=5)
        assert elements == {"reduce_scatter": ring * reduce, "all_gather": ring * gather}
    assert sum(traffic_elements(3, 1, 4).values()) == Fraction(3, 2) * sum(traffic_elements(2, 1, 4).values())


def test_gathers_are_counted_when_the_first_user_comes():
    events = [TokenEvent("a", 1, True), TokenEvent("a", 2, True), TokenEvent("a", 1, False), TokenEvent("a", 1, False)]
    assert count_gathers(events) == {"a": 1}
    assert count_gathers([*events, TokenEvent("a", 2, False), TokenEvent("a", 3, True)]) == {"a": 2}


def test_token_order_gives_the_textbook_counts():
    untied = token_order(["embed", "b0", "b1", "head"], root="root", no_backward=["embed"])
    assert count_gathers(untied) == {"root": 1, "embed": 1, "b0": 2, "b1": 2, "head": 1}
    twice = token_order(["embed", "b0", "b1", "b0", "b1", "head"], no_backward=["embed"])
    assert count_gathers(twice) == {"embed": 1, "b0": 4, "b1": 4, "head": 1}


def test_step_traffic_counts_frozen_units_and_policies():
    units = [UnitTraffic("a", 100, 2, 4, 4, True), UnitTraffic("b", 60, 2, 4, 4, False)]
    three = step_traffic(3, units, 4, {"a": 4, "b": 2}, micro_batches=2)
    assert three["all_gather", "a"] == (4, 300, 600)
    assert three["all_gather", "b"] == (2, 90, 180)
    assert three["reduce_scatter", "a"] == (2, 150, 600)
    assert ("reduce_scatter", "b") not in three
    zero = step_traffic(0, units, 4, {}, micro_batches=2)
    assert zero["all_gather", "a"] == (1, 75, 300)  # gradients, fp32
    assert step_traffic(1, units, 4, {})["all_gather", "a"] == (1, 75, 150)  # weights, bf16
    assert step_traffic(2, units, 4, {}, 3, reduce="every_step")["reduce_scatter", "a"].calls == 1


def test_unknown_stages_and_policies_are_refused():
    with pytest.raises(ConfigError, match="stage=0, 1, 2 or 3"):
        stage_row(7)
    with pytest.raises(ConfigError, match="type stage=2"):
        resolve_policies(stage_row(0), "auto", "every_micro_batch")
    with pytest.raises(ConfigError, match="every_use, every_step"):
        resolve_policies(stage_row(3), "sometimes", "auto")


def played(before, action):
    """Count the gathers of tokens that follow those of the forward `before`, if any, by playing all of them."""
    left = forward_tokens(*before) if before else []
    return count_gathers([*left, *action]) - count_gathers(left)


def test_gathers_by_formula_are_those_of_the_tokens_played():
    draw = Random(1)
    for _ in range(300):
        names = draw.sample("abcde", draw.randint(1, 5))
        forward, root = [draw.choice(names) for _ in range(draw.randint(1, 7))], draw.choice([None, "root"])
        no_backward = frozenset(name for name in names if draw.random() < 0.3)
        before = draw.choice([None, (forward, root), ([draw.choice("abcxy")], draw.choice([None, "root", "other"]))])
        there = left_by(*before) if before else set()
        assert forward_gathers(forward, root) == played(None, forward_tokens(forward, root))
        backward = backward_tokens(forward, root, no_backward)
        assert backward_gathers(forward, root, no_backward, there) == played(before, backward)


def played_in_a_pipeline(actions, chunks):
    """Count the gathers of a rank's actions by playing tokens: what a forward leaves goes before the next one, else last."""
    events, left = [], []
    for kind, chunk, _ in actions:
        if (kind, chunk) == ("I", 0):
            continue
        units = chunks[chunk]
        if kind == "F":
            events += [*left, *forward_tokens(units.forward, units.root)]
            left = [TokenEvent(units.forward[-1], TURN, False)]
            left += [TokenEvent(units.root, ROOT_TURN, False)] if units.root else []
            continue
        if kind == "W":
            events += [TokenEvent(unit, "weights", acquire) for unit in units.names for acquire in (True, False)]
        else:
            events += backward_tokens(units.forward, units.root, units.no_backward)
        events, left = [*events, *left], []
    return count_gathers(events)


def test_gathers_of_a_pipeline_by_formula_are_those_of_the_tokens_played():
    draw = Random(2)
    for _ in range(200):
        chunks = {}
        for chunk in (0, 1, 2):
            names = [f"{chunk} {name}" for name in "abc"[: draw.randint(1, 3)]]
            forward = [draw.choice(names) for _ in range(draw.randint(1, 5))]
            root = draw.choice([None, f"{chunk} root"])
            chunks[chunk] = ChunkUnits(forward, root, frozenset(name for name in names if draw.random() < 0.2))
        actions = [Action(draw.choice("FFBIW"), draw.choice((0, 1, 2)), 0) for _ in range(draw.randint(1, 20))]
        found = pipeline_gathers(actions, chunks, "every_use")
        assert {unit: count for unit, count in found.items() if count} == played_in_a_pipeline(actions, chunks)
