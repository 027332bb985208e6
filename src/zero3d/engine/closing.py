"""Records what an engine changes in a model's modules, and undoes it when the engine is closed.

    before   Before(model)             hooks, attributes and parameters of every module, as the caller has made them
    built    before.changes()          all differences, which are the engine's; nothing else is remembered
    closed   changes.undo(values, ...)  the modules as they were, with parameters that have these values

    hooks        the engine's are removed; the caller's own, later ones too, stay
    attributes   forwards, classes and child modules that were replaced are put back, unless the caller has replaced
                 them since
    parameters   the same objects, in the dtype in which they came; of a layer in tiles a new one
    buffers      stay as they are

A rank of a pipeline, or of a tp or ep axis, never has the whole model: there it goes on refusing to be used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hooks" in name]
KEPT = {"training", "_parameters", "_buffers", *HOOKS}  # not compared as attributes
ABSENT = object()


class Known(NamedTuple):
    """A module as the caller has made it. parameters: from a name in the module to that in the model."""

    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    hooks: Mapping[str, set[int]]
    parameters: Mapping[str, str | None]

    @classmethod
    def of(cls, module: nn.Module, names: Mapping[nn.Parameter, str]) -> Known:
        """Return what a module has now."""
        attributes = {name: value for name, value in vars(module).items() if name not in KEPT}
        attributes["_modules"] = dict(module._modules)
        parameters = {key: None if p is None else names[p] for key, p in module._parameters.items()}
        return cls(type(module), attributes, {name: set(vars(module)[name]) for name in HOOKS}, parameters)


class Before:
    """Knows a model as it was, by names, numbers and identities: it keeps no parameter alive."""

    def __init__(self, model: nn.Module) -> None:
        names = {p: name for name, p in model.named_parameters()}
        self._dtypes = {name: p.dtype for p, name in names.items()}
        self._model = model
        self._hooks = {name: set(_hooks_of(p)) for p, name in names.items()}
        self._modules = [(module, Known.of(module, names)) for module in model.modules()]

    def changes(self) -> Changes:
        """Return what has changed since."""
        changed = [_Change(module, known) for module, known in self._modules]
        return Changes(self._model, self._dtypes, self._hooks, changed)


class _Change:
    """Records how one module differs from before."""

    def __init__(self, module: nn.Module, known: Known) -> None:
        self.module = module
        self._kind = known.kind
        self._parameters = known.parameters
        self._built = dict(module._parameters)
        self._hooks = {name: set(vars(module)[name]) - known.hooks[name] for name in HOOKS}
        now = {**vars(module), "_modules": dict(module._modules)}
        before = known.attributes
        self._attributes = {
            name: (before.get(name, ABSENT), now.get(name, ABSENT))
            for name in dict.fromkeys((*before, *now))
            if name not in KEPT and not _same(before.get(name, ABSENT), now.get(name, ABSENT))
        }

    def put(self, name: str, value: Any) -> None:
        before, _ = self._attributes.get(name, (vars(self.module).get(name, ABSENT), None))
        self._attributes[name] = before, value
        vars(self.module)[name] = value

    def undo(self, made: Mapping[str, nn.Parameter]) -> None:
        module = self.module
        module.__class__ = self._kind
        for name, numbers in self._hooks.items():
            for number in numbers:
                vars(module)[name].pop(number, None)
        for name, (before, ours) in self._attributes.items():
            there = dict(module._modules) if name == "_modules" else vars(module).get(name, ABSENT)
            if not _same(there, ours):
                continue  # the caller's
            if name == "_modules":
                module._modules.clear()
                module._modules.update(before)
            elif before is ABSENT:
                del vars(module)[name]
            else:
                vars(module)[name] = before
        registered = dict(module._parameters)
        back: dict[str, nn.Parameter | None] = {}
        for key, owner in self._parameters.items():
            if registered.get(key, ABSENT) is self._built.get(key, ABSENT):
                back[key] = None if owner is None else made.get(owner, registered.get(key))
            elif key in registered:
                back[key] = registered[key]  # the caller has replaced it
        module._parameters = {**back, **{key: p for key, p in registered.items() if key not in self._parameters}}


class Changes:
    """Knows what an engine has changed in a model, hooks of parameters included.

    model   as the caller has it
    dtypes  of its parameters as they came, by name
    """

    def __init__(
        self,
        model: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        hooks: Mapping[str, set[int]],
        modules: Iterable[_Change],
    ) -> None:
        self.model = model
        self.dtypes = dtypes
        self._hooks = hooks
        self._modules = list(modules)

    def put(self, name: str, value: Any, everywhere: bool = False) -> None:
        """Give the model, or each of its modules, an attribute of its own, to be undone with the rest."""
        for change in self._modules if everywhere else self._modules[:1]:
            change.put(name, value)

    def undo(
        self, values: Mapping[str, Tensor], owned: Mapping[str, nn.Parameter], trained: Collection[str]
    ) -> dict[str, nn.Parameter]:
        """Put the modules back as they were, and whole values into their parameters, by name; return these.

        owned    the engine's parameters; for a layer that it kept in parts a new parameter is made
        trained  names of parameters with some part that requires a gradient
        """
        made = dict(owned)
        for name, p in made.items():
            for number in set(_hooks_of(p)) - self._hooks.get(name, set()):
                del _hooks_of(p)[number]
        for name, value in values.items():
            if name in made:
                made[name].data = value
            else:
                made[name] = nn.Parameter(value, requires_grad=name in trained)
        for change in self._modules:
            change.undo(made)
        return made


def give_back_optimizer(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Have an engine's torch optimizer hold these parameters, by group, with empty state."""
    optimizer.state.clear()
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = list(params)


def _hooks_of(p: nn.Parameter) -> dict[int, Any]:
    """Return a parameter's hooks on its accumulated gradient, by number."""
    hooks: dict[int, Any] | None = p._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _same(one: Any, other: Any) -> bool:
    """Return whether two attributes are the same object; of children, whether all are."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(one[key] is other[key] for key in one)
    return one is other
