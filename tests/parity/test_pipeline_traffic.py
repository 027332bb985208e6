"""What pipelines send, per axis, equals the formulas; what they do is recorded, and its bubble is the formula's."""

from fractions import Fraction
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from models import Net, batch
from pipelines import build, engine_of, micro_batches

import zero3d
from zero3d.account.traffic import Moved, step_traffic
from zero3d.pipeline.actions import bubble
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.traffic import pipeline_traffic

M, WIDTH = 4, 24


class Lm(Net):
    """Called with a batch's entries."""

    def forward(self, input_ids):
        return super().forward(input_ids)


def loss(logits, micro_batch):
    ids = micro_batch["input_ids"]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return total, float(ids[:, 1:].numel())


def moved(engine, axis):
    """(operation, unit) -> what the ledger counted on one axis."""
    entries = [entry for entry in engine.traffic if entry.axis == axis]
    return {(e.op, e.unit): Moved(e.calls, e.elements, e.bytes) for e in entries}


def traffic_of_a_step(schedule, stage, dp):
    """The second step's traffic by axis, the formulas for it, and the recorded actions."""
    torch.manual_seed(7)
    mesh = zero3d.Mesh(pp=2, dp=dp)
    engine = zero3d.Engine(
        Lm(WIDTH, layers=4), stage=stage, mesh=mesh, precision="fp32", accumulate=M, schedule=schedule, loss=loss
    )
    rows = [{"input_ids": batch(i)} for i in range(M)]
    engine.train_batch(rows)  # the first step exchanges orders and positions once
    engine.traffic.reset()
    engine.train_batch(rows)
    kind = Schedule.of(schedule)
    chunks = kind.chunks_of(mesh.place.pp, 2)
    cuts = [[(batch(0).numel() * WIDTH, 4)]] * (2 * kind.chunks_per_rank - 1)
    sends = pipeline_traffic(chunks, M, cuts)
    held = {unit.name: 1 for unit in engine.units}  # gathered once, held for the schedule
    state = step_traffic(stage, engine.traffic_units, dp, held, M, "every_step")
    return moved(engine, "pp"), sends, moved(engine, "dp"), state, engine.pipeline.recorded_order()


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        ("gpipe", 3),
        ("zbv", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("1f1b", 1), ("interleaved", 0), ("zero-bubble", 3))
        ),
    ],
)
def test_each_axis_sends_what_the_formulas_say(ranks, schedule, stage):
    for pp, sends, dp, state, _ in ranks(4, traffic_of_a_step, schedule, stage, 2):
        assert {key: value for key, value in pp.items() if key[0].startswith("send")} == sends
        assert {key: value for key, value in dp.items() if key[0] != "exchange"} == {
            key: value for key, value in state.items() if key[0] != "exchange"
        }
        assert not [key for key in dp if key[0].startswith("send")]


@pytest.fixture(scope="module")
def orders_of(ranks):
    """What each of two pipeline stages says was done in a step of a schedule, each once."""
    return cache(lambda schedule: [order for *_, order in ranks(2, traffic_of_a_step, schedule, 0, 1)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_what_was_recorded_is_p_minus_1_over_m(orders_of, schedule):
    for order in orders_of(schedule):
        assert bubble(order) == Fraction(1, M)


def test_looped_and_split_schedules_wait_less(orders_of):
    waits = [bubble(orders_of(name)[0]) for name in ("1f1b", "interleaved", "zbv")]
    assert waits[0] > waits[1] > waits[2]


def traffic_of_experts(schedule, stage, dp):
    """Every step's traffic of a mixture of experts whose router logits travel, first step first, and the formula."""
    model = build("qwen3_moe", 4)
    model.config.output_router_logits = True
    engine = engine_of(model, zero3d.Mesh(pp=2, dp=dp), stage=stage, schedule=schedule, loss=None)
    steps = []
    for step in range(2):
        engine.traffic.reset()
        given = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in micro_batches(step, 0, M)]
        engine.train_batch(given)
        gathers = {unit: moves.calls for (op, unit), moves in moved(engine, "dp").items() if op == "all_gather"}
        sends = {key: value for key, value in moved(engine, "pp").items() if key[0].startswith("send")}
        steps.append((sends, engine.pipeline.traffic(M), gathers))
    return steps


@pytest.mark.parametrize(
    ("schedule", "stage", "dp"), [pytest.param("1f1b", 3, 2, marks=pytest.mark.long), ("zbv", 0, 1)]
)
def test_router_logits_are_in_the_formula_and_learning_their_shapes_is_no_training(ranks, schedule, stage, dp):
    for steps in ranks(2 * dp, traffic_of_experts, schedule, stage, dp):
        for sends, formula, gathers in steps:
            assert sends == formula
            assert all(calls == 1 for calls in gathers.values())
        assert steps[0][1] == steps[1][1]


def lengths_in_turn():
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2))
    steps = []
    for step, length in enumerate((12, 8, 12)):
        engine.traffic.reset()
        engine.train_batch(micro_batches(step, 0, M, length=length))
        sends = {key: value for key, value in moved(engine, "pp").items() if key[0].startswith("send")}
        steps.append((sends, engine.pipeline.traffic(M)))
    return steps


def test_the_formula_is_that_of_the_last_step_s_length(ranks):
    for steps in ranks(2, lengths_in_turn):
        assert all(sends == formula for sends, formula in steps)
        assert steps[0] == steps[2] != steps[1]
