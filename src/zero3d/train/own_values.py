"""Values of a user's own function at each evaluation: `evaluate.function: module:function`.

    function(engine, step) -> {name: number}

is called on every rank, without gradients, after the held-out loss. It may call what all ranks call together
(`engine.evaluate`, `engine.generate`, `engine.full_params`) or exchange numbers (`engine.world.exchange`). Names must
be the same on all ranks; of the numbers those of rank 0 count, on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any

from zero3d.config.own_code import imported
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, short
from zero3d.train.own_calls import own_call

KEY = "evaluate.function"
Function = Callable[[Engine, int], Mapping[str, Any]]


def open_function(path: str) -> Function:
    """Import a function of an engine and a step. Raises ConfigError."""
    function: Function = imported(KEY, path)
    if not callable(function):
        raise ConfigError(f"{KEY} {short(path)!r} is a {type(function).__name__}: it must be a function(engine, step).")
    try:
        signature(function).bind(None, 0)
    except TypeError as error:
        raise ConfigError(f"{KEY} {short(path)!r} is called as function(engine, step): {error}.") from error
    except ValueError:  # its arguments are not known
        pass
    return function


class OwnValues:
    """Owns the function of a run."""

    def __init__(self, path: str, engine: Engine) -> None:
        self._path = path
        self._engine = engine
        self._function = open_function(path)

    @property
    def _name(self) -> str:
        return f"{KEY} {self._path}"

    def at(self, step: int, taken: Collection[str]) -> dict[str, float]:
        """Return its values after `step`, rank 0's, on all ranks. taken: names that others have.

        Raises ConfigError, on all ranks, where it returns no numbers by name, or ranks do not return the same names.
        """
        engine = self._engine
        with own_call(f"{self._name} at step {step}", engine, "evaluate"):
            found = self._function(engine, step)
        world = engine.world
        values = agree(world, partial(self._checked, found, taken))
        of_ranks = [json.loads(text) for text in exchange_texts(world, json.dumps(values))]
        agree(world, lambda: self._check_names(of_ranks) if world.rank == 0 else None)
        return {name: float(of_ranks[0][name]) for name in values}

    def _checked(self, found: Any, taken: Collection[str]) -> dict[str, float]:
        """Return what the function returned as plain numbers."""
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{self._name} returned {_kind(found)}: it must return a dict of numbers by name, such as "
                "{'accuracy': 0.5}."
            )
        values = {}
        for name, value in found.items():
            if not isinstance(name, str) or not name.isprintable() or not name.strip():
                raise ConfigError(f"{self._name} returned the name {short(repr(name))}: names must be texts.")
            if name in taken:
                raise ConfigError(f"{self._name} returned {name!r}, which metrics have already: call it otherwise.")
            values[name] = self._number(name, value)
        return values

    def _number(self, name: str, value: Any) -> float:
        """Return a number, or the only element of a tensor or array."""
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ConfigError(f"{self._name} returned {name!r} as {_kind(value)}: it must be a number.") from None

    def _check_names(self, of_ranks: list[dict[str, float]]) -> None:
        for rank, values in enumerate(of_ranks):
            if values.keys() != of_ranks[0].keys():
                raise ConfigError(
                    f"{self._name} returned {_listed(of_ranks[0])} on rank 0 and {_listed(values)} on rank {rank}: it "
                    "is called on every rank and must return the same names on all."
                )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{short(repr(value))} ({type(value).__name__})"


def _listed(values: Collection[str]) -> str:
    return ", ".join(sorted(values)) or "no names"
