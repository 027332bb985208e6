"""What is known of a type of models before torch is imported: its tensor-parallel plan, and sizes nobody has given.

    the plan    zero3d's own (tensor_parallel/shipped.py) over transformers'
    a number    what a config.json or a preset says, by either of its names; else the type's usual one

The source of transformers' configuration of the type is read, and not imported, which takes seconds. What cannot be
read so is nothing here, and is left to the ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from zero3d.errors import ConfigError
from zero3d.tensor_parallel.shipped import SHIPPED

PLAN, NAMES, KIND = "base_model_tp_plan", "attribute_map", "model_type"  # of a class of transformers'
OF_TEXT = "_text"  # ends types whose configuration is beside another's


class UnbuiltType(NamedTuple):
    """A type with what one model's configuration says.

    given    of that configuration
    usual    literals of the type's class
    plan     styles by name, as tensor_parallel/plan.py has them
    """

    given: Mapping[str, Any]
    usual: Mapping[str, Any]
    plan: Mapping[str, str]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> UnbuiltType:
        """Return what is known of the type that a configuration names."""
        kind = str(given.get(KIND))
        usual = _literals(kind)
        builtin = usual.get(PLAN)
        plan = dict(builtin) if isinstance(builtin, dict) else {}
        return cls(given, usual, {**plan, **_shipped(kind, cls(given, usual, {}))})

    def number(self, name: str) -> int | None:
        """Return a number by transformers' common name; None where it is not known."""
        for known in (self.given, self.usual):
            for key in (name, self.own_names.get(name, name)):
                if key in known:
                    return known[key] if isinstance(known[key], int) else None
        return None

    @property
    def own_names(self) -> Mapping[str, str]:
        """Return what the type itself calls attributes, by transformers' common names."""
        names = self.usual.get(NAMES)
        return names if isinstance(names, dict) else {}

    @property
    def attributes(self) -> SimpleNamespace:
        """Return all of it as attributes, as a plan that follows from a configuration asks for them."""
        known = {**self.usual, **self.given}
        common = {name: known[own] for name, own in self.own_names.items() if own in known}
        return SimpleNamespace(**{**common, **known})


def _shipped(kind: str, known: UnbuiltType) -> Mapping[str, str]:
    """Return zero3d's own plan of a type; nothing where it has none, or asks for what is not known."""
    entry = SHIPPED.get(kind, {})
    if not callable(entry):
        return entry
    with suppress(AttributeError, TypeError, ConfigError):
        return entry(known.attributes)
    return {}


def _literals(kind: str) -> dict[str, Any]:
    """Return the attributes that the class of a type's configuration has by literals; nothing where it is not found."""
    package = find_spec("transformers")
    if package is None or package.origin is None or not kind.isidentifier():
        return {}
    for folder in dict.fromkeys((kind, kind.removesuffix(OF_TEXT))):
        file = Path(package.origin).parent / "models" / folder / f"configuration_{folder}.py"
        if file.is_file():
            tree = ast.parse(file.read_text(encoding="utf-8"))
            classes = (dict(_assigned(node)) for node in tree.body if isinstance(node, ast.ClassDef))
            return next((found for found in classes if found.get(KIND) == kind), {})
    return {}


def _assigned(body: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Yield names of a class and the literals that they are assigned."""
    for node in body.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                with suppress(ValueError):
                    yield target.id, ast.literal_eval(node.value)
