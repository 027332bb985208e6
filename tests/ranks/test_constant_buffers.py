"""ZeRO's C_B: buffers of gathers, reductions, casts and rings are as large for a deep model as for a flat one."""

from unittest import mock

import pytest
from buckets import buckets_of
from models import adamw, batch, loss_of, net

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.memory import scratch

TRANSIENT = ("gathered", "bucket", "wire")


def peaks(options, group):
    """The most that was lent by category in two steps, for models of 4 and 12 blocks."""
    found = []
    with mock.patch.object(scratch, "group_elements", return_value=group), buckets_of(group):
        for layers in (4, 12):
            model = net(layers=layers)
            recompute(model, "full")
            engine = zero3d.Engine(model, precision="bf16", optimizer=adamw, **options)
            for step in range(2):
                engine.backward(loss_of(engine, batch(step)))
                engine.step()
            found.append({category: engine.arena.peak(category) for category in TRANSIENT})
    return found


SELDOM = (
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "reduce_scatter": "native"},
    {"stage": 1, "master": "split"},
)


@pytest.mark.parametrize("options", [
    {"stage": 3, "offload": {"activations": "host"}},
    *(pytest.param(case, marks=pytest.mark.long) for case in SELDOM),
], ids=str)  # fmt: skip
def test_buffers_do_not_grow_with_the_number_of_blocks(ranks, options):
    for flat, deep in ranks(2, peaks, options, 1 << 12):
        assert flat == deep
        assert deep["wire"] > 0


def test_with_a_group_as_large_as_all_masters_they_would(ranks):
    for flat, deep in ranks(2, peaks, {"stage": 1}, 1 << 30):
        assert flat["wire"] < deep["wire"]
