"""Names of modules and parameters as plans of transformers call them: layers.*.mlp.experts, * for one part of a name.

A name may begin at the model, at the model inside a PEFT wrapper, or at the base model below the head.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator

from torch import nn

from zero3d.models.bases import base_of, language_model, model_of, sees_images
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder


def roots(model: nn.Module) -> list[str]:
    """Return the prefixes at which a pattern may begin."""
    named = {id(module): name for name, module in model.named_modules()}
    inner = inner_model(model)
    names = [named.get(id(module)) for module in (inner, base_of(model))]
    return ["", *(f"{name}." for name in names if name)]


def is_of_tower(model: nn.Module) -> Callable[[str], bool]:
    """Return what says of a name whether it is of a vision-language model's base, and not of its language model."""
    if not sees_images(model):
        return lambda name: False
    named = {module: name for name, module in model.named_modules()}
    base, text = named[base_of(model_of(model))], language_model(model)
    return lambda name: name.startswith(f"{base}." if base else "") and not f"{name}.".startswith(f"{text}.")


def names_in(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield every module's and parameter's full name, and the names that a pattern may call it."""
    prefixes = roots(model)
    for module_name, module in model.named_modules():
        for local in ("", *dict(module.named_parameters(recurse=False))):
            name = ".".join(part for part in (module_name, local) if part)
            yield name, [name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)]


def fits(pattern: str, name: str) -> bool:
    """Return whether a pattern fits a name, part by part, so that * never stands for two."""
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(fnmatch.fnmatchcase, parts, patterns))


def in_other_chunk(model: nn.Module, pattern: str) -> bool:
    """Return whether a pattern names something inside a module that is in another model chunk."""
    parts, prefixes = pattern.split("."), roots(model)
    for name, module in model.named_modules():
        if isinstance(module, Placeholder):
            aliases = [name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)]
            if any(fits(".".join(parts[: alias.count(".") + 1]), alias) for alias in aliases):
                return True
    return False
