"""Merging adapters of PEFT into the weights that they adapt, one layer at a time: W + scale x B A.

    adapted.q_proj.base_layer.weight       [out, in]   W
    adapted.q_proj.lora_A.default.weight   [r, in]     A      ->   adapted.q_proj.weight   [out, in]
    adapted.q_proj.lora_B.default.weight   [out, r]    B

PEFT's own layers do the arithmetic, on a twin that holds whole tensors, so that every kind of theirs (transposed ones,
embeddings, convolutions, stacked experts, DoRA) has the bits of `merge_and_unload` on the host. An engine's own layers
hold slices and tiles, and are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from zero3d.errors import CheckpointError

WRAPPER = "base_model.model."  # how names begin in a model inside PEFT's wrapper
WRAPPED, REPLACED, KEPT = "base_layer", "modules_to_save", "original_module"


def plain_name(name: str) -> str:
    """Return what a parameter or buffer is called in the model without adapters."""
    parts = name.removeprefix(WRAPPER).split(".")
    kept: list[str] = []
    for i, part in enumerate(parts):
        of_replaced = i > 0 and parts[i - 1] == REPLACED  # the adapter's name
        if part not in (WRAPPED, REPLACED, KEPT) and not of_replaced:
            kept.append(part)
    return ".".join(kept)


def adapted_layers(modules: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return PEFT's layers by name, of those inside one another the outermost. Raises CheckpointError.

    modules  parts of one model, with the names of the whole
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    found: dict[str, nn.Module] = {}
    for module in modules:
        for name, layer in module.named_modules():
            if not isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)) or _is_inside(name, found):
                continue
            if not isinstance(layer, (BaseTunerLayer, ModulesToSaveWrapper)):
                raise CheckpointError(
                    f"{name} is PEFT's {type(layer).__name__}, which is not merged here: export the adapter, and call "
                    "PEFT's merge_and_unload() on what PeftModel.from_pretrained makes of it."
                )
            found[name] = layer
    return found


def _is_inside(name: str, around: Iterable[str]) -> bool:
    parts = name.split(".")
    heads = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return any(each in heads for each in around)


def merged(layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the plain tensors of one of PEFT's layers: W + scale x B A, or those that replace the module's.

    tensors  all of the layer's, whole, on the host, by their names in it; W is written over
    """
    if any(name.startswith(f"{REPLACED}.") for name in tensors):
        return {plain_name(name): values for name, values in tensors.items() if name.startswith(f"{REPLACED}.")}
    inner: Any = _twin(layer, tensors)
    while hasattr(inner, WRAPPED):  # of stacked experts each matrix has a layer around those of the others
        inner.merge(safe_merge=False)
        inner = inner.base_layer
    return {name: p.detach() for name, p in inner.named_parameters()}


def _twin(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a layer of PEFT's that holds these tensors, on a base of nothing but parameters."""
    twin: Any = object.__new__(type(layer))  # an engine's modules refuse to be copied
    vars(twin).update(vars(layer), _parameters={}, _modules=dict(layer._modules), merged_adapters=[])
    inside: dict[str, dict[str, Tensor]] = {}
    for name, values in tensors.items():
        head, _, rest = name.partition(".")
        if rest:
            inside.setdefault(head, {})[rest] = values
        else:
            twin._parameters[head] = nn.Parameter(values, requires_grad=False)
    for head, held in inside.items():
        child = layer.get_submodule(head)
        is_base = head == WRAPPED and not hasattr(child, WRAPPED)
        twin._modules[head] = _base(held) if is_base else _twin(child, held)
    made: nn.Module = twin
    return made


def _base(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module of these parameters alone."""
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
