"""Tensor-parallel plans that transformers lacks, or has and that are not right; by the model's type.

    opt, gptj, stablelm, bloom, mpt, falcon, gpt2    no plan there
    gpt_oss                                          none for tp; its experts are [experts, inputs, outputs] with biases
    deepseek_v3                                      none for its latent attention; deepseek_v2's is transformers'
    lfm2, jamba                                      attention and MLPs; convolutions and Mamba mixers stay whole
    mamba2, bamba, falcon_h1, granitemoehybrid,      Mamba2 mixers by heads; attention and MLPs
    nemotron_h, zamba2                               also in blocks that layers share
    qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid    gated delta rules by heads; the rest is transformers'
    kimi_linear, bailing_hybrid, glm5_next           Kimi delta attention by heads, and latent attention
    falcon_mamba                                     matrices are cut, and mixers whole between them
    inkling2                                         its experts' gates and ups lie one behind the other
    gemma3n                                          an MLP that takes mean and deviation of all its gates
    apertus, phi, qwen3_vl_moe, qwen3_omni_moe       parameters that are used on what each rank has for itself
    qwen3_vl                                         no plan there: attention and MLPs, as Qwen3's

Matrices of one module stand in the order in which its forward calls them. Some plans follow from the config: what
cannot be shared out by heads is computed whole on every rank, of matrices that are cut (`whole_attention`). Patterns
begin at the model that has the type, inside whatever model that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zero3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Plan = dict[str, str]
PARTIAL = "replicated_with_grad_allreduce"
CUTS = ("colwise", "packed_colwise", "rowwise", "packed_rowwise")  # styles that leave a rank its part between matrices
ATTENTION = ("attn", "attention", ".q_proj")  # in names; Nemotron-H calls every mixer so


def cuts_attention(kinds: Mapping[str, str]) -> bool:
    """Return whether a plan shares out the heads of attention. kinds: of styles, by names or patterns."""
    return any(kind in CUTS and any(part in name for part in ATTENTION) for name, kind in kinds.items())


def cut(where: str, colwise: str, rowwise: str, *divided: str) -> Plan:
    """Return styles by name inside the modules `where`: matrices cut by outputs, one cut by inputs, and numbers."""
    plan = {f"{where}.{name}": "colwise" for name in colwise.split()} | {f"{where}.{rowwise}": "rowwise"}
    return plan | {f"{where}.{name}": "divided" for name in divided}


def whole_attention(where: str, inputs: str, output: str) -> Plan:
    """Return styles that cut matrices and leave what is between them whole on every rank: right for any module."""
    plan = {f"{where}.{name}": "colwise_gather_output" for name in inputs.split()}
    return plan | {f"{where}.{output}": "rowwise_split_input"}


def _attention(where: str = "layers.*.self_attn", *divided: str, output: str = "o_proj") -> Plan:
    return cut(where, "q_proj k_proj v_proj", output, *divided)


def _gated(where: str) -> Plan:
    return cut(where, "gate_proj up_proj", "down_proj")


def _gemma3n(config: Any) -> Plan:
    """Leave sparse MLPs whole between their matrices: they take mean and deviation of all gates."""
    sparse = [i for i, part in enumerate(config.activation_sparsity_pattern or ()) if part > 0]
    plans = [whole_attention(f"layers.{i}.mlp", "gate_proj up_proj", "down_proj") for i in sparse]
    return {name: style for plan in plans for name, style in plan.items()}


def _stablelm(config: Any) -> Plan:
    """Leave attention whole between its matrices under qk_layernorm: a list of norms, one for every head."""
    if config.qk_layernorm:
        attention = whole_attention("layers.*.self_attn", "q_proj k_proj v_proj", "o_proj")
    else:
        attention = _attention("layers.*.self_attn", "num_heads", "num_key_value_heads")
    return attention | _gated("layers.*.mlp")


def _falcon(config: Any) -> Plan:
    """Cut the fused matrix, whose rows go by groups of heads; a single key for all heads, at its end, cannot be cut."""
    where = "h.*.self_attention"
    mlp = cut("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h")
    if config.multi_query and not config.new_decoder_architecture:
        return mlp | whole_attention(where, "query_key_value", "dense")
    attention = cut(where, "query_key_value", "dense", "num_heads", "num_kv_heads")
    return mlp | attention | {where: f"own_heads:{config.num_attention_heads}"}


def _bloom(config: Any) -> Plan:
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ConfigError(
            f"BLOOM with slow_but_exact=True and pretraining_tp={config.pretraining_tp} slices its matrices itself, "
            "which tp does, too: set slow_but_exact to False in its config, or pass tp=1."
        )
    attention = cut("h.*.self_attention", "query_key_value", "dense", "num_heads")
    own = {"h.*.self_attention": f"own_heads:{config.n_head}"}
    return attention | own | cut("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h")


def _mpt(config: Any) -> Plan:
    where = "blocks.*.attn"
    attention = {f"{where}.Wqkv": "packed_colwise:3", f"{where}.out_proj": "rowwise", f"{where}.n_heads": "divided"}
    return attention | {where: f"own_heads:{config.n_heads}"} | cut("blocks.*.ffn", "up_proj", "down_proj")


def _sizes(*sizes: int) -> str:
    return ",".join(map(str, sizes))


def _by_heads(where: str, matrices: str, output: str, norm: str, channels: Sequence[int], *numbers: str) -> Plan:
    """Cut a delta rule by heads: matrices, the convolution of [q | k | v], decays; the norm is every head's."""
    plan = cut(where, matrices, output, "conv_dim", *numbers) | {f"{where}.{norm}": PARTIAL}
    plan |= {f"{where}.conv1d": f"depthwise:{_sizes(*channels)}"}
    return plan | {f"{where}.{number}": "colwise" for number in ("A_log", "dt_bias")}


def _gated_delta_rule(matrices: str, output: str, norm: str) -> Callable[[Any], Plan]:
    """Return the plan of `layers.*.linear_attn`, whose value heads are those of some key heads in turn."""

    def plan(config: Any) -> Plan:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        channels = (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim)
        numbers = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
        rows = _by_heads("layers.*.linear_attn", matrices, output, norm, channels, *numbers)
        fused = {"layers.*.linear_attn.in_proj_qkv": f"packed_colwise:{_sizes(*channels)}"}
        return rows | {name: style for name, style in fused.items() if name in rows}

    return plan


def _kimi_delta_attention(gate: str, forget: str) -> Callable[[Any], Plan]:
    """Return the plan of `layers.*.self_attn`, such or latent attention; first matrices of pairs stay whole."""

    def plan(config: Any) -> Plan:
        where, inside = "layers.*.self_attn", "layers.*.self_attn.forget_gate"
        channels = (config.linear_num_heads * config.linear_head_dim,) * 3
        matrices = f"q_proj k_proj v_proj b_proj {gate}"
        rows = _by_heads(where, matrices, "o_proj", "o_norm", channels, "num_heads", "qkv_dim")
        rows |= {f"{inside}.{name}": "colwise" for name in (forget, "A_log", "dt_bias")}
        rows |= {f"{inside}.{number}": "divided" for number in ("num_heads", "qkv_dim")}
        latent = {"q_b_proj": "colwise", "kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise"}
        return rows | {f"{where}.{name}": style for name, style in latent.items()}

    return plan


def _mamba2(where: str, heads: int, inner: int, groups: int, states: int) -> Plan:
    """Cut a Mamba2 mixer by heads: in_proj is [gate | x | B | C | dt], the convolution's channels are [x | B | C]."""
    b_c = groups * states
    return {
        where: f"own_groups:{groups}",
        f"{where}.in_proj": f"packed_colwise:{_sizes(inner, inner, b_c, b_c, heads)}",
        f"{where}.conv1d": f"depthwise:{_sizes(inner, b_c, b_c)}",
        **{f"{where}.{number}": "colwise" for number in ("A_log", "D", "dt_bias", "norm.weight")},
        f"{where}.out_proj": "rowwise",
        **{f"{where}.{number}": "divided" for number in ("num_heads", "intermediate_size")},
    }


def _nemotron_h(config: Any) -> Plan:
    """Cut attention, MLPs and mixers, which all have one name; experts are transformers' to cut."""
    where, inner = "layers.*.mixer", config.mamba_num_heads * config.mamba_head_dim
    mixers = _mamba2(where, config.mamba_num_heads, inner, config.n_groups, config.ssm_state_size)
    mlps = cut(where, "up_proj", "down_proj") | cut(f"{where}.shared_experts", "up_proj", "down_proj")
    return mixers | _attention(where) | mlps


def _mamba2_alone(config: Any) -> Plan:
    inner = int(config.expand * config.hidden_size)
    return _mamba2("layers.*.mixer", config.num_heads, inner, config.n_groups, config.state_size)


def _zamba2(config: Any) -> Plan:
    """Cut mixers, also those beside a shared transformer, and that one, with the second matrices of its adapters."""
    inner = int(config.mamba_expand * config.hidden_size)
    sizes = (config.n_mamba_heads, inner, config.mamba_ngroups, config.mamba_d_state)
    shared, mlp = "layers.*.shared_transformer", "layers.*.shared_transformer.feed_forward"
    adapters = {f"{shared}.self_attn.linear_{x}_adapter_list.*.1": "colwise" for x in "qkv"}
    gated = dict.fromkeys((f"{mlp}.gate_up_proj", f"{mlp}.gate_up_proj_adapter_list.*.1"), "packed_colwise")
    return {
        **_mamba2("layers.*.mamba", *sizes),
        **_mamba2("layers.*.mamba_decoder.mamba", *sizes),
        **_attention(f"{shared}.self_attn"),
        **adapters,
        **gated,
        f"{mlp}.down_proj": "rowwise",
    }


def _mamba2_beside(config: Any) -> Plan:
    """Cut the mixers of hybrids that name their numbers mamba_*."""
    inner = getattr(config, "mamba_d_ssm", None) or int(config.mamba_expand * config.hidden_size)
    return _mamba2("layers.*.mamba", config.mamba_n_heads, inner, config.mamba_n_groups, config.mamba_d_state)


_NORMS_OF_HEADS = {f"layers.*.self_attn.{x}_norm": PARTIAL for x in "qk"}
_HYBRID = _attention() | _gated("layers.*.feed_forward")
_FALCON_H1 = _attention() | cut("layers.*.feed_forward", "up_proj gate_proj", "down_proj")
_GATED_DELTA_NET = _gated_delta_rule("in_proj_qkv in_proj_z in_proj_b in_proj_a", "out_proj", "norm")
_GRANITE = _attention() | {
    "layers.*.shared_mlp.input_linear": "packed_colwise",  # gates and ups
    "layers.*.shared_mlp.output_linear": "rowwise",
}
SHIPPED: Mapping[str, Plan | Callable[[Any], Plan]] = {
    "apertus": {"layers.*.mlp.act_fn": PARTIAL},
    "bailing_hybrid": _kimi_delta_attention("g_proj", "f_proj"),
    "bamba": lambda config: _HYBRID | _mamba2_beside(config),
    "bloom": _bloom,
    "deepseek_v3": {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.q_b_proj": "colwise"}
    | {"layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"}
    | cut("layers.*.self_attn", "kv_b_proj", "o_proj"),
    "falcon": _falcon,
    "falcon_h1": lambda config: _FALCON_H1 | _mamba2_beside(config),
    "falcon_mamba": whole_attention("layers.*.mixer", "in_proj", "out_proj"),
    "gemma3n_text": _gemma3n,
    "glm5_next_text": _kimi_delta_attention("g_b_proj", "f_b_proj"),
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise:3",  # q, k and v
        "h.*.attn.c_proj": "rowwise",
        "h.*.attn.split_size": "divided",  # its forward splits by this number
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "gpt_oss": _attention()
    | {
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",  # of [experts, inputs, outputs]; gates and ups take turns
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "added_once",
    },
    "granitemoehybrid": lambda config: _GRANITE | _mamba2_beside(config),
    "gptj": _attention("h.*.attn", "num_attention_heads", output="out_proj") | cut("h.*.mlp", "fc_in", "fc_out"),
    "inkling2_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "jamba": _HYBRID,
    "kimi_linear": _kimi_delta_attention("g_b_proj", "f_b_proj"),
    "lfm2": _attention(output="out_proj")
    | {f"layers.*.self_attn.{x}_layernorm": PARTIAL for x in "qk"}
    | cut("layers.*.feed_forward", "w1 w3", "w2"),
    "mamba2": _mamba2_alone,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _gated_delta_rule("q_proj k_proj v_proj a_proj b_proj g_proj", "o_proj", "o_norm"),
    "opt": _attention("decoder.layers.*.self_attn", "num_heads", output="out_proj")
    | cut("decoder.layers.*", "fc1", "fc2"),
    "phi": {f"layers.*.self_attn.{x}_layernorm": PARTIAL for x in "qk"},
    "qwen3_5_moe_text": _GATED_DELTA_NET,
    "qwen3_5_text": _GATED_DELTA_NET,
    "qwen3_next": _gated_delta_rule("in_proj_qkvz in_proj_ba", "out_proj", "norm"),  # every key head's, in turn
    "qwen3_omni_moe_text": _NORMS_OF_HEADS,
    "qwen3_vl_moe_text": _NORMS_OF_HEADS,
    "qwen3_vl_text": _attention() | _NORMS_OF_HEADS | _gated("layers.*.mlp"),
    "stablelm": _stablelm,
    "zamba2": _zamba2,
}


UNPLANNED: Mapping[str, str] = {  # types without a plan, and what between their matrices no style shares out
    "inkling_text": "short convolutions behind attention and MLP, and shared experts in stacks of their own",
    "lfm3": "short convolutions, and attention with a gate for every head",
    "mamba": "a scan whose time steps follow from all of its channels",
    "recurrent_gemma": "gated recurrences (RG-LRU) with matrices for every head",
    "rwkv": "a recurrence over its channels, and a shift of tokens in attention and MLP",
    "xlstm": "mLSTM cells with gates and norms of all heads",
    "zamba": "mixers with matrices for every head, and a transformer that its blocks share",
    "zaya": "attention that convolves queries and keys together and delays values",
}


def unplanned(model: nn.Module) -> str:
    """Return the type of UNPLANNED that `model` has inside, or nothing."""
    kinds = (
        getattr(module.config, "model_type", "")
        for module in model.modules()
        if hasattr(module, "config") and getattr(module, "base_model", None) is module
    )
    return next((kind for kind in kinds if kind in UNPLANNED), "")


def shipped_plan(model: nn.Module) -> Plan:
    """Return the plans of all models inside `model` whose types have one; patterns begin with their full names."""
    plan: Plan = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        entry = SHIPPED.get(getattr(config, "model_type", ""))
        if entry is not None and getattr(module, "base_model", None) is module:
            own = entry(config) if callable(entry) else entry
            plan |= {f"{name}.{pattern}".lstrip("."): style for pattern, style in own.items()}
    return plan
