"""Names functions, classes and objects by what they compute, as far as that can be seen: name, code, plain values.

All lambdas have one name, so a function has a hash of its code beside it, with the functions inside of it. Numbers and
texts that it takes from around it, from its defaults, from a `functools.partial` or from its object count, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, NoneType
from typing import Any

from torch import nn

PLAIN = (str, int, float, NoneType)


def name_of(function: Any) -> str:
    """Return a name of a pattern, a class or a function, which has a hash of its code: all lambdas have one name."""
    if isinstance(function, str):
        return function
    if isinstance(function, partial):
        given = [*enumerate(function.args), *sorted(function.keywords.items())]
        return f"{name_of(function.func)} with {', '.join(f'{name}={value!r}' for name, value in _plain(given))}"
    named = function if hasattr(function, "__qualname__") else type(function)
    name, code = f"{_module(named)}.{named.__qualname__}", getattr(_called(function), "__code__", None)
    if code is None:
        return name
    said = _written(code, function.__doc__) + repr(list(_values(function)))
    return f"{name} ({hashlib.sha256(said.encode()).hexdigest()[:8]})"


def _module(named: Any) -> str:
    """Return the name of a thing's module as checkpoints have it, for which `setup` lies beside `train`."""
    name = str(named.__module__)
    return f"zero3d.{name.removeprefix('zero3d.train.')}" if name.startswith("zero3d.train.setup.") else name


def _values(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the plain values of a function's defaults and of what it takes from around it, or of an object."""
    if not hasattr(function, "__code__"):
        yield from _plain(sorted(getattr(function, "__dict__", {}).items()))
        return
    yield from _plain(enumerate(function.__defaults__ or ()))
    yield from _plain(sorted((function.__kwdefaults__ or {}).items()))
    cells = zip(function.__code__.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    yield from _plain((name, cell.cell_contents) for name, cell in cells if cell != _EMPTY)


def _plain(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    return ((name, value) for name, value in items if isinstance(value, PLAIN))


_EMPTY = CellType()  # of a variable that has no value yet


def _called(function: Any) -> Any:
    """Return what is called of a function, of an object that can be called, or of a module."""
    if hasattr(function, "__code__") or isinstance(function, type):
        return function
    return type(function).forward if isinstance(function, nn.Module) else type(function).__call__


def _written(code: CodeType, docstring: str | None) -> str:
    """Return a function's code, with that of functions inside of it, as a text that is the same in every process."""
    constants = [
        _written(each, None)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))  # in one order
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
        if each != docstring or docstring is None
    ]
    return repr((code.co_code, constants, code.co_names))
