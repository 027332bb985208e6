"""Experts of hybrids shared out over ranks: in exact mode the bits of one process, at stages 2 and 3; packed rows, too."""

import pytest
import torch
from hybrids import hybrid
from mixtures import curve, engine_of, own_part

from zero3d.expert_parallel.plan import find_experts

STEPS = range(2)
MOE = {  # beside tests/hybrids.py: experts, of Nemotron-H in a latent space, 32 wide as in tests/mixtures.py
    "bailing_hybrid": {"first_k_dense_replace": 1, "moe_intermediate_size": 32},
    "granitemoehybrid": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "intermediate_size": 32},
    "kimi_linear": {"first_k_dense_replace": 1, "moe_intermediate_size": 32},
    "lfm2_moe": {"moe_intermediate_size": 32, "num_dense_layers": 1},
    "minimax": {"num_local_experts": 4, "intermediate_size": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "moe_latent_size": 16,
                   "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "n_group": 2},
    "qwen3_5_moe_text": {"moe_intermediate_size": 32},
    "qwen3_next": {"moe_intermediate_size": 32},
}  # fmt: skip
ASKED = ("qwen3_5_moe_text", "nemotron_h", "granitemoehybrid", "lfm2_moe")


def model_of(name):
    model = hybrid(name, **MOE[name])
    model.set_experts_implementation("grouped_mm")
    return model


def curves(name, cases, **options):
    """Curves of cases {ep, stage} in exact mode: losses in all digits, and a hash of masters and moments."""
    from torch import distributed as dist

    accumulate = 8 // (dist.get_world_size() if dist.is_initialized() else 1)
    return [
        curve(engine_of(model_of(name), exact=True, accumulate=accumulate, clip_norm=0.05, **case, **options), STEPS)
        for case in cases
    ]


@pytest.mark.parametrize(("name", "stages"), [
    ("lfm2_moe", (3,)),
    *(pytest.param(name, (2, 3), marks=pytest.mark.long) for name in MOE),
])  # fmt: skip
def test_experts_over_two_ranks_have_the_bits_of_one_process(ranks, name, stages):
    (wanted,) = ranks(1, curves, name, [{"stage": 3}])[0]
    for found in ranks(2, curves, name, [{"ep": 2, "stage": stage} for stage in stages]):
        assert found == [wanted] * len(stages)


# --- packed rows ----------------------------------------------------------------------------------------------------

LENGTH = 17
DOCUMENTS = ((5, 12), (9, 1, 7)), ((LENGTH,), (3, 3, 11)), ((16, 1), (8, 9))  # of two rows, in turn


def packed(micro_batch):
    """The same tokens as documents, which change from micro-batch to micro-batch and from step to step."""
    rows = DOCUMENTS[int(micro_batch["input_ids"].sum()) % len(DOCUMENTS)]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    return micro_batch | {"position_ids": positions, "labels": micro_batch["labels"].where(positions > 0, -100)}


def packed_curves(name, cases):
    """Curves of packed rows by case: whether where documents are is told, and options."""
    found = []
    for apart, case in cases:
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        engine = engine_of(model_of(name), exact=True, accumulate=8 // world, clip_norm=0.05, **case)
        losses = []
        for step in STEPS:
            rows = [packed(each) for each in own_part(engine, step, LENGTH)]
            if not apart:
                rows = [{key: t for key, t in each.items() if key != "position_ids"} for each in rows]
            losses.append(float(engine.train_batch(rows)).hex())
        found.append((losses, engine.fingerprint()))
    return found


@pytest.mark.parametrize(("name", "stages"), [
    ("lfm2_moe", (3,)), *(pytest.param(name, (2, 3), marks=pytest.mark.long) for name in ASKED),
])  # fmt: skip
def test_packed_rows_of_experts_over_two_ranks_have_the_bits_of_one_process(ranks, name, stages):
    ((wanted, as_one),) = ranks(1, packed_curves, name, [(True, {"stage": 3}), (False, {"stage": 3})])
    assert wanted != as_one
    for found in ranks(2, packed_curves, name, [(True, {"ep": 2, "stage": stage}) for stage in stages]):
        assert found == [wanted] * len(stages)


@pytest.mark.parametrize("name", ASKED)
def test_each_layers_experts_are_found(name):
    layers = find_experts(model_of(name))
    assert [layer.experts for layer in layers] == [4] * len(layers)
    assert layers
