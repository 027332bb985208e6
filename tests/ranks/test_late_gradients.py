"""Gradients that come after their unit was reduced: none is lost, none counts twice (decision 0006).

late   a second backward of one forward, a block called twice under reentrant recomputation, a backward that goes
       through parameters alone
"""

import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from blueprints import unit_plan
from models import batch, net
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.blueprint.layout import UnitLayout
from zero3d.distributed.axis import Axis, Pending
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.unit_order import IN_FLIGHT
from zero3d.memory.arena import Arena
from zero3d.spec.offload import Offload
from zero3d.zero.gradients import Gradients
from zero3d.zero.streams import ToHost
from zero3d.zero.unit_parts import SlowWire, UnitParts

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

STAGES = [0, 1, 2, 3]


def engine_of(model, stage, **options):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    return zero3d.Engine(model, stage=stage, **{"precision": "fp32", "clip_norm": None, "optimizer": sgd} | options)


def reduced(engine):
    """Gradients by name, once all reductions are over: this rank's pieces, which on one rank are whole."""
    engine.reductions.catch_up()
    found = {owned.name: grad.detach().double().clone() for owned, grad in engine.optimizer.shard_grads()}
    assert found
    return found


def worst(found, wanted):
    """The largest ||a - b|| / ||b||."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def losses(output):
    """Three of one forward, with other gradients each."""
    return [output.square().mean(), 3 * output.sin().mean(), 2 * output.cos().square().mean()]


@pytest.mark.parametrize(("stage", "accumulate", "reduce"), [
    *((stage, accumulate, "auto") for stage in STAGES for accumulate in (1, 2)),
    (2, 1, "every_step"), (3, 2, "every_step"),
])  # fmt: skip
def test_several_backwards_of_one_forward_equal_one_of_the_sum(stage, accumulate, reduce):
    once, often = (engine_of(net(), stage, accumulate=accumulate, reduce=reduce) for _ in range(2))
    for step in range(2):  # what the first one leaves behind would show in the second
        for m in range(accumulate):
            ids = batch(10 * step + m)
            sum(losses(once(ids))).backward()
            for loss in losses(often(ids)):
                loss.backward(retain_graph=True)
        assert often.accumulation.count == once.accumulation.count == accumulate
        assert worst(reduced(often), reduced(once)) < 1e-6
        assert often.step().applied
        assert once.step().applied
        assert often.arena.live("bucket") == 0


@pytest.mark.parametrize("stage", STAGES)
def test_late_gradients_of_a_narrow_dtype_are_summed_in_fp32(stage):
    """Bit for bit what each backward alone gives in bf16, added up in fp32."""
    wanted = {}
    for index in range(3):
        alone = engine_of(net(), stage, precision="bf16")
        losses(alone(batch(0)).float())[index].backward()
        for name, grad in reduced(alone).items():
            wanted[name] = wanted.get(name, 0.0) + grad.float()
    engine = engine_of(net(), stage, precision="bf16")
    for loss in losses(engine(batch(0)).float()):
        loss.backward(retain_graph=True)
    found = reduced(engine)
    assert [name for name in wanted if not torch.equal(found[name].float(), wanted[name])] == []


@pytest.mark.parametrize(("stage", "reduce"), [(1, "auto"), (2, "every_step"), (3, "every_step"), (3, "auto")])
def test_more_micro_batches_than_planned_are_summed_in_fp32(stage, reduce):
    """bf16 gradients of one planned micro-batch are kept narrow: the second one widens them, once for all steps."""
    planned, surprised = (
        engine_of(net(), stage, precision="bf16", accumulate=accumulate, reduce=reduce) for accumulate in (3, 1)
    )
    for step, count in enumerate((1, 3, 2)):
        for engine in (planned, surprised):
            for m in range(count):
                engine.backward(engine(batch(10 * step + m)).float().square().mean(), last=m == count - 1)
        found, wanted = reduced(surprised), reduced(planned)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        assert planned.step().applied
        assert surprised.step().applied
    assert [(e.planned, e.measured) for e in surprised.memory] == [(e.planned, e.measured) for e in planned.memory]


class Twice(nn.Module):
    """Blocks called in turn and over again, recomputed in reentrant checkpoints or not at all."""

    def __init__(self, reentrant, width=16, times=2):
        super().__init__()
        self.times = times
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for layer in [*self.layers] * self.times:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


@pytest.mark.parametrize("stage", STAGES)
def test_a_block_called_twice_in_reentrant_checkpoints(poison, stage):
    """Each call's gradients come for themselves, and those of the first one after the unit was reduced."""
    engines = [engine_of(Twice(reentrant), stage, units=[nn.Sequential]) for reentrant in (False, True)]
    for _ in range(2):  # in the second step in the order that the first one recorded
        for engine in engines:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
            engine(x).square().mean().backward()
        plain, late = map(reduced, engines)
        assert worst(late, plain) < 1e-6
        assert all(engine.step().applied for engine in engines)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_late_gradients_of_a_narrow_dtype_widen_for_all_steps_to_come(stage):
    """The second late one finds a first beside the sum: from then on memory is that of sums in fp32, as planned."""
    engine = engine_of(Twice(True, times=3), stage, precision="bf16", reduce="every_step", units=[nn.Sequential])
    plain = Twice(False, times=3)
    for _ in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
        engine(x.clone().requires_grad_()).float().square().mean().backward()
        assert engine.step().applied
        assert [(e.planned, e.category) for e in engine.memory if e.planned not in (None, e.measured)] == []
    assert not engine.units[0].gradients.plan.shard
    with engine.full_params():
        moved = {n: p.detach().float() for n, p in engine.module.named_parameters()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(moved[name], p.detach(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_through_parameters_alone_adds_to_the_step(stage):
    """A penalty that does not go through the model's forward; no root forward announces its reduction."""
    engine, whole = engine_of(net(), stage), net()
    with engine.full_params(engine.module.head):
        engine(batch(0)).square().mean().backward()
        engine.module.head.weight.square().sum().backward()
    whole(batch(0)).square().mean().backward()
    whole.head.weight.square().sum().backward()
    wanted = {name: p.grad.double().flatten() for name, p in whole.named_parameters()}
    assert worst(reduced(engine), wanted) < 1e-6
    assert engine.step().applied


@pytest.mark.parametrize("stage", [2, 3])
def test_units_are_reduced_while_the_backward_goes_on_and_two_at_a_time(stage):
    """In every step, not all at its end, where the loop for late gradients would take them as well."""
    engine, log, before_embedding = engine_of(net(), stage), [], []
    engine.reductions._side._log = log
    engine.module.embed.register_forward_hook(
        lambda module, args, out: (out.register_hook(lambda grad: before_embedding.append(list(log))), None)[1]
    )
    for _ in range(3):
        log.clear()
        engine(batch(0)).square().mean().backward()
        assert [what for what, _ in log].count("reduce.issue") == len(engine.units) == 6
        assert [unit for what, unit in log if what == "reduce.issue"][-1] == "root"
        under_way = list(accumulate(1 if what == "reduce.issue" else -1 for what, _ in log))
        assert (max(under_way), under_way[-1]) == (IN_FLIGHT, 0)
        assert engine.step().applied
    for seen in before_embedding:
        assert [unit for what, unit in seen if what == "reduce.issue"][:3] == ["head", "layers.2", "layers.1"]
    assert len(before_embedding) == 3


def on_two_ranks(stages, communicators):
    """By stage: the worst difference of late gradients from those that come at once; what is left in buckets."""
    rank, found = torch.distributed.get_rank(), []
    for stage in stages:
        groups = {"communicators": communicators}
        once, often = (engine_of(net(width=96), stage, **groups) for _ in range(2))
        at_once, late = (
            engine_of(Twice(how, width=96), stage, units=[nn.Sequential], **groups) for how in (False, True)
        )
        for step in range(2):
            sum(losses(once(batch(step, rank)))).backward()
            for loss in losses(often(batch(step, rank))):
                loss.backward(retain_graph=True)
            for engine in (at_once, late):
                x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2 * step + rank)).requires_grad_()
                engine(x).square().mean().backward()
            found += [worst(reduced(often), reduced(once)), worst(reduced(late), reduced(at_once))]
            for engine in (once, often, at_once, late):
                assert engine.step().applied
        found += [float(engine.arena.live("bucket")) for engine in (often, late)]
    for stage in set(stages) - {0}:  # sums of micro-batches that no plan knew of travel as wide as they are
        planned, surprised = (
            engine_of(net(width=96), stage, precision="bf16", reduce="every_step", accumulate=m, **groups)
            for m in (3, 1)
        )
        for engine in (planned, surprised):
            for m in range(3):
                engine.backward(engine(batch(m, rank)).float().square().mean(), last=m == 2)
        wanted = reduced(planned)
        found += [float(not torch.equal(grad, wanted[name])) for name, grad in reduced(surprised).items()]
    return found


@pytest.mark.parametrize(("stages", "communicators"), [
    ((1, 3), 2), ((0, 3), 1), pytest.param((0, 2), 2, marks=pytest.mark.long),
    pytest.param((1, 2), 1, marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_late_gradients_of_two_ranks_come_while_reductions_are_under_way(ranks, stages, communicators):
    for found in ranks(2, on_two_ranks, stages, communicators):
        assert max(found) < 1e-6


class Branching(nn.Module):
    """Calls its last layer first, too, and may leave others out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x, left_out):
        for number in (3, *(number for number in range(3) if number not in left_out), 3):
            x = checkpoint(self.layers[number], x, use_reentrant=True)
        return x


def train_with_branches(stage, communicators):
    engine = engine_of(Branching(), stage, units=[nn.Sequential], communicators=communicators)
    for step in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        engine(x, [2] if torch.distributed.get_rank() else []).square().mean().backward()
        assert engine.step().applied
    return engine.fingerprint()


def test_ranks_may_leave_units_out_while_others_have_late_gradients(ranks):
    found = [ranks(2, train_with_branches, *case) for case in [(0, 2), (1, 2), (2, 2), (0, 1), (1, 1)]]
    assert len({fingerprint for ranks_of in found for fingerprint in ranks_of}) == 1


# --- behind sums over copies, of one rank whose copies move nothing ----------------------------------


class Copies:
    """A rank of two that have copies of a shard: each of their sums is twice this one's term."""

    size, rank, device = 2, 0, torch.device("cpu")

    def __init__(self):
        self.drawn = []

    def all_reduce(self, shard, unit, wire):
        assert shard.device.type == self.device.type
        return Pending(lambda: shard.mul_(2))

    def all_reduce_coded(self, shard, unit, form, noise):
        self.drawn.append(torch.rand(4, generator=noise).tolist())
        return self.all_reduce(shard, unit, form)


def unit_with_copies(reduce, slow=None, device=None):
    """A unit of two parameters of two elements; on a device, sums are kept on the host."""
    arena, copies = Arena(device or torch.device("cpu")), Copies()
    plan = unit_plan(
        2, 1, copies=2, reduce=reduce, precision="fp32", offload=device and Offload(optimizer="host", gradients="host")
    )
    layout = UnitLayout([("a", (2,), 0), ("b", (2,), 0)], 1)
    parts = UnitParts(plan, Comm(Axis("dp", 0, 1), arena, Ledger()), arena, copies, slow=slow)
    if device is not None:
        copies.device = device
        parts = parts._replace(kept={"unit": torch.zeros(layout.shard)}, to_host=ToHost(device, behind=True))
    return Gradients("unit", layout, parts), copies, arena


def reduce_ones(gradients, times, indices=(0, 1), device=None):
    """A backward whose gradients are so many times one, of these parameters."""
    for index in indices:
        gradients.hold(index, torch.full((2,), float(times), device=device))
    gradients.land()
    gradients.fill_up()
    gradients.reduce(single=True)
    gradients.finish()


def sums_behind(reduce, on_device=False):
    """The sums of two steps, of each of which more comes in two reductions while its sum over copies is under way."""
    device = None
    if on_device:
        from instruments import accelerator

        device = accelerator.register()
    gradients, _, arena = unit_with_copies(reduce, device=device)
    found = []
    for _ in range(2):
        reduce_ones(gradients, 1, device=device)
        first = gradients.sum_copies(0)
        reduce_ones(gradients, 10, device=device)
        reduce_ones(gradients, 100, [1], device)
        first.wait()
        assert gradients.differs_on_copies
        gradients.sum_copies(0).wait()
        assert not gradients.differs_on_copies
        gradients.complete()
        found.append([piece.tolist() for piece in gradients.reduced.pieces()])
        assert arena.live("bucket") == 0
        gradients.reset()
        assert arena.live("gradients") == 0
    return found


TWICE_THE_TERMS = [[22.0] * 2, [222.0] * 2]


@pytest.mark.parametrize("reduce", ["every_step", "every_micro_batch"])
def test_what_comes_in_several_reductions_behind_a_sum_over_copies_counts_once(reduce):
    assert sums_behind(reduce) == [TWICE_THE_TERMS] * 2


def test_it_counts_once_where_sums_are_kept_on_the_host(alone):
    assert alone(sums_behind, "every_micro_batch", True) == [TWICE_THE_TERMS] * 2


@pytest.mark.parametrize("reduce", ["every_step", "every_micro_batch"])
def test_a_step_that_is_dropped_beside_late_gradients_leaves_nothing(reduce):
    gradients, _, arena = unit_with_copies(reduce)
    reduce_ones(gradients, 1)
    gradients.sum_copies(0).wait()
    reduce_ones(gradients, 10)
    gradients.hold(0, torch.ones(2))
    gradients.reset()
    assert arena.live("bucket") == arena.live("gradients") == 0
    reduce_ones(gradients, 3)
    assert gradients.differs_on_copies
    gradients.sum_copies(1).wait()
    assert [piece.tolist() for piece in gradients.reduced.pieces()] == [[6.0] * 2] * 2


def test_late_gradients_are_rounded_with_other_numbers_than_the_sum_that_they_are_added_to():
    gradients, copies, _ = unit_with_copies("every_step", SlowWire("int8", stochastic=True))
    for step in (0, 0, 1):
        for times in (1, 10):
            reduce_ones(gradients, times)
            gradients.sum_copies(step).wait()
        gradients.reset()
    first, again, next_step = (copies.drawn[place : place + 2] for place in (0, 2, 4))
    assert first == again, "a step repeats its own"
    assert len({tuple(drawn) for drawn in (*first, *next_step)}) == 4


class Slots:
    """A rank of two whose sums are its own terms; what it gathers takes the place of what was there."""

    size, rank = 2, 0

    def travels(self, kept, made, wire):
        return kept

    def reduce_scatter(self, full, shard, unit, wire, add):
        return Pending(lambda: None)

    def all_gather(self, full, shard, unit):
        return Pending(lambda: full.fill_(torch.nan))


def test_a_unit_that_takes_its_turn_beside_late_gradients_keeps_them():
    """Two late ones of a parameter, of which the first has landed where the sum was."""
    arena = Arena(torch.device("cpu"))
    parts = UnitParts(unit_plan(0, 2, precision="fp32"), Slots(), arena, Comm(Axis("replica", 0, 1), arena, Ledger()))
    gradients = Gradients("unit", UnitLayout([("a", (2,), 0), ("b", (2,), 0)], 2), parts)
    reduce_ones(gradients, 1)
    for _ in range(2):
        gradients.hold(1, torch.ones(2))
    gradients.gather()
    gradients.fill_up()
    assert [view.tolist() for view in gradients.local.views] == [[0.0] * 2, [2.0] * 2]
    gradients.reset()
    assert arena.live("bucket") == 0
