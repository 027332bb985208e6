"""`selective` recomputes what mixes tokens in hybrids: attention, recurrences and short convolutions."""

import pytest
import torch
from deep import kept_inputs, recomputed, train
from hybrids import HYBRIDS, hybrid
from models import clone

from zero3d.activations.targets import mixers_in
from zero3d.models.blocks import find_blocks
from zero3d.tools.sim.model_spec import trace

MIXERS = {  # of each block, by name
    "bailing_hybrid": [["self_attn"], ["self_attn"]],
    "bamba": [["mamba"], ["self_attn"]],
    "falcon_h1": [["mamba", "self_attn"]] * 2,
    "falcon_mamba": [["mixer"]] * 2,
    "granitemoehybrid": [["mamba"], ["self_attn"]],
    "jamba": [["mamba"], ["self_attn"]],
    "kimi_linear": [["self_attn"]] * 2,
    "lfm2": [["conv"], ["self_attn"]],
    "lfm2_moe": [["conv"], ["self_attn"]],
    "mamba": [["mixer"]] * 2,
    "mamba2": [["mixer"]] * 2,
    "minimax": [["self_attn"]] * 2,
    "nemotron_h": [["mixer"], ["mixer"], []],  # the third is an MLP
    "olmo_hybrid": [["linear_attn"], ["self_attn"]],
    "qwen3_5_moe_text": [["linear_attn"], ["self_attn"]],
    "qwen3_5_text": [["linear_attn"], ["self_attn"]],
    "qwen3_next": [["linear_attn"], ["self_attn"]],
    "recurrent_gemma": [["temporal_block"]] * 2,
    "rwkv": [["attention", "feed_forward"]] * 2,  # which shift tokens by one, both
    "xlstm": [["mlstm_layer"]] * 2,
    "zamba2": [["mamba"], ["mamba"], ["mamba_decoder.mamba", "shared_transformer.self_attn"], ["mamba"]],
    "zaya": [["self_attn"]] * 2,
    "lfm3": [["conv"], ["self_attn"]],
}


@pytest.mark.parametrize(
    "name", [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.long) for name in sorted(MIXERS)]
)
def test_selective_recomputes_mixers_of_every_kind_with_the_bits_of_none(name):
    model = hybrid(name)
    assert [[mixer for mixer, _ in mixers_in(block)] for block in find_blocks(model).values()] == MIXERS[name]
    assert train(recomputed(model, "selective")) == train(clone(model))
    assert kept_inputs(recomputed(model, "selective"))[1] < kept_inputs(clone(model))[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("lfm2", 3 * 32 * 32 + 32 * 32),  # in_proj of three parts, out_proj
        ("mamba", 2 * 48 * 32 + 48 * (4 + 2 * 8) + 4 * 48 + 48 * 32),  # no A_log
    ],
)
def test_a_planner_counts_what_selective_does_not_keep_of_a_mixer(name, matrices):
    with torch.device("meta"):
        model = hybrid(name)
    block = next(part.operations for part in trace(model, 32).parts if part.kind == "block")
    assert block.again == 2.0 * matrices
    assert 0 < block.attention < block.kept_cut + block.kept_whole


def test_the_table_of_mixers_has_all_types():
    assert set(MIXERS) == set(HYBRIDS)
