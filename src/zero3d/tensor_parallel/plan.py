"""Which style each module, parameter or attribute of a model gets: built-in plans as data, and the user's map.

    layers.*.self_attn.q_proj: colwise      a name in which * stands for one part, and a style
    layers.*.mlp.gate_up: packed_colwise:3  how many equal blocks are fused, where not 2
    layers.*.conv1d: depthwise:64,64,128    or of which sizes

The user's map wins over shipped plans (`shipped.py`), and these over Hugging Face's; "none" takes a name out. A name
may begin at the model, at the model inside a PEFT wrapper, or at the base model below the head. Towers of models of
images and text are whole, unless the user's map says otherwise.

    style                           what is cut                        what its input or output does
    colwise                         outputs of a Linear or Conv1D      input is copied in
    rowwise                         inputs, the bias is not            output is reduced, then the bias is added
    packed_colwise, packed_rowwise  the same, of fused matrices        (fused experts: [experts, 2 I, H] and so on)
    depthwise                       channels of a convolution   that has filters of its own for each
    colwise_gather_output           as colwise                         and the ranks' outputs are gathered
    rowwise_split_input             as rowwise                         but its input is common
    embedding_rowwise               the vocabulary of an Embedding     output is reduced
    replicated_with_grad_allreduce  nothing: gradients are partial
    moe_tp_experts                  nothing (its parameters are)       floating inputs are copied in, output is reduced
    mla_kv_a_proj                   nothing                            the rotary part of its output is copied in
    own_heads:8                     nothing                            ALiBi, masks of 8 heads: this rank's are taken
    own_groups:2                    nothing                            B and C of a Mamba2 mixer: this rank's are taken
    added_once                      nothing: a bias that rank 0 adds
    all_reduce                      nothing                            output is reduced
    divided                         an integer attribute becomes // tp
    replicate, local_params         nothing

A parameter gets colwise or rowwise where it is fused experts' [experts, ., .], their biases [experts, .] or one number
for every head (attention sinks, decays of a recurrence). Styles that only help what is cut around them are idle where
nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.mixing import is_mixer_class
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder
from zero3d.models.plan_names import fits, in_other_chunk, is_of_tower, names_in, roots
from zero3d.tensor_parallel.proposal import propose
from zero3d.tensor_parallel.shipped import CUTS, UNPLANNED, shipped_plan, unplanned

NONE = "none"
STYLES = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "depthwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "colwise_rep",
    "rowwise_rep",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "all_reduce",
    "divided",
    "replicate",
    "mla_kv_a_proj",
    "local_params",
    "own_heads",
    "own_groups",
    "added_once",
)
OLD_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input", "local_params": "replicate"}
FUSED = ("packed_colwise", "packed_rowwise", "depthwise")
COUNTED = (*FUSED, "own_heads", "own_groups")
USUAL = {"packed_colwise": 2, "packed_rowwise": 2}  # blocks where a style names no number; of others one
REFUSED = {
    "embedding_colwise": "embeddings are cut along the vocabulary",
    "moe_identity_expert": "identity experts must count once, not once per rank",
    "sequence_parallel": "pass sequence_parallel=True, which cuts sequences from the first block to the last",
}


class Style(NamedTuple):
    """A style's name and, where matrices are fused, how many, and of which sizes if not equal; or of how many heads."""

    kind: str
    blocks: int = 1
    sizes: tuple[int, ...] = ()


def read_plan(
    model: nn.Module, given: Mapping[str, str] | None = None, usual: Mapping[str, Style] | None = None
) -> dict[str, Style]:
    """Return styles by full name of a module, parameter or attribute of `model`: the `usual` ones, then in model order.

    given   the user's map: patterns to styles
    usual   by full name, for what neither that nor the model's own plan names
    Errors: no plan at all, an unknown or refused style, a pattern of the user's that names nothing (ConfigError).
    """
    built_in, user = _built_in_plan(model), dict(given or {})
    if not user and (not built_in or unplanned(model)):
        raise ConfigError(_no_plan(model))
    for pattern, style in user.items():
        parse(pattern, style)
    plan: dict[str, Style] = dict(usual or {})
    matched = set()
    shipped, called = list(shipped_plan(model)), {}
    whole = is_of_tower(model)
    for name, aliases in names_in(model):
        for patterns in (user,) if whole(name) else (user, built_in):
            match = next((p for p in patterns if any(fits(p, alias) for alias in aliases)), None)
            if match is not None:
                matched.add(match)
                if match in shipped:
                    called[name] = shipped.index(match)
                plan[name] = parse(match, patterns[match])
                break
    for pattern in user:
        known = pattern in matched or _add_attributes(model, pattern, plan, user[pattern])
        if not known and not in_other_chunk(model, pattern):
            raise ConfigError(
                f"the tensor-parallel plan gives {pattern!r} a style, but nothing in {type(model).__name__} has that "
                f"name. {propose(model, roots(model))}"
            )
    for pattern in built_in:
        if built_in[pattern] == "divided":
            _add_attributes(model, pattern, plan, "divided")
    if not user and not any(name.startswith(f"{block}.") for name in plan for block in find_blocks(model)):
        raise ConfigError(_no_plan(model))  # some models' own plan is about their head alone
    plan = _in_call_order(plan, called)
    absent = {name for name, module in model.named_modules() if isinstance(module, Placeholder)}
    plan = {name: style for name, style in plan.items() if style.kind != NONE and name not in absent}
    _check_mixers(model, plan)
    return {name: style for name, style in plan.items() if not _is_idle(name, style, plan)}


def _check_mixers(model: nn.Module, plan: Mapping[str, Style]) -> None:
    """Refuse a plan that cuts the last matrix of a recurrence alone: its names are attention's. Raises ConfigError."""
    kinds: dict[str, dict[str, str]] = {}
    for name, style in plan.items():
        around = name.rpartition(".")[0]
        if is_mixer_class(type(model.get_submodule(around))):
            kinds.setdefault(around, {})[style.kind] = name
    for around, names in kinds.items():
        if names.keys() <= {"rowwise", "packed_rowwise"}:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut over tp: its plan cuts {next(iter(names.values()))} and nothing "
                f"before it in {around}, which gives it whole heads. Use mesh.tp=1."
            )


def _in_call_order(plan: Mapping[str, Style], called: Mapping[str, int]) -> dict[str, Style]:
    """Sort the matrices of a module as shipped plans list them: as its forward calls them, not as it registers them.

    called   by name, the place of its pattern in the shipped plans
    """
    siblings: dict[str, list[str]] = {}
    for name in plan:
        if name in called:
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    queues = {parent: iter(sorted(names, key=lambda name: called[name])) for parent, names in siblings.items()}
    names = [next(queues[name.rpartition(".")[0]]) if name in called else name for name in plan]
    return {name: plan[name] for name in names}


def _is_idle(name: str, style: Style, plan: Mapping[str, Style]) -> bool:
    """Return whether a style only helps what is cut in its module, and nothing there is."""
    if style.kind == "own_groups":
        return plan.get(f"{name}.in_proj", style).kind not in CUTS
    around = {
        "own_heads": name,
        "divided": name.rpartition(".")[0],
        "depthwise": name.rpartition(".")[0],
        "mla_kv_a_proj": name.rpartition(".")[0],
    }.get(style.kind)
    return around is not None and not any(inner.startswith(f"{around}.") and plan[inner].kind in CUTS for inner in plan)


def parse(name: str, style: str) -> Style:
    """Parse a style as it is written. Raises ConfigError for one that is unknown, or refused."""
    kind, _, count = style.partition(":") if isinstance(style, str) else (str(style), "", "")
    if kind in REFUSED:
        raise ConfigError(f"{name}: style {kind!r} is not supported ({REFUSED[kind]}). Use tp=1.")
    numbers = count.split(",") if kind in FUSED else [count]
    counted = kind in COUNTED and all(number.isdecimal() and int(number) > 0 for number in numbers)
    needed = bool(count) or kind.startswith("own_")
    if (kind not in STYLES and kind != NONE) or (needed and not counted):
        raise ConfigError(
            f"{name}: unknown tensor-parallel style {style!r}. Known are {', '.join(STYLES)}, "
            "packed_colwise:3 (three fused matrices), packed_colwise:64,64,128 (of these sizes), own_heads:8 (of "
            "eight heads) and none."
        )
    if len(numbers) > 1:
        return Style(kind, len(numbers), tuple(map(int, numbers)))
    return Style(OLD_NAMES.get(kind, kind), int(count) if count else USUAL.get(kind, 1))


def _built_in_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that transformers (as data: its functions change) or zero3d has for this model."""
    inner: Any = inner_model(model)
    plan = dict(getattr(inner, "_tp_plan", None) or {})
    config = getattr(inner, "config", None)
    if not plan:  # a base model that was built without the usual ending
        plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    shipped = shipped_plan(model)
    return shipped | {pattern: style for pattern, style in plan.items() if pattern not in shipped}


def _add_attributes(model: nn.Module, pattern: str, plan: dict[str, Style], style: str) -> bool:
    """Add the plain attributes that a pattern names to the plan, to be divided. Return whether there are any."""
    if style != "divided":
        return False
    owner, _, attribute = pattern.rpartition(".")
    owners = [
        name
        for name, aliases in names_in(model)
        if any(fits(owner, alias) for alias in aliases) and _has(model, name, attribute)
    ]
    plan.update({f"{name}.{attribute}".lstrip("."): parse(pattern, style) for name in owners})
    return bool(owners)


def _has(model: nn.Module, name: str, attribute: str) -> bool:
    try:
        return attribute in vars(model.get_submodule(name))
    except AttributeError:  # a parameter's name
        return False


def _no_plan(model: nn.Module) -> str:
    kind = unplanned(model)
    why = f": zero3d has none for {kind}, which has {UNPLANNED[kind]}" if kind else ""
    return (
        f"{type(model).__name__} comes without a tensor-parallel plan for its blocks{why}. Write one, with colwise for "
        "matrices whose outputs the ranks share out and rowwise for those that take these as inputs. "
        + propose(model, roots(model))
    )
