"""A weight that is read outside its module's forward: a fused loss reads the head's, at stage 3 too."""

import copy

import pytest
import torch
from models import adamw, batch, bits, hf
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.activations import recompute
from zero3d.models.codecs import CODECS
from zero3d.models.quantised import QuantisedLinear
from zero3d.zero.tokens import count_gathers


class Fused(torch.nn.Module):
    """A causal language model whose loss is computed from its head's weight, without a call of the head."""

    def __init__(self, name):
        super().__init__()
        self.model = hf(name)

    def forward(self, ids):
        hidden = self.model.base_model(input_ids=ids).last_hidden_state[:, :-1]
        logits = functional.linear(hidden, self.model.get_output_embeddings().weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model, ids):
    return model(ids)


def trained(name, stage, recomputed=False, precision="fp32"):
    """Losses, an evaluation and weights; traffic is the formula's."""
    model = Fused(name)
    if recomputed:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    engine = zero3d.Engine(model, stage=stage, precision=precision, optimizer=adamw, clip_norm=1.0)
    losses = []
    for step in range(3):
        engine.traffic.reset()
        engine.gathers.events = []
        loss = engine(batch(step, engine.mesh.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    planned = step_traffic(stage, engine.traffic_units, engine.dp.size, count_gathers(engine.gathers.events))
    moved = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    assert {key: tuple(value) for key, value in planned.items()} == moved
    with torch.no_grad():
        held_out = [float(engine(batch(step))) for step in range(2)]
    with engine.full_params():
        weights = bits(model.parameters())
    return losses, held_out, weights


@pytest.mark.parametrize(("name", "recomputed", "precision"), [
    ("qwen3", True, "bf16"), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("llama", False, "fp32"), ("llama", True, "bf16"), ("gpt2", False, "bf16"), ("qwen3", True, "fp32"),
    )),
])  # fmt: skip
def test_a_fused_loss_trains_at_every_stage_with_the_same_bits(ranks, name, recomputed, precision):
    wanted = ranks(2, trained, name, 2, recomputed, precision)
    assert ranks(2, trained, name, 3, recomputed, precision) == wanted


class Inner(torch.nn.Module):
    """A block with modules and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Sequential(torch.nn.Linear(6, 6))
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.scale.to(x.dtype)


class Borrowing(torch.nn.Module):
    """Uses what its blocks have inside before it calls them."""

    def __init__(self, read, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.read, self.reentrant = torch.nn.ModuleList([Inner(), Inner()]), read, reentrant

    def forward(self, x):
        x = self.read(x, *self.blocks)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


READS = {
    "a weight of an inner module": lambda x, first, last: x @ last.up.weight,
    "one further inside": lambda x, first, last: x @ first.down[0].weight,
    "a parameter of its own": lambda x, first, last: x * last.scale,
    "a comparison": lambda x, first, last: x * 2 if first.up.weight.max() > 0 else x,
    "a forward without its hooks": lambda x, first, last: last.up.forward(x),
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("read", list(READS))
def test_weights_inside_blocks_may_be_read_by_the_root(read, recomputed):
    found = set()
    for stage in (2, 3):
        model = Borrowing(READS[read])
        if recomputed:
            recompute(model, "full")
        engine = zero3d.Engine(model, stage=stage, precision="fp32", optimizer=adamw, units=[Inner])
        for step in range(2):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            assert engine.step().applied
        found.add(engine.fingerprint())
    assert len(found) == 1


def of_several_units(kind, read, reentrant=None):
    """A model with adapters, perhaps beside a base of 4 or 8 bits: its blocks have a frozen unit and a trained one."""
    config = LoraConfig(r=2, target_modules=["up", "down.0"], init_lora_weights=False)
    model = get_peft_model(Borrowing(read, reentrant), config)
    for block in model.base_model.model.blocks if kind in CODECS else ():
        block.up.base_layer = QuantisedLinear(block.up.base_layer, CODECS[kind], torch.float32)
    return model


def low_rank(x, layer):
    return functional.linear(functional.linear(x, layer.lora_A["default"].weight), layer.lora_B["default"].weight)


def borrowed_inside(x, first, last):
    """Have the first block, which may be recomputed, read what the other one has."""
    if "borrows" not in vars(first):
        first.borrows = first.up.register_forward_hook(lambda _, args, out: out + args[0] @ last.up.weight)
    return x


READS_OF_SEVERAL = READS | {
    "an adapter": lambda x, first, last: low_rank(x, last.up),
    "an adapter and what it adapts": lambda x, first, last: low_rank(x @ first.up.weight, last.up),
    "what another block reads inside": borrowed_inside,
}
TORCHS = {"reentrant": True, "not reentrant": False}


def trained_with(model, engine=None):
    """Losses, evaluations and weights of two steps, in an engine or in plain PyTorch."""
    called = model if engine is None else engine
    plain = adamw([p for p in model.parameters() if p.requires_grad]) if engine is None else None
    found = []
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step), requires_grad=True)
        loss = called(x).square().mean()
        if engine is None:
            loss.backward()
            plain.step()
            plain.zero_grad()
        else:
            engine.backward(loss)
            assert engine.step().applied
        with torch.no_grad():
            found += [loss.item(), called(x).square().mean().item()]
    return found, bits(model.parameters())


def of_engine(model, recomputed=None, **options):
    """What `trained_with` finds in an engine, which is given a model that may be recomputed by its policies."""
    if recomputed is not None and recomputed not in TORCHS:
        inner = {name: module for name, module in model.named_modules() if isinstance(module, Inner)}
        recompute(model, recomputed, inner)
    options = {"precision": "fp32", "optimizer": adamw, "clip_norm": None, "units": [Inner]} | options
    engine = zero3d.Engine(model, **options)
    losses, _ = trained_with(model, engine)
    with engine.full_params():
        return losses, bits(model.parameters())


def equals_plain(kind, read, recomputed, release):
    model = of_several_units(kind, READS_OF_SEVERAL[read], TORCHS.get(recomputed))
    wanted = trained_with(copy.deepcopy(model))
    assert of_engine(model, recomputed, stage=3, release=release) == wanted


@pytest.mark.parametrize(("kind", "recomputed", "release"), [
    ("lora", None, "every_use"), ("lora", "full", "every_step"), ("nf4", "not reentrant", "every_use"),
    ("int8", "reentrant", "every_use"),
])  # fmt: skip
@pytest.mark.parametrize("read", list(READS_OF_SEVERAL))
def test_blocks_of_several_units_may_be_read_by_the_root_as_in_plain_pytorch(poison, kind, read, recomputed, release):
    equals_plain(kind, read, recomputed, release)


@pytest.mark.long
@pytest.mark.parametrize("release", ["every_use", "every_step"])
@pytest.mark.parametrize("recomputed", [None, "full", *TORCHS])
@pytest.mark.parametrize("kind", ["lora", "nf4", "int8"])
def test_blocks_of_several_units_may_be_read_in_all_combinations(poison, kind, recomputed, release):
    for read in READS_OF_SEVERAL:
        equals_plain(kind, read, recomputed, release)


@pytest.mark.parametrize("read", [
    lambda x, first, last: x * last.scale.to(x.dtype), lambda x, first, last: x @ last.up.weight,
    lambda x, first, last: x @ last.up.weight * last.scale.to(x.dtype),
])  # fmt: skip
@pytest.mark.parametrize("recomputed", [None, "full", *TORCHS])
def test_blocks_of_two_dtypes_may_be_read_by_the_root(poison, read, recomputed):
    found = []
    for stage in (2, 3):
        model = Borrowing(read, TORCHS.get(recomputed))
        model._keep_in_fp32_modules = ["scale"]
        found.append(of_engine(model, recomputed, stage=stage, precision="bf16"))
    assert found[0] == found[1]
    assert {p.dtype for p in model.blocks[1].parameters()} == {torch.float32, torch.bfloat16}


def read_now_and_then(x, first, last):
    """Read nothing in the first forward, and from the second one on another weight each time."""
    first.calls = getattr(first, "calls", -1) + 1
    weights = [None, last.up, first.up, None, last.down[0]]
    layer = weights[first.calls % len(weights)]
    return x if layer is None else low_rank(x @ layer.weight, layer)


def on_ranks(stage, read, release):
    model = of_several_units("lora", READS_OF_SEVERAL.get(read, read_now_and_then))
    return of_engine(model, stage=stage, release=release)


@pytest.mark.parametrize(("read", "release"), [
    ("an adapter and what it adapts", "every_use"), ("now and then", "every_use"), ("now and then", "every_step"),
    *(pytest.param(read, "every_use", marks=pytest.mark.long) for read in READS_OF_SEVERAL),
])  # fmt: skip
def test_blocks_of_several_units_are_read_with_the_same_bits_on_two_ranks(ranks, read, release):
    assert ranks(2, on_ranks, 3, read, release) == ranks(2, on_ranks, 2, read, "every_use")


def test_a_weight_of_a_block_that_is_never_called_has_its_values_in_a_second_backward(poison):
    class Second(Borrowing):
        def forward(self, x):
            return self.blocks[0](self.read(x, *self.blocks))

    found = set()
    for stage in (2, 3):
        model = Second(borrowed_inside)
        engine = zero3d.Engine(model, stage=stage, precision="fp32", optimizer=adamw, units=[Inner])
        kept = []
        model.blocks[0].down.register_forward_pre_hook(lambda _, args, kept=kept: kept.extend(args))
        out = engine(torch.ones(3, 6, requires_grad=True))
        out.square().mean().backward(retain_graph=True)
        kept[0].square().mean().backward()
        assert engine.step().applied
        found.add(engine.fingerprint())
    assert len(found) == 1


UP = "blocks.1.up.base_layer.weight"


def read_from_a_list(x, first, last):
    return x @ dict(last.named_parameters())["up.base_layer.weight"]


def transposed_from_a_list(x, first, last):
    return functional.linear(x, dict(last.named_parameters())["up.base_layer.weight"])


def saved_in_a_hook(x, first, last):
    """Have the first block's forward read a weight of the other one that nobody asks a module for."""
    if "borrows" not in vars(first):
        first.borrows = first.up.register_forward_hook(lambda _, args, out: read_from_a_list(out, first, last))
    return x


class Own(torch.nn.Parameter):
    """A parameter whose class is somebody else's: a released one is NaN, and does not refuse."""


@pytest.mark.parametrize("read", [read_from_a_list, transposed_from_a_list, saved_in_a_hook])
def test_a_frozen_weight_that_a_forward_has_from_a_list_is_refused_by_name(poison, read):
    model = of_several_units("lora", read)
    with pytest.raises(zero3d.ReleasedParameterError, match=rf"of parameter '\S*{UP}'"):
        of_engine(model, stage=3)
    model = of_several_units("lora", read)
    model.base_model.model.blocks[1].up.base_layer.weight.__class__ = Own
    with pytest.raises(zero3d.ReleasedParameterError, match=rf"'\S*{UP}' in the forward, but not as an attribute"):
        of_engine(model, stage=3)


@pytest.mark.parametrize(
    "use", [lambda x, layer: x @ layer.weight, lambda x, layer: functional.linear(x, layer.weight)]
)
def test_a_frozen_weight_that_a_loss_reads_outside_of_a_forward_is_refused_by_name(poison, use):
    model = of_several_units("lora", READS["a parameter of its own"])
    engine = zero3d.Engine(model, stage=3, precision="fp32", optimizer=adamw, units=[Inner])
    x, layer = torch.ones(3, 6), model.base_model.model.blocks[1].up
    with pytest.raises(zero3d.ReleasedParameterError, match=rf"of parameter '\S*{UP}'"):
        engine.backward(use(engine(x), layer).square().mean())
    with engine.full_params():
        engine.backward(use(engine(x), layer).square().mean())
    assert engine.step().applied


def test_a_loss_that_is_nan_by_itself_is_no_released_weight_s(poison):
    for read in READS_OF_SEVERAL.values():
        engine = zero3d.Engine(
            of_several_units("lora", read), stage=3, precision="fp32", optimizer=adamw, units=[Inner], clip_norm=None
        )
        for value in (1.0, float("nan"), 1.0):
            engine.backward(engine(torch.ones(3, 6, requires_grad=True)).square().mean() * value)
            assert engine.step().applied == (value == 1.0)
