"""A backward's gradients of a unit are copied in together, small ones, and in the order in which they came.

And sums on their way to the host and back.
"""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from models import adamw, batch, build, loss_of
from torch import nn

import zero3d
from zero3d.memory.arena import Arena
from zero3d.zero import local_gradients
from zero3d.zero.gradient_shards import HostShard
from zero3d.zero.streams import ToHost
from zero3d.zero.unit_parts import UnitParts

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from instruments.dispatches import Dispatches


def engine_of(model=None, **options):
    return zero3d.Engine(model or build("net"), precision="bf16", optimizer=adamw, **options)


def launches(engine, turn=0):
    """The copies and sums that a backward launches."""
    loss = loss_of(engine, batch(turn))
    with Dispatches() as seen:
        engine.backward(loss)
    return {name: seen.by_name[f"aten::_foreach_{name}_"] for name in ("copy", "add", "zero")}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_further_micro_batches_are_added_in_a_launch_a_unit(stage):
    engine = engine_of(stage=stage, accumulate=3, reduce="every_step")
    units = len(engine.units)
    assert launches(engine) == {"copy": units, "add": 0, "zero": 0}
    assert [launches(engine, turn) for turn in (1, 2)] == [{"copy": 0, "add": units, "zero": 0}] * 2


def test_large_gradients_are_copied_at_once_with_the_same_bits():
    found = []
    for most in (local_gradients.HELD, 4000, 0):
        with mock.patch.object(local_gradients, "HELD", most):
            engine = engine_of(stage=2, clip_norm=0.1)
            copies = launches(engine)["copy"]
            engine.step()
        found.append((copies, engine.fingerprint()))
    (together, bits), (some, of_some), (alone, of_one) = found
    assert together < some < alone == len(list(build("net").parameters()))
    assert bits == of_some == of_one


def test_what_was_held_before_leaves_room_for_as_much_again():
    """Three matrices of 64 bytes in bf16 may wait, in each of three micro-batches."""
    model = nn.Sequential(
        *(nn.Linear(8, 4, bias=False) if at % 2 == 0 else nn.Linear(4, 8, bias=False) for at in range(3))
    )
    with mock.patch.object(local_gradients, "HELD", 3 * 64):
        engine = engine_of(model, stage=0, accumulate=3, units=[])
        for name in ("copy", "add", "add"):
            loss = engine(torch.ones(2, 8)).float().sum()
            with Dispatches() as seen:
                engine.backward(loss)
            assert seen.by_name[f"aten::_foreach_{name}_"] == 1


class Partly(nn.Module):
    """Two matrices, of which a forward uses both or one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.used, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x, both):
        return self.used(x) + (self.other(x) if both else 0)


def test_nothing_is_held_after_a_backward_that_left_a_parameter_out():
    """Its gradients count, and what is held would be memory of the next forward."""
    sums = []
    for order in ((True, False), (False, True)):
        engine = engine_of(Partly(), stage=1, accumulate=2, units=[])
        for both in order:
            engine.backward(engine(torch.ones(2, 8) * (1 + both), both).float().sum())
            assert not any(unit.gradients.local._held for unit in engine.units)
        engine.step()
        sums.append(engine.fingerprint())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_second_gradient_in_one_backward_is_added_to_the_first(precision):
    engine = zero3d.Engine(Partly(), stage=2, units=[], precision=precision, optimizer=adamw)
    (unit,) = engine.units
    first, second = (torch.full((8, 8), value, dtype=engine.precision.dtype) for value in (1.5, 2.25))
    for grad in (first, second.to_sparse()):
        unit.gradients.hold(0, grad)
    unit.gradients.local.views[1].fill_(7)  # of another unit, whose bucket this was
    unit.gradients.fill_up()
    assert torch.equal(unit.gradients.local.views[0].float(), (first + second).float())
    assert not unit.gradients.local.views[1].any()


def test_sums_that_wait_rounded_on_the_host_borrow_a_bucket_of_each_width_and_give_both_back():
    cpu, kept = torch.device("cpu"), torch.zeros(64, dtype=torch.bfloat16)
    arena, to_host = Arena(cpu), ToHost(cpu, behind=False)
    shard = HostShard(kept, UnitParts(None, None, arena, None, to_host=to_host))
    shard.receive(torch.float32, add=False).fill_(1.5)
    shard.keep_received()
    shard.receive(torch.float32, add=True).add_(2.25)
    shard.keep_received()
    to_host.finish()
    assert kept.tolist() == [3.75] * 64
    assert (arena.live("bucket"), arena.peak("bucket")) == (0, 64 * (4 + 2))
