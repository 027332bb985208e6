"""Merging adapters of PEFT into the weights that they adapt, one layer at a time: W + scale x B A.

    adapted.q_proj.base_layer.weight       [out, in]   W
    adapted.q_proj.lora_A.default.weight   [r, in]     A      ->   adapted.q_proj.weight   [out, in]
    adapted.q_proj.lora_B.default.weight   [out, r]    B

PEFT's own layers do the arithmetic, on a twin that holds whole tensors, so that every kind of theirs (transposed ones,
embeddings, convolutions, stacked experts, DoRA, rotations, single tokens) has the bits of `merge_and_unload` on the
host. An engine's own layers hold slices and tiles, and are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import CheckpointError
from zero3d.models.packing import inner_model

WRAPPER = "base_model.model."  # how names begin in a model inside PEFT's wrapper
WRAPPED, REPLACED, KEPT, TOKENS = "base_layer", "modules_to_save", "original_module", "token_adapter"


def plain_name(name: str) -> str:
    """Return what a parameter or buffer is called in the model without adapters."""
    parts = name.removeprefix(WRAPPER).split(".")
    kept: list[str] = []
    for i, part in enumerate(parts):
        of_replaced = i > 0 and parts[i - 1] == REPLACED  # the adapter's name
        if part not in (WRAPPED, REPLACED, KEPT, TOKENS) and not of_replaced:
            kept.append(part)
    return ".".join(kept)


def base_prefix(model: nn.Module) -> str:
    """Return how names of the base begin in a model that PEFT has wrapped: "" where it has not."""
    inner = inner_model(model)
    name = next(name for name, module in model.named_modules() if module is inner)
    return f"{name}." if name else ""


def adapted_layers(modules: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return PEFT's layers by name, of those inside one another the outermost.

    modules  parts of one model, with the names of the whole
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    found: dict[str, nn.Module] = {}
    for module in modules:
        for name, layer in module.named_modules(remove_duplicate=False):
            if isinstance(layer, (BaseTunerLayer, ModulesToSaveWrapper)) and not _is_inside(name, found):
                found[name] = layer
    return found


def _is_inside(name: str, around: Iterable[str]) -> bool:
    parts = name.split(".")
    heads = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return any(each in heads for each in around)


def is_of_base(layer: nn.Module, name: str) -> bool:
    """Say whether a tensor of one of PEFT's layers, by its name in it, is the base's or replaces one of the base's."""
    head, _, rest = name.partition(".")
    if head != WRAPPED:
        return head == REPLACED
    inner = layer.get_submodule(WRAPPED)
    return not hasattr(inner, WRAPPED) or is_of_base(inner, rest)


def base_of(layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the plain tensors of one of PEFT's layers as they are without it: W, or the module that it replaced.

    tensors  of the layer, by their names in it; a copy that is tied to another pipeline stage's lacks the module that
             was replaced, which that stage has
    """
    replaced = {name: values for name, values in tensors.items() if name.startswith(f"{KEPT}.")}
    own = replaced or {
        name: values
        for name, values in tensors.items()
        if is_of_base(layer, name) and not name.startswith(f"{REPLACED}.")
    }
    return {plain_name(name): values for name, values in own.items()}


def merged(layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the plain tensors of one of PEFT's layers: W + scale x B A, or those that replace the module's.

    tensors  all of the layer's, whole, on the host, by their names in it; W is written over
    Raises CheckpointError where PEFT does not merge its kind.
    """
    if any(name.startswith(f"{REPLACED}.") for name in tensors):
        return {plain_name(name): values for name, values in tensors.items() if name.startswith(f"{REPLACED}.")}
    inner: Any = twin(layer, tensors)
    try:
        while hasattr(inner, WRAPPED):  # of stacked experts each matrix has a layer around those of the others
            inner.merge(safe_merge=False)
            inner = inner.base_layer
    except Exception as error:  # whatever PEFT says of a kind that it does not merge
        raise CheckpointError(
            f"{type(layer).__module__}.{type(layer).__name__} cannot be merged into the weights "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): export the adapter."
        ) from error
    return {name: p.detach() for name, p in inner.named_parameters()}


def twin(module: nn.Module, tensors: Mapping[str, Tensor]) -> Any:
    """Return a copy of a module with layers of PEFT that holds these tensors, and no engine's hooks.

    tensors  by their names in the module. What they leave out is on meta; a module that PEFT has put another one around
             is nothing but these, since an engine's may hold tiles
    """
    made: Any = object.__new__(type(module))  # an engine's modules refuse to be copied
    fresh = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}
    own = {name: value for name, value in vars(module).items() if name not in ("forward", "__reduce_ex__")}
    vars(made).update(own | fresh, _parameters={}, _buffers={}, _modules={})
    if "merged_adapters" in own:
        made.merged_adapters = []
    inside: dict[str, dict[str, Tensor]] = {}
    for name, values in tensors.items():
        head, _, rest = name.partition(".")
        inside.setdefault(head, {})[rest] = values
    for head, p in module._parameters.items():
        value = inside.pop(head, {}).get("", None if p is None else torch.empty_like(p, device="meta"))
        made._parameters[head] = None if value is None else nn.Parameter(value, requires_grad=False)
    for head, buffer in module._buffers.items():
        value = inside.pop(head, {}).get("", buffer)
        made._buffers[head] = value if value is None or value.is_meta else value.detach().cpu()
    for head, child in module._modules.items():
        held = inside.get(head, {})
        made._modules[head] = None if child is None else _inner_twin(module, head, child, held)
    return made


def _inner_twin(module: nn.Module, head: str, child: nn.Module, held: Mapping[str, Tensor]) -> nn.Module:
    from peft.utils.other import ModulesToSaveWrapper

    if head == KEPT or (head == WRAPPED and not hasattr(child, WRAPPED)):
        base = _holding(held)
        for name, p in child._parameters.items():
            if p is None and name not in held:
                base.register_parameter(name, None)  # a layer without bias, which PEFT asks for
        return base
    if head == REPLACED and isinstance(module, ModulesToSaveWrapper):
        saved = nn.ModuleDict()
        for adapter in child._modules:
            inside = {name.removeprefix(f"{adapter}."): t for name, t in held.items() if name.startswith(f"{adapter}.")}
            saved.add_module(adapter, _holding(inside))
        return saved
    copied: nn.Module = twin(child, held)
    return copied


def _holding(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of these tensors alone."""
    base = nn.Module()
    for name, values in tensors.items():
        owner = base
        *path, last = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(values, requires_grad=False))
    return base
