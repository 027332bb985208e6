"""One process group for an axis' gathers and reductions: the same bits, and one order on ranks that are not alike.

On gloo, whose messages have names, a wrong order would not show: what each rank asks of its groups is compared.
"""

from contextlib import contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deep import deep
from models import adamw, batch, net
from pipelines import build, engine_of, micro_batches
from test_holes import BLOCKS, Block, Net, data, sgd
from test_late_gradients import Branching, Twice, losses
from torch import nn

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm


@contextmanager
def asked():
    """What this rank asks of its axes inside: (axis, operation, unit), in order."""
    found, announce, exchange = [], Comm._announce, Comm.exchange

    def announced(comm, op, unit, *rest):
        found.append((comm.axis, op, unit))
        return announce(comm, op, unit, *rest)

    def exchanged(comm, values):
        found.append((comm.axis, "exchange", "-"))
        return exchange(comm, values)

    with mock.patch.object(Comm, "_announce", announced), mock.patch.object(Comm, "exchange", exchanged):
        yield found


def bits_of(engine):
    with engine.full_params():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


# --- the same bits ------------------------------------------------------------------------------

FAR = "offload of weights and gradients"
WAYS = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "reduced every step": {"accumulate": 2, "reduce": "every_step"},
    "offload": {"offload": {"optimizer": "host"}, "accumulate": 2},
    FAR: {"offload": {"optimizer": "host", "gradients": "host", "params": "host"}, "accumulate": 2},
    "exact": {"exact": True, "accumulate": 2},
    "copies": {"mesh": {"shard": 1}},
}


def trained(model, options, number):
    """Weights after two steps of a model whose axes have so many communicators, and the most bytes that it held."""
    mesh = zero3d.Mesh(**options.get("mesh", {}))
    options = {"accumulate": 1, "precision": "bf16"} | options | {"mesh": mesh, "communicators": number}
    engine = zero3d.Engine(model, optimizer=adamw, **options)
    axis = mesh.axis("shard")
    assert (axis.reductions is axis.gathers) == (number == 1 or axis.size == 1)
    for step in range(2):
        for part in range(options["accumulate"]):
            ids = batch(10 * step + part, dist.get_rank(), dist.get_world_size())
            engine.backward(engine(ids).float().square().mean())
        assert engine.step().applied
    return bits_of(engine), {category: engine.arena.peak(category) for category in ("gathered", "bucket", "wire")}


def equal_bits(cases):
    """Names of parameters and categories of memory that another number of communicators changes, by stage and way."""
    found = {}
    for stage, way in cases:
        (one, held), (two, wanted) = (trained(net(layers=6), WAYS[way] | {"stage": stage}, number) for number in (1, 2))
        found[stage, way] = [name for name in two if not torch.equal(one[name], two[name])]
        found[stage, way] += [category for category in held if held[category] != wanted[category]]
    return found


@pytest.mark.parametrize("cases", [
    [(0, "accumulation"), (3, "accumulation")],
    pytest.param([case for case in product(range(4), WAYS) if case[1] != FAR or case[0] == 3], marks=pytest.mark.long),
], ids=["few", "all"])  # fmt: skip
def test_one_communicator_gives_the_bits_of_two_and_takes_the_same_buffers(ranks, cases):
    for found in ranks(2, equal_bits, cases):
        assert not any(found.values())


def through_pipelines(schedules, number):
    """Losses and weights of a pipeline with so many communicators, by schedule."""
    found = []
    for schedule in schedules:
        mesh = zero3d.Mesh(dp=2, pp=2)
        layers = 4 if schedule in ("1f1b", "gpipe") else 8
        with asked() as log:
            engine = engine_of(
                build("llama", layers), mesh, stage=3, accumulate=4, schedule=schedule, communicators=number
            )
            told = [float(engine.train_batch(micro_batches(step, mesh.place.dp, 4))) for step in range(2)]
        found.append((told, engine.fingerprint(), [row for row in log if row[0] == "dp"]))
        engine.close()
    return found


@pytest.mark.long
def test_pipelines_have_the_bits_of_two_communicators_and_one_order(ranks):
    schedules = ("1f1b", "gpipe", "interleaved", "zero-bubble")
    one, two = (ranks(4, through_pipelines, schedules, number) for number in (1, 2))
    for rank in range(4):
        assert [row[:2] for row in one[rank]] == [row[:2] for row in two[rank]]
    for number in range(len(schedules)):
        assert one[0][number][2] == one[1][number][2]
        assert one[2][number][2] == one[3][number][2]


# --- one order on ranks that are not alike ------------------------------------------------------


def with_holes(places, number, stage=3):
    """What this rank asks in two steps, by the block of which an expert has no tokens on one rank."""
    rank, found = dist.get_rank(), []
    for place in places:
        engine = zero3d.Engine(
            Net(None), stage=stage, precision="fp32", clip_norm=None, units=[Block], optimizer=sgd, communicators=number
        )
        with asked() as log:
            for step in range(2):
                hole = place if rank == place % 2 else None
                engine.backward(engine(data(step, 0, rank).float(), hole))
                assert engine.step().applied
        found.append(log)
        engine.close()
    return found


def interleavings(found):
    """How many orders the ranks have, by case."""
    return [len({tuple(log) for log in logs}) for logs in zip(*found, strict=True)]


@pytest.mark.parametrize("places", [(3, 9), pytest.param(range(BLOCKS), marks=pytest.mark.long)], ids=str)
def test_a_hole_on_one_rank_leaves_gathers_and_reductions_in_one_order(ranks, places):
    found = ranks(2, with_holes, places, 1)
    assert interleavings(found) == [1] * len(places)
    ops = [op for _, op, _ in found[0][0]]
    last_gather = len(ops) - ops[::-1].index("all_gather")
    assert ops[:last_gather].count("reduce_scatter") > BLOCKS, "behind gathers, and not all at the end"


class Skipping(nn.Module):
    """A block that may pass its input on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, skips):
        return x * 1.0 if skips else x + torch.tanh(self.linear(x))


class Skippers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.entrance, self.layers = nn.Linear(16, 16), nn.ModuleList(Skipping() for _ in range(8))

    def forward(self, x, place):
        x = self.entrance(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, number == place)
        return x.square().mean()


def with_a_block_without_gradients(at_module_ends):
    """What this rank asks where none of a block's parameters has a gradient on one rank."""
    engine = zero3d.Engine(
        Skippers(), precision="fp32", clip_norm=None, units=[Skipping], optimizer=sgd, communicators=1
    )
    engine.reductions.arrivals.at_module_ends = at_module_ends
    with asked() as log:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 16), 4 if dist.get_rank() else None))
            assert engine.step().applied
    return [log], engine.fingerprint()


def test_a_block_without_gradients_on_one_rank_is_reduced_in_its_place_and_elsewhere_by_arrival(ranks):
    found, planted = (ranks(2, with_a_block_without_gradients, at_module_ends) for at_module_ends in (True, False))
    assert interleavings([logs for logs, _ in found]) == [1]
    assert interleavings([logs for logs, _ in planted]) == [2], "the fault that the order of what is asked would show"
    assert {fingerprint for _, fingerprint in found} == {fingerprint for _, fingerprint in planted}


def with_late_gradients(keep_turns=True):
    """What this rank asks at stage 0 while a late gradient comes earlier on one rank than on the other."""
    engine = zero3d.Engine(
        Branching(), stage=0, precision="fp32", clip_norm=None, units=[nn.Sequential], optimizer=sgd, communicators=1
    )
    if not keep_turns:
        engine.reductions._shared = False
    with asked() as log:
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            engine(x, [2] if dist.get_rank() else []).square().mean().backward()
            assert engine.step().applied
    return [log], engine.fingerprint()


def test_late_gradients_leave_the_gathers_of_sums_in_their_places(ranks):
    found = ranks(2, with_late_gradients)
    assert interleavings([logs for logs, _ in found]) == [1]
    assert len({fingerprint for _, fingerprint in found}) == 1
    seen = ranks(2, with_late_gradients, False)
    assert interleavings([logs for logs, _ in seen]) == [2], "without their turns"
    assert seen[0][1] == found[0][1]


class TwoInputs(nn.Module):
    """Blocks that have a second input with a gradient, which one of two ranks does not use, or does not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.entrance = nn.Linear(16, 16)
        self.memory = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Reader() for _ in range(6))

    def forward(self, x, blind, absent):
        x, memory = self.entrance(x), None if blind and absent else self.memory(x)
        for layer in self.layers:
            x = layer(x, memory, blind)
        return x.square().mean()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, memory, blind):
        y = torch.tanh(self.own(x))
        return x + y if blind else x + y + self.other(memory)


def with_two_inputs(absent, stage, number):
    """What this rank asks where it reads no second input, or has none, and the other rank does; its parameters."""
    engine = zero3d.Engine(
        TwoInputs(), stage=stage, precision="fp32", clip_norm=None, units=[Reader], optimizer=sgd, communicators=number
    )
    engine.arena.reset_peaks()
    with asked() as log:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 16), dist.get_rank() == 1, absent))
            assert engine.step().applied
            buckets = engine.arena.peak("bucket") / (4 * engine.units[1].layout.total)
            assert buckets <= 4, "not those of all units at once"
    return [log], engine.fingerprint()


@pytest.mark.parametrize("absent", [False, True])
def test_blocks_of_several_inputs_are_reduced_in_one_order_at_their_ends(ranks, absent):
    found = ranks(2, with_two_inputs, absent, 3, 1)
    assert interleavings([logs for logs, _ in found]) == [1]
    two = ranks(2, with_two_inputs, absent, 2, 2)
    assert len({fingerprint for _, fingerprint in (*found, *two)}) == 1


def twice_called(number):
    """Gradients of blocks that are called twice, of one backward and of several, and what this rank asks."""
    found = []
    for reentrant in (False, True):
        engine = zero3d.Engine(
            Twice(reentrant, width=32), precision="fp32", clip_norm=None, units=[nn.Sequential], optimizer=sgd,
            communicators=number,
        )  # fmt: skip
        for step in range(2):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step + dist.get_rank())).requires_grad_()
            output = engine(x)
            for loss in losses(output)[: 1 if reentrant else 3]:
                loss.backward(retain_graph=not reentrant)
            assert engine.step().applied
        found.append(engine.fingerprint())
    return found


def test_blocks_that_are_called_twice_have_the_bits_of_two_communicators(ranks):
    assert ranks(2, twice_called, 1) == ranks(2, twice_called, 2)


# --- axes of one group --------------------------------------------------------------------------

SHAPES = {
    "tensors, in a pipeline": ("qwen3", {"tp": 2, "pp": 2}, {"tp", "replica"}),
    "sequences": ("qwen3", {"dp": 4, "sp": 2}, {"sp"}),
    "experts": ("moe", {"dp": 4, "ep": 2}, {"ep"}),
    "copies of shards": ("qwen3", {"dp": 4, "shard": 2}, {"replicate", "dp"}),
}


def on_axes(family, degrees):
    """What this rank begins on its axes in two steps and an evaluation, recomputing blocks, and each one's ranks."""
    torch.manual_seed(7)
    mesh, begun, begins = zero3d.Mesh(**degrees), [], Axis.begins

    def noted(axis, op, unit):
        begun.append((axis.name, op, unit))
        return begins(axis, op, unit)

    model = deep(family, layers=4, inner=96)
    model.resize_token_embeddings(pad_to_multiple_of=2)
    recompute(model, "full")
    schedule = {"schedule": "1f1b"} if mesh.pp > 1 else {}
    with mock.patch.object(Axis, "begins", noted):
        engine = zero3d.Engine(
            model, mesh=mesh, stage=3, precision="fp32", optimizer=adamw, clip_norm=0.5, accumulate=2, **schedule
        )
        for step in range(2):
            ids = [batch(10 * step + part, mesh.row) for part in range(2)]
            engine.train_batch([{"input_ids": each, "labels": each} for each in ids])
        if mesh.pp == 1:
            with torch.no_grad():
                engine(input_ids=ids[0], labels=ids[0])
    names = {name for name, _, _ in begun}
    found = {name: (list(mesh._ranks(name)), [each[1:] for each in begun if each[0] == name]) for name in names}
    single = {name for name in names if mesh.axis(name).reductions is mesh.axis(name).gathers}
    engine.close()
    return found, single


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_of_an_axis_of_one_group_begin_everything_in_one_order(ranks, shape):
    family, degrees, axes = SHAPES[shape]
    found = ranks(4, on_axes, family, degrees)
    for rank, (own, single) in enumerate(found):
        assert axes <= single
        for name in single:
            members, begun = own[name]
            assert rank in members
            assert all(found[peer][0][name][1] == begun for peer in members), f"{name} of rank {rank}"
            assert begun


# --- groups of a mesh ---------------------------------------------------------------------------


def groups_of_a_shared_mesh(numbers):
    """How many groups there are after each of several engines on one mesh, beside the default one; what a close leaves."""
    groups, mesh, found = dist.distributed_c10d._world.pg_map, zero3d.Mesh(shard=2), []
    engines = []
    for number in numbers:
        engines.append(
            zero3d.Engine(nn.Linear(16, 16), mesh=mesh, precision="fp32", optimizer=sgd, communicators=number)
        )
        found.append(len(groups) - 1)
        axis = mesh.axis("shard")
        assert (axis.reductions is axis.gathers) == (number == 1)
    for engine in engines:
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        assert engine.step().applied
    mesh.close()
    return found, len(groups) - 1


@pytest.mark.parametrize(("numbers", "groups"), [((1, 1), [2, 2]), ((1, 2, 1), [2, 3, 3]), ((2, 1), [3, 3])])
def test_a_second_group_is_made_for_the_first_engine_that_needs_it(ranks, numbers, groups):
    assert ranks(4, groups_of_a_shared_mesh, numbers) == [(groups, 0)] * 4
