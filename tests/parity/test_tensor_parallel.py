"""A model cut over tp ranks computes what one process computes."""

import ast
import hashlib
import re

import pytest
import torch
import torch.distributed as dist
from models import bits, net
from tensors import LAYERS, axis, cut_model, ids, logical_gradients, one_process, step, tiny
from test_stages import LiftCasts
from torch.nn import functional as F

import zero3d
from zero3d.distributed.algorithms import Native, Pairwise
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.parallelize import parallelize, read_styles
from zero3d.tensor_parallel.vocabulary import cross_entropy

COMMON_ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
COMMON_ATTENTION |= {"layers.*.self_attn.o_proj": "rowwise_split_input", "embed_tokens": "replicate"}


def loss_and_gradients(name, policy, options):
    """fp64 throughout, as the oracle."""
    with LiftCasts():
        model, sharded, ledger = cut_model(name, **options)
        loss = step(model, policy)
    return loss, logical_gradients(model, sharded), {(e.op, e.unit): (e.calls, e.elements) for e in ledger}


def assert_equal_one_process(results, name, **options):
    with LiftCasts():
        loss, grads = one_process(name, **options)
    least = 1e-6 * torch.stack([grad.norm() for grad in grads.values()]).norm()  # some, of keys' biases, are zero
    for value, joined, _ in results:
        assert abs(float(value - loss)) < 1e-10
        assert joined.keys() == grads.keys()
        for key, grad in grads.items():
            assert float((joined[key] - grad).norm() / grad.norm().clamp_min(least)) < 1e-10, key


@pytest.mark.parametrize(("name", "world", "policy", "options"), [
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("llama", 2, "none", {}), ("llama", 2, "none", {"sequence": True}), ("llama", 4, "none", {"kv_heads": 4}),
        ("qwen3", 4, "none", {"sequence": True, "kv_heads": 4}), ("gpt2", 4, "full", {"sequence": True}),
        ("llama", 2, "none", {"lora": True}), ("gpt2", 2, "full", {"lora": True}), ("apertus", 2, "none", {}),
        ("gemma3n_text", 2, "none", {}), ("gpt_oss", 2, "none", {}),
    )),
    ("qwen3", 2, "none", {}), ("gpt2", 2, "every:2", {}), ("moe", 2, "none", {}),
    ("llama", 2, "none", {"lora": True, "sequence": True}), ("llama", 2, "none", {"plan": COMMON_ATTENTION}),
    ("mla", 2, "none", {}), ("bloom", 2, "none", {}),
    ("llama", 2, "none", {"plan": {"embed_tokens": "none", "lm_head": "none"}}),
    ("llama", 2, "none", {"plan": {"embed_tokens": "replicate"}, "lora": {"target_modules": ["q_proj", "embed_tokens"]}}),
])  # fmt: skip
def test_loss_and_gradients_equal_one_process_in_float64(ranks, name, world, policy, options):
    results = ranks(world, loss_and_gradients, name, policy, options)
    assert_equal_one_process(results, name, **{k: v for k, v in options.items() if k not in ("sequence", "plan")})


MULTI_QUERY = {"multi_query": True, "new_decoder_architecture": False}
OLD_FALCON = {"multi_query": False, "new_decoder_architecture": False, "num_kv_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}


@pytest.mark.long
@pytest.mark.parametrize(("name", "world", "policy", "options"), [
    ("opt", 2, "none", {}), ("opt", 2, "none", {"sequence": True}), ("opt", 2, "full", {"do_layer_norm_before": False}),
    ("gptj", 2, "none", {}), ("gptj", 2, "none", {"sequence": True}),
    ("stablelm", 2, "none", {}), ("stablelm", 2, "none", {"use_parallel_residual": True}),
    ("stablelm", 2, "none", {"qk_layernorm": True}),
    ("falcon", 2, "none", {"new_decoder_architecture": True}), ("falcon", 2, "none", MULTI_QUERY),
    ("falcon", 2, "none", {"new_decoder_architecture": True, "sequence": True}),
    ("falcon", 2, "none", OLD_FALCON | {"alibi": True}),
    ("falcon", 2, "selective", OLD_FALCON | {"alibi": True, "attn_implementation": "eager"}),
    ("falcon", 2, "full", {"new_decoder_architecture": True, "alibi": True}),
    ("bloom", 4, "none", {}), ("bloom", 2, "selective", {}), ("bloom", 2, "none", {"sequence": True}),
    ("mpt", 2, "none", {}), ("mpt", 4, "full", {}),
    ("gpt_oss", 2, "full", {}), ("lfm2", 2, "none", {}), ("bamba", 2, "none", {}), ("falcon_h1", 2, "none", {}),
    ("falcon_mamba", 2, "none", {}), ("jamba", 2, "none", {}), ("jamba", 2, "full", EXPERTS), ("inkling2_text", 2, "none", {}),
    ("mla", 4, "full", {"kv_heads": 4}), ("deepseek_v3", 2, "none", {}), ("gemma3n_text", 2, "full", {}), ("gemma4_text", 2, "none", {}),
    ("gemma4_text", 2, "none", {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 16}),
    ("gemma4_text", 2, "full", {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0}),
])  # fmt: skip
def test_plans_of_ours_equal_one_process_in_float64(ranks, name, world, policy, options):
    results = ranks(world, loss_and_gradients, name, policy, options)
    assert_equal_one_process(results, name, **{k: v for k, v in options.items() if k != "sequence"})


@pytest.mark.parametrize("options", [{}, pytest.param({"sequence": True}, marks=pytest.mark.long)])
def test_norms_with_weights_for_every_head_are_cut_by_heads(ranks, options):
    results = ranks(2, loss_and_gradients, "cohere", "none", {"use_qk_norm": True} | options)
    assert_equal_one_process(results, "cohere", use_qk_norm=True)


def with_a_norm_for_every_head():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(4))
    return model


def with_a_number_for_every_head():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    return model


@pytest.mark.parametrize(("make", "told", "name"), [
    (with_a_norm_for_every_head, "norms has a module for each of 4 heads", "norms"),
    (with_a_number_for_every_head, "sinks has an entry for each of 4 heads", "sinks"),
])  # fmt: skip
def test_what_an_attention_has_for_every_head_is_refused_where_no_style_says_who_has_it(make, told, name):
    with pytest.raises(ConfigError, match=f"layers.0.self_attn.{told}"):
        parallelize(make().to("meta"), Axis("tp", 0, 2), Ledger())
    plan = {f"layers.*.self_attn.{name}": "replicate"}
    assert parallelize(make().to("meta"), Axis("tp", 0, 2), Ledger(), plan).cuts


def proposed(name):
    """The map that the refusal of a model without a plan proposes."""
    with pytest.raises(ConfigError, match="comes without a tensor-parallel plan") as error:
        read_styles(tiny(name))
    return ast.literal_eval(re.search(r"For example: (\{.*\})\.", str(error.value))[1])


@pytest.mark.parametrize("name", ["bert", pytest.param("bart", marks=pytest.mark.long)])
def test_the_plan_that_a_refusal_proposes_is_right(ranks, name):
    results = ranks(2, loss_and_gradients, name, "none", {"plan": proposed(name)})
    assert_equal_one_process(results, name)


POLICIES = ("none", "full", "every:2", "selective")


def recomputed_bits(name, options, policies=POLICIES):
    """Loss and gradients of two micro-batches under every policy, and all-reduces of a layer under `full`."""
    results, calls = {}, {}
    for policy in policies:
        model, _, ledger = cut_model(name, dtype=torch.float32, **options)
        torch.manual_seed(3)
        loss = [step(model, policy), step(model)]
        results[policy] = bits(loss), bits(p.grad for p in model.parameters() if p.grad is not None)
        calls[policy] = per_layer({(e.op, e.unit): (e.calls, e.elements) for e in ledger}, "all_reduce")
    return results, calls["full"]


@pytest.mark.parametrize(("name", "options"), [
    ("llama", {"dropout": 0.2, "sequence": True, "lora": True}),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in [("moe", {}), ("llama", {"dropout": 0.2}), ("qwen3", {"sequence": True})]),
])  # fmt: skip
def test_recomputed_blocks_give_the_same_bits(ranks, name, options):
    for results, _ in ranks(2, recomputed_bits, name, options):
        assert len(set(results.values())) == 1, results


# --- ids and labels beyond the vocabulary -----------------------------------------------------------

WRONG = {"input_ids": (64, 90, -1, -100), "labels": (64, 90, -1)}  # of 64 tokens


def given(key=None, value=None):
    """A micro-batch of which some labels do not count; one entry is `value`."""
    batch = {"input_ids": ids(), "labels": ids().clone()}
    batch["labels"][0, :4] = -100
    if key is not None:
        batch[key][1, 5] = value
    return batch


def refusals(sequence, tiled):
    """Of every call with every id and label of no token: the error's words."""
    engine = zero3d.Engine(
        tiny("llama"), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=zero3d.Mesh(tp=2), precision="fp32",
        sequence_parallel=sequence, tiled_loss=tiled,
    )  # fmt: skip
    said = {}
    for key, value in ((key, value) for key, values in WRONG.items() for value in values):
        batch = given(key, value)
        calls = {"train_batch": lambda b: engine.train_batch([b]), "evaluate": lambda b: engine.evaluate([b])}
        calls |= {"forward": lambda b: engine(**b)}
        calls |= {"generate": lambda b: engine.generate(b["input_ids"], max_new_tokens=1)} if key == "input_ids" else {}
        for call, work in calls.items():
            with pytest.raises(IndexError) as error:
                work(dict(batch))
            said[key, value, call] = str(error.value)
    return said, float(engine.train_batch([given()]))


@pytest.mark.parametrize(("sequence", "tiled"), [(True, False), (False, True)])
def test_ids_and_labels_beyond_the_vocabulary_are_errors_on_all_ranks_as_in_one_process(ranks, sequence, tiled):
    plain = tiny("llama")
    for key, value in ((key, value) for key, values in WRONG.items() for value in values):
        with pytest.raises(IndexError):
            plain(**given(key, value))
    for said, loss in ranks(2, refusals, sequence, tiled):
        kinds = {"input_ids": "token id", "labels": "label"}
        assert all(words.startswith(f"{kinds[key]} {value} is not a token") for (key, value, _), words in said.items())
        assert abs(loss - float(plain(**given()).loss)) < 1e-5


def ignored_labels(ignore_index):
    group = axis()
    local = torch.randn(6, 32, generator=torch.Generator().manual_seed(group.rank))
    labels = torch.tensor([1, ignore_index, 40, 63, 0, 5])
    return cross_entropy(local, labels, Channel(group, Ledger()), ignore_index).isfinite().item()


@pytest.mark.parametrize("ignore_index", [-100, -7, 99])
def test_labels_that_the_loss_ignores_may_be_of_no_token(ranks, ignore_index):
    assert all(ranks(2, ignored_labels, ignore_index))


# --- traffic ----------------------------------------------------------------------------------------


def per_layer(traffic, op, layer=1):
    return {
        unit.split(".", 3)[3]: calls
        for (o, unit), (calls, _) in traffic.items()
        if o == op and f"layers.{layer}." in unit
    }


def test_a_layer_takes_two_all_reduces_forward_and_two_backward(ranks):
    hidden = 2 * 8 * 32
    _, _, traffic = ranks(2, loss_and_gradients, "llama", "none", {})[0]
    for layer in range(LAYERS):
        forward = {"self_attn.o_proj": 1, "mlp.down_proj": 1}
        assert per_layer(traffic, "all_reduce", layer) == forward | {"self_attn.q_proj": 1, "mlp.gate_proj": 1}
    outside = {key: value for key, value in traffic.items() if "layers" not in key[1]}
    assert outside == {
        ("all_reduce", "model.embed_tokens"): (1, hidden),
        ("all_reduce", "lm_head"): (1, hidden),
        ("all_gather", "lm_head"): (1, 2 * 2 * 8),
    }
    assert {elements for (op, _), (_, elements) in traffic.items() if op == "all_reduce"} == {hidden}


def test_recomputing_a_block_repeats_one_all_reduce_of_the_two(ranks):
    _, calls = ranks(2, recomputed_bits, "llama", {}, ("full",))[0]  # two micro-batches
    assert calls == {"self_attn.o_proj": 4, "mlp.down_proj": 2, "self_attn.q_proj": 2, "mlp.gate_proj": 2}


def test_sequence_parallelism_gathers_and_scatters_as_much_as_it_would_all_reduce(ranks):
    _, _, traffic = ranks(2, loss_and_gradients, "llama", "none", {"sequence": True})[0]
    assert per_layer(traffic, "all_reduce") == {}
    matrices = {"self_attn": 1, "mlp": 1, "self_attn.o_proj": 1, "mlp.down_proj": 1}
    assert per_layer(traffic, "all_gather", 0) == matrices
    assert per_layer(traffic, "reduce_scatter", 0) == matrices
    assert traffic["all_gather", "model.layers.0"] == (1, 2 * 8 * 32 // 2)  # backward of the split
    assert traffic["all_gather", f"model.layers.{LAYERS - 1}"] == (1, 2 * 8 * 32 // 2)  # the join


# --- vocabulary -------------------------------------------------------------------------------------


def logits_of(name, sequence):
    with LiftCasts():
        model, _, _ = cut_model(name, sequence=sequence)
        widest = []
        model.lm_head.register_forward_hook(lambda *a: widest.append(a[2].shape[-1]))
        given = model(ids(), labels=ids()).logits.shape
        with torch.no_grad():
            odd = model(ids(length=7)).logits
        whole = model(ids()).logits
        grad = torch.autograd.grad(whole.square().sum(), model.lm_head.weight)[0]
    return given, odd, whole.detach(), grad, widest


@pytest.mark.parametrize("sequence", [False, True])
def test_logits_stay_local_where_the_model_computes_its_loss_and_are_whole_elsewhere(ranks, sequence):
    with LiftCasts():
        plain = tiny("llama").double()
        wanted = plain(ids()).logits
        grad = torch.autograd.grad(wanted.square().sum(), plain.lm_head.weight)[0]
        odd_wanted = plain(ids(length=7)).logits
    for rank, (given, odd, whole, local_grad, widest) in enumerate(ranks(2, logits_of, "llama", sequence)):
        assert given == (2, 8, 32)
        assert widest[0] == 32
        assert torch.allclose(whole, wanted, atol=1e-12)
        assert torch.allclose(odd, odd_wanted, atol=1e-12)
        assert torch.allclose(local_grad, grad.chunk(2)[rank], rtol=1e-9)


def local_losses(logits, labels, items, dtype):
    channel = Channel(axis(), Ledger())
    local = channel.slice_of(logits.to(dtype), -1).detach().requires_grad_()
    loss = cross_entropy(local, labels, channel, num_items_in_batch=items)
    loss.backward()
    return loss.detach(), local.grad


@pytest.mark.parametrize(
    ("items", "dtype"), [(None, torch.float64), (5, torch.float64), (torch.tensor(7), torch.bfloat16)]
)
def test_local_cross_entropy_equals_that_of_transformers(ranks, items, dtype):
    from transformers.loss.loss_utils import fixed_cross_entropy

    torch.manual_seed(1)
    logits, labels = torch.randn(6, 12, dtype=torch.float64) * 30, torch.tensor([0, 11, -100, 5, 6, -100])
    whole = logits.to(dtype).requires_grad_()
    wide = whole if dtype == torch.float64 else whole.float()
    loss = fixed_cross_entropy(wide, labels, items)
    loss.backward()
    results = ranks(4, local_losses, logits, labels, items, dtype)
    close = {"atol": 1e-14, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-2}
    assert all(torch.allclose(value, loss, **close) for value, _ in results)
    assert torch.allclose(torch.cat([grad for _, grad in results], 1), whole.grad, **close)


# --- dropout ----------------------------------------------------------------------------------------


def random_states(name, sequence):
    """A hash of the random state inside attention, at the residual dropout and after the step; for full too."""
    seen = {}

    def note(where):
        state = torch.get_rng_state().numpy().tobytes()
        seen.setdefault(where, []).append(hashlib.sha256(state).hexdigest()[:8])

    grads = []
    for policy in ("none", "full", "every:2"):
        model, _, _ = cut_model(name, dtype=torch.float32, sequence=sequence, dropout=0.3)
        if policy == "none":
            model.transformer.h[1].attn.c_proj.register_forward_pre_hook(lambda *_: note("attention"))
            model.transformer.h[1].attn.resid_dropout.register_forward_pre_hook(lambda *_: note("residual"))
            model.transformer.ln_f.register_forward_pre_hook(lambda *_: note("end"))
        torch.manual_seed(5)
        loss = [step(model, policy), step(model, "none")]  # two micro-batches: what a replay left behind shows
        note(f"after {policy}")
        grads.append((bits(loss), bits(p.grad for p in model.parameters())))
    return seen, grads


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.long), True])
def test_dropout_is_alike_where_activations_are_and_a_ranks_own_elsewhere(ranks, sequence):
    (first, grads), (second, second_grads) = ranks(2, random_states, "gpt2", sequence)
    assert all(a != b for a, b in zip(first["attention"], second["attention"], strict=True))
    assert (first["residual"] == second["residual"]) is not sequence
    assert first["end"] == second["end"]
    assert {tuple(first[f"after {p}"]) for p in ("none", "full", "every:2")} == {tuple(second["after none"])}
    assert len(set(grads)) == 1  # recomputed blocks draw the same numbers
    assert len(set(second_grads)) == 1


# --- the rest ---------------------------------------------------------------------------------------


def sums(numel, native):
    rank, size = dist.get_rank(), dist.get_world_size()
    ledger = Ledger()
    channel = Channel(axis(), ledger)
    channel._algorithm = (Native if native else Pairwise)(channel.axis, None)
    t = torch.randn(numel, 3, generator=torch.Generator().manual_seed(rank))
    summed = channel.all_reduce(t, "m")
    rows = t[: numel // size * size]
    scattered = channel.all_gather(channel.reduce_scatter(rows.t(), 1, "m"), 1, "m").t()
    return t, summed, scattered, {(e.op, e.axis, e.unit): (e.calls, e.elements, e.bytes) for e in ledger}


@pytest.mark.parametrize(("world", "numel", "native"), [(2, 5, False), (4, 8, False), (4, 7, False), (2, 6, True)])
def test_every_rank_gets_the_bits_of_a_sum_in_rank_order(ranks, world, numel, native):
    results = ranks(world, sums, numel, native)
    wanted = results[0][0].clone()
    for t, *_ in results[1:]:
        wanted += t
    even, padded = numel // world * world * 3, -(-numel * 3 // world) * world
    reduced, moved = 2 * (world - 1) * padded // world, even * (world - 1) // world
    if world == 2:
        reduced = numel * 3
    for _, summed, scattered, ledger in results:
        assert torch.equal(summed, wanted)
        assert torch.equal(scattered, wanted[: len(scattered)])
        assert ledger == {
            ("all_reduce", "tp", "m"): (1, reduced, 4 * reduced),
            ("all_gather", "tp", "m"): (1, moved, 4 * moved),
            ("reduce_scatter", "tp", "m"): (1, moved, 4 * moved),
        }


def parts_of_a_pipeline(name):
    """The halves of a model, each cut over tp, called one after the other."""
    from zero3d.pipeline.split import split

    with LiftCasts():
        model = tiny(name).double()
        parts = [split(model, [1, 1], stage) for stage in range(2)]
        sharded = [parallelize(part, axis(), Ledger(), sequence=True) for part in parts]
        labels = ids().clone()
        labels[0, :3] = -100
        output = parts[1](parts[0](ids()), labels=labels)
    shapes = [
        {n: tuple(p.shape) for n, p in part.named_parameters() if n in cut.cuts}
        for part, cut in zip(parts, sharded, strict=True)
    ]
    return output.loss.detach(), output.logits.shape, shapes


def test_parts_of_a_pipeline_are_cut_as_the_whole_model_is(ranks):
    with LiftCasts():
        loss, _ = one_process("gpt2")
    for value, shape, (first, last) in ranks(2, parts_of_a_pipeline, "gpt2"):
        assert abs(float(value - loss)) < 1e-10
        assert shape == (2, 8, 32)
        assert first["transformer.wte.weight"] == last["lm_head.weight"] == (32, 32)
        assert first["transformer.h.0.attn.c_attn.weight"] == last["transformer.h.1.attn.c_attn.weight"] == (32, 48)


def uneven(name):
    model, _, _ = cut_model(name, sequence=True)
    try:
        model(ids(length=9), labels=ids(length=9))
    except ConfigError as error:
        return str(error)


def test_a_sequence_that_tp_does_not_divide_is_refused_with_lengths_that_work(ranks):
    assert all("9 tokens / 2" in text and "8 or 10 tokens" in text for text in ranks(2, uneven, "llama"))


def trained(name, dtype):
    model, sharded, _ = cut_model(name, dtype=dtype, sequence=True)
    loss = step(model)
    return float(loss), logical_gradients(model, sharded)


def test_bf16_differs_from_one_process_by_rounding_only(ranks):
    loss, grads = one_process("llama", dtype=torch.bfloat16)
    for value, joined in ranks(2, trained, "llama", torch.bfloat16):
        assert value == pytest.approx(float(loss), rel=1e-2)
        total = torch.cat([(joined[n] - g).float().flatten() for n, g in grads.items()]).norm()
        assert float(total / torch.cat([g.float().flatten() for g in grads.values()]).norm()) < 0.03


NET = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
}


def own_model(sequence):
    """A plain module with a user's map, its matrices directly in the block, tied."""
    model = net(tied=True, vocab=64).double()
    sharded = parallelize(model, axis(), Ledger(), plan=NET, sequence=sequence)
    loss = F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())
    loss.backward()
    return loss.detach(), logical_gradients(model, sharded)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_of_ones_own_is_cut_by_a_map(ranks, sequence):
    plain = net(tied=True, vocab=64).double()
    loss = F.cross_entropy(plain(ids()).flatten(0, 1), ids().flatten())
    loss.backward()
    for value, joined in ranks(2, own_model, sequence):
        assert abs(float(value - loss)) < 1e-12
        assert all(torch.allclose(joined[n], p.grad, rtol=1e-9, atol=1e-14) for n, p in plain.named_parameters())
