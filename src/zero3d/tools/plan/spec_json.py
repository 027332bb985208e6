"""Planner data as JSON and back. What a tree must look like is read off the dataclasses' own annotations.

dataclass <-> object        tuple[X, ...] <-> list        Mapping[str, X] <-> object        X | None <-> X or null

A plan is one flat object, of its keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short
from zero3d.tools.plan.spec import PLAN_KEYWORDS, ParallelPlan

T = TypeVar("T")


def to_json(value: Any) -> dict[str, Any]:
    """Return a dataclass of `tools.plan.spec` as a tree that `json.dump` takes."""
    tree = _plain(value.as_dict() if isinstance(value, ParallelPlan) else asdict(value))
    assert isinstance(tree, dict)
    return tree


def from_json(cls: type[T], tree: Any) -> T:
    """Build the dataclass `cls` of a tree. Raises ConfigError for unknown, missing and misfit entries, with paths."""
    built = _build(cls, tree, cls.__name__)
    assert isinstance(built, cls)
    return built


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value


def _build(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, path)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        rest = [option for option in inner if option is not type(None)]
        return None if value is None else _build(rest[0], value, path)
    if origin is tuple:
        items = _expect(value, (list, tuple), path, "a list")
        return tuple(_build(inner[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if origin is Mapping:
        entries = _expect(value, (Mapping,), path, "an object")
        return {str(key): _build(inner[1], item, f"{path}.{key}") for key, item in entries.items()}
    if kind is float:
        try:
            return float(_expect(value, (int, float), path, "a number"))
        except OverflowError:
            raise ConfigError(f"{path}={short(value)}: expected a number that a float can be.") from None
    return _expect(value, (kind,), path, {int: "a whole number", str: "text", bool: "true or false"}[kind])


def _build_dataclass(kind: type, value: Any, path: str) -> Any:
    entries = _expect(value, (Mapping,), path, "an object")
    hints = _hints(kind)
    names = list(hints)
    for key in entries:
        if key not in names:
            near = nearest(str(key), names)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"{path}: {short(repr(key))} is unknown; it has {', '.join(names)}.{hint}")
    built = {key: _build(hints[key], inner, f"{path}.{key}") for key, inner in entries.items()}
    try:
        return kind(**built)
    except TypeError as error:
        raise ConfigError(f"{path}: {str(error).replace('__init__() ', '')}.") from None


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the type of each entry: of a plan by keyword."""
    own = get_type_hints(kind)
    if kind is ParallelPlan:
        return {
            name: get_type_hints(own[field])[key] if key else own[field] for name, (field, key) in PLAN_KEYWORDS.items()
        }
    return {each.name: own[each.name] for each in fields(kind)}


def _expect(value: Any, kinds: tuple[Any, ...], path: str, words: str) -> Any:
    """Return the value, or raise ConfigError. True and False are no numbers."""
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{path}={short(repr(value))}: expected {words}.")
