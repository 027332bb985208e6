"""Tiny models whose layers mix tokens by recurrences and convolutions, by type; and kernels for them."""

import inspect
import sys
from itertools import pairwise
from types import ModuleType

import torch
from families import CONFIGS, SIZES
from torch.nn import functional as F

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
KIMI = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8,
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
MAMBA = {"state_size": 8, "time_step_rank": 4}
HYBRIDS = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "qwen3_5_moe_text": DELTA,
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": KIMI,
    "bailing_hybrid": KIMI,
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 2, "chunk_size": 8},
    "bamba": CONFIGS["bamba"],
    "falcon_h1": CONFIGS["falcon_h1"],
    "granitemoehybrid": CONFIGS["bamba"] | {"layer_types": ["mamba", "attention"], "num_local_experts": 0,
                                            "shared_intermediate_size": 48},
    "jamba": CONFIGS["jamba"],
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
    "zamba2": CONFIGS["zamba2"],
    "lfm2": CONFIGS["lfm2"],
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "num_dense_layers": 2},
    "lfm3": CONFIGS["lfm2"],
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "block_size": 8,
                "num_local_experts": 2},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 16,
                        "head_dim": 8},
    "zaya": {},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "num_heads": 2, "chunk_size": 8},
}  # fmt: skip
BY_MODULE = ("minimax", "recurrent_gemma", "zaya", "rwkv", "xlstm")


def hybrid(name, **options):
    """A model of this type in training mode, whose numbers of one dimension matter."""
    import transformers as t

    torch.manual_seed(7)
    config = t.AutoConfig.for_model(name, **SIZES | {"max_position_embeddings": 256} | HYBRIDS[name] | options)
    config.use_cache = False
    model = t.AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the usual one has no fp64
    if torch.get_default_device().type != "meta":
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(torch.randn(p.shape) * 0.1)
    return model.train()


# --- kernels that stand for those of packages, which are not installed here -----------------------------------------


def conv_kernel(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    """As causal_conv1d's: rows are told by numbers."""
    CALLS.append(seq_idx)
    taps = weight.shape[1]
    made = x * weight[:, taps - 1 :]
    for back in range(1, min(taps, x.shape[-1])):
        same = 1.0 if seq_idx is None else (seq_idx[:, None, back:] == seq_idx[:, None, :-back]).to(x.dtype)
        made = made + F.pad(x[..., :-back] * same * weight[:, taps - 1 - back, None], (back, 0))
    made = made if bias is None else made + bias[:, None]
    return made if activation is None else F.silu(made)


def delta_kernel(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                 use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):  # fmt: skip
    """As fla's: one row, and where documents end."""
    CALLS.append(cu_seqlens)
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (q.shape[0] == 1 and torch.equal(cu_seqlens_cpu, cu_seqlens))
    torch_rule = inspect.unwrap(qwen3_5().torch_chunk_gated_delta_rule)
    parts = [
        torch_rule(*(t[:, start:stop] for t in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        for start, stop in pairwise(bounds)
    ]
    return torch.cat(parts, 1), None


CALLS = []


def qwen3_5():
    import transformers.models.qwen3_5.modeling_qwen3_5 as file

    return file


def with_kernels(monkeypatch, file, kernels):
    """Have transformers itself find kernels in a package, by the decorator that the file uses."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    package = ModuleType("of_a_test")
    monkeypatch.setitem(sys.modules, "of_a_test", package)
    for name, kernel in kernels.items():
        setattr(package, name, kernel)
        own = inspect.unwrap(getattr(file, name))
        monkeypatch.setattr(file, name, use_kernel_func_from_hub_with_fallback(name, "of_a_test")(own))
