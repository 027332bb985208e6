"""Recomputation on the blocks changes no bit, keeps what the arithmetic says and leaves nothing behind."""

import gc
import random
import weakref
from fractions import Fraction

import pytest
import torch
from models import VOCAB, Net, batch, bits, clone, net
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import zero3d
from zero3d.activations import compile_blocks, prepare_blocks, recompute
from zero3d.errors import ConfigError
from zero3d.plan.recompute import Policy, best_segment, recompute_arithmetic, replayed
from zero3d.zero.stages import count_gathers, token_order

POLICIES = ["full", "every:1", "every:2", "every:3", "selective"]
MODELS = ["net", "llama", "gpt2", "qwen3", "moe"]
LAYERS = 5


def deep(name, layers=LAYERS):
    """A tiny model of five blocks in training mode; net and gpt2 with dropout."""
    if name == "net":
        return net(layers=layers, dropout=0.2).train()
    import transformers as t

    torch.manual_seed(7)
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    common |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
    if name == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**common, attention_dropout=0.1))
    elif name == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=8, tie_word_embeddings=True))
    elif name == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**common, **experts))
    else:
        sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64, "use_cache": False}
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes))
    return model.train()


def loss_of(model, ids):
    output = model(ids)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, loss=loss_of):
    """Losses and gradients of two micro-batches, and the random number drawn after them."""
    torch.manual_seed(0)
    losses = [loss(model, batch(step)) for step in range(2)]
    for value in losses:
        value.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bits(losses), len(grads), bits(grads), float(torch.rand(()))


def recomputed(model, policy, **options):
    copy = clone(model)
    recompute(copy, policy, **options)
    return copy


# --- equal to none --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_policy_gives_the_bits_of_none(name):
    model = deep(name)
    wanted = train(clone(model))
    for policy in POLICIES:
        if name != "net" or policy != "selective":
            assert train(recomputed(model, policy)) == wanted, policy


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["net", "gpt2"])
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


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
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


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_a_dry_run_recomputes_without_data(policy):
    with FakeTensorMode():
        model = deep("llama")
        recompute(model, policy)
        engine = zero3d.Engine(model, stage=3, precision="bf16")
        engine.backward(loss_of(engine, torch.randint(0, VOCAB, (2, 9))))
        assert engine.step().applied.numel() == 1


# --- what is kept -----------------------------------------------------------------------------------


def kept_inputs(model):
    """(block inputs saved, all bytes saved) by one forward, parameters left out; distinct storages."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(t):
        saved[t.untyped_storage()._cdata] = t
        return t

    inputs = []
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].untyped_storage()))
    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, batch(0))
    loss.backward()
    count = len({s._cdata for s in inputs if s._cdata in saved})
    return count, sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in weights)


@pytest.mark.parametrize("policy", ["full", "every:1", "every:2", "every:3", "every:9"])
def test_as_many_inputs_are_kept_as_the_arithmetic_says(policy):
    assert kept_inputs(recomputed(deep("llama"), policy))[0] == recompute_arithmetic(LAYERS, policy).kept_inputs


def test_the_more_is_recomputed_the_fewer_bytes_are_saved():
    saved = [kept_inputs(recomputed(deep("llama"), p))[1] for p in ("none", "selective", "full", "every:2", "every:5")]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == len(saved)


def test_a_blocks_interior_is_let_go_as_its_backward_goes_on():
    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            alive.append(sum(ref() is not None for ref in seen))
            seen.append(weakref.ref(saved))
            return grad

    seen, alive = [], []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return Watch.apply(self.linear(x))

    model = nn.Sequential(*(Watched() for _ in range(6)))
    recompute(model, "every:3")
    model(torch.randn(2, 8)).sum().backward()
    assert alive == [0] * 6


@pytest.mark.parametrize("policy", ["full", "every:2", "every:3"])
def test_nothing_is_left_after_a_backward_or_a_dropped_forward(policy):
    model = recomputed(deep("net"), policy)
    refs = []
    for block in model.layers:
        block.register_forward_hook(lambda m, args, out: refs.append(weakref.ref(out.untyped_storage())))
    gc.collect()
    gc.disable()  # reference counting alone must do
    try:
        loss_of(model, batch(0)).backward()
        loss_of(model, batch(0))
        if policy == "full":  # torch's checkpoint leaves a cycle
            gc.collect()
        assert len(refs) >= 2 * LAYERS
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


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


@pytest.mark.parametrize(("policy", "message"), [
    ("ful", "Did you mean 'full'"), ("selectiv", "Did you mean 'selective'"), ("evry:2", "Did you mean 'every:K'"),
    ("every:0", "whole number from 1"), ("every", "whole number from 1"), ("every:-1", "whole number"),
    ("full:2", "unknown"), ("", "pass one of none, full"),
])  # fmt: skip
def test_an_unknown_policy_is_refused_with_the_nearest(policy, message):
    with pytest.raises(ConfigError, match=message):
        recompute(net(), policy)


def test_models_without_blocks_or_attention_are_refused():
    with pytest.raises(ConfigError, match="no list of two or more modules"):
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


@pytest.mark.parametrize("policy", ["none", "full", "every:2"])
@pytest.mark.parametrize("name", ["net", "gpt2"])
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


# --- arithmetic --------------------------------------------------------------------------------------


def test_one_more_forward_is_a_third_of_a_step():
    assert recompute_arithmetic(24, "none") == (0, 24, 24, 0)
    assert recompute_arithmetic(24, "full") == (24, 1, 1, Fraction(1, 3))
    assert recompute_arithmetic(24, "every:5") == (5, 5, 5, Fraction(1, 3))
    assert recompute_arithmetic(3, "every:8") == (1, 3, 3, Fraction(1, 3))
    assert recompute_arithmetic(24, "selective") == (24, 24, 1, None)
    assert recompute_arithmetic(24, "selective", Fraction(3, 10)).extra_forward == Fraction(1, 10)


def test_the_best_segment_is_near_the_square_root():
    for layers in (1, 4, 16, 36, 64, 100):
        best = best_segment(layers)
        at_best = recompute_arithmetic(layers, f"every:{best}")
        assert best == round(layers**0.5)
        assert at_best.kept_inputs + at_best.interiors == 2 * best
    assert best_segment(64, interior=16) == 2
    assert Policy.of("every:12").every == 12


def test_a_replay_gathers_all_but_the_last_unit_of_a_segment_once_more():
    names = [f"layers.{i}" for i in range(5)]
    plain = token_order(["embed", *names, "head"], root="root", no_backward=["embed"])
    segments = [names[:2], names[2:4], names[4:]]
    gathers = count_gathers(replayed(plain, segments))
    assert [gathers[name] for name in names] == [3, 2, 3, 2, 2]
    engine = zero3d.Engine(recomputed(deep("net"), "every:2"), stage=3, precision="fp32")
    engine.gathers.events = []
    engine.backward(loss_of(engine, batch(random.Random(0).randrange(9))))
    assert count_gathers(engine.gathers.events) == gathers
