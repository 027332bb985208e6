"""Public names, and which of them lack a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

MODULES = ("zero3d", "zero3d.errors", "zero3d.plan", "zero3d.activations", "zero3d.weights")


def public() -> Iterator[tuple[str, object]]:
    """Every public name with its thing: what modules list, and methods and properties of classes among that."""
    for module in map(import_module, MODULES):
        errors = [name for name, thing in vars(module).items() if inspect.isclass(thing)]
        for name in getattr(module, "__all__", errors):
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for inner, member in vars(thing).items():
                    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    if not inner.startswith("_") and inspect.isfunction(member):
                        yield f"{module.__name__}.{name}.{inner}", member


def undocumented() -> list[str]:
    """Public names without a docstring; one that a dataclass or a named tuple made of its fields is none."""
    return [
        name
        for name, thing in public()
        if not (text := getattr(thing, "__doc__", None)) or text.startswith(f"{name.rsplit('.')[-1]}(")
    ]
