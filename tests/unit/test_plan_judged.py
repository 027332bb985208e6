"""What no published run was compared with a plan of: cards, kinds of run, kinds of layers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.judged import CARDS, HYBRIDS, IMAGES, JUDGED, judged, not_judged
from zero3d.tools.plan.margin import KINDS, kind_of, margin_of_kind
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import AS_KERNELS, ParallelPlan, Unit, Weight

MODEL = gpt(2, 256, 4, 1024, 128)
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "planner-accuracy.json"


def frozen(model, packed=False):
    """The model with all of its weights frozen, in two bytes or in half of one, and a small adapter."""

    def held(weight):
        if packed and len(weight.shape) == 2:
            return replace(weight, shape=(weight.numel // 2,), trainable=False, matrix=weight.shape)
        return replace(weight, trainable=False)

    parts = [
        replace(part, units=tuple(replace(u, weights=tuple(map(held, u.weights))) for u in part.units))
        for part in model.parts
    ]
    first = replace(parts[0], units=(*parts[0].units, Unit("a", (Weight("a.lora_a", (4, 256)),))))
    return replace(model, name=f"frozen {packed}", parts=(first, *parts[1:]))


@pytest.mark.parametrize(
    ("model", "plan", "kind"),
    [
        (MODEL, {}, "full"),
        (frozen(MODEL), {}, "lora"),
        (frozen(MODEL, packed=True), {}, "qlora"),
        (frozen(MODEL), {"offload": "host"}, "offload"),
        (MODEL, {"offload_activations": "host", "activations": "full"}, "offload"),
    ],
)
def test_a_run_is_of_the_kind_of_what_it_trains_and_where(model, plan, kind):
    assert kind_of(model, ParallelPlan(**plan)) == kind
    assert margin_of_kind(kind).share > 0


def test_cards_and_kinds_are_those_of_the_rows():
    [run] = json.loads(RESULT.read_text())["runs"]
    assert tuple(run["result"]["cards"]) == CARDS
    assert tuple(kind for kind in run["result"]["runs"] if kind in JUDGED) == JUDGED


def test_margins_are_what_the_rows_ask_for_to_the_next_percent():
    [run] = json.loads(RESULT.read_text())["runs"]
    for kind, found in run["result"]["margins"].items():
        assert found["share"] <= margin_of_kind(kind).share < found["share"] + 0.01
    assert margin_of_kind("offload").share == max(margin_of_kind(kind).share for kind in KINDS)


def test_what_was_not_compared_is_said():
    known, unknown = cluster("h100", 8), cluster("mi300x", 8)
    plan = ParallelPlan(dp=8)
    assert judged(MODEL, known, plan) is None
    hybrid = replace(MODEL, provenance=f"traced, {AS_KERNELS}", patches=576)
    away = plan.replace(offload="host")
    words = ("mi300x", "states or inputs off the GPU", HYBRIDS, IMAGES)
    assert not_judged(hybrid, unknown, away) == words
    assert judged(hybrid, unknown, away) == f"no published run of {' or '.join(words)} was compared with its plan"
