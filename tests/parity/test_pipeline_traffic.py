"""What pipelines send, per axis, equals the formulas; what they do is recorded, and its bubble is the formula's."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from models import Net, batch

import zero3d
from zero3d.plan.bubble import bubble
from zero3d.plan.traffic import Moved, pipeline_traffic, step_traffic
from zero3d.schedules import Schedule

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
    mine = kind.parts_of(mesh.place.pp, 2)
    cuts = [[(batch(0).numel() * WIDTH, 4)]] * (2 * kind.parts_per_rank - 1)
    sends = pipeline_traffic(mine, M, cuts)
    held = {unit.name: 1 for unit in engine.units}  # gathered once, held for the schedule
    state = step_traffic(stage, engine.traffic_units, dp, held, M, "every_step")
    return moved(engine, "pp"), sends, moved(engine, "dp"), state, engine.pipeline.order()


@pytest.mark.parametrize(
    ("schedule", "stage"), [("gpipe", 3), ("1f1b", 1), ("interleaved", 0), ("zero-bubble", 3), ("zbv", 2)]
)
def test_each_axis_sends_what_the_formulas_say(ranks, schedule, stage):
    for pp, sends, dp, state, _ in ranks(4, traffic_of_a_step, schedule, stage, 2):
        assert {key: value for key, value in pp.items() if key[0].startswith("send")} == sends
        assert {key: value for key, value in dp.items() if key[0] != "exchange"} == {
            key: value for key, value in state.items() if key[0] != "exchange"
        }
        assert not [key for key in dp if key[0].startswith("send")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_what_was_recorded_is_p_minus_1_over_m(ranks, schedule):
    for *_, order in ranks(2, traffic_of_a_step, schedule, 0, 1):
        assert bubble(order) == Fraction(1, M)


def test_looped_and_split_schedules_wait_less(ranks):
    waits = [bubble(ranks(2, traffic_of_a_step, name, 0, 1)[0][-1]) for name in ("1f1b", "interleaved", "zbv")]
    assert waits[0] > waits[1] > waits[2]
