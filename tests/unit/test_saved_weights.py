"""Stage 3: a backward that does not come through a module's outputs finds its weights all the same (zero/saved.py)."""

import collections
import contextlib
import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.activations import recompute
from zero3d.activations.recomputation import Recomputed
from zero3d.errors import ConfigError, ReleasedParameterError

pytestmark = pytest.mark.usefixtures("poison")  # so that one rank, too, releases its weights

WIDTH = 6
STEPS = range(3)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Chain(nn.Module):
    """Blocks one after the other, whose outputs `pack` hides and `unpack` finds."""

    def __init__(self, blocks, pack=lambda x: x, unpack=lambda x: x):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.out = nn.Linear(WIDTH, 1)
        self.pack, self.unpack = pack, unpack
        for block in self.layers:
            block.pack, block.unpack = pack, unpack

    def forward(self, x):
        hidden = self.pack(x)
        for block in self.layers:
            hidden = block(hidden)
        return self.out(self.unpack(hidden))


class Block(nn.Module):
    """A kernel between two linear layers. kept: what the last forward left on the module, for a loss of its own."""

    def __init__(self, kernel):
        super().__init__()
        self.first, self.kernel, self.last = nn.Linear(WIDTH, WIDTH), kernel, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        x = self.unpack(hidden)
        self.kept = self.kernel(torch.tanh(self.first(x)))
        return self.pack(x + self.last(self.kept))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x * self.scale


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return self.bilinear(x, x)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.line(x[:, None])[:, 0]


KERNELS = {
    "PReLU": lambda: nn.PReLU(WIDTH), "GroupNorm": lambda: nn.GroupNorm(2, WIDTH), "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH), "BatchNorm": lambda: nn.BatchNorm1d(WIDTH), "Bilinear": Twice, "scale": Scale,
    "Conv": Convolution,
}  # fmt: skip
HIDDEN = {
    "slots": (Slots, lambda box: box.value),
    "object in a list": (lambda x: [Slots(x)], lambda box: box[0].value),
    "deque": (lambda x: collections.deque([x]), lambda box: box[0]),
    "set": (lambda x: {x}, lambda box: next(iter(box))),
    "generator": (lambda x: (each for each in [x]), lambda box: next(iter(box))),
    "closure": (lambda x: lambda: x, lambda box: box()),
}


def chain(kernel="LayerNorm", *hidden):
    torch.manual_seed(0)
    return Chain([Block(KERNELS[kernel]()) for _ in range(3)], *hidden)


def batch(step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def of_output(model, module, x):
    return model(x).pow(2).mean()


def of_kept(model, module, x):
    """A loss of inner activations alone."""
    model(x)
    return sum(block.kept.pow(2).mean() for block in module.layers)


def of_both(model, module, x):
    return model(x).pow(2).mean() + module.layers[1].kept.pow(2).mean()


def penalty(model, module, x):
    """The norm of the gradient of inputs (WGAN-GP)."""
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (grad.norm(dim=1) - 1).pow(2).mean()


def third(model, module, x):
    """Three derivatives, as of equations that networks solve."""
    x = x.clone().requires_grad_()
    value = model(x).sum()
    for _ in range(2):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        value = grad.pow(2).sum()
    return value


def two_graphs(model, module, x):
    """Two forwards and their inner gradients before either's backward."""
    return penalty(model, module, x) + penalty(model, module, x + 1)


def trained(model, loss, **options):
    engine = zero3d.Engine(
        model, units=[Block], clip_norm=None, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05),
        **{"precision": "fp32", "stage": 3} | options,
    )  # fmt: skip
    for step in STEPS:
        engine.backward(loss(engine, engine.module, batch(step)))
        assert engine.step().reason == "applied"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return engine


def reference(model, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in STEPS:
        optimizer.zero_grad()
        loss(model, model, batch(step)).backward()
        optimizer.step()
    return model


def check(model, loss, change=lambda model: None, **options):
    plain = reference(copy.deepcopy(model), loss)
    change(model)
    engine = trained(model, loss, **options)
    with engine.full_params():
        for name, p in engine.module.named_parameters():
            assert torch.equal(p, dict(plain.named_parameters())[name]), name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("loss", [of_kept, penalty])
def test_every_kernel_has_its_weights(kernel, loss):
    check(chain(kernel), loss)


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_outputs_may_be_hidden(hidden):
    check(chain("LayerNorm", *hidden), of_output)


@pytest.mark.parametrize("loss", [of_both, third, two_graphs])
def test_losses_may_go_other_ways(loss):
    check(chain(), loss)


@pytest.mark.parametrize("policy", ["full", "every:2"])
@pytest.mark.parametrize("loss", [of_output, of_both])
def test_recomputed_blocks_have_theirs(policy, loss):
    if loss is of_both:  # what a forward leaves elsewhere is left twice: its gradient goes to the first one's graph
        policy = "full"
    check(chain(), loss, lambda model: recompute(model, policy))


@pytest.mark.parametrize("policy", ["full", "every:2", "torch"])
def test_recomputed_blocks_have_theirs_in_gradients_of_gradients(policy):
    model = chain()
    if policy == "torch":
        for block in model.layers:
            block.kernel.forward = functools.partial(checkpoint, block.kernel.forward, use_reentrant=False)
    check(model, penalty, lambda model: None if policy == "torch" else recompute(model, policy))


def test_a_graph_may_be_looked_at_between_forward_and_backward():
    engine = zero3d.Engine(chain(), stage=3, precision="fp32", units=[Block])
    output = engine(batch(0))
    left, seen = [output.grad_fn], 0
    while left:
        node = left.pop()
        for name in dir(node):
            if name.startswith("_saved_"):
                seen += torch.is_tensor(getattr(node, name))
        left += [child for child, _ in node.next_functions if child is not None]
    assert seen > 10
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    engine.backward(output.pow(2).mean())
    assert engine.step().reason == "applied"
    assert engine.arena.live("gathered") == 0


@pytest.mark.parametrize("hidden", ["slots", "closure"])
def test_recomputed_blocks_may_hide_their_outputs(hidden):
    model = chain("GroupNorm", *HIDDEN[hidden])
    check(model, of_output, lambda model: recompute(model, "full"))
    assert isinstance(model.layers[0].forward, Recomputed)


class Checkpointed(Chain):
    """Has torch recompute its blocks."""

    reentrant = False

    def forward(self, x):
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


def of_leaf(model, module, x):
    return of_output(model, module, x.requires_grad_())


@pytest.mark.parametrize(
    ("reentrant", "loss"), [(False, of_output), (False, penalty), (False, of_leaf), (True, of_leaf)]
)
def test_blocks_under_torchs_checkpoint_have_theirs(reentrant, loss):
    torch.manual_seed(0)
    model = Checkpointed([Block(nn.LayerNorm(WIDTH)) for _ in range(2)])
    model.reentrant = reentrant
    check(model, loss)


def test_a_gradient_penalty_counts_one_micro_batch_and_may_be_fp16_or_exact():
    engine = trained(chain(), penalty, precision="bf16", exact=True)
    assert engine.steps == len(STEPS)
    engine = zero3d.Engine(chain(), stage=2, precision="fp16", units=[Block])
    engine.backward(penalty(engine, engine.module, batch(0).half()))
    assert engine.accumulation.count == 1
    assert engine.step().reason in ("applied", "overflow")


def test_gradients_of_parameters_may_be_asked_for():
    engine = zero3d.Engine(chain(), stage=3, precision="fp32", units=[Block])
    weight = engine.module.layers[0].first.weight
    (grad,) = torch.autograd.grad(of_output(engine, engine.module, batch(0)), [weight])
    plain = chain()
    (wanted,) = torch.autograd.grad(of_output(plain, plain, batch(0)), [plain.layers[0].first.weight])
    assert torch.equal(grad, wanted)
    assert engine.accumulation.count == 0


def test_a_write_in_place_is_an_error_as_in_torch():
    class Writes(Block):
        def forward(self, x):
            hidden = torch.sigmoid(self.first(x))
            y = self.last(hidden)
            hidden.mul_(2)
            return y

    engine = zero3d.Engine(Chain([Writes(nn.Identity()) for _ in range(2)]), stage=3, precision="fp32", units=[Writes])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(engine(batch(0)).pow(2).mean())
    assert engine.accumulation.count == 0


def test_hooks_of_the_caller_are_kept():
    model = chain()
    seen = []

    def pack(t):
        seen.append(t.shape)
        return t.detach()

    def loss(model, module, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return of_kept(model, module, x)

    check(model, loss)
    assert len(seen) > 2 * 20


class OnCpu(Chain):
    """Saves what its last blocks need on the CPU."""

    def forward(self, x):
        x = self.layers[0](x)
        with save_on_cpu():
            for block in self.layers[1:]:
                x = block(x)
        return self.out(x)


@pytest.mark.parametrize("around", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("loss", [of_output, penalty, third])
def test_what_is_saved_on_the_cpu_is_there_in_gradients_of_gradients(loss, around):
    def around_loss(model, module, x):
        with around():
            return loss(model, module, x)

    torch.manual_seed(0)
    check(OnCpu([Block(nn.LayerNorm(WIDTH)) for _ in range(3)]), around_loss)


def copying():
    """Hooks that save copies, as save_on_cpu does on an accelerator."""
    return saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


class Under(Block):
    """Runs its modules under hooks of its own."""

    hooks = staticmethod(save_on_cpu)

    def forward(self, x):
        with self.hooks():
            return super().forward(x)


class UnderCopying(Under):
    hooks = staticmethod(copying)


class Reads(nn.Module):
    """Reads its own weights under hooks of its own, by kernels that read raw memory."""

    def __init__(self):
        super().__init__()
        self.slope, self.scale = nn.Parameter(torch.full((WIDTH,), 0.25)), nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        with save_on_cpu():
            return F.layer_norm(F.prelu(x, self.slope), (WIDTH,), self.scale)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cells(x[:, None])[0][:, 0]


def blocks_under_hooks(block, kernel, *hidden):
    torch.manual_seed(0)
    return Chain([block(kernel()) for _ in range(3)], *hidden)


UNDER_HOOKS = {
    "a block": lambda *hidden: blocks_under_hooks(Under, KERNELS["PReLU"], *hidden),
    "copies": lambda *hidden: blocks_under_hooks(UnderCopying, KERNELS["LayerNorm"], *hidden),
    "a module reads its own": lambda *hidden: blocks_under_hooks(Block, Reads, *hidden),
    "torch's wrapper inside": lambda *hidden: blocks_under_hooks(Block, lambda: offload_wrapper(nn.PReLU(WIDTH)), *hidden),
}  # fmt: skip


def check_bits(model, loss, stage=3):
    plain = reference(copy.deepcopy(model), loss)
    engine = trained(model, loss, stage=stage)
    with engine.full_params():
        for p, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wanted)
    engine.release()
    assert stage == 0 or engine.arena.live("gathered") == 0


@pytest.mark.parametrize("loss", [of_output, of_kept, penalty, third])
@pytest.mark.parametrize("under", UNDER_HOOKS.values(), ids=UNDER_HOOKS)
def test_a_forward_may_put_hooks_on_what_it_saves(under, loss):
    check_bits(under(), loss)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("under", UNDER_HOOKS.values(), ids=UNDER_HOOKS)
def test_and_hide_its_outputs(under, stage):
    check_bits(under(*HIDDEN["slots"]), of_output, stage)


@pytest.mark.parametrize("kernel", [*KERNELS, "GRU"])
def test_every_kernel_has_its_weights_under_hooks_of_the_forward(kernel):
    check_bits(blocks_under_hooks(Under, Recurrent if kernel == "GRU" else KERNELS[kernel]), of_kept)


def test_torch_may_offload_what_blocks_of_a_root_with_weights_of_its_own_save():
    class Root(Chain):
        def __init__(self):
            super().__init__([offload_wrapper(Block(nn.LayerNorm(WIDTH))) for _ in range(3)])
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x * self.scale)

    torch.manual_seed(0)
    model = Root()
    for block in model.layers:
        block._checkpoint_wrapped_module.pack = block._checkpoint_wrapped_module.unpack = lambda x: x
    check_bits(model, penalty)


def test_submodules_under_hooks_of_the_forward_are_released_from_the_second_step_on():
    engine = trained(blocks_under_hooks(Under, KERNELS["LayerNorm"]), of_output)
    engine(batch(0))
    assert [unit.name for unit in engine.units if unit.users] == ["root"]


def test_blocks_are_compiled_whole():
    torch.manual_seed(0)
    model = Chain([Block(Scale()) for _ in range(2)])
    for block in model.layers:
        block.pack = block.unpack = lambda x: x
        block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
    engine = zero3d.Engine(model, stage=3, precision="fp32", units=[Block])
    for step in STEPS:
        engine.backward(of_output(engine, engine.module, batch(step)))
        assert engine.step().reason == "applied"


def test_functional_gradients_inside_a_forward_need_whole_weights():
    class Forces(Chain):
        def forward(self, x):
            return torch.func.grad(lambda x: super(Forces, self).forward(x).sum())(x)

    def forces():
        torch.manual_seed(0)
        return Forces([Block(nn.LayerNorm(WIDTH)) for _ in range(2)])

    model = forces()
    plain = reference(forces(), of_output)
    engine = zero3d.Engine(
        model,
        stage=3,
        units=[Block],
        clip_norm=None,
        precision="fp32",
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05),
    )
    with pytest.raises(ConfigError, match=r"torch\.func or vmap reached .*full_params"):
        engine(batch(0))
    engine.zero_grad()
    for step in STEPS:
        with engine.full_params():
            engine.backward(engine(batch(step)).pow(2).mean())
        assert engine.step().reason == "applied"
    with engine.full_params():
        for p, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wanted)


def of_function(transform):
    """A loss of what a transform of torch.func makes of the model as a function of its input."""

    def loss(model, module, x):
        return transform(lambda x: model(x).sum())(x).pow(2).mean() + model(x).pow(2).mean()

    return loss


FUNCTIONS = {
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "hessian": lambda f: torch.func.jacrev(torch.func.grad(f)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(2.0))[0],
    "each": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x[None]))),
}


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside a forward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_gradients_of_an_engine_are_those_of_torch(name, stage, alone):
    loss = of_function(FUNCTIONS[name])
    if alone:
        loss = lambda model, module, x: FUNCTIONS[name](lambda x: model(x).sum())(x).pow(2).mean()  # noqa: E731
    plain = reference(chain(), loss)
    options = {"units": [Block], "clip_norm": None, "precision": "fp32"}
    engine = zero3d.Engine(chain(), stage=stage, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05), **options)
    for step in STEPS:
        with engine.full_params():
            engine.backward(loss(engine, engine.module, batch(step)))
        assert engine.accumulation.count == 1
        assert engine.step().reason == "applied"
    with engine.full_params():
        for p, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wanted)


class KeepsWeight(torch.autograd.Function):
    """A product that keeps its weight as an attribute, where autograd does not see it."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        ctx.weight = keep(weight)
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x, None


class KeepsAll(torch.autograd.Function):
    """The same, and its input in the same way."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        ctx.kept = x, keep(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.kept
        return grad @ weight, grad.t() @ x, None


class KeepsInBackward(KeepsWeight):
    """The same, whose backward calls another one."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return KeepsWeight.apply(grad, ctx.weight.t(), lambda w: w), grad.t() @ x, None


class Keeper(nn.Module):
    def __init__(self, keep, function):
        super().__init__()
        self.linear, self.keep, self.function = nn.Linear(WIDTH, WIDTH), keep, function

    def forward(self, x):
        self.kept = self.function.apply(x, self.linear.weight, self.keep)
        return self.kept.tanh()


class Own(nn.Parameter):
    """A parameter whose class is somebody else's: a released one is NaN, and does not refuse."""


def keeper(keep, stage, function=KeepsWeight, kind=nn.Parameter):
    torch.manual_seed(0)
    blocks = [Keeper(keep, function), Keeper(keep, function)]
    for block in blocks:
        block.linear.weight.__class__ = kind
    return zero3d.Engine(Chain(blocks), stage=stage, precision="fp32", units=[Keeper])


@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w.detach()])
def test_weights_that_a_function_keeps_by_itself_are_there_in_an_ordinary_backward(keep):
    found = set()
    for stage in (2, 3):
        engine = keeper(keep, stage)
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        assert engine.step().applied
        found.add(engine.fingerprint())
    assert len(found) == 1


@pytest.mark.parametrize("loss", [penalty, third, two_graphs])
@pytest.mark.parametrize("function", [KeepsWeight, KeepsAll, KeepsInBackward])
@pytest.mark.parametrize("keep", [lambda w: w, lambda w: w.detach()], ids=["itself", "detached"])
def test_weights_that_a_function_keeps_by_itself_are_there_in_a_gradient_of_a_gradient(keep, function, loss):
    found = set()
    for stage in (2, 3):
        engine = keeper(keep, stage, function)
        for step in range(2):
            engine.backward(loss(engine, engine.module, batch(step)))
            assert engine.step().applied
        found.add(engine.fingerprint())
        engine.release()
        assert stage == 2 or engine.arena.live("gathered") == 0
    assert len(found) == 1


def test_those_that_no_hook_sees_are_named():
    engine = keeper(lambda w: w, 3)
    engine(torch.ones(2, WIDTH))
    with pytest.raises(ReleasedParameterError, match=r"matmul\(\) of parameter 'layers\.1\.linear\.weight'"):
        engine.backward(engine.module.layers[1].kept.square().mean())
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    assert engine.step().applied


def test_those_of_a_class_of_their_own_that_no_hook_sees_are_named():
    engine = keeper(lambda w: w, 3, kind=Own)
    engine(torch.ones(2, WIDTH))
    engine.backward(engine.module.layers[1].kept.square().mean())
    reason = engine.step().reason
    assert reason.startswith("overflow, after a backward of 'layers.1' without its weights. A torch.autograd.Function")


def backward_of_what_was_kept():
    """The error of a backward that reaches a released weight, if any, and whether a step is applied after it."""
    engine, said = keeper(lambda w: w.detach(), 3), None
    engine(torch.ones(2, WIDTH))
    try:
        engine.backward(engine.module.layers[1].kept.square().mean())
    except ReleasedParameterError as error:
        said = str(error)
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    return said, engine.step().applied


def test_those_whose_memory_is_freed_are_named_and_those_of_one_rank_are_there(ranks):
    assert ranks(1, backward_of_what_was_kept) == [(None, True)]
    for said, applied in ranks(2, backward_of_what_was_kept):
        assert re.search(r"released, perhaps of 'layers\.1\.linear\.weight'.*save_for_backward", said)
        assert applied


def micro_batches_behind_a_failure():
    """How many a step has after a backward that reached a released weight, behind one that did not."""
    engine = keeper(lambda w: w.detach(), 3)
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean(), last=False)
    engine(torch.ones(2, WIDTH))
    with pytest.raises(ReleasedParameterError):
        engine.backward(engine.module.layers[1].kept.square().mean())
    return engine.accumulation.count


def test_a_backward_that_reaches_freed_memory_forgets_the_step_so_far(ranks):
    assert ranks(2, micro_batches_behind_a_failure) == [0, 0]


def test_evaluation_saves_nothing():
    engine = trained(chain(), of_output)
    with torch.no_grad():
        assert F.mse_loss(engine(batch(0)), engine(batch(0))) == 0
