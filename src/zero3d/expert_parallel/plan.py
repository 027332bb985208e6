"""Which modules of a model are experts, and which of their parameters are stacked [experts, ...]: plans as data.

    layers.*.mlp.experts: ep_dispatch_experts        a module that is called with tokens and their experts
    layers.*.mlp.experts.down_proj: grouped_gemm     a parameter [experts, ...] of such a module

A user's map wins over the plan that transformers has for a model (`base_model_ep_plan`); "none" takes a name out.
Other styles of such plans are about what is not experts, and idle here. What PEFT has put around a module has its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.names import own_name
from zero3d.models.packing import inner_model
from zero3d.models.plan_names import fits, in_other_chunk, names_in

NONE = "none"
MODULE, OLD_MODULE, PARAMETER = "ep_dispatch_experts", "moe_tp_experts", "grouped_gemm"
STYLES = (MODULE, PARAMETER, NONE)


class ExpertLayer(NamedTuple):
    """A module that holds a layer's experts.

    module      called with hidden states [T, H], experts [T, K] and weights [T, K]; returns [T, H]
    parameters  local names of those that are [experts, ...]
    experts     how many there are in the whole layer
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    experts: int


def find_experts(model: nn.Module, given: Mapping[str, str] | None = None) -> list[ExpertLayer]:
    """Return the expert layers of a model or model chunk, in model order; none where no plan names any.

    Raises ConfigError for an unknown style, a pattern that names nothing, and stacks of different lengths.
    """
    user = dict(given or {})
    for pattern, style in user.items():
        if style not in STYLES:
            raise ConfigError(f"mesh.ep_plan: {pattern}: unknown style {style!r}. Known are {', '.join(STYLES)}.")
    styles = _styles(model, user)
    layers = []
    for name, style in styles.items():
        if style not in (MODULE, OLD_MODULE):
            continue
        module: Any = model.get_submodule(name)
        local = tuple(key for key in module._parameters if styles.get(f"{name}.{key}") == PARAMETER)
        if local:
            layers.append(ExpertLayer(name, module, local, _count(name, module, local)))
    return layers


def whole_over_tp(layers: Iterable[ExpertLayer]) -> dict[str, str]:
    """Return the tp plan of experts that ep shares out: tp leaves them whole."""
    return {name: NONE for layer in layers for name in (layer.name, *(f"{layer.name}.{p}" for p in layer.parameters))}


def refuse_none(ep: int, model: nn.Module) -> NoReturn:
    """Raise ConfigError: no plan names a layer that ep could share out."""
    raise ConfigError(
        f"ep={ep} distributes experts over ranks, but no plan names any in {type(inner_model(model)).__name__}: leave "
        "ep out, or name them in mesh.ep_plan: "
        f"{{'layers.*.mlp.experts': {MODULE}, 'layers.*.mlp.experts.down_proj': {PARAMETER}, ...}}."
    )


def _styles(model: nn.Module, user: Mapping[str, str]) -> dict[str, str]:
    """Return styles by full name."""
    built_in, matched, styles = _built_in_plan(model), set(), {}
    for name, aliases in names_in(model):
        for patterns in (user, built_in):
            match = next(
                (pattern for pattern in patterns if any(fits(pattern, own_name(alias)) for alias in aliases)), None
            )
            if match is not None:
                matched.add(match)
                styles[name] = patterns[match]
                break
    for pattern in user:
        if pattern not in matched and not in_other_chunk(model, pattern):
            raise ConfigError(
                f"mesh.ep_plan gives {pattern!r} a style, but nothing in {type(model).__name__} has that name."
            )
    return styles


def _built_in_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that transformers has for this model, as data."""
    inner: Any = inner_model(model)
    config: Any = getattr(inner, "config", None)
    for plan in (getattr(inner, "_ep_plan", None), getattr(config, "base_model_ep_plan", None)):
        if plan:
            return dict(plan)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return dict(getattr(text, "base_model_ep_plan", None) or {})


def _count(name: str, module: nn.Module, parameters: tuple[str, ...]) -> int:
    lengths = {key: len(module._parameters[key]) for key in parameters}  # type: ignore[arg-type]
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"{name} has stacks of experts of different lengths, {lengths}: give those that are not [experts, ...] the "
            "style 'none' in mesh.ep_plan."
        )
    return next(iter(lengths.values()))
