"""The sequence axis: ranks that share sequences out have the bits of one rank that has all of them."""

import sys
import warnings
from functools import cache, partial
from shutil import which
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import vision
from families import family
from hybrids import hybrid
from meshes import CLIP, sgd, sum_of
from models import LiftCasts
from tensors import tiny
from torch.nn import functional as F
from training import field, save_model, save_rows, train, tree
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import zero3d
from zero3d.account.traffic import Moved
from zero3d.activations.compilation import compile_blocks
from zero3d.activations.recomputation import recompute
from zero3d.checkpoint.resume_contract import USUAL
from zero3d.errors import ConfigError, CorruptionError
from zero3d.models.bases import decoder_of
from zero3d.sequence.attention import SharedAttention
from zero3d.sequence.blocks import DENSE, ENDS, FLEX, Fallback
from zero3d.sequence.entry import Entry, _added_in
from zero3d.sequence.group import check_sequence
from zero3d.sequence.positions import Positions
from zero3d.sequence.shares import Attended, Heads, MaskTooLarge, Sharing, even_parts
from zero3d.sequence.trial import find_positions, mixing_module
from zero3d.tensor_parallel.vocabulary import shifted
from zero3d.tools.vision.tiny import tiny_model

LENGTH = 48
long = partial(pytest.param, marks=pytest.mark.long)


def batch(number, length=LENGTH, size=2, ignored=range(0)):
    """A micro-batch of whole sequences; labels of the ignored places are no targets."""
    ids = torch.randint(3, 61, (size, length), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[:, ignored.start : ignored.stop] = -100
    return {"input_ids": ids, "labels": labels}


def mesh(**degrees):
    return zero3d.Mesh(**degrees)


def engine_of(model, degrees, **options):
    made = {"precision": "fp64", "clip_norm": CLIP, "optimizer": sgd}
    return zero3d.Engine(model, mesh=mesh(**degrees), **made | options)


def model_of(name, **sizes):
    """A tiny model; `experts` is a mixture without a loss that balances them."""
    model = tiny("moe" if name == "experts" else name, **sizes)
    if name == "experts":
        model.config.output_router_logits = False
    return model


def trained(name, degrees, steps=2, lengths=(LENGTH,), activations="none", accumulate=1, ignored=range(0), **options):
    """Losses and gradient norms of a few steps, and the fingerprint; every row of ranks has micro-batches of its own."""
    model, more = model_of(name, **options.pop("sizes", {})), options.pop("more", {})
    if (backend := options.pop("backend", None)) is not None:
        compile_blocks(model, backend=backend)
    recompute(model, activations)
    with LiftCasts():
        engine, found = engine_of(model, degrees, accumulate=accumulate, **options), []
        rows, row = engine.mesh.degrees.rows, engine.mesh.row
        for step in range(steps):
            length = lengths[step % len(lengths)]
            given = [batch(100 * step + k * rows + row, length, ignored=ignored) | more for k in range(accumulate)]
            found.append((float(engine.train_batch(given)), float(engine.last_step.grad_norm)))
    return found, engine.fingerprint()


def reference(name, rows, steps=2, lengths=(LENGTH,), accumulate=1, ignored=range(0), sizes=None, more=None):
    """The same of one process and no engine, in float64."""
    model, found = tiny(name, **(sizes or {})), []
    for p in model.parameters():  # buffers keep their dtype, as in an engine
        p.data = p.data.double()
    optimizer = sgd(model.parameters())
    with LiftCasts():
        for step in range(steps):
            total, weight = 0.0, 0
            for k in range(accumulate * rows):
                given = batch(100 * step + k, lengths[step % len(lengths)], ignored=ignored) | (more or {})
                summed, count = sum_of(model(**given), given)
                total, weight = total + summed, weight + count
            optimizer.zero_grad()
            (total / weight).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            found.append((float(total.detach() / weight), float(norm)))
    return found


def check(found, wanted, most=1e-10):
    for result, _ in found:
        assert torch.tensor(result, dtype=torch.float64).allclose(torch.tensor(wanted, dtype=torch.float64), most, 0), (
            result
        )


# --- against one process ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "degrees", "options"), [
    ("llama", {"sp": 2}, {}),
    ("gpt2", {"sp": 2}, {"lengths": (48, 31, 33), "steps": 3}),
    ("gemma2", {"sp": 2}, {"sizes": {"sliding_window": 7}, "sp_kind": "gather"}),
    long("llama", {"sp": 2, "dp": 4}, {"accumulate": 2, "ignored": range(0, 30)}),
    long("qwen3", {"sp": 2, "tp": 2}, {}),
    long("gemma2", {"sp": 2}, {"sizes": {"sliding_window": 7}}),
    ("llama", {"sp": 4}, {"sizes": {"kv_heads": 1}}),
    long("llama", {"sp": 4}, {"sizes": {"kv_heads": 1, "num_attention_heads": 2}}),
    ("llama", {"sp": 2, "pp": 2}, {"accumulate": 2}),
    long("qwen3", {"sp": 2, "pp": 2}, {"accumulate": 2, "lengths": (33,), "schedule": "zbv", "sizes": {"layers": 4}}),
], ids=str)  # fmt: skip
def test_losses_and_norms_are_those_of_one_process_in_float64(ranks, name, degrees, options):
    dp = degrees.get("dp", degrees["sp"])
    world = dp * degrees.get("tp", 1) * degrees.get("pp", 1)
    wanted = reference(
        name, dp // degrees["sp"], **{k: v for k, v in options.items() if k not in ("schedule", "sp_kind")}
    )
    check(ranks(world, partial(trained, **options), name, degrees), wanted)


def balanced(degrees, accumulate=1, activations="none"):
    """Losses and norms of a mixture whose loss balances experts over all tokens, with padding and without.

    And how many numbers a rank sent for its losses. Layers are more than a trial of the model runs.
    """
    recompute(model := tiny("moe", layers=3), activations)
    with LiftCasts():
        engine, found = engine_of(model, degrees, accumulate=accumulate), []
        for number, length in enumerate((48, 33)):
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[1, 20 + number * 13 :] = 0
            given = [batch(10 * number + k, length) | {"attention_mask": mask} for k in range(accumulate)]
            found.append((float(engine.train_batch(given)), float(engine.last_step.grad_norm)))
    assert model.config.output_router_logits
    return found, sum(e.elements for e in engine.traffic if (e.op, e.axis) == ("exchange", "sp"))


@pytest.mark.parametrize(("degrees", "options"), [
    ({"sp": 2}, {"activations": "full"}), long({"sp": 2, "pp": 2}, {"accumulate": 2}),
], ids=str)  # fmt: skip
def test_experts_are_balanced_over_the_tokens_of_whole_sequences(ranks, degrees, options):
    ((one, _),) = ranks(1, partial(balanced, **options), {})
    found = ranks(2 * degrees.get("pp", 1), partial(balanced, **options), degrees)
    check(found, one)
    # Of 2 sequences a loss and, of 3 layers, 4 router logits for each row; the longer part has 24 rows, and 17.
    assert found[-1][1] == (2 + 3 * 4 * 2) * (24 + 17) * options.get("accumulate", 1)


def by_hand(degrees, weighs):
    """One's own loop: a backward of the output's mean, with its weight or without."""
    with LiftCasts():
        engine, found = engine_of(tiny("llama"), degrees), []
        for number in range(2):
            given = batch(100 * number, ignored=range(0, 30))  # all targets are on the second rank
            loss = engine(**given).loss
            engine.backward(loss, (given["labels"][:, 1:] != -100).sum() if weighs else None)
            found.append((float(loss.detach()), float(engine.step().grad_norm)))
    return found, None


@pytest.mark.parametrize("weighs", [False, True])
def test_a_backward_of_ones_own_has_the_mean_of_the_whole_group(ranks, weighs):
    check(ranks(2, by_hand, {"sp": 2}, weighs), reference("llama", 1, ignored=range(0, 30)))


def with_another_keyword():
    """A step with masks of a transformers whose function names its cache otherwise."""
    from transformers import masking_utils

    made = masking_utils.create_masks_for_generate

    def renamed(config, inputs_embeds, attention_mask, cache, position_ids=None):
        return made(config, inputs_embeds, attention_mask, cache, position_ids)

    with mock.patch.object(masking_utils, "create_masks_for_generate", renamed):
        return trained("llama", {"sp": 2}, steps=1)


def test_masks_are_made_whatever_transformers_calls_its_cache(ranks):
    check(ranks(2, with_another_keyword), reference("llama", 1, steps=1))


def own_loss(output, given):
    total = F.cross_entropy(output.logits.flatten(0, 1), given["shift_labels"].flatten(), reduction="sum")
    return total, (given["shift_labels"] != -100).sum()


def test_a_loss_of_ones_own_sees_the_rows_of_its_rank(ranks):
    found = ranks(2, partial(trained, loss=own_loss, ignored=range(0, 30)), "llama", {"sp": 2})
    check(found, reference("llama", 1, ignored=range(0, 30)))


def test_labels_are_shifted_before_they_are_cut():
    assert shifted(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]


FAMILIES_WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # Qwen3-VL's first blocks add features of images, too


def with_images(name, sp):
    """Losses and norms of a vision-language model: tower and merge run whole on every rank, the decoder on its rows."""
    with LiftCasts():
        engine, found = engine_of(vision.model(name), {"sp": sp}), []
        for number in range(2):
            given = vision.micro_batch(name, torch.Generator().manual_seed(number), length=25)
            found.append((float(engine.train_batch([given])), float(engine.last_step.grad_norm)))
    return found, None


@pytest.mark.parametrize("name", [
    name if name in FAMILIES_WITH_IMAGES else pytest.param(name, marks=pytest.mark.long)
    for name in (*FAMILIES_WITH_IMAGES, "idefics3", "internvl", "llava", "llava_next", "mistral3", "paligemma", "qwen2_vl",
                 "qwen3_vl_moe")
])  # fmt: skip
def test_images_are_seen_whole(ranks, name):
    ((one, _),) = ranks(1, with_images, name, 1)
    check(ranks(2, with_images, name, 2), one)


@pytest.mark.parametrize("width", [None, 4], ids=["a mask of tokens, features in a list", "of their widths, by block"])
def test_features_that_blocks_add_are_those_of_a_ranks_rows(width):
    tokens = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0]], dtype=torch.bool)
    features = torch.arange(6 * 4.0).view(6, 4)
    mask = tokens if width is None else tokens[..., None].expand(-1, -1, width)
    whole = torch.zeros(2, 5, 4).masked_scatter(tokens[..., None], features)
    for rows in even_parts(5, 2):
        own, cut = _added_in(rows, mask, [features] if width is None else {7: features})
        added = cut[0] if width is None else cut[7]
        there = own if width is None else own[..., 0]
        assert whole[:, rows.start : rows.stop].equal(
            torch.zeros(2, len(rows), 4).masked_scatter(there[..., None], added)
        )


@pytest.mark.parametrize("name", [
    "gpt_oss",  # its heads have sinks
    *(pytest.param(name, marks=pytest.mark.long)
      for name in ("apertus", "bert", "deepseek_v3", "llama4", "mla", "opt", "stablelm")),
])  # fmt: skip
def test_other_families_are_those_of_one_process(ranks, name):
    options = {"steps": 2, "lengths": (33,)}
    check(ranks(2, partial(trained, **options), name, {"sp": 2}), reference(name, 1, **options))


def both_ways(name, sp):
    """Losses and norms of a masked language model, whose tokens see each other in both directions."""
    import transformers as t

    torch.manual_seed(7)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    if name == "modernbert":
        drops = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
        model = t.ModernBertForMaskedLM(t.ModernBertConfig(**sizes, **drops, local_attention=8, pad_token_id=0))
    else:
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = t.BertForMaskedLM(t.BertConfig(**sizes, **drops))
    with LiftCasts():
        engine, found = engine_of(model, {"sp": sp}), []
        for number in range(2):
            given = batch(number, 33)
            given["labels"][:, 5:] = -100
            mask = torch.ones(2, 33, dtype=torch.int64)
            mask[1, 20:] = number
            try:
                found.append(
                    (float(engine.train_batch([given | {"attention_mask": mask}])), float(engine.last_step.grad_norm))
                )
            except ConfigError as error:
                return str(error)
    return found, None


def test_masked_language_models_have_their_labels_as_they_are(ranks):
    ((one, _),) = ranks(1, both_ways, "modernbert", 1)
    check(ranks(2, both_ways, "modernbert", 2), one)
    assert "BertForMaskedLM computes a loss of its own" in ranks(2, both_ways, "bert", 2)[0]


# --- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    long({"precision": "bf16"}), long({"precision": "fp32", "activations": "full"}),
], ids=str)  # fmt: skip
def test_stages_have_the_same_bits(ranks, options):
    stages = (0, 1, 2, 3) if options["precision"] == "bf16" else (0, 3)
    first, *others = (ranks(2, partial(trained, stage=stage, **options), "llama", {"sp": 2}) for stage in stages)
    assert all(found == first for found in others)


@torch.no_grad()
def rows_are_alike(name):
    """Whether this CPU's products give rows the same bits among half of them: those of the model's first micro-batch."""
    from transformers.pytorch_utils import Conv1D

    model, alike = model_of(name), []

    def compare(layer, given, output):
        for rows in even_parts(output.shape[1], 2):
            own = slice(rows.start, rows.stop)
            alike.append(layer.forward(given[0][:, own].contiguous()).equal(output[:, own]))

    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_hook(compare)
    model(**batch(0))
    assert alike
    return all(alike)


@pytest.mark.parametrize("name", ["llama", long("qwen3"), long("gpt2")])
def test_the_first_loss_of_two_ranks_is_that_of_one_and_bit_for_bit_where_rows_are_alike(ranks, name):
    case = partial(trained, precision="fp32", lengths=(48, 47))
    (one, _), (two, _) = ranks(1, case, name, {"sp": 1})[0], ranks(2, case, name, {"sp": 2})[1]
    assert two[0][0] == (one[0][0] if rows_are_alike(name) else pytest.approx(one[0][0], rel=1e-6))
    check([(two, None)], one, 1e-5)


def exactly(degrees, **options):
    return trained("llama", degrees, exact=True, precision="fp32", **options)


@pytest.mark.long
def test_exact_mode_has_one_fingerprint_at_one_sp(ranks):
    want = ranks(2, partial(exactly, accumulate=2), {"sp": 2})[0]
    assert ranks(4, partial(exactly, stage=1, activations="full"), {"sp": 2, "dp": 4})[3] == want


def goes_on(folder, degrees, steps, **options):
    """Losses, norms and fingerprint of steps in exact mode behind those in a folder, and what is said of their bits."""
    recompute(model := tiny("llama"), options.pop("activations", "none"))
    engine, found = engine_of(model, degrees, precision="fp32", exact=True, **options), []
    if steps.start:
        engine.load(folder)
    rows, row = engine.mesh.degrees.rows, engine.mesh.row
    for step in steps:
        given = [batch(100 * step + k * rows + row) for k in range(options.get("accumulate", 1))]
        found.append((float(engine.train_batch(given)), float(engine.last_step.grad_norm)))
        if step == 0:
            engine.save(folder)
    return found, engine.fingerprint(), engine.resumed


OTHER_PARTS = "(gradients are summed over other parts of sequences)"


@pytest.mark.long
@pytest.mark.parametrize(("saved", "resumed"), [
    ({"sp": 2, "accumulate": 2}, [
        ({"sp": 2, "dp": 4, "stage": 1, "activations": "full"}, ["bitwise: as if it had not been interrupted, dp 2 -> 4, stage 3 -> 1"]),
        ({"sp": 1, "dp": 2}, ["not bitwise: ", f"sp 2 -> 1 {OTHER_PARTS}"]),
    ]),
    long({"sp": 2, "accumulate": 2}, [
        ({"sp": 4, "accumulate": 2}, ["not bitwise: ", f"sp 2 -> 4 {OTHER_PARTS}"]),
        ({"sp": 2, "accumulate": 2, "sp_kind": "gather"}, ["not bitwise: sp_kind heads -> gather (gradients of keys"]),
    ]),
    long({"sp": 1, "dp": 2}, [
        ({"sp": 2, "accumulate": 2}, ["not bitwise: ", f"sp 1 -> 2 {OTHER_PARTS}"]),
        ({"sp": 1, "dp": 2, "stage": 1}, ["bitwise: as if it had not been interrupted, stage 3 -> 1"]),
    ]),
    long({"sp": 4, "dp": 4, "accumulate": 2}, [
        ({"sp": 2, "dp": 4}, ["not bitwise: ", f"sp 4 -> 2 {OTHER_PARTS}"]),
        ({"sp": 4, "dp": 4, "accumulate": 2}, ["bitwise: as if it had not been interrupted, in batches"]),
    ]),
], ids=["sp 2", "sp 2 again", "sp 1", "sp 4"])  # fmt: skip
def test_exact_mode_goes_on_bitwise_at_its_sp_and_to_rounding_at_another(ranks, tmp_path, saved, resumed):
    def run(settings, steps):
        degrees = {name: settings[name] for name in ("sp", "dp") if name in settings}
        options = {name: value for name, value in settings.items() if name not in degrees}
        return ranks(degrees.get("dp", degrees["sp"]), partial(goes_on, **options), tmp_path, degrees, steps)[0]

    whole, states, _ = run(saved, range(2))
    for settings, said in resumed:
        again, fingerprint, told = run(settings, range(1, 2))
        assert told.startswith(said[0])
        assert said[-1] in told
        assert "leaves" not in told  # parts of a sequence are one micro-batch
        if said[0].startswith("bitwise"):
            assert (again, fingerprint) == (whole[1:], states)
        else:
            check([(again, None)], whole[1:], 1e-4)


def told(exact):
    return engine_of(tiny("llama"), {"sp": 2}, exact=exact, precision="fp32").sequence.describe(1)


def test_a_run_tells_that_exact_mode_is_of_its_sp(ranks):
    assert ranks(2, told, False)[0] == "sequences over 2 ranks, attention by heads"
    assert ranks(2, told, True)[0] == "sequences over 2 ranks, attention by heads, exact for mesh.sp=2 alone"


def attention_of(heads, keys, length, dtype, masked):
    """Queries, keys and values [2, H, S, 8] of a Llama attention, a gradient of its output, its mask and itself."""
    torch.manual_seed(5)
    query = torch.randn(2, heads, length, 8, dtype=dtype)
    key, value = torch.randn(2, 2, keys, length, 8, dtype=dtype)
    weight = torch.randn(2, length, heads, 8, dtype=dtype)
    mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-5)[None, None] if masked else None
    module = tiny("llama").model.layers[0].self_attn
    module.num_key_value_groups = heads // keys
    return query, key, value, weight, mask, module


def attended(heads, keys, length, dtype, masked, cut, kind="auto"):
    """Outputs and gradients of queries, keys and values of a Llama attention: whole, or of these ranks' parts."""
    import torch.distributed as dist

    from zero3d.distributed.collectives import Comm
    from zero3d.distributed.ledger import Ledger
    from zero3d.memory.arena import Arena

    *whole, weight, mask, module = attention_of(heads, keys, length, dtype, masked)
    if not cut:
        leaves = [t.requires_grad_() for t in whole]
        output, _ = sdpa_attention_forward(module, *leaves, mask)
        output.backward(weight)
        return [output.detach(), *(t.grad for t in leaves)]
    world = mesh(sp=dist.get_world_size())
    comm = Comm(world.axis("sp"), Arena(world.device), Ledger())
    rows = even_parts(length, comm.size)[comm.rank]
    leaves = [t[:, :, rows.start : rows.stop].clone().requires_grad_() for t in whole]
    attend = SharedAttention(sdpa_attention_forward, False, comm, Sharing(comm.size, kind, False, 10**9), None, {})
    output, _ = attend(module, *leaves, mask, sequence_length=length)
    output.backward(weight[:, rows.start : rows.stop])
    return [output.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "keys", "ranks_", "length", "masked"), [
    (4, 4, 2, 64, False), (4, 2, 2, 63, True), (4, 2, 4, 64, False), (4, 1, 2, 64, True), (6, 6, 4, 66, False),
])  # fmt: skip
def test_attention_by_heads_has_the_bits_of_whole_attention(ranks, alone, heads, keys, ranks_, length, masked, dtype):
    of_one = attended(heads, keys, length, dtype, masked, False)
    parts = ranks(ranks_, attended, heads, keys, length, dtype, masked, True, "heads")
    joined = [torch.cat([part[i] for part in parts], 1 if i == 0 else 2) for i in range(4)]
    shared = 2 if keys % ranks_ else 4  # keys whose query heads are on several ranks have another order of sums
    assert [a.equal(b) for a, b in zip(joined[:shared], of_one, strict=False)] == [True] * shared
    assert_near(joined[shared:], of_one[shared:], dtype)


def attended_by_rows(heads, keys, length, dtype, masked, ranks, called):
    """The same of one process that calls the kernel as each rank does: for its rows, and padding up to so many."""
    query, key, value, weight, mask, module = attention_of(heads, keys, length, dtype, masked)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    found = []
    for rows in even_parts(length, ranks):
        own = slice(rows.start, rows.stop)
        leaves = [t.clone().requires_grad_() for t in (query[:, :, own], key, value)]
        more = called - len(rows)
        seen = F.pad(mask[:, :, own], (0, 0, 0, more), value=True)
        output, _ = sdpa_attention_forward(module, F.pad(leaves[0], (0, 0, 0, more)), *leaves[1:], seen)
        output[:, : len(rows)].backward(weight[:, own])
        found.append([output[:, : len(rows)].detach(), *(t.grad for t in leaves)])
    outputs, queries, *of_keys = zip(*found, strict=True)
    return [torch.cat(outputs, 1), torch.cat(queries, 2), *map(sum, of_keys)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "keys", "length", "masked", "called"), [
    (4, 2, 64, False, 32), (1, 1, 61, True, 32), (4, 1, 800, False, 768),
])  # fmt: skip
def test_attention_by_rows_has_the_bits_of_a_kernel_called_for_them(ranks, heads, keys, length, masked, called, dtype):
    """Whole attention's, too, where this CPU's kernel gives rows the same bits in a call of so many as of all."""
    by_rows = attended_by_rows(heads, keys, length, dtype, masked, 2, called)
    parts = ranks(2, attended, heads, keys, length, dtype, masked, True, "gather")
    joined = [torch.cat([part[i] for part in parts], 1 if i == 0 else 2) for i in range(4)]
    assert [a.equal(b) for a, b in zip(joined, by_rows, strict=True)] == [True] * 4
    assert_near(joined, attended(heads, keys, length, dtype, masked, False), dtype)


@pytest.mark.parametrize("length", [190, 192, 766, 768])
def test_rows_are_attended_in_blocks_as_large_as_those_of_whole_sequences(length):
    def block(rows):  # of torch's kernel for CPUs
        return 256 if rows >= 768 else 64 if rows >= 192 else 32

    def attend(module, query, key, value, mask, **_):
        given.append(query.shape[2])
        return query.transpose(1, 2), None

    given, first = [], SimpleNamespace(size=2, rank=0, pass_rows=lambda sent, *_: sent)
    shared = SharedAttention(attend, False, first, Sharing(2, "gather", False, 10**9), None, {})
    shared(torch.nn.Linear(1, 1), *torch.zeros(3, 1, 1, length // 2, 4), None, sequence_length=length)
    (rows,) = given
    assert block(rows) == block(length)
    assert rows % 32 == 0


def assert_near(found, wanted, dtype):
    for a, b in zip(found, wanted, strict=True):
        assert a.float().allclose(b.float(), rtol=0.02, atol=0.1 if dtype == torch.bfloat16 else 1e-5)


# --- what is beside it -----------------------------------------------------------------------------


def losses(degrees, name="llama", sizes=None, **options):
    """Losses and norms of two steps under a setting; norms of fp16 overflow first."""
    found, _ = trained(name, degrees, sizes=sizes or {}, **options)
    return [(loss, 0.0 if options.get("precision") == "fp16" else norm) for loss, norm in found]


@cache
def of_whole_sequences(ranks, rows, name, shares_experts, lora, precision):
    """What ranks have that share no sequences, without the settings that change no bit, and tiles."""
    degrees = {"dp": rows} | ({"ep": rows} if shares_experts and rows > 1 else {})
    return ranks(rows, partial(losses, name=name, sizes={"lora": True} if lora else {}, precision=precision), degrees)[
        0
    ]


@pytest.mark.parametrize(("degrees", "options"), [
    long({"sp": 2}, {"activations": "full"}),
    long({"sp": 2}, {"activations": "selective", "stage": 2}),
    ({"sp": 2}, {"offload": {"optimizer": "host", "params": "host", "activations": "host"}, "activations": "full"}),
    ({"sp": 2}, {"sizes": {"lora": True}, "stage": 1}),
    ({"sp": 2, "ep": 2}, {"name": "experts"}),
    long({"sp": 2, "dp": 4, "ep": 4}, {"name": "experts"}),
    ({"sp": 2, "tp": 2}, {"tiled_loss": True}),
    long({"sp": 2}, {"gather_budget": 2000}),
    long({"sp": 2}, {"precision": "fp16"}),
], ids=str)  # fmt: skip
def test_settings_beside_it_train_as_without_it(ranks, degrees, options):
    rows, tp = degrees.get("dp", 2) // 2, degrees.get("tp", 1)
    lora, precision = bool(options.get("sizes")), options.get("precision", "fp64")
    whole = of_whole_sequences(ranks, rows, options.get("name", "llama"), "ep" in degrees, lora, precision)
    cut = ranks(2 * rows * tp, partial(losses, **options), degrees)
    check([(each, None) for each in cut], whole, 2e-3 if precision == "fp16" else 1e-10)


def seen_by_others(packed, changed):
    """Logits of whole sequences, joined; positions begin anew at 20, and one token before it is changed."""
    with LiftCasts():
        engine = engine_of(tiny("qwen3"), {"sp": 2})
        given = batch(0, size=1)
        given["input_ids"][0, 7] = changed
        positions = torch.arange(LENGTH) if not packed else torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])
        with torch.no_grad():
            return engine(input_ids=given["input_ids"], position_ids=positions[None]).logits


@pytest.mark.parametrize("packed", [True, False])
def test_packed_documents_do_not_see_each_other(ranks, packed):
    one, two = (torch.cat(ranks(2, seen_by_others, packed, token), 1)[0] for token in (5, 9))
    differs = (one != two).any(-1)
    assert differs[7]
    assert not differs[:7].any()
    assert differs[20:].any() != packed


def m_rope_loss(degrees, packed):
    """Loss of a step of an M-RoPE model over documents of 20, 9 and 19 tokens: in one row, or each in its own."""
    engine = zero3d.Engine(vision.model("qwen2_5_vl"), mesh=mesh(**degrees), precision="fp32")
    ids = batch(0, size=1)["input_ids"].clamp(max=50)
    if packed:
        labels, positions = ids.clone(), torch.cat([torch.arange(n) for n in (20, 9, 19)])
        labels[0, [20, 29]] = -100  # the first token of a document is no target of the one before
        return float(engine.train_batch([{"input_ids": ids, "labels": labels, "position_ids": positions[None]}]))
    return float(engine.train_batch([{"input_ids": part, "labels": part} for part in ids.split([20, 9, 19], 1)]))


@pytest.mark.parametrize("degrees", [long({"sp": 2}), long({"tp": 2})], ids=str)
def test_packed_documents_of_an_m_rope_model_train_as_apart(ranks, degrees):
    (apart,) = ranks(1, m_rope_loss, {}, False)
    assert ranks(2, m_rope_loss, degrees, True) == pytest.approx([apart] * 2, rel=1e-5)


def padded_loss():
    """A micro-batch whose second half is padding, which the second rank has alone, and one sequence of it whole."""
    with LiftCasts():
        engine = engine_of(tiny("gemma2", sliding_window=9), {"sp": 2} if zero3d_world() > 1 else {})
        given = batch(0)
        mask = torch.ones(2, LENGTH, dtype=torch.int64)
        mask[0, 24:] = 0
        given["labels"][0, 24:] = -100
        return float(engine.train_batch([given | {"attention_mask": mask}])), float(engine.last_step.grad_norm)


def zero3d_world():
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def test_padding_is_seen_by_nobody(ranks):
    (one,), two = ranks(1, padded_loss), ranks(2, padded_loss)
    assert two == [pytest.approx(one, rel=1e-10)] * 2


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COUNTING = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "roberta": NO_DROPOUT | {"is_decoder": True},
    "bert": NO_DROPOUT | {"is_decoder": True},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
}


def counting(name):
    """A model with weights so large that positions matter."""
    model = family(name, **COUNTING[name])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.dim() > 1 else 1.0)
    return model


def padded_ways():
    """Micro-batches that are padded on the left, with a mask and without, and one with the padding token amid others."""
    for number, masked in enumerate((True, False, True)):
        ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(number))
        mask = torch.ones_like(ids)
        if number < 2:
            ids[1, :4], mask[1, :4] = 2, 0
        ids[0, 5] = 2
        yield {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)} | (
            {"attention_mask": mask} if masked else {}
        )


def padded_losses(name, degrees):
    with LiftCasts():
        engine = engine_of(counting(name), degrees)
        return [float(engine.evaluate([given])) for given in padded_ways()]


@pytest.mark.parametrize(("name", "degrees"), [
    ("opt", {"sp": 2}), ("roberta", {"sp": 2}),
    *(long(*case) for case in (("bert", {"sp": 2}), ("gpt2", {"sp": 2}), ("llama", {"sp": 2}))),
], ids=str)  # fmt: skip
def test_positions_are_counted_as_the_model_counts_them_where_sequences_are_padded_on_the_left(ranks, name, degrees):
    plain = counting(name).double().eval()
    with LiftCasts():
        wanted = [float(plain(**given).loss) for given in padded_ways()]
    for found in ranks(2 * degrees.get("pp", 1), padded_losses, name, degrees):
        assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize(
    ("name", "rule"), [("opt", "attended"), ("roberta", "tokens"), ("gpt2", "rows"), ("llama", "rows")]
)
def test_a_trial_tells_what_positions_count(name, rule):
    model = family(name, **COUNTING[name])
    modes = [module.training for module in model.modules()]
    assert find_positions(model.base_model).rule.__name__ == rule
    assert [module.training for module in model.modules()] == modes


def backwards():
    model = family("gpt2", **COUNTING["gpt2"])
    decoder = model.transformer
    forward = type(decoder).forward

    def counted(*args, position_ids=None, **options):
        given = next(t for t in (*args, options.get("input_ids"), options.get("inputs_embeds")) if t is not None)
        own = torch.arange(given.shape[1]).flip(0)[None] if position_ids is None else position_ids
        return forward(decoder, *args, position_ids=own, **options)

    decoder.forward = counted
    return model


def test_a_model_that_counts_positions_in_another_way_or_takes_none_is_refused():
    with pytest.raises(ConfigError, match=r"counts neither rows, nor .* type mesh.sp=1"):
        check_sequence(backwards(), 2, 1, "auto")
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    with pytest.raises(ConfigError, match=r"layers.0.self_attn_layer_norm gives a part of a sequence other values"):
        check_sequence(family("blenderbot", **sizes), 2, 1, "auto")  # its positions begin at 0 on every rank


def by_blocks(module, query, key, value, mask, scaling, softcap=None, **_):
    """Stands for flex attention: makes the dense mask of one in blocks."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    assert isinstance(mask, BlockMask)
    seen = create_mask(mask.mask_mod, mask.shape[0], None, query.shape[2], key.shape[2], query.device)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


def trained_by_blocks(name, **options):
    """`trained` where a mask is too large to be made, and what is told of it: torch has no such attention for CPUs."""
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from zero3d.sequence import blocks

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(blocks, "why_not", lambda *_: None)
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", by_blocks)
        create = masking_utils.create_block_mask
        patch.setattr(masking_utils, "create_block_mask", lambda **given: create(**given | {"_compile": False}))
        found, _ = trained(name, {"sp": 2}, sp_mask_budget=600, **options)
    return found, [str(each.message) for each in told if "flex attention" in str(each.message)]


@pytest.mark.parametrize(("name", "options"), [
    long("gemma2", {"sizes": {"sliding_window": 7}}), ("gemma2", {"sizes": {"sliding_window": 7}, "sp_kind": "gather"}),
    long("llama", {"sizes": {"kv_heads": 1}, "sp_kind": "gather"}),
], ids=str)  # fmt: skip
def test_masks_that_are_too_large_are_in_blocks(ranks, name, options):
    found = ranks(2, partial(trained_by_blocks, name, **options))
    check(found, reference(name, 1, sizes=options["sizes"]))
    assert [len(told) for _, told in found] == [1, 0]


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    softcap=0,
):
    """Stands for a flash kernel: documents one by one, the last query of each sees its last key."""
    assert causal
    made, (key, value) = [], (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    for start, stop, first, last in zip(*cuts(cu_seqlens_q), *cuts(cu_seqlens_k), strict=True):
        assert stop - start <= max_seqlen_q
        assert last - first <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], key[first:last]) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        behind = torch.arange(start - stop, 0)[:, None] - torch.arange(first - last, 0)
        seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else len(k)))
        made.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value[first:last]))
    return torch.cat(made)


KERNELS = {"flash_attention_2": varlen}


def cuts(ends):
    return ends[:-1].tolist(), ends[1:].tolist()


def trained_by_documents(name, **options):
    """`trained` where a mask is too large to be made, and a flash kernel is there, and what is told of it."""
    from transformers import modeling_flash_attention_utils as flash

    from zero3d.sequence import blocks

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(blocks, "flash_kernel", lambda *_: "flash_attention_2")
        patch.setattr(flash, "_lazy_imports", lambda name, *_, **__: (None, KERNELS[name], None, None, None))
        patch.setattr(flash, "_loaded_implementation", None)
        found, _ = trained(name, {"sp": 2}, sp_mask_budget=600, **options)
    return found, [str(each.message) for each in told if "where documents end" in str(each.message)]


PACKED = torch.stack([torch.cat([torch.arange(n) for n in documents]) for documents in ((20, 9, 19), (30, 18))])


@pytest.mark.parametrize(("name", "options"), [
    ("gemma2", {"sizes": {"sliding_window": 7}, "sp_kind": "gather"}),
    ("llama", {"sizes": {"kv_heads": 2}, "activations": "full"}),
    long("gemma2", {"sizes": {"sliding_window": 7}}), long("llama", {"sizes": {"kv_heads": 1}, "sp_kind": "gather"}),
], ids=str)  # fmt: skip
def test_packed_documents_of_masks_that_are_too_large_are_told_by_their_ends(ranks, name, options):
    more = {"position_ids": PACKED}
    found = ranks(2, partial(trained_by_documents, name, more=more, **options))
    check(found, reference(name, 1, sizes=options["sizes"], more=more))
    assert [len(told) for _, told in found] == [1, 0]


@pytest.mark.parametrize(("changed", "kernel"), [
    ({}, "flash_attention_3"), ({"card": (8, 0)}, "flash_attention_2"), ({"installed": ("2",)}, "flash_attention_2"),
    ({"installed": ()}, None), ({"dtype": torch.float32}, None), ({"name": "gpt_oss"}, None),
    ({"sizes": {"head_dim": 512}}, None),
], ids=str)  # fmt: skip
def test_a_flash_kernel_stands_in_where_it_computes_what_the_model_does(monkeypatch, changed, kernel):
    given = {"card": (9, 0), "installed": ("2", "3"), "dtype": torch.bfloat16, "name": "llama", "sizes": {}} | changed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["card"])
    for number in ("2", "3"):
        monkeypatch.setattr(
            f"transformers.utils.is_flash_attn_{number}_available", lambda n=number: n in given["installed"]
        )
    decoder = tiny(given["name"], **given["sizes"]).to(given["dtype"]).model
    fallback, refused = Fallback(decoder, torch.device("cuda"), False), MaskTooLarge("too large")
    assert fallback.flash == kernel
    assert fallback.choose(refused, documents=True) == (kernel or FLEX)
    assert fallback.choose(refused, documents=False) == FLEX
    assert fallback.describe(4000) == f"{f'{kernel} or ' if kernel else ''}{FLEX} beyond 4,000 B"


def test_a_decoder_is_given_its_rows_of_a_mask_of_images_and_the_features_of_these():
    """Granite 4's adds features at two blocks, by a mask of their widths; the ranks' rows together are the whole's."""
    model = tiny_model("granite4_vision").eval()
    decoder = decoder_of(model)
    shown = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0]], dtype=torch.bool)
    width, generator = decoder.config.hidden_size, torch.Generator().manual_seed(1)
    features = {block: torch.randn(6, width, generator=generator) for block in (0, 3)}
    whole = {
        "inputs_embeds": torch.randn(2, 5, width, generator=generator),
        "vision_mask": shown[..., None].expand(-1, -1, width),
        "deepstack_features": features,
    }
    tell, fallback = lambda *_: None, Fallback(decoder, torch.device("cpu"), False)
    entries = [
        Entry(decoder, "sdpa", rank, Sharing(2, "auto", False, 10**9), fallback, Positions(), tell, lambda _: None)
        for rank in (0, 1)
    ]
    first, second = (entry(decoder, (), whole)[1] for entry in entries)
    assert [given["vision_mask"].shape[1] for given in (first, second)] == [2, 3]
    for name, dim in {"inputs_embeds": 1, "vision_mask": 1, "position_ids": -1}.items():
        assert torch.cat([first[name], second[name]], dim).equal(whole.get(name, torch.arange(5)[None]))
    for block, all_of_block in features.items():
        added = torch.zeros(2, 5, width).masked_scatter(whole["vision_mask"], all_of_block)
        own = [
            torch.zeros(given["inputs_embeds"].shape).masked_scatter(
                given["vision_mask"], given["deepstack_features"][block]
            )
            for given in (first, second)
        ]
        assert torch.cat(own, 1).equal(added)


def test_documents_are_told_by_positions_and_padding_is_not(monkeypatch):
    monkeypatch.setattr("zero3d.sequence.blocks.flash_kernel", lambda *_: "flash_attention_2")
    decoder, told = tiny("llama").model, []
    fallback = Fallback(decoder, torch.device("cpu"), False)
    sharing = Sharing(2, "auto", False, 600)
    tell = lambda length, documents: told.append((length, documents))  # noqa: E731
    entry = Entry(decoder, "sdpa", 1, sharing, fallback, Positions(), tell, lambda length: None)
    given = {"input_ids": batch(0)["input_ids"], "position_ids": PACKED}
    _, passed = entry(decoder, (), given)
    assert passed[ENDS].tolist() == [0, 20, 29, 48, 78, 96]
    assert passed["attention_mask"] is None
    assert told == [(LENGTH, True)]
    with pytest.raises(MaskTooLarge, match="padding"):
        entry(decoder, (), given | {"attention_mask": (PACKED > 0).long()})


def test_a_window_of_which_a_model_makes_no_mask_is_in_none():
    decoder = tiny("llama").model  # of whose file attention is causal alone; Moshi's config has a window, too
    decoder.config.sliding_window = 4
    tell, fallback = lambda *_: None, Fallback(decoder, torch.device("cpu"), False)
    entry = Entry(decoder, "sdpa", 1, Sharing(2, "auto", False, 10**9), fallback, Positions(), tell, lambda _: None)
    _, passed = entry(decoder, (), {"input_ids": batch(0)["input_ids"]})
    assert passed["attention_mask"] is None
    assert decoder.config.sliding_window == 4


def test_what_attends_beyond_a_budget_is_the_dense_mask_s_on_cpus():
    fallback = Fallback(tiny("llama").model, torch.device("cpu"), True)
    assert fallback.describe(4000) == DENSE == USUAL["sp_masks"]


@pytest.mark.parametrize(("options", "why"), [
    ({}, "Linear cannot be told where documents end"),
    ({"slopes": torch.zeros(1, 2, 1, 1)}, "Linear passes slopes, whose second dimension is the number of heads, 2"),
], ids=["ends", "heads"])  # fmt: skip
def test_an_attention_that_is_told_too_little_or_too_much_is_refused(options, why):
    attend = SharedAttention(None, False, SimpleNamespace(size=1, rank=0), Sharing(1, "auto", False, 10), None, {})
    attend.tell(LENGTH, True)
    with pytest.raises(ConfigError, match=why):
        attend(torch.nn.Linear(1, 1), *torch.zeros(3, 1, 2, LENGTH, 4), attention_mask=None, **options)


def checked_twice():
    """Two steps whose gradients are computed twice, what they sent, and the error where a bit of a third's differs."""
    with LiftCasts():
        engine = engine_of(tiny("llama"), {"sp": 2, "dp": 4}, replay=1)
        engine.traffic.reset()
        steps, as_told = [], []
        for step in range(2):  # in the second, counts are there already that a replay could add to
            loss = engine.train_batch([batch(100 * step + engine.mesh.row)])
            steps.append((float(loss), float(engine.last_step.grad_norm)))
            formula = Moved.total(row.moved for row in engine.sequence.traffic(engine.sequence.calls))
            measured = Moved.total(Moved(e.calls, e.elements, e.bytes) for e in engine.traffic if e.axis == "sp")
            as_told.append(formula == measured)
        if engine.mesh.rank == 3:
            p = dict(engine.module.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            p.register_hook(lambda grad: grad + 1e-3)
        with pytest.raises(CorruptionError) as error:
            engine.train_batch([batch(200 + engine.mesh.row)])
    return steps, as_told, str(error.value)


def test_gradients_are_computed_twice_by_another_row(ranks):
    found = ranks(4, checked_twice)
    check([(steps, None) for steps, *_ in found], reference("llama", 2, steps=2))
    for _, as_told, error in found:
        assert as_told == [True, True]
        assert "rank 1" in error
        assert "rank 3" in error
        assert "model.layers.1.mlp.up_proj.weight" in error


@pytest.mark.long
@pytest.mark.parametrize("activations", ["none", "full"])
def test_compiled_blocks_have_the_bits_of_plain_ones(ranks, activations):
    case = partial(trained, precision="fp32", activations=activations, lengths=(48, 33))
    assert ranks(2, partial(case, backend="eager"), "llama", {"sp": 2}) == ranks(2, case, "llama", {"sp": 2})


def fused(**options):
    """`trained` with blocks that inductor compiles, in this process."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        return trained("llama", {"sp": 2}, backend="inductor", **options)


@pytest.mark.long
@pytest.mark.skipif(which("c++") is None, reason="inductor needs a C++ compiler")
def test_fused_blocks_train_as_plain_ones(ranks):
    options = {"precision": "fp32", "steps": 3, "lengths": (33,)}
    plain, _ = ranks(2, partial(trained, **options), "llama", {"sp": 2})[0]
    check(ranks(2, partial(fused, **options)), plain, 1e-5)


def evaluated_and_generated():
    """A held-out loss, and what greedy decoding makes of a prompt, on ranks that share sequences and on one."""
    engine = engine_of(tiny("llama"), {"sp": zero3d_world()}, precision="fp32")
    ids = batch(1)["input_ids"][:1, :9]
    before = float(engine.evaluate([batch(5), batch(6, 31)]))
    tokens = engine.generate(ids, max_new_tokens=5).tolist()
    engine.train_batch([batch(7)])
    return before, tokens, float(engine.evaluate([batch(5)])) == float(engine.evaluate([batch(5)]))


def test_evaluation_is_shared_and_generation_is_not(ranks):
    (one,), two = ranks(1, evaluated_and_generated), ranks(2, evaluated_and_generated)
    assert two == [one] * 2


def given_back():
    """The model after its engine is closed: its own attention and loss, on whole sequences."""
    model, given = tiny("llama"), batch(0)
    engine = engine_of(model, {"sp": 2}, precision="fp32")
    engine.train_batch([given])
    implementation = model.config._attn_implementation
    engine.close()
    output = model(**given)
    return implementation, model.config._attn_implementation, output.logits.shape[1], float(output.loss)


def test_a_closed_engine_gives_the_model_its_own_attention_back(ranks):
    inside, after, length, loss = ranks(2, given_back)[1]
    assert inside.startswith("sequence_parallel")
    assert (after, length) == ("sdpa", LENGTH)
    assert loss < 10


def refused(name, degrees, given=None, loads=None, sizes=None, times=1, **options):
    """The error of an engine, or of its first step."""
    model = tiny(name, **(sizes or {})) if loads is None else loads()
    try:
        engine = engine_of(model, degrees, **options)
        engine.train_batch([batch(0) | (given or {})] * times)
    except ConfigError as error:
        return str(error)
    return ""


class Smoothed(torch.nn.Module):
    """A block's MLP behind a causal convolution over time."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.taps = mlp, torch.nn.Parameter(torch.ones(32, 3) / 3)

    def forward(self, x):
        padded = F.pad(x.transpose(1, 2), (2, 0))
        return self.mlp(F.conv1d(padded, self.taps[:, None], groups=32).transpose(1, 2))


def smoothed():
    model = tiny("llama", layers=4)
    model.model.layers[3].mlp = Smoothed(model.model.layers[3].mlp)
    return model


def test_models_are_tried_without_their_weights_and_experts_in_their_usual_form():
    with torch.device("meta"):
        model = tiny("moe")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # loading fills its buffers
    model.set_experts_implementation("grouped_mm")
    assert mixing_module(model.model) is None
    assert model.config._experts_implementation == "grouped_mm"
    assert model.config._attn_implementation == "sdpa"
    assert mixing_module(smoothed().model) == "layers.3.mlp.mlp.gate_proj"


class Leaking(torch.nn.Module):
    """A block's MLP whose outputs are those of each row, and whose gradients are of the rows behind it, too."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        sums = x.cumsum(1)  # as a state that goes through a sequence
        return self.mlp(x + (sums - sums.detach()))


class Restarting(torch.nn.Module):
    """A block's MLP whose outputs pass a function of each row, whose backward adds gradients of the rows behind it."""

    class _State(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad + grad.flip(1).cumsum(1).flip(1) / grad.shape[1]

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self._State.apply(self.mlp(x))


@pytest.mark.parametrize(("layer", "name"), [(Leaking, "mlp"), (Restarting, "mlp.mlp.down_proj")])
def test_a_layer_whose_gradients_mix_tokens_is_refused_by_name(layer, name):
    model = tiny("llama", layers=4)
    model.model.layers[3].mlp = layer(model.model.layers[3].mlp)
    with pytest.raises(ConfigError, match=f"the backward of layers.3.{name} gives a part"):
        check_sequence(model, 2, 1, "auto")


REFUSED = {
    "minimax": "linear_attention (layers.0)",
    "recurrent_gemma": "linear_attention (layers.0.temporal_block)",
    "rwkv": "attention of its own, ",
    "xlstm": "blocks.0.mlstm_layer.multihead_norm gives a part",
    "zaya": "hybrid (layers.0.self_attn.qkv_proj)",
}


class Weighing(torch.nn.Module):
    """Attention with a mask of its own values, as Doge's."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, attention_mask=None, **options):
        weights = hidden_states.mean(-1)[:, None, None].expand(-1, 1, hidden_states.shape[1], -1)
        return self.attention(hidden_states, attention_mask=weights, **options)


def test_attention_that_makes_its_mask_of_values_is_refused_by_name():
    model = tiny("llama")
    model.model.layers[1].self_attn = Weighing(model.model.layers[1].self_attn)
    with pytest.raises(ConfigError, match=r"the attention of LlamaAttention rows .* of which it makes the mask"):
        check_sequence(model, 2, 1, "auto")


@pytest.mark.parametrize("name", REFUSED)
def test_recurrences_that_are_not_known_are_refused_by_name(name):
    with pytest.raises(ConfigError) as refused:
        check_sequence(hybrid(name), 2, 1, "auto")
    assert REFUSED[name] in str(refused.value)


def closed(monkeypatch):
    """A Llama with an attention that a file of transformers defines without those that are registered: of no release."""
    file = ModuleType("transformers.models.closed.modeling_closed")
    monkeypatch.setitem(sys.modules, file.__name__, file)

    class ClosedAttention(torch.nn.Module):
        __module__ = file.__name__

    model = tiny("llama")
    model.model.layers[1].self_attn = ClosedAttention()
    return model


@pytest.mark.parametrize(("name", "where"), [
    ("falcon", "h.0.self_attention"), ("mpt", "blocks.0.attn"), ("bloom", "h.0.self_attention"),
    ("closed", "layers.1.self_attn"),
])  # fmt: skip
def test_attention_that_is_not_registered_is_refused_with_its_name_and_what_to_use(name, where, monkeypatch):
    model = closed(monkeypatch) if name == "closed" else family(name)
    with pytest.raises(ConfigError) as refused:
        check_sequence(model, 2, 1, "auto")
    assert f"has attention of its own, which transformers does not register ({where})" in str(refused.value)
    assert "type mesh.sp=1. activations=full and mesh.tp save memory with long sequences" in str(refused.value)


def odd_router():
    """A mixture of experts whose decoder returns router logits of other tokens than its own."""
    model = tiny("moe")
    model.model.register_forward_hook(
        lambda _, args, output: output.__setitem__("router_logits", (torch.zeros(96, 4),))
    )
    return model


def classifier():
    import transformers as t

    model = t.LlamaForSequenceClassification(t.LlamaConfig(**tiny("llama").config.to_diff_dict() | {"num_labels": 2}))
    model.config.pad_token_id = 2
    return model


def net():
    import models

    return models.net()


@pytest.mark.parametrize(("name", "degrees", "options", "why"), [
    ("moe", {"sp": 2}, {"loads": odd_router}, "router logits of shape [96, 4]"),
    ("llama", {"sp": 2, "tp": 2}, {"sequence_parallel": True}, "once more"),
    ("zaya", {"sp": 2}, {"loads": partial(hybrid, "zaya")}, "hybrid (layers.0.self_attn.qkv_proj)"),
    ("llama", {"sp": 2}, {"loads": net}, "is not one of them"),
    ("llama", {"sp": 2}, {"loads": classifier, "given": {"labels": torch.tensor([0, 1])}}, "a loss of its own"),
    ("llama", {"sp": 2}, {"loads": smoothed}, "layers.3.mlp.mlp.gate_proj gives a part"),
    ("llama", {"sp": 2}, {"exact": True, "stage": 1, "accumulate": 2}, "stage=2 or 3 and without a pipeline"),
    ("llama", {"sp": 2}, {"exact": True, "stage": 1, "times": 2}, "one micro-batch per step"),
    ("llama", {"sp": 2}, {"given": {"output_attentions": True}}, "output_attentions"),
    ("gemma2", {"sp": 2}, {"sp_mask_budget": 2000, "sizes": {"sliding_window": 7}}, "needs a mask of 2.30 kB"),
    ("gemma2", {"sp": 2}, {"sp_mask_budget": 2000, "sizes": {"sliding_window": 7}}, "no backward of it for CPUs"),
    ("llama", {"sp": 2}, {"sp_mask_budget": 1000, "sp_kind": "gather"}, "needs a mask of 1.15 kB"),
    ("llama", {"sp": 2}, {"sp_mask_budget": "a lot"}, "is not a size"),
    ("llama", {"sp": 2, "tp": 2}, {"sp_kind": "heads", "sizes": {"num_attention_heads": 2}}, "more than the 2"),
    ("llama", {"sp": 2}, {"given": {"odd": torch.zeros(2, LENGTH)}}, "odd"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_name(ranks, name, degrees, options, why):
    world = 2 * degrees.get("pp", 1) * degrees.get("tp", 1)
    for told in ranks(world, partial(refused, **options), name, degrees):
        assert why in told


def moved(degrees, **options):
    """Traffic of the sp axis in a step, and what the formula says of the calls that were made."""
    name, lora = options.pop("name", "llama"), options.pop("lora", False)
    recompute(
        model := tiny(name, **({} if name == "moe" else {"kv_heads": 1, "lora": lora})),
        options.pop("activations", "none"),
    )
    engine = engine_of(model, degrees, **options)
    engine.traffic.reset()
    before = engine.sequence.calls
    engine.train_batch([batch(0), batch(1, 33)])
    sent = {}
    for row in engine.sequence.traffic(engine.sequence.calls.less(before)):
        sent[row.op, row.unit] = Moved.total([sent.get((row.op, row.unit), Moved()), row.moved])
    measured = {(e.op, e.unit): Moved(e.calls, e.elements, e.bytes) for e in engine.traffic if e.axis == "sp"}
    return sent, measured


@pytest.mark.parametrize("options", [
    {}, long({"activations": "full"}), long({"lora": True}), long({"sp_kind": "gather"}), {"sp_kind": "heads"}, {"name": "moe"},
], ids=str)  # fmt: skip
def test_what_is_sent_is_what_the_formula_says(ranks, options):
    for sent, measured in ranks(2, partial(moved, **options), {"sp": 2}):
        assert sent == measured
        assert len(sent) == 3  # two attentions, and the loss


@pytest.mark.parametrize(("query", "key"), [(28, 4), (14, 2), (12, 3)])
def test_attention_is_shared_out_the_way_that_sends_less_where_ranks_share_heads_of_keys(query, key):
    ways = {}
    for sp in range(2, query + 1):
        heads = Heads.of(query, key, sp)
        call = Attended(1, 8 * sp, query, key * heads.repeat, 64, 64, 2, (True, True, True))
        by_heads, by_rows = (
            sum(each.sent(rank, sp, False).elements for rank in range(sp))
            for each in (call, call._replace(key=key, by_heads=False))
        )
        if heads.repeat > 1:
            ways[sp] = by_heads <= by_rows
            assert Sharing(sp, "auto", False, 0).by_heads(query, key) == ways[sp], (sp, by_heads, by_rows)
    assert {*ways.values()} == {True, False}


def tiled(stage):
    """Losses and norms of two steps with the matrices of MLPs in tiles, the fingerprint, and what a layer was given."""
    with LiftCasts():
        engine, given, found = engine_of(tiny("llama"), {"sp": 2}, stage=stage, gather_budget=9000), [], []
        layer = engine.module.get_submodule("model.layers.1.mlp.up_proj")
        layer.register_forward_hook(lambda _, args, made: given.append((len(layer.tiles), *args[0].shape, *made.shape)))
        for step in range(2):
            found.append((float(engine.train_batch([batch(100 * step)])), float(engine.last_step.grad_norm)))
    return found, (engine.fingerprint(), given)


@pytest.mark.long
def test_a_tiled_mlp_computes_the_rows_of_its_rank(ranks):
    """Losses to rounding, and the bits of every stage at one size of tiles (docs/tiling.md)."""
    three, none = ranks(2, tiled, 3), ranks(2, tiled, 0)
    check(three, reference("llama", 1))
    assert three == none
    assert three[1][1][1] == [(2, 2, LENGTH // 2, 32, 2, LENGTH // 2, 48)] * 2


# --- gradients of weights --------------------------------------------------------------------------


def weight_gradients(sp):
    """What a step of SGD with rate 1 takes off each weight, in fp32, by name."""
    model, rate = tiny("llama", kv_heads=4), 1.0
    engine = engine_of(
        model, {"sp": sp}, precision="fp32", clip_norm=None, optimizer=lambda p: torch.optim.SGD(p, rate)
    )
    with engine.full_params():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.train_batch([batch(0, 64)])
    with engine.full_params():
        return before, {name: p.detach().clone() for name, p in model.named_parameters()}


class ByRows(torch.autograd.Function):
    """A linear layer of halves of the rows: each is computed as on its rank, and gradients are added in their order."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.cat([F.linear(half.contiguous(), weight, bias) for half in x.chunk(2, 1)], 1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        halves = [(h.flatten(0, 1), g.flatten(0, 1)) for h, g in zip(x.chunk(2, 1), grad.chunk(2, 1), strict=True)]
        weights = [g.T @ h for h, g in halves]
        biases = [g.sum(0) for _, g in halves]
        of_rows = torch.cat([(g @ weight).unflatten(0, (len(x), -1)) for _, g in halves], 1)
        return of_rows, weights[0] + weights[1], biases[0] + biases[1] if ctx.needs_input_grad[2] else None


def test_gradients_of_weights_are_those_of_parts_added_in_rank_order(ranks, monkeypatch):
    before, after = ranks(2, weight_gradients, 2)[0]
    model = tiny("llama", kv_heads=4)
    model.load_state_dict(before)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name in linears:
        module = model.get_submodule(name)
        monkeypatch.setattr(module, "forward", lambda x, m=module: ByRows.apply(x, m.weight, m.bias))
    given = batch(0, 64)
    output = model(**given)
    targets = float((given["labels"][:, 1:] != -100).sum())
    (output.loss * targets).backward()
    same = []
    for name in linears:
        weight = model.get_submodule(name).weight
        weight.grad.mul_(1 / targets)
        same.append((before[f"{name}.weight"] - weight.grad).equal(after[f"{name}.weight"]))
    assert all(same), dict(zip(linears, same, strict=True))


# --- whole runs ------------------------------------------------------------------------------------


def ran(folder, sp, output, resume=None):
    """Losses of three steps of `zero3d train` in this folder, or of those that are left."""
    made = tree(folder, output, mesh={"sp": sp}, train={"steps": 3, "batch": 4, "accumulate": 1})
    made["checkpoint"] = {"export": False, "every": 2, "keep": 3}
    return field(train(made, resume), "loss")


@pytest.mark.long
@pytest.mark.parametrize(("sp", "world"), [(1, 2), (2, 2), (2, 4), (4, 4)])
def test_a_run_goes_on_at_another_sp(ranks, tmp_path, sp, world):
    save_rows(tmp_path / "rows.npy")
    save_model(tmp_path / "model")
    whole = ranks(2, ran, tmp_path, 2, "whole")[0]
    again = ranks(world, ran, tmp_path, sp, "again", str(tmp_path / "whole" / "checkpoints" / "step-2"))[0]
    assert again == (whole[2:] if (sp, world) == (2, 2) else pytest.approx(whole[2:], rel=1e-5))
