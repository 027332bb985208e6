"""Tensors inside other things: a module may take and return dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from tensors_in(getattr(value, part.name, None))


def tensors_out(output: Any) -> Iterator[Tensor]:
    """Yield all tensors in what a forward returns, which may also be an object of the caller's own class."""
    nest = isinstance(output, (Tensor, Mapping, list, tuple)) or dataclasses.is_dataclass(output)
    return tensors_in(output if nest else getattr(output, "__dict__", None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with every tensor changed; parts in which nothing changed keep their identity."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else _mapping_like(value, items)
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return _sequence_like(value, parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.init}
        new = {key: map_tensors(item, change) for key, item in old.items()}
        return value if all(new[key] is old[key] for key in new) else dataclasses.replace(value, **new)
    return value


def own_containers(value: Any) -> Any:
    """Return the same tensors in new mappings and lists: what somebody puts into the old ones stays there."""
    if isinstance(value, MutableMapping):
        return _mapping_like(value, {key: own_containers(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return _sequence_like(value, [own_containers(item) for item in value])
    return value


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `value` with other items; one that is no dict is copied first."""
    if type(value) is dict:
        return items
    copied: Any = copy.copy(value)
    for key, item in items.items():
        copied[key] = item
    return copied


def _sequence_like(value: Any, parts: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the class of `value` with other items."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
