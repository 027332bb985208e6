"""To which part of a step a wait is counted: a clock goes on in one function alone."""

from types import SimpleNamespace
from unittest import mock

import pytest
from pipelines import build, engine_of, micro_batches

import zero3d
from zero3d.zero.model_group import ModelGroup
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.step_parts import BUBBLE, GATHERS, REDUCTIONS, UPDATE
from zero3d.zero.streams import SideStream

WAITS = {  # what waits, of which side stream; settings; parts
    "gathers": (SideStream, "join", "gather", {"stage": 3}, {GATHERS}),
    "reductions": (SideStream, "join", "reduce", {"stage": 3}, {REDUCTIONS}),
    "new weights": (ShardedOptimizer, "wait", None, {"stage": 2}, {UPDATE, GATHERS}),  # before the update, behind it
    "losses": (ModelGroup, "sum", None, {"stage": 2}, {UPDATE}),
    "losses of a pipeline": (ModelGroup, "sum", None, {"stage": 1, "mesh": {"pp": 2}}, {BUBBLE}),
}


def seconds_by_part(what):
    """Train a step in which each call of a function takes a second, and nothing else any time."""
    owner, name, side, options, _ = WAITS[what]
    now, original = SimpleNamespace(seconds=0.0), getattr(owner, name)

    def slow(self, *args):
        now.seconds += side is None or self._name == side
        return original(self, *args)

    mesh = zero3d.Mesh(**options.get("mesh", {"dp": 2}))
    with mock.patch("zero3d.zero.clocks.time", SimpleNamespace(perf_counter=lambda: now.seconds)):
        engine = engine_of(build("net", 2), **options | {"mesh": mesh})
        with mock.patch.object(owner, name, slow):
            engine.train_batch(micro_batches(0, engine.dp.rank))
    found = {row.part: row.seconds for row in engine.clocks.rows()}
    assert sum(found.values()) == now.seconds > 0
    return found


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted_where_a_user_looks_for_it(ranks, what):
    *_, parts = WAITS[what]
    assert [set(found) for found in ranks(2, seconds_by_part, what)] == [parts, parts]
