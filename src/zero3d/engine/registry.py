"""Refuse a model whose parameters were added, removed or replaced after its engine was built.

An engine trains, saves and exports the parameters that it found. A module put in afterwards has others, which nobody
updates and which differ from rank to rank.

    a new head            model.lm_head = nn.Linear(...)       another parameter under a known name
    an adapter            get_peft_model(engine.module, ...)   new names
    a new norm weight     norm.weight = nn.Parameter(...)      another parameter under a known name
    a buffer              module.register_buffer(...)          a new name

The model is checked in every step and every forward without grad, so the check is cheap. Modules keep parameters and
modules in dicts, whose values are all compared by identity, in one pass. Buffers are compared by name alone: forwards
assign new ones to old names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from zero3d.errors import LayoutError
from zero3d.models.names import persistent_buffers

REGISTERED = itemgetter("_parameters", "_modules")  # the dicts of a module whose values are compared


class Registered(NamedTuple):
    """Holds what some modules have registered: parameters and modules, names of buffers, and how many of each."""

    values: tuple[Any, ...]
    names: list[str]
    lengths: list[int]


class Registry:
    """Knows the parameters, persistent buffers and modules of a model as they were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(_parameters(module))
        self._buffers = set(persistent_buffers(module))
        self._look()

    def check(self) -> None:
        """Raise LayoutError where the model has other parameters, or persistent buffers, than it had."""
        values, names, lengths = self._registered()
        known = self._known
        if lengths == known.lengths and names == known.names and all(map(is_, values, known.values)):
            return
        found, buffers = dict(_parameters(self._module)), set(persistent_buffers(self._module))
        replaced = [name for name, p in self._parameters.items() if name in found and found[name] is not p]
        added = [name for name in found if name not in self._parameters] + sorted(buffers - self._buffers)
        removed = [name for name in self._parameters if name not in found] + sorted(self._buffers - buffers)
        changes = [("replaced", replaced), ("added", added), ("removed", removed)]
        if any(names for _, names in changes):
            told = "; ".join(f"{what}: {_some(names)}" for what, names in changes if names)
            raise LayoutError(
                f"the model has other parameters than when its Engine was built ({told}): the engine would neither "
                "train nor save them. Change modules first (new heads, adapters, more tokens), then build the Engine; "
                "new values for the same parameters are written inside `with engine.full_params():`."
            )
        self._look()  # modules without parameters came or went

    def _look(self) -> None:
        """Take the modules' present parameters, buffers and modules as the known ones."""
        self._modules = [vars(inner) for inner in self._module.modules()]
        values, names, lengths = self._registered()
        self._known = Registered(tuple(values), names, lengths)

    def _registered(self) -> tuple[Iterator[Any], list[str], list[int]]:
        """Return the values that modules have registered now, to be read one by one, names of buffers, and counts."""
        dicts = [*chain.from_iterable(map(REGISTERED, self._modules))]
        buffers = [attributes["_buffers"] for attributes in self._modules]
        lengths = [*map(len, dicts), *map(len, buffers)]
        return chain.from_iterable(map(dict.values, dicts)), [*chain.from_iterable(buffers)], lengths


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
