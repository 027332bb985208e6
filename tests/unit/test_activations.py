"""Recomputation on the blocks changes no bit."""

import pytest
import torch
from deep import deep, kept_inputs, recomputed, train
from families import family
from models import VOCAB, Net, batch, bits, clone, loss_of, net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import DynamicCache

import zero3d
from zero3d.activations import compile_blocks, prepare_blocks, recompute
from zero3d.errors import ConfigError
from zero3d.models.wrappers import Compiled

POLICIES = ["full", "every:1", "every:2", "every:3", "selective"]
MODELS = ["net", "llama", "gpt2", "qwen3", "moe"]


# --- equal to none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("llama", "qwen3") else ()) for name in MODELS]
)
def test_every_policy_gives_the_bits_of_none(name):
    model = deep(name)
    wanted = train(clone(model))
    for policy in POLICIES:
        if name != "net" or policy != "selective":
            assert train(recomputed(model, policy)) == wanted, policy


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", [pytest.param("net", marks=pytest.mark.long), "gpt2"])
def test_an_engine_gives_the_bits_of_none_under_poison(poison, name, stage):
    def run(policy):
        model = recomputed(deep(name), policy)
        engine = zero3d.Engine(model, stage=stage, precision="fp32", clip_norm=0.5)
        torch.manual_seed(0)
        norms = []
        for step in range(2):
            engine.backward(loss_of(engine, batch(step)))
            norms.append(float(engine.step().grad_norm))
        assert engine.arena.live("gathered") == 0
        with engine.full_params():
            return norms, bits(model.parameters())

    wanted = run("none")
    for policy in ["full", "every:2", "every:3"] + ["selective"] * (name != "net"):
        assert run(policy) == wanted, policy


def frozen(model):
    """Blocks 0 and 2 do not train; nothing before block 1 needs a gradient."""
    for module in (model.embed, model.layers[0], model.layers[2]):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize("policy", ["full", "every:2", "every:3"])
def test_frozen_blocks(poison, policy):
    model = frozen(deep("net"))
    assert train(recomputed(model, policy)) == train(clone(model))
    engine = zero3d.Engine(recomputed(model, policy), stage=3, precision="fp32", clip_norm=None)
    torch.manual_seed(0)
    engine.backward(loss_of(engine, batch(0)))
    assert engine.step().grad_norm.isfinite()


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.long), "every:2", "selective"])
def test_adapters_on_a_frozen_model(poison, policy):
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    model = peft.get_peft_model(deep("llama"), lora).train()

    def norm(policy):
        torch.manual_seed(0)
        engine = zero3d.Engine(recomputed(model, policy), stage=3, precision="fp32")
        engine.backward(loss_of(engine, batch(0)))
        return float(engine.step().grad_norm)

    assert norm(policy) == norm("none")


def test_a_block_called_several_times_and_an_early_exit():
    class Loops(Net):
        def forward(self, ids):
            x = self.embed(ids)
            for i in (0, 1, 0, 0, 3, 1):  # blocks 2 and 4 are skipped
                x = self.layers[i](x)
            return self.head(x)

    torch.manual_seed(1)
    model = Loops(layers=5, dropout=0.2)
    for policy in ["full", "every:2", "every:4"]:
        assert train(recomputed(model, policy)) == train(clone(model))


def drop(x):
    return F.dropout(x * 1.5, 0.1)


def write(x):
    return x.mul_(1.5)


@pytest.mark.parametrize("between", [drop, write])
def test_what_a_model_does_between_blocks_only_ends_a_segment(between):
    class Between(Net):
        def forward(self, ids):
            x = self.embed(ids)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 1:
                    x = between(x)
            return self.head(x)

    torch.manual_seed(1)
    model = Between(layers=5, dropout=0.2)
    assert train(recomputed(model, "every:4")) == train(clone(model))
    assert kept_inputs(recomputed(model, "every:4"))[0] == 2


class SecondOutput(nn.Module):
    """Takes its input by name; hands on two tensors in a tuple and takes a mask."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, mask, *, hidden_states, state=None):
        y = torch.tanh(self.a(hidden_states)) * mask
        return y, torch.sigmoid(self.b(y)) + (0 if state is None else state)


def test_named_inputs_and_several_outputs_are_handed_on():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.embed = nn.Embedding(VOCAB, 16)
            self.layers = nn.ModuleList(SecondOutput(16) for _ in range(4))
            self.head = nn.Linear(16, VOCAB)

        def forward(self, ids):
            x, state, mask = self.embed(ids), None, torch.rand(16)
            for layer in self.layers:
                x, state = layer(mask, hidden_states=x, state=state)
            return self.head(x + state)

    model = Two()
    for policy in ["full", "every:2", "every:3"]:
        assert train(recomputed(model, policy)) == train(clone(model))


@pytest.mark.parametrize("name", ["gemma3n_text", pytest.param("gemma4_text", marks=pytest.mark.long), "jamba"])
def test_layers_of_several_classes_and_those_that_share_keys_and_values_in_a_dict_are_recomputed(name):
    model = family(name)
    wanted = train(clone(model))
    assert {policy: train(recomputed(model, policy)) for policy in POLICIES} == dict.fromkeys(POLICIES, wanted)


def test_layers_that_share_keys_and_values_are_recomputed_with_weights_gathered_anew(poison):
    def norm(policy):
        engine = zero3d.Engine(recomputed(family("gemma4_text"), policy), stage=3, precision="fp32")
        engine.backward(loss_of(engine, batch(0)))
        return float(engine.step().grad_norm)

    assert norm("full") == norm("every:3") == norm("none")


class Remembers(nn.Module):
    """Appends what it computes to a list that all blocks are given, and adds what was put there first."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x, seen):
        y = torch.tanh(self.a(x)) + (seen[0] if seen else 0)
        seen.append(y)
        return y


def test_blocks_may_write_to_a_list_that_is_empty_at_first_and_be_recomputed_twice():
    class Lists(Net):
        def forward(self, ids):
            x, seen = self.embed(ids), []
            for layer in self.layers:
                x = layer(x, seen)
            return self.head(x + seen[1])

    model = Lists(layers=0)
    model.layers = nn.ModuleList(Remembers(24) for _ in range(4))

    def grads(model):
        out = model(batch(0))
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        return bits(p.grad for p in model.parameters() if p.grad is not None)

    blocks = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    for policy in ["full", "every:2"]:
        copied = clone(model)
        recompute(copied, policy, {name: copied.get_submodule(name) for name in blocks})
        assert grads(copied) == grads(clone(model))


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_two_losses_of_one_forward(policy):
    def grads(model):
        torch.manual_seed(0)
        out = model(batch(0))
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        return bits(p.grad for p in model.parameters())

    model = deep("net")
    assert grads(recomputed(model, policy)) == grads(clone(model))


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_autocast_is_the_same_in_the_recomputation(policy):
    def loss(model, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, ids)

    model = deep("net")
    assert train(recomputed(model, policy), loss) == train(clone(model), loss)


@pytest.mark.parametrize("policy", [pytest.param("full", marks=pytest.mark.long), "every:2"])
def test_a_dry_run_recomputes_without_data(policy):
    with FakeTensorMode():
        model = deep("llama", layers=3)
        recompute(model, policy)
        engine = zero3d.Engine(model, stage=3, precision="bf16")
        engine.backward(loss_of(engine, torch.randint(0, VOCAB, (2, 9))))
        assert engine.step().applied.numel() == 1


# --- forwards that are not recorded ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_without_grad_and_in_eval_mode_it_is_the_plain_model(policy):
    model = deep("gpt2")
    other = recomputed(model, policy)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(batch(0)).logits
        torch.manual_seed(0)
        assert torch.equal(other(batch(0)).logits, expected)
    model.eval(), other.eval()
    assert train(other) == train(model)
    assert kept_inputs(recomputed(model, policy))[1] == kept_inputs(clone(model))[1]
    ids = [m.generate(batch(0), max_new_tokens=3, do_sample=False, use_cache=True) for m in (model, other)]
    assert torch.equal(*ids)


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_a_forward_that_raises_leaves_the_next_one_right(poison, policy):
    model = recomputed(deep("net"), policy)
    wanted = train(clone(deep("net")))
    handle = model.layers[1].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(0))
    handle.remove()
    assert train(model) == wanted


def test_a_cache_is_left_out_in_training_and_a_filled_one_is_refused():
    from transformers import DynamicCache

    model = deep("llama")
    wanted = train(clone(model))
    other = recomputed(model, "every:2")
    other.config.use_cache = True
    assert train(other) == wanted
    with torch.no_grad():
        cache = model(batch(0), use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    with pytest.raises(ConfigError, match="a cache of 9 keys"):
        other(batch(1), past_key_values=cache)


# --- recomputation that differs --------------------------------------------------------------------


class Moody(nn.Module):
    """Does something else the second time."""

    def __init__(self, second):
        super().__init__()
        self.linear, self.second, self.calls = nn.Linear(8, 8), second, 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls == 1 else self.second(self.linear, x)


@pytest.mark.parametrize(("second", "message"), [
    (lambda linear, x: linear(x[:1]), r"forward saved \[2, 8\] torch.float32 on cpu, its recomputation \[1, 8\]"),
    (lambda linear, x: linear(x).sin(), "forward saved 2 tensors, its recomputation 3"),
    (lambda linear, x: x, "forward saved 2 tensors, its recomputation 0"),
])  # fmt: skip
def test_a_block_that_computes_otherwise_the_second_time_is_named(second, message):
    model = nn.Sequential(Moody(second), Moody(second))
    recompute(model, "every:2")
    out = model(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(ConfigError, match=f"^0 did not compute the same when it was recomputed: its {message}"):
        out.sum().backward()


def test_the_last_multiplication_of_a_segment_is_not_repeated():
    model = deep("net", layers=4)
    recompute(model, "every:2")
    done = [0] * 4
    for i, block in enumerate(model.layers):
        block.down.register_forward_hook(lambda *_, i=i: done.__setitem__(i, done[i] + 1))
        block.dropout.p = 0.0
    loss_of(model, batch(0)).backward()
    assert done == [2, 1, 2, 1]


def test_an_input_changed_in_place_is_an_error():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    recompute(model, "every:2")
    x = torch.randn(2, 8)
    out = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- bad input ---------------------------------------------------------------------------------------


def test_models_without_blocks_or_attention_are_refused():
    with pytest.raises(ConfigError, match="no list of two or more blocks"):
        recompute(nn.Linear(2, 2), "full")
    with pytest.raises(ConfigError, match=r"layers\.0 has norm, up, down, dropout"):
        recompute(net(), "selective")
    model = net()
    recompute(model, "full", blocks={"only": model.layers[0]})
    with pytest.raises(ConfigError, match="recomputed already"):
        recompute(model, "full")
    with pytest.raises(ConfigError, match=r"compile_blocks\(\) first"):
        compile_blocks(model)
    with pytest.raises(ConfigError, match="do not compile"):
        prepare_blocks(deep("llama"), "selective", compile="eager")


# --- compiled blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [
    ("net", "every:2"), *(pytest.param("net", policy, marks=pytest.mark.long) for policy in ("none", "full")),
    *(pytest.param("gpt2", policy, marks=pytest.mark.long) for policy in ("none", "full", "every:2")),
])  # fmt: skip
def test_compiled_blocks_share_one_graph_without_a_break_and_draw_the_same_dropout(name, policy):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = deep(name)
    other = clone(model)
    prepare_blocks(other, policy, compile="aot_eager")
    assert train(other) == train(clone(model))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_cache_that_holds_something_is_a_compiled_block_s_in_training_and_an_empty_one_is_nobody_s():
    block = nn.Linear(2, 2)
    seen = []
    block.forward = Compiled(block, lambda forward: lambda *args, **kwargs: seen.append((args, kwargs)))
    empty, held = DynamicCache(), DynamicCache()
    held.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    block(empty, past_key_values=held)
    block(held, past_key_values=empty)
    assert seen == [((None,), {"past_key_values": held}), ((held,), {"past_key_values": None})]
    block.eval()(empty)
    with torch.no_grad():
        block.train()(empty)
    assert seen[2:] == [((empty,), {})] * 2
