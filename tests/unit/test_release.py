"""Gathering and releasing under poison, in one process: the right weights at the right moment.

Released storages hold NaN here, so any use of a unit outside its token gives a NaN gradient.
Every case is compared with the same module without an engine, bit for bit.
"""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from models import VOCAB, Block, Net, batch, bits, build, clone, loss_of, net
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.distributed.unit_order import AHEAD
from zero3d.zero.tokens import count_gathers
from zero3d.zero.weights import is_placeholder

RECOMPUTATION = ["none", "non-reentrant", "reentrant"]


def recompute(how, function, *args):
    if how == "none":
        return function(*args)
    return checkpoint(function, *args, use_reentrant=how == "reentrant")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def engine_for(model, stage=3, **options):
    return zero3d.Engine(
        model, **({"stage": stage, "precision": "fp32", "clip_norm": None, "optimizer": sgd} | options)
    )


def same_as_plain(model, run, steps=2, **options):
    """Run `run(model) -> loss` on a plain copy and on an engine; their weights must agree bit for bit."""
    plain = clone(model)
    engine = engine_for(model, **options)
    optimizer = sgd([p for p in plain.parameters() if p.requires_grad])
    for _ in range(steps):
        expected = run(plain)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = run(engine.module)
        assert torch.equal(loss, expected)
        loss.backward()
        assert engine.step().applied
    assert engine.arena.live("gathered") == 0
    with engine.full_params():
        assert bits(engine.module.parameters()) == bits(plain.parameters())
    return engine


class Blocks(nn.Module):
    """Blocks called as `call(self, x)` says."""

    def __init__(self, call, block=Block, layers=2, width=16):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(block(width) for _ in range(layers))
        self.call = call

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("how", RECOMPUTATION)
@pytest.mark.parametrize("stage", [2, 3])
def test_plain_blocks(poison, how, stage):
    def call(self, x):
        for layer in self.layers:
            x = recompute(how, layer, x)
        return x

    same_as_plain(Blocks(call), lambda m: m(X.clone().requires_grad_()).square().mean(), stage=stage)


@pytest.mark.parametrize("how", RECOMPUTATION[:2])
def test_a_block_called_several_times(poison, how):
    def call(self, x):
        for layer in [*self.layers, *self.layers, self.layers[0]]:
            x = recompute(how, layer, x)
        return x

    same_as_plain(Blocks(call), lambda m: m(X.clone().requires_grad_()).square().mean())


def test_a_block_called_twice_is_gathered_four_times():
    def call(self, x):
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x

    engine = engine_for(Blocks(call, layers=3))
    engine.gathers.events = []
    engine(X).square().mean().backward()
    assert count_gathers(engine.gathers.events) == {
        "layers.0": 4,
        "layers.1": 4,
        "layers.2": 3,
    }  # the last keeps its turn


class TwoInputs(nn.Module):
    """Uses its first input early and its second one late."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)

    def forward(self, a, b):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(a)) + b)))


@pytest.mark.parametrize("leaf", ["none", "first", "second", "both"])
@pytest.mark.parametrize("how", RECOMPUTATION)
def test_blocks_with_two_inputs_of_which_some_are_leaves(poison, how, leaf):
    def call(self, a, b):
        for layer in self.layers:
            a = recompute(how, layer, a, b)
        return a

    def run(model):
        a, b = X.clone().requires_grad_(), (X + 1).requires_grad_()
        return (
            model(a if leaf in ("first", "both") else a * 1, b if leaf in ("second", "both") else b * 1).square().mean()
        )

    same_as_plain(Blocks(call, TwoInputs), run)


class SidePath(nn.Module):
    """A path of parameters alone, computed before the one through the input: its backward runs last."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.main = nn.Linear(width, width)

    def forward(self, x):
        side = self.outer(torch.tanh(self.inner(torch.ones(1, x.shape[1]))))
        return torch.tanh(self.main(x)) + side


@pytest.mark.parametrize("how", RECOMPUTATION)
def test_a_leaf_input_does_not_release_before_the_whole_block_is_done(poison, how):
    def call(self, x):
        for layer in self.layers:
            x = recompute(how, layer, x)
        return x

    same_as_plain(Blocks(call, SidePath), lambda m: m(X.clone().requires_grad_()).square().mean())


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list


class Nested(nn.Module):
    """Takes and returns tensors inside other things."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, value):
        kind, x = value
        y, z = torch.tanh(self.a(x)), torch.tanh(self.b(x))
        return {
            "dict": {"y": y, "z": z},
            "list": [y, {"z": z}],
            "ordered": OrderedDict(y=y, z=(z,)),
            "data": Pair(y, [z]),
        }[kind]


@pytest.mark.parametrize("kind", ["dict", "list", "ordered", "data"])
def test_nested_inputs_and_outputs(poison, kind):
    def join(out):
        if isinstance(out, Pair):
            return out.left + 2 * out.right[0]
        if isinstance(out, list):
            return out[0] + 2 * out[1]["z"]
        z = out["z"]
        return out["y"] + 2 * (z[0] if isinstance(z, tuple) else z)

    def call(self, x):
        for layer in self.layers:
            x = join(layer((kind, x)))
        return x

    same_as_plain(Blocks(call, Nested), lambda m: m(X.clone().requires_grad_()).square().mean())


def test_two_forwards_before_one_backward_count_one_micro_batch(poison):
    engine = same_as_plain(build("net"), lambda m: loss_of(m, batch(0)) + loss_of(m, batch(1)))
    assert engine.steps == 2


def test_several_losses_of_one_forward_count_one_micro_batch(poison):
    plain, model = build("net"), build("net")
    engine = engine_for(model)
    for m in (plain, model):
        out = m(batch(0)).float()
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
    assert engine.accumulation.count == 1
    engine.step()
    sgd(plain.parameters()).step()
    with engine.full_params():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("stage", [0, 3])
def test_non_scalar_backward(poison, stage):
    plain, model = build("net"), build("net")
    engine = engine_for(model, stage=stage)
    seed = torch.ones(2, 9, VOCAB)
    for m in (plain, model):
        m(batch(0)).backward(gradient=seed)
    engine.step()
    sgd(plain.parameters()).step()
    with engine.full_params():
        assert bits(model.parameters()) == bits(plain.parameters())


@pytest.mark.parametrize("model", ["qwen3", "gpt2", "tied"])
def test_tied_weights(poison, model):
    same_as_plain(build(model), lambda m: loss_of(m, batch(0)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_recomputation_by_hugging_face(poison, model, reentrant):
    source = build(model)
    engine = engine_for(source)
    source.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        source.enable_input_require_grads()
    source.train()
    engine.gathers.events = []
    plain = build(model)
    loss, expected = loss_of(source, batch(0)), loss_of(plain, batch(0))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    engine.step()
    sgd(plain.parameters()).step()
    with engine.full_params():
        assert bits(source.parameters()) == bits(plain.parameters())


def test_a_parameter_outside_its_modules_forward_is_refused_or_right(poison):
    class Fused(Net):
        """A fused loss: multiplies with the head's weight itself."""

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    def fused_loss(model, ids):
        return (model(ids) @ model.head.weight.T).float().square().mean()

    torch.manual_seed(1)
    model = Fused()
    plain = clone(model)
    engine = engine_for(model)
    with pytest.raises(zero3d.ReleasedParameterError, match=r"'head\.weight'"):
        fused_loss(model, batch(0))
    expected = fused_loss(plain, batch(0))
    expected.backward()
    with engine.full_params(model.head):
        loss = fused_loss(model, batch(0))
        assert torch.equal(loss, expected)
        loss.backward()
    engine.step()
    sgd(plain.parameters()).step()
    with engine.full_params():
        assert bits(model.parameters()) == bits(plain.parameters())


@pytest.mark.parametrize("how", RECOMPUTATION)
@pytest.mark.parametrize("first_layer_frozen", [True, False])
def test_frozen_blocks_with_adapters(poison, how, first_layer_frozen):
    class Adapted(nn.Module):
        """A frozen projection beside a small trainable one."""

        def __init__(self, width):
            super().__init__()
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.low = nn.Linear(width, 2, bias=False)
            self.high = nn.Linear(2, width, bias=False)

        def forward(self, x):
            return x + torch.tanh(self.base(x)) + self.high(self.low(x))

    def call(self, x):
        for layer in self.layers:
            x = recompute(how, layer, x)
        return x

    def run(model):
        return model(X.clone().requires_grad_(how == "reentrant" or not first_layer_frozen)).square().mean()

    same_as_plain(Blocks(call, Adapted, layers=3), run)


def test_gathered_peak_over_frozen_blocks_is_two_units_and_the_window():
    torch.manual_seed(0)
    model = Net(width=32, layers=12)
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        layer.down.weight.requires_grad_(True)
    engine = engine_for(model)
    for _ in range(2):
        engine.arena.reset_peaks()
        loss_of(engine, batch(0)).backward()
        engine.step()
    size = {unit.name: unit.layout.total * unit.dtype.itemsize for unit in engine.units}
    block = sum(size[name] for name in size if name.startswith("layers.0/"))  # a frozen and a trainable unit
    assert engine.arena.peak("gathered") <= 2 * block + AHEAD * max(size.values()) + size["root"]


def test_outputs_that_need_no_grad_release_their_unit(poison):
    class Gate(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.score = nn.Linear(width, width)
            self.norm = nn.LayerNorm(width)

        def forward(self, x):
            return (self.score(self.norm(x)) > 0).float()

    def call(self, x):
        return x * self.layers[0](x) + x * self.layers[1](x)

    model = Blocks(call, Gate)
    engine = engine_for(model)
    engine(X.clone().requires_grad_()).sum().backward()
    assert engine.step().applied
    assert engine.arena.live("gathered") == 0


def test_submodules_may_be_called_without_the_root(poison):
    plain = build("llama")
    engine = engine_for(build("llama"))
    with torch.no_grad():
        expected = plain.model(batch(0)).last_hidden_state
        assert torch.equal(engine.module.model(batch(0)).last_hidden_state, expected)


def test_evaluation_keeps_units_until_training_goes_on(poison):
    engine = engine_for(build("net"))
    with torch.no_grad():
        engine(batch(0))
    assert engine.arena.live("gathered") > 0
    loss_of(engine, batch(0)).backward()
    assert engine.arena.live("gathered") == 0
    with torch.no_grad():
        engine(batch(0))
    engine.release()
    assert engine.arena.live("gathered") == 0


def test_streams_issue_before_join_before_free():
    engine = engine_for(build("net"))
    log = []
    engine.gathers._side._log = log
    for _ in range(2):
        loss_of(engine, batch(0)).backward()
        engine.step()
    for name in ("layers.1", "head"):
        events = [what for what, unit in log if unit == name]
        assert events[:3] == ["gather.issue", "gather.join", "gather.free"]
    order = [f"{what} {unit}" for what, unit in log]
    second = order.index("gather.issue embed", order.index("gather.issue embed") + 1)
    ahead = order[second:]
    assert ahead.index("gather.issue layers.1") < ahead.index("gather.join layers.0")  # prefetched before it is needed


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_regional_compile_has_no_graph_break(poison, backend):
    plain = build("llama")
    model = clone(plain)
    engine = engine_for(model)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    loss = loss_of(model, batch(0))
    expected = loss_of(plain, batch(0))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    engine.step()
    sgd(plain.parameters()).step()
    with engine.full_params():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_step_that_is_not_due_leaves_parameters_released():
    engine = engine_for(net(), release="every_step", accumulate=2)
    for due in (False, True):
        engine.backward(loss_of(engine, batch(0)))
        assert bool(engine.step().applied) == due
        assert all(map(is_placeholder, engine.module.parameters()))
        assert engine.steps == int(due)


@pytest.mark.parametrize("name", ["net", "tied"])
def test_one_rank_has_its_weights_and_gradients_once(name):
    def train(stage):
        engine = engine_for(build(name), stage, precision="bf16", clip_norm=1.0, accumulate=3)
        steps = []
        for step in range(2):
            for k in range(3):
                loss = loss_of(engine, batch(3 * step + k))
                engine.backward(loss)
                steps.append(loss.item())
            steps.append(engine.step().grad_norm.item())
        return engine, steps

    (engine, released), (_, whole) = train(3), train(0)
    assert released == whole
    assert all(map(is_placeholder, engine.module.parameters()))  # released all the same
    assert engine.arena.peak("gathered") == engine.arena.peak("bucket") == 0
