"""Which parameters of a model are matrices that Muon takes, and what is fused in each.

    in a block, two dimensions or more     a matrix: Linear, Conv1D, a convolution as [out, in h w], LoRA's A and B
    experts [experts, A, B]                one for each expert; their biases [experts, A] are none
    of recurrences: A_log, D, dt_bias,     none: AdamW's; nor short convolutions [channels, 1, width]
    embeddings, heads, all outside blocks  none: AdamW's, as norms and biases are

Fused matrices are made orthogonal apart, along their outputs. Which are fused the tensor-parallel plan says
(packed_colwise), and names that Hugging Face's models have: qkv_proj, Wqkv, c_attn, query_key_value, gate_up_proj.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import find_experts
from zero3d.models.blocks import find_blocks
from zero3d.models.names import is_named, matches, own_name
from zero3d.models.packing import inner_model
from zero3d.models.recurrences import own_of_recurrences
from zero3d.optim.matrices import NONE, Form, read_split
from zero3d.tensor_parallel.plan import Style, read_plan

GATE_UP = ("gate_up_proj", "w1w3", "Wi")
QKV = ("qkv_proj", "qkv", "Wqkv", "c_attn", "query_key_value")
# Types of models whose fused q, k and v are head after head, where every head has its own; and in another order still.
BY_HEAD = ("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "gpt_bigcode", "minimax")
MIXED = ("codegen",)
MUON, ADAMW = RULES = ("muon", "adamw")


class Owner(NamedTuple):
    """The module that has a parameter, and the parameter's name in it."""

    name: str
    module: nn.Module
    local: str


def find_matrices(
    model: nn.Module, match: str | None, split: Mapping[str, str], groups: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Form]:
    """Return how the trainable parameters that Muon takes are seen, by name, in model order.

    match   patterns of those that get it, None: the matrices of blocks
    split   {pattern: style} before what the model's plan says
    groups  `param_groups`: the first that matches may say "name": "muon" or "adamw"

    Raises ConfigError where there is none, for patterns that fit nothing, and sizes that do not fit.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    stacks = {f"{layer.name}.{key}" for layer in find_experts(model) for key in layer.parameters}
    packed, found, recurrent = _packed(model), {}, own_of_recurrences(model)
    used: set[str] = set()
    for owner, p in _parameters(model):
        name = f"{owner.name}.{owner.local}".lstrip(".")
        stacked = name in stacks or (p.dim() == 3 and not _is_convolution(owner.module))
        own = name.startswith(blocks) and name not in recurrent and not isinstance(owner.module, nn.Embedding)
        chosen = own if match is None else is_named(name, match.split("|"))
        rule = _rule(name, groups)
        chosen = chosen if rule is None else rule == MUON
        if not chosen or p.dim() < (3 if stacked else 2):
            continue
        form = Form(stacked)
        pattern = next((pattern for pattern in split if matches(name, pattern)), None)
        used |= {pattern} if pattern is not None else set()
        shape, dim = form.shape_of(tuple(p.shape)), _outputs(owner, stacked)
        style = _fused(model, owner, stacked, shape, dim, packed) if pattern is None else split[pattern]
        found[name] = replace(form, split=read_split(name, style, shape, dim))
    for pattern in split:
        if pattern not in used:
            raise ConfigError(
                f"optimizer.split: {pattern!r} names no matrix of {type(model).__name__}, which has such as "
                f"{next(iter(found), 'none')!r}: give names of parameters, or patterns of these."
            )
    if not found:
        raise ConfigError(_none(model, match, groups))
    return found


def _parameters(model: nn.Module) -> list[tuple[Owner, nn.Parameter]]:
    """Return the trainable parameters, each once."""
    modules = dict(model.named_modules())
    split = [(name.rpartition("."), p) for name, p in model.named_parameters() if p.requires_grad]
    return [(Owner(prefix, modules[prefix], local), p) for (prefix, _, local), p in split]


def _rule(name: str, groups: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return what the first group that matches says. Raises ConfigError for a name of another optimizer."""
    for group in groups or ():
        if _fits(name, group):
            rule = group.get("name")
            if rule is not None and rule not in RULES:
                raise ConfigError(f"the group {group['match']!r} has the name {rule!r}: take {' or '.join(RULES)}.")
            return rule
    return None


def _fits(name: str, group: Mapping[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(name, part.strip()) for part in str(group["match"]).split("|"))


def _none(model: nn.Module, match: str | None, groups: Sequence[Mapping[str, Any]] | None) -> str:
    if match is not None:
        return (
            f"Muon: {match!r} names no trainable matrix of {type(model).__name__}: give other patterns, or use AdamW."
        )
    if any(group.get("name") == ADAMW for group in groups or ()):
        return (
            f"Muon: groups (optimizer.groups) give AdamW to every matrix of blocks of {type(model).__name__}: give it "
            "to fewer, or use AdamW (optimizer.name=adamw)."
        )
    return (
        f"Muon takes the matrices of blocks, and {type(model).__name__} has no trainable one in a list of two or more "
        "modules that are alike: name some, with zero3d.optim.muon(match='*.weight') in Python, or use AdamW."
    )


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _outputs(owner: Owner, stacked: bool) -> int:
    """Return the dimension of a matrix's outputs."""
    if stacked:
        return int(_is_transposed(owner.module))
    return 1 if type(owner.module).__name__ == "Conv1D" else 0


def _is_transposed(experts: nn.Module) -> bool:
    """Return whether experts are [inputs, outputs]: as they say, or by the width in which gates, ups and downs meet."""
    said = getattr(experts, "is_transposed", None)
    gates, downs = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if said is not None or not isinstance(gates, nn.Parameter) or not isinstance(downs, nn.Parameter):
        return bool(said)
    return gates.dim() == downs.dim() == 3 and gates.shape[2] == 2 * downs.shape[1] and gates.shape[1] == downs.shape[2]


def _packed(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return in which proportion matrices are fused along their outputs, by the name of a module or parameter."""
    plan: dict[str, Style] = {}
    with suppress(ConfigError):
        plan = read_plan(model)
    packed = ((name, style) for name, style in plan.items() if style.kind == "packed_colwise")
    return {own_name(name): style.sizes or (1,) * style.blocks for name, style in packed}


def _fused(
    model: nn.Module,
    owner: Owner,
    stacked: bool,
    shape: tuple[int, int],
    dim: int,
    packed: Mapping[str, tuple[int, ...]],
) -> str:
    """Return the style of a parameter whose matrices are [A, B], with outputs along `dim`: what is fused in each."""
    length = shape[dim]
    if ".lora_" in f"{owner.name}.{owner.local}":
        return NONE
    local = owner.local if stacked else own_name(owner.name).rpartition(".")[2]
    if local in GATE_UP and length % 2 == 0:
        return "in_turn:1,1" if stacked and not getattr(owner.module, "is_concatenated", True) else "equal:2"
    if local in QKV:
        return _query_key_value(model, length, shape[1 - dim])
    sizes = packed.get(own_name(owner.name)) or packed.get(own_name(f"{owner.name}.{owner.local}"))
    if not sizes or length % sum(sizes):
        return NONE
    if len(set(sizes)) == 1:
        return f"equal:{len(sizes)}"
    return "sizes:" + ",".join(str(length // sum(sizes) * size) for size in sizes)


def _query_key_value(model: nn.Module, length: int, inputs: int) -> str:
    """Return the style of fused queries, keys and values, with so many outputs together, of so many inputs."""
    inner: Any = inner_model(model)
    config: Any = getattr(inner, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    hidden = int(getattr(config, "hidden_size", 0) or 0)
    if not heads or not hidden:
        return "equal:3" if length == 3 * inputs else NONE
    size = int(getattr(config, "head_dim", None) or hidden // heads)
    kind, groups = str(getattr(config, "model_type", "")), int(getattr(config, "num_key_value_heads", 0) or heads)
    if kind == "falcon":
        groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
        if config.new_decoder_architecture or not config.multi_query:
            return f"in_turn:{heads // groups * size},{size},{size}"
    if kind in BY_HEAD and length == 3 * heads * size:
        return f"in_turn:{size},{size},{size}"
    if kind in MIXED:
        return NONE
    if kind == "gpt_bigcode":  # one head of keys and values for all
        groups = 1
    if (heads + 2 * groups) * size == length:
        return f"sizes:{heads * size},{groups * size},{groups * size}"
    return "equal:3" if length == 3 * inputs else NONE


def groups_of(
    model: nn.Module, matrices: Mapping[str, Form], groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return `param_groups` of one rule each, those of AdamW first: a unit's parameters of one rule lie together."""
    of_group: dict[tuple[bool, int], list[str]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            place = next((n for n, group in enumerate(groups or ()) if _fits(name, group)), len(groups or ()))
            of_group.setdefault((name in matrices, place), []).append(name)
    options: list[Mapping[str, Any]] = [*(groups or ()), {}]
    return [
        {key: value for key, value in options[place].items() if key not in ("match", "name")}
        | {"match": "|".join(map(glob.escape, names)), "matrices": is_matrix}
        for (is_matrix, place), names in sorted(of_group.items())
    ]


def describe(shapes: Mapping[str, Sequence[int]], trained: Collection[str], matrices: Mapping[str, Form]) -> list[str]:
    """Say in lines which parameters get which rule, those of all blocks that are alike in one.

    shapes    of all parameters, in model order; trained: names of those that are
    """
    rows: dict[tuple[str, str, str], int] = {}
    for name in shapes:
        if name in trained:
            form, shape = matrices.get(name), list(shapes[name])
            pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            seen = "" if form is None else _seen(form, shapes[name])
            row = (ADAMW if form is None else MUON, pattern, f"{shape}{seen}")
            rows[row] = rows.get(row, 0) + 1
    return [
        f"{rule:<6} {pattern} {what}{f' x {count}' if count > 1 else ''}"
        for (rule, pattern, what), count in sorted(rows.items(), key=lambda item: item[0][0] != MUON)
    ]


def _seen(form: Form, shape: Sequence[int]) -> str:
    """Say how a parameter is seen, where it is not one matrix."""
    parts, many = form.parts(shape), form.matrices(shape)
    said = [f"{many} matrices"] if many > 1 else []
    if form.split is not None:
        said.append("each of " * (many > 1) + " + ".join(map(str, map(list, parts))))
    elif len(shape) > 2 and not form.stacked:
        said.append(f"as {list(parts[0])}")
    return f": {', '.join(said)}" if said else ""
