"""Packed documents are what they are alone in models with recurrences and convolutions, outputs and gradients."""

import copy
import inspect

import pytest
import torch
from families import family
from hybrids import CALLS, HYBRIDS, conv_kernel, delta_kernel, hybrid, qwen3_5, with_kernels

import zero3d
from zero3d.activations import recompute
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models import mixing, packed_documents
from zero3d.models.fp64 import StaysInFp64
from zero3d.models.mask_code import masks_by_position
from zero3d.models.packed_documents import Documents, told
from zero3d.models.packing import check_packing, packing_verdict, tell
from zero3d.tensor_parallel.parallelize import parallelize

SHORT = ("qwen3_5_text", "kimi_linear", "mamba2", "jamba", "lfm2", "granitemoehybrid", "rwkv")
ROWS = (
    (13, 1, 3, 16),
    (4, 8, 9, 12),
)  # documents of one token, of fewer than a convolution reaches, of a chunk and one more


def some(names, short):
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


def ids_of(rows=ROWS):
    return torch.randint(3, 60, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(1))


def positions_of(rows=ROWS):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def alone(model, ids, rows=ROWS):
    """Logits of each document in a row of its own, where it is in the packed rows."""
    made = []
    for row, lengths in zip(ids, rows, strict=True):
        made.append(torch.cat([model(input_ids=part[None]).logits for part in row.split(lengths)], 1))
    return torch.cat(made)


def gradients(model, logits):
    weights = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(made, wanted):
    return float((made - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def both(model, rows=ROWS):
    """How far outputs and gradients of packed rows are from those of documents alone."""
    ids = ids_of(rows)
    with StaysInFp64():
        wanted = alone(model, ids, rows)
        of_alone = gradients(model, wanted)
        mixing = tell(model)
        made = model(input_ids=ids, position_ids=positions_of(rows)).logits
        of_packed = gradients(model, made)
        mixing.close()
    return apart(made, wanted), max(apart(of_packed[name], of_alone[name]) for name in of_alone)


@pytest.mark.parametrize("name", some(HYBRIDS, SHORT))
def test_packed_documents_are_what_they_are_alone(name):
    values, grads = both(hybrid(name).double())
    assert values < 1e-12
    assert grads < 1e-12


@pytest.mark.parametrize(("name", "rows"), [
    ("rwkv", ((5, 3, 5, 1), (1, 5, 3, 5))),
    ("minimax", ((4, 9),)), ("xlstm", ((2, 1),)),  # the first document as long as there are heads, as states are
])  # fmt: skip
def test_documents_come_back_from_whole_modules_in_their_order_and_no_states(name, rows):
    values, grads = both(hybrid(name).double(), rows)
    assert values < 1e-12
    assert grads < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2"])
def test_documents_of_a_chunk_one_more_and_several_are_what_they_are_alone(name):
    values, grads = both(hybrid(name).double(), ((64, 65, 1, 130),))
    assert values < 1e-12
    assert grads < 1e-12


@pytest.mark.parametrize(
    ("name", "broken"), [("qwen3_5_text", "_convolved"), ("qwen3_5_text", "_scanned"), ("lfm2", "_convolved")]
)
def test_without_either_of_them_documents_are_not(monkeypatch, name, broken):
    """The negative control of the test above."""

    def as_one(*args):
        function, call = args[-3:-1]
        return call(function)

    monkeypatch.setattr(mixing, broken, as_one)
    values, _ = both(hybrid(name).double())
    assert values > 1e-8


@pytest.mark.parametrize("name", ["mamba2", "recurrent_gemma"])
def test_what_is_told_of_a_forward_ends_with_it(name):
    model, rows = hybrid(name), ROWS
    ids, positions = ids_of(rows), positions_of(rows)
    plain = model(input_ids=ids).logits
    told_model = tell(model)
    first = model(input_ids=ids, position_ids=positions).logits
    assert told() is None
    assert torch.equal(model(input_ids=ids).logits, plain)
    assert torch.equal(model(input_ids=ids, position_ids=torch.arange(33)[None].expand(2, -1)).logits, plain)
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, first)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(input_ids=ids, position_ids=positions, inputs_embeds=torch.zeros(1))
    assert told() is None
    told_model.close()
    assert torch.equal(model(input_ids=ids).logits, plain)


@pytest.mark.parametrize("name", ["qwen3_5_text", "recurrent_gemma"])
def test_documents_are_found_however_positions_are_passed(name):
    """By position, and once for all rows, as transformers takes them."""
    model, ids, positions = hybrid(name).double(), ids_of(), positions_of((ROWS[0], ROWS[0]))
    with StaysInFp64(), torch.no_grad():
        wanted = alone(model, ids, (ROWS[0], ROWS[0]))
        told_model = tell(model)
        names = [*inspect.signature(model.forward).parameters][:3]
        given = {"input_ids": ids, "position_ids": positions}
        assert apart(model(*map(given.get, names)).logits, wanted) < 1e-12
        assert apart(model(input_ids=ids, position_ids=positions[:1]).logits, wanted) < 1e-12
        given["attention_mask"] = torch.ones_like(ids)
        assert torch.equal(model(*map(given.get, names)).logits, model(**given).logits)
    told_model.close()


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_documents_are_found_by_the_names_that_kernels_have_for_them(name):
    """As loops of one's own pass them: attention's masks are made by them, too."""
    model, ids = hybrid(name).double(), ids_of()
    documents = Documents.of(positions_of())
    with StaysInFp64(), torch.no_grad():
        wanted, leaky = alone(model, ids), model(input_ids=ids).logits
        told_model = tell(model)
        for numbers in (documents.numbers, -documents.numbers):  # that they change counts, not how
            assert apart(model(input_ids=ids, seq_idx=numbers).logits, wanted) < 1e-12
        assert apart(model(input_ids=ids, cu_seq_lens_q=documents.ends.int()).logits, wanted) < 1e-12
        assert torch.equal(model(input_ids=ids, seq_idx=torch.zeros_like(ids)).logits, leaky)
    told_model.close()


def test_a_forward_with_a_cache_has_no_documents():
    """As in transformers' own masks, which then look at no positions."""
    from transformers import DynamicCache

    model, ids, positions = hybrid("qwen3_5_text").eval(), ids_of(), positions_of()
    given = {"input_ids": ids, "position_ids": positions, "use_cache": True}
    with torch.no_grad():
        plain = model(**given, past_key_values=DynamicCache(config=model.config)).logits
        told_model = tell(model)
        assert torch.equal(model(**given, past_key_values=DynamicCache(config=model.config)).logits, plain)
    told_model.close()


def test_what_a_recomputation_is_told_ends_where_it_stops():
    model = hybrid("qwen3_5_text")
    recompute(model, "full")
    told_model = tell(model)
    ids = ids_of()
    model(input_ids=ids, position_ids=positions_of()).logits.sum().backward()
    assert told() is None
    assert packed_documents._traced.told is None
    told_model.close()


def test_models_of_one_file_do_not_disturb_each_other():
    first, second = hybrid("qwen3_5_text"), hybrid("qwen3_5_text")
    ids = ids_of()
    plain = second(input_ids=ids, position_ids=positions_of()).logits  # nobody tells its functions anything
    told_model = tell(first)
    inside = []
    first.model.layers[1].register_forward_hook(
        lambda *_: inside.append(second(input_ids=ids, position_ids=positions_of()).logits)
    )
    made = first(input_ids=ids, position_ids=positions_of()).logits
    assert apart(made, plain) > 1e-4
    assert torch.equal(second(input_ids=ids, position_ids=positions_of()).logits, plain)
    second_told = tell(second)
    first(input_ids=ids, position_ids=positions_of())
    assert torch.equal(inside[-1], made)
    assert told() is None
    told_model.close(), second_told.close()


def test_a_mask_of_padding_is_not_of_packed_documents():
    """As in transformers' own masks: positions tell documents apart where there is no mask."""
    model, ids = hybrid("granitemoehybrid"), ids_of()
    mask = torch.ones_like(ids)
    plain = model(input_ids=ids, attention_mask=mask, position_ids=positions_of()).logits
    told_model = tell(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask, position_ids=positions_of()).logits, plain)
    told_model.close()


def test_where_documents_are():
    found = Documents.of(torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 0, 1, 2]]))
    assert found.spans == ((0, 0, 4), (0, 4, 6), (1, 0, 1), (1, 1, 3), (1, 3, 6))
    assert found.places.tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 0, 1, 2]]
    assert found.numbers.tolist() == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 2, 2, 2]]
    assert found.ends.tolist() == found.ends_on_host.tolist() == [0, 4, 6, 7, 9, 12]
    assert Documents.of(torch.tensor([[5, 6, 7], [0, 1, 2]])) is None
    later = Documents.of(torch.tensor([[5, 6, 9]]))
    assert later.places.tolist() == [[0, 1, 0]]
    of_rows = torch.tensor([[[0, 1, 0]], [[7, 7, 7]], [[7, 7, 7]], [[7, 7, 7]]])
    assert Documents.of(of_rows).spans == ((0, 0, 2), (0, 2, 3))
    assert Documents.of(of_rows[1:]) is None  # of time and place alone
    for same in (Documents.of_numbers(found.numbers), Documents.of_ends(found.ends, (2, 6))):
        assert same.spans == found.spans
        assert torch.equal(same.positions, found.positions)
    assert Documents.of_numbers(torch.tensor([[3, 3], [3, 3]])) is None
    assert Documents.of_ends(torch.tensor([0, 3, 6]), (2, 3)) is None
    assert Documents.of_ends(torch.tensor([0, 4, 6]), (2, 3)).spans == ((0, 0, 3), (1, 0, 1), (1, 1, 3))


# --- an engine ------------------------------------------------------------------------------------------------------


def steps(name, batches, activations="none", checkpointed=False, **options):
    """Losses and gradients of one step of several micro-batches, by an engine."""
    model = hybrid(name)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recompute(model, activations)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0), "clip_norm": None}
    engine = zero3d.Engine(model, stage=2, precision="fp32", **sgd | options)
    loss = engine.train_batch(batches)
    engine.close()
    return float(loss), {name: before[name] - p.detach() for name, p in model.named_parameters()}


def packed_batches():
    """Two micro-batches whose documents end at other places, and one of a document a row."""
    batches = []
    for rows in (ROWS, ((5, 28), (30, 3))):
        ids, positions = ids_of(rows), positions_of(rows)
        batches.append({"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)})
    whole = ids_of()
    return [*batches, {"input_ids": whole, "labels": whole}]


@pytest.mark.parametrize("name", some(HYBRIDS, ("qwen3_5_text",)))
def test_a_recomputed_forward_has_the_documents_of_its_own_micro_batch(name):
    batches = packed_batches()
    loss, grads = steps(name, batches)
    for options in ({"activations": "full"}, {"activations": "every:2"}):
        again, of_again = steps(name, batches, **options)
        assert again == loss
        assert all(torch.equal(of_again[name], grads[name]) for name in grads)


def test_so_has_one_that_transformers_recomputes():
    loss, grads = steps("qwen3_5_text", packed_batches())
    again, of_again = steps("qwen3_5_text", packed_batches(), checkpointed=True)
    assert again == loss
    assert all(torch.equal(of_again[name], grads[name]) for name in grads)


def test_an_engine_of_attention_alone_is_told_nothing():
    engine = zero3d.Engine(family("llama"), stage=2, precision="fp32")
    assert engine._parts.mixing is None
    assert zero3d.Engine(hybrid("lfm2"), stage=2, precision="fp32")._parts.mixing is not None


# --- kernels, which transformers takes from packages ----------------------------------------------------------------


def test_a_kernel_is_told_by_its_own_names_where_documents_end(monkeypatch):
    file = qwen3_5()
    model = hybrid("qwen3_5_text").double()
    with_kernels(monkeypatch, file, {"causal_conv1d_fn": conv_kernel, "torch_chunk_gated_delta_rule": delta_kernel})
    CALLS.clear()
    values, grads = both(model)
    assert values < 1e-12
    assert grads < 1e-12
    told_of = [each for each in CALLS if each is not None]
    assert [each.tolist() for each in told_of] == [
        [[0] * 13 + [1] + [2] * 3 + [3] * 16, [0] * 4 + [1] * 8 + [2] * 9 + [3] * 12],
        [0, 13, 14, 17, 33, 37, 45, 54, 66],
    ]
    assert told_of[0].dtype == torch.int32
    check_packing(model)


def test_a_kernel_is_not_told_what_attention_was(monkeypatch):
    """Ends of documents as flash attention takes them: a mixer's kernel is told ours or, of whole rows, nothing."""
    model, ids, positions = hybrid("qwen3_5_text"), ids_of(), positions_of()
    of_attention = {"cu_seq_lens_q": torch.tensor([0, 66], dtype=torch.int32), "seq_idx": torch.zeros_like(ids)}
    with_kernels(
        monkeypatch, qwen3_5(), {"causal_conv1d_fn": conv_kernel, "torch_chunk_gated_delta_rule": delta_kernel}
    )
    told_model = tell(model)
    for given in ({}, {"position_ids": positions}):
        CALLS.clear()
        model(input_ids=ids, **given)
        alone_told = list(CALLS)
        CALLS.clear()
        model(input_ids=ids, **given, **of_attention)
        assert len(CALLS) == len(alone_told) == 2
        assert all(
            one is other is None or torch.equal(one, other) for one, other in zip(CALLS, alone_told, strict=True)
        )
    told_model.close()


def test_a_kernel_without_such_a_name_is_refused(monkeypatch):
    file = qwen3_5()
    model = hybrid("qwen3_5_text")

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        return conv_kernel(x, weight, bias, activation=activation)

    with_kernels(monkeypatch, file, {"causal_conv1d_fn": causal_conv1d_fn})
    with pytest.raises(ConfigError, match=r"takes no seq_idx, .* its parameters are x, weight, bias, activation"):
        check_packing(model)
    told_model = tell(model)
    model(input_ids=ids_of())  # no documents, no need
    with pytest.raises(ConfigError, match="takes no seq_idx"):
        model(input_ids=ids_of(), position_ids=positions_of())
    told_model.close()


def fused(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D=None, outproj_weight=None, **kwargs):
    """Stands for a kernel that makes all of a mixer, and takes out_proj's weight past it."""
    CALLS.append("fused")
    return zxbcdt[..., : outproj_weight.shape[1]] @ outproj_weight.T


def test_a_fused_kernel_is_left_out_where_documents_or_a_module_that_it_goes_past_are_there(monkeypatch):
    import transformers.models.mamba2.modeling_mamba2 as file
    from peft import LoraConfig, get_peft_model

    with_kernels(monkeypatch, file, {"mamba2_split_conv1d_scan_combined": fused})
    plain, adapted = hybrid("mamba2"), hybrid("mamba2")
    told_model = tell(plain)
    CALLS.clear()
    plain(input_ids=ids_of())
    assert CALLS == ["fused"] * 2
    plain(input_ids=ids_of(), position_ids=positions_of())
    assert CALLS == ["fused"] * 2
    told_model.close()
    for block in adapted.backbone.layers:
        block.mixer.norm = copy.deepcopy(block.mixer.norm)
        torch.nn.utils.parametrizations.weight_norm(block.mixer.out_proj)
    told_model = tell(adapted)
    adapted(input_ids=ids_of())
    assert CALLS == ["fused"] * 2
    told_model.close()
    wrapped = get_peft_model(hybrid("mamba2"), LoraConfig(target_modules=["in_proj"]))
    told_model = tell(wrapped)
    wrapped(input_ids=ids_of())
    assert CALLS == ["fused"] * 4
    told_model.close()
    cut = hybrid("mamba2").to("meta")
    parallelize(cut, Axis("tp", 0, 2), Ledger())
    assert all(mixing.is_taken_apart(block.mixer) for block in cut.backbone.layers), "out_proj's hook sums over tp"


def inner(projected, conv1d_weight, conv1d_bias, x_proj_weight, dt_proj_weight, outproj_weight, *_, **__):
    """Stands for Mamba 1's."""
    CALLS.append("inner")
    half = projected.shape[1] // 2
    return projected[:, :half].transpose(1, 2) @ outproj_weight.T


def test_mamba_1_s_is_left_out_where_x_proj_is_adapted(monkeypatch):
    import transformers.models.mamba.modeling_mamba as file
    from peft import LoraConfig, get_peft_model

    with_kernels(monkeypatch, file, {"mamba_inner_fn": inner})
    for target, called in (("in_proj", 2), ("x_proj", 0)):
        CALLS.clear()
        wrapped = get_peft_model(hybrid("mamba"), LoraConfig(target_modules=[target]))
        told_model = tell(wrapped)
        wrapped(input_ids=ids_of())
        assert CALLS.count("inner") == called
        told_model.close()


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(("gpt_oss", "opt", "falcon", "biogpt", "xglm"), ("gpt_oss",)))
def test_a_mask_that_is_made_without_positions_is_given_them(name):
    model = family(name).eval()
    assert packing_verdict(model).leak is None
    ids, positions = ids_of(), positions_of()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        told_model = tell(model)
        packed = model(input_ids=ids, position_ids=positions).logits
        assert apart(packed, alone(model, ids)) < 1e-5
        assert torch.equal(model(input_ids=ids, position_ids=torch.arange(33)[None].expand(2, -1)).logits, plain)
    told_model.close()


def test_a_model_one_of_whose_masks_has_no_positions_is_one_that_makes_them_without():
    class OneOfTwo(torch.nn.Module):
        def forward(self, x, position_ids=None):
            full = create_causal_mask(x, position_ids=position_ids)  # noqa: F821 (read, not run)
            return full, create_sliding_window_causal_mask(x)  # noqa: F821

    assert masks_by_position(OneOfTwo) is False
