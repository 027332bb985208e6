"""Packed documents do not see each other in Hugging Face models, and those where they would are refused."""

import pytest
import torch
from corpora import opened, write_lines
from models import VOCAB, Net, hf
from torch import nn
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.packing import as_row, check_packing, forward_options, row_options

DENSE = ("llama", "qwen3", "gpt2")
FAMILIES = (*DENSE, "qwen3_moe")
A, B, C = slice(0, 7), slice(7, 16), slice(16, 20)
POSITIONS = torch.cat([torch.arange(part.stop - part.start) for part in (A, B, C)])


def family(name, attention):
    model = hf(name)
    model.set_attn_implementation(attention)
    return model.train()


def logits(model, ids, positions=None, **options):
    options = forward_options(model) | options
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, **options).logits


def three_documents(rows=2):
    ids = torch.randint(3, VOCAB, (rows, 20), generator=torch.Generator().manual_seed(1))
    return ids, POSITIONS.expand(rows, -1)


def leaks(model, **options):
    """How far logits of the second and third document move with a token of the first and second."""
    ids, positions = three_documents()
    found = []
    for place, document in ((3, B), (10, C)):
        other = ids.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        before, after = (logits(model, some, positions, **options)[:, document] for some in (ids, other))
        found.append(float((before - after).norm()))
    return found


def assert_apart(model):
    """Judge by a planted leak: experts multiply as many rows as choose them, and rounding depends on how many do."""
    for found, planted in zip(leaks(model), leaks(model, use_cache=True), strict=True):
        assert found < 1e-3 * planted


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_another_token_in_one_document_moves_the_others_of_a_mixture_by_rounding_alone(attention):
    model = family("qwen3_moe", attention)
    check_packing(model)
    assert_apart(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DENSE)
def test_another_token_in_one_document_changes_no_bit_of_the_others(name, attention):
    model = family(name, attention)
    check_packing(model)
    ids, positions = three_documents()
    other = ids.clone()
    other[:, 10] = (other[:, 10] + 1) % VOCAB
    before, after = logits(model, ids, positions), logits(model, other, positions)
    for document in (A, C):
        assert torch.equal(before[:, document], after[:, document])
    assert not torch.equal(before[:, B], after[:, B])


@pytest.mark.parametrize("name", FAMILIES)
def test_with_a_cache_documents_would_see_each_other(name):
    """The reason for `forward_options`: if this fails, transformers has become safer."""
    model = family(name, "sdpa")
    ids, positions = three_documents()
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1) % VOCAB
    before, after = (logits(model, some, positions, use_cache=True) for some in (ids, other))
    assert not torch.equal(before[:, B], after[:, B])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_packed_loss_is_the_token_weighted_loss_of_separate_documents(tmp_path, name, attention):
    model = family(name, attention)
    texts = ["\x05\x06\x07\x08", "\x09\x0a\x0b\x0c\x0d\x0e\x0f", "\x10\x11", "\x12\x13\x14\x15\x16\x17\x18\x19"]
    train = opened(tmp_path, write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts]), length=32).train
    batch = train.stack([train[0]])
    packed = float(model(**batch, **forward_options(model)).loss.detach())
    total = count = 0
    for text in texts:
        ids = torch.tensor([[*text.encode(), 0]])
        total += float(F.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    assert packed == pytest.approx(total / count, abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_the_right_is_invisible(name):
    model = family(name, "sdpa")
    ids, _ = three_documents()
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.int64)], dim=1)
    assert torch.allclose(logits(model, padded)[:, :20], logits(model, ids), atol=1e-6)


def test_a_module_without_position_ids_is_refused():
    with pytest.raises(ConfigError, match=r"Net\.forward takes no position_ids.*Set data\.packing=false"):
        check_packing(Net())


def test_a_decoder_beside_an_encoder_is_refused():
    class Both(nn.Module):
        def forward(self, input_ids, labels, position_ids, decoder_input_ids=None):
            return input_ids

    with pytest.raises(ConfigError, match=r"Both\.forward makes a second sequence of the labels"):
        check_packing(Both())


def test_a_module_of_one_s_own_that_takes_position_ids_is_trusted():
    class Own(nn.Module):
        def forward(self, input_ids, labels, position_ids):
            return input_ids

    check_packing(Own())
    assert forward_options(Own()) == {}


def test_a_micro_batch_is_one_row_of_documents_where_attention_makes_no_mask():
    model = hf("llama")
    ids, positions = three_documents()
    batch = {"input_ids": ids, "labels": ids + 1, "position_ids": positions}
    assert as_row(batch, row_options(model, 20)) is batch
    model.config._attn_implementation = "flash_attention_2"
    check_packing(model)
    options = row_options(model, 20)
    assert options == {"max_length_q": 20, "max_length_k": 20}
    row = as_row(batch, options)
    assert torch.equal(row["input_ids"], ids.reshape(1, 40))
    assert torch.equal(row["labels"], ids.reshape(1, 40) + 1)
    assert row["cu_seq_lens_q"].dtype == torch.int32
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 7, 16, 20, 27, 36, 40]
    without = {"input_ids": ids}
    assert as_row(without, options) is without


def test_what_a_row_has_beside_its_tokens_is_what_transformers_gives_its_kernels():
    from inspect import signature

    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    model = hf("llama")
    model.config._attn_implementation = "flash_attention_2"
    options = row_options(model, 20)
    row = as_row({"position_ids": three_documents()[1]}, options)
    assert {*row, *options} <= set(signature(_flash_attention_forward).parameters)


def test_a_model_that_hands_nothing_on_to_such_attention_is_refused():
    class Closed(type(hf("llama"))):
        def forward(self, input_ids, position_ids=None, labels=None):
            return super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels)

    model = Closed(hf("llama").config)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"Closed\.forward takes no cu_seq_lens_q, which tells"):
        check_packing(model)


def test_layers_that_run_across_documents_keep_them_apart():
    from transformers import MambaConfig, MambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    linear = Qwen3NextConfig(
        **small,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    with torch.device("meta"):
        for model in (Qwen3NextForCausalLM(linear), MambaForCausalLM(MambaConfig(**small))):
            assert check_packing(model) is None


def test_a_model_whose_mask_ignores_positions_is_refused():
    from transformers.masking_utils import create_causal_mask

    class Heeding(type(hf("llama"))):
        def forward(self, input_ids, position_ids=None, **options):
            mask = create_causal_mask(
                self.config, self.model.embed_tokens(input_ids), None, None, position_ids=position_ids
            )
            return super().forward(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **options)

    class Ignoring(type(hf("llama"))):
        def forward(self, input_ids, position_ids=None, **options):
            mask = torch.ones_like(input_ids)
            return super().forward(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **options)

    config = hf("llama").config
    check_packing(Heeding(config))
    with pytest.raises(ConfigError, match="Ignoring lets documents see each other"):
        check_packing(Ignoring(config))


def test_a_model_that_hides_its_cache_behind_keywords_gets_none():
    from transformers import GptOssConfig, GptOssForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM

    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**small, num_local_experts=4))
    assert forward_options(model) == {"use_cache": False}
    assert_apart(model)
    with torch.device("meta"):  # whose mask is made without positions, and is given them
        heads = {"num_key_value_heads": 2, "head_dim": 8}
        assert check_packing(GptOssForCausalLM(GptOssConfig(**small, **heads, num_local_experts=4))) is None


def test_masks_made_through_a_local_name_or_a_table_are_recognised():
    from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM, Gemma2Config, Gemma2ForCausalLM

    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    with torch.device("meta"):
        for model in (
            ExaoneMoeForCausalLM(ExaoneMoeConfig(**small)),
            Gemma2ForCausalLM(Gemma2Config(**small)),
            hf("qwen3_moe"),
        ):
            check_packing(model)


def test_a_lora_wrapper_is_looked_through():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(hf("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    check_packing(model)
    assert forward_options(model) == {"use_cache": False}
