"""A parameter that gets no gradient on one rank alone, in each block: the step of one process, and never a wait.

hole    of a block: its second expert, which is no unit of its own, has no tokens on one rank
first   in the first step, whose reductions have the layout's order; later ones have the recorded order
"""

import copy
from itertools import product

import pytest
import torch
from models import VOCAB
from pipelines import MICRO_BATCHES, micro_batches, weights_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.distributed.unit_order import AHEAD

BLOCKS, WIDTH, STEPS = 10, 96, 2
assert BLOCKS > 2 * AHEAD + 2, "so that ranks would wait for each other"
PARAMETERS = "offload of parameters"
WAYS = {  # of training: options of an engine, and what is done with the model
    "plain": ({}, None),
    "accumulation": ({"accumulate": 2}, None),
    "accumulation, reduced every step": ({"accumulate": 2, "reduce": "every_step"}, None),
    "recomputation": ({}, "full"),
    "recomputation of two blocks": ({}, "every:2"),
    "recomputation of attention": ({}, "selective"),
    "reentrant recomputation": ({}, "reentrant"),
    "offload": ({"offload": {"optimizer": "host", "gradients": "host"}}, None),
    PARAMETERS: ({"offload": {"optimizer": "host", "params": "host"}}, None),
    "exact": ({"exact": True}, None),
    "LoRA": ({}, "LoRA"),
    "a Function without a gradient": ({}, "function"),
    "the first block's input has no gradient": ({}, "bare"),
    "one communicator": ({"communicators": 1}, None),
    "one communicator, accumulation": ({"communicators": 1, "accumulate": 2}, None),
    "one communicator, reentrant recomputation": ({"communicators": 1}, "reentrant"),
    "one communicator, recomputation of two blocks": ({"communicators": 1}, "every:2"),
}


OF_STAGE_3 = [name for name in WAYS if name == PARAMETERS or name.startswith("one communicator")]


class NoGradient(torch.autograd.Function):
    """Adds an expert's weights times zero, and has no gradient for them."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        return x + 0.0 * (weight.sum() + bias.sum())

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class Block(nn.Module):
    """Two experts behind what stands for attention; the second one may have no tokens."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.hole, self.function = False, False

    def forward(self, x):
        x = x + torch.tanh(self.attn(x))
        first, second = self.experts
        if self.hole:
            x = NoGradient.apply(x, second.weight, second.bias) if self.function else x
            return x + torch.tanh(first(x))
        return x + torch.tanh(first(x)) + torch.tanh(second(x))


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(11)
        self.entrance = nn.Identity() if way == "bare" else nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.reentrant = way == "reentrant"
        for block in self.blocks:
            block.function = way == "function"

    def forward(self, x, hole=None):
        for number, block in enumerate(self.blocks):
            block.hole = number == hole
        x = self.entrance(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.head(x).square().mean()


def build(way):
    net = Net(way)
    if way == "LoRA":
        import peft

        options = {"r": 4, "target_modules": r".*(attn|experts\.\d)", "init_lora_weights": False}
        net = peft.get_peft_model(net, peft.LoraConfig(**options))
    return net.double()


def data(step, part, rank):
    """One rank's part of a step."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)).double()


def holes_of(place, first, steps):
    """By step: the block with a hole, None in a step without."""
    return [place if (step == 0) == first else None for step in range(steps)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def expected(way, parts, holes, owner, world=2):
    """The parameters that one process has after these steps over the parts of all ranks."""
    net = build(way)
    optimizer = sgd([p for p in net.parameters() if p.requires_grad])
    for step, hole in enumerate(holes):
        optimizer.zero_grad()
        for part, rank in product(range(parts), range(world)):
            (net(data(step, part, rank), hole if rank == owner else None) / (world * parts)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}


def differences(stage, name, cases, shard=None):
    """The worst differences of each case's parameters from those of one process."""
    rank, world, found = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    options, way = WAYS[name]
    parts = options.get("accumulate", 1)
    for place, first in cases:
        net, owner, holes = build(way), place % world, holes_of(place, first, STEPS)
        wanted = expected(way, parts, holes, owner, world)
        if way in ("full", "every:2", "selective"):
            recompute(net, way)
        engine = zero3d.Engine(
            net, stage=stage, mesh=zero3d.Mesh(shard=shard), precision="fp64", clip_norm=None, units=[Block],
            optimizer=sgd, **copy.deepcopy(options),
        )  # fmt: skip
        for step, hole in enumerate(holes):
            for part in range(parts):
                engine.backward(engine(data(step, part, rank), hole if rank == owner else None))
            assert engine.step().applied
        with engine.full_params():
            have = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
        assert have.keys() == wanted.keys()
        found.append(max(float((have[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted))
        engine.close()
    return found


ALL = [(place, first) for place in range(BLOCKS) for first in (True, False)]
FEW = [(3, True), (5, False), (9, True)]


@pytest.mark.parametrize(("stage", "name", "cases"), [
    (3, "plain", FEW), (3, "reentrant recomputation", FEW[1:]), (2, "plain", FEW[:1]),
    (3, "one communicator", FEW[:1]),
    *(pytest.param(stage, name, ALL, marks=pytest.mark.long) for stage, name in [
        *((3, name) for name in WAYS), *((2, name) for name in WAYS if name not in OF_STAGE_3),
        *product((1, 0), ("plain", "accumulation")),
    ]),
])  # fmt: skip
def test_a_hole_on_one_rank_gives_the_step_of_one_process(ranks, stage, name, cases):
    for found in ranks(2, differences, stage, name, cases):
        assert max(found) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "accumulation", "exact"])
@pytest.mark.parametrize("shard", [2, 4])
def test_a_hole_on_one_of_four_ranks_that_have_copies_of_shards(ranks, shard, name):
    for found in ranks(4, differences, 3, name, ALL[1::3], shard):
        assert max(found) < 1e-10


# --- what a rank with a hole begins, and when -------------------------------------------------------


class Tower(nn.Module):
    """A layer over what has no gradient, so that no module's end tells when backward has left it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.ones(*shape, WIDTH)) for shape in ((WIDTH,), ()))

    def forward(self, given, hole):
        return F.linear(given, self.weight, None if hole else self.bias)


class WithTower(Net):
    """Blocks, and before the sixth one a tower whose bias may have no gradient."""

    def __init__(self):
        super().__init__(None)
        self.tower = Tower()

    def forward(self, given, hole=None):
        x = self.entrance(given)
        for number, block in enumerate(self.blocks):
            x = block(x + self.tower(given, hole is not None)) if number == 5 else block(x)
        return self.head(x).square().mean()


def begun(way, options):
    """What gathers and reductions one process begins in a step without a hole, and in one with a hole in block 5."""
    net = WithTower().double() if way == "tower" else build(way)
    if way in ("full", "every:2"):
        recompute(net, way)
    engine = zero3d.Engine(
        net, stage=3, precision="fp64", clip_norm=None, units=[Block] + [Tower] * (way == "tower"),
        optimizer=sgd, **options,
    )  # fmt: skip
    log, found = [], []
    engine.reductions._side._log = engine.gathers._side._log = log
    for hole in (None, None, 5):  # in the first step nothing is gathered ahead
        log.clear()
        engine.backward(engine(data(0, 0, 0), hole))
        found.append([(what, unit) for what, unit in log if what.endswith("issue")])
        assert engine.step().applied
    return found[1:]


@pytest.mark.parametrize(("way", "options"), [
    ("tower", {}), *product(("plain", "function", "full", "every:2"), ({}, {"communicators": 1})),
], ids=str)  # fmt: skip
def test_a_rank_with_a_hole_begins_everything_where_others_begin_it(way, options):
    """Beside the backward, and not at its end."""
    whole, with_hole = begun(way, options)
    assert with_hole == whole
    last_gather = max(place for place, (what, _) in enumerate(whole) if what == "gather.issue")
    reduced = [unit for what, unit in whole[:last_gather] if what == "reduce.issue"]
    blocks = [f"blocks.{number}" for number in reversed(range(2 * AHEAD, BLOCKS))]
    assert [unit for unit in reduced if unit in blocks] == blocks


# --- through pipelines --------------------------------------------------------------------------


class Tokens(nn.Module):
    """A model that a pipeline cuts: blocks of which one may have a hole on a rank."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(12)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits, given):
    """The sum over next tokens in fp64, and their number."""
    targets = given["targets"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), float(targets.numel())


def through_pipelines(schedule, stage, release, places):
    """The worst differences from one process of steps whose first row of ranks has a hole in these blocks, by block."""
    found, layers = [], 2 * BLOCKS
    for place in places:
        mesh = zero3d.Mesh(dp=2, pp=2)
        whole, net = Tokens(layers).double(), Tokens(layers)
        net.layers[place].hole = mesh.place.dp == 0
        engine = zero3d.Engine(
            net, mesh=mesh, stage=stage, precision="fp64", clip_norm=None, units=[Block], optimizer=sgd, loss=loss_of,
            schedule=schedule, accumulate=MICRO_BATCHES, release=release,
        )  # fmt: skip
        optimizer = sgd(whole.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            for row in range(2):
                whole.layers[place].hole = row == 0
                for given in micro_batches(step, row):
                    loss, weight = loss_of(whole(given["input_ids"]), given)
                    loss.backward()
                    total += weight
            for p in whole.parameters():
                p.grad /= total
            optimizer.step()
            engine.train_batch(micro_batches(step, mesh.place.dp))
            assert engine.last_step.applied
        wanted, have = {n: p.detach() for n, p in whole.named_parameters()}, weights_of(engine)
        found.append(max(float((have[n] - wanted[n]).norm() / wanted[n].norm()) for n in have))
        engine.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "stage", "release"), [
    ("1f1b", 3, "every_use"), ("zero-bubble", 3, "every_use"), ("gpipe", 3, "every_step"), ("1f1b", 2, "every_use"),
])  # fmt: skip
def test_a_hole_in_a_pipeline_on_one_row_of_ranks(ranks, schedule, stage, release):
    for found in ranks(4, through_pipelines, schedule, stage, release, (0, 3, 9, 13, 19)):
        assert max(found) < 1e-10
