"""A user's own classes, told what happens in a run: `callbacks: [module:Class]`.

    event                           when, on every rank
    on_start(engine, config, step)  before the first step of a session; `step` steps are done
    on_evaluate(engine, record)     after an evaluation, with its values in the record
    on_step(engine, record)         after each step: what metrics.jsonl gets of it
    on_save(engine, folder)         a checkpoint is whole in `folder`
    on_end(engine, record)          after the last step, its evaluation and its checkpoint, and before the export

A class has the methods that it wants and is made without arguments. Records are copies: what is written into one
reaches nobody. What a callback raises ends the run (`own_calls.py`). A run that stops for a signal or an error has no
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isclass, signature
from types import MappingProxyType
from typing import Any

from zero3d.config.hints import nearest
from zero3d.config.own_code import imported, in_one_line
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, short
from zero3d.train.own_calls import own_call

KEY = "callbacks"
EVENTS = MappingProxyType(
    {
        "on_start": ("engine", "config", "step"),
        "on_step": ("engine", "record"),
        "on_evaluate": ("engine", "record"),
        "on_save": ("engine", "folder"),
        "on_end": ("engine", "record"),
    }
)
FOREIGN = MappingProxyType(  # events of Hugging Face's Trainer and of Lightning -> ours
    {
        "on_train_begin": "on_start",
        "on_train_start": "on_start",
        "on_train_end": "on_end",
        "on_fit_end": "on_end",
        "on_step_end": "on_step",
        "on_log": "on_step",
        "on_train_batch_end": "on_step",
        "on_validation_end": "on_evaluate",
        "on_save_checkpoint": "on_save",
    }
)


def open_callbacks(paths: Sequence[str]) -> list[type]:
    """Import classes and check their events. Raises ConfigError."""
    return [_open(path) for path in paths]


def _open(path: str) -> type:
    kind = imported(KEY, path)
    if not isclass(kind):
        raise ConfigError(f"{KEY} {short(path)!r} is not a class, but a {type(kind).__name__}: name a class.")
    methods = [name for name in dir(kind) if _like_event(name) and callable(getattr(kind, name))]
    for name in methods:
        if name not in EVENTS:
            meant = FOREIGN.get(name) or nearest(name, EVENTS)
            hint = f"Did you mean {meant}?" if meant else f"There are {', '.join(EVENTS)}."
            raise ConfigError(f"{KEY} {path}: {name} is not an event. {hint}")
    if not methods:
        raise ConfigError(f"{KEY} {path} has none of the events: give it {' or '.join(EVENTS)}.")
    for name in methods:
        _check_arguments(path, kind, name)
    return kind


def _like_event(name: str) -> bool:
    return name.startswith("on_") or (name.startswith("on") and name[2:3].isupper())


def _check_arguments(path: str, kind: type, name: str) -> None:
    """Refuse a method that cannot be called as the table says."""
    try:
        signature(getattr(kind, name)).bind(*[None] * (1 + len(EVENTS[name])))
    except TypeError as error:
        raise ConfigError(f"{KEY} {path}: {name} is called with ({', '.join(EVENTS[name])}): {error}.") from error
    except ValueError:  # its arguments are not known
        pass


class Callbacks:
    """Owns the objects of a run's classes, in the order of the configuration."""

    def __init__(self, paths: Sequence[str], engine: Engine) -> None:
        self._engine = engine
        self._objects = [(path, _made(path, kind)) for path, kind in zip(paths, open_callbacks(paths), strict=True)]

    def tell(self, event: str, *arguments: Any) -> None:
        """Call every object that has this event, in turn; a record is given as a copy. Raises ConfigError."""
        for path, method in self._methods(event):
            with own_call(f"{KEY} {path}: {event}", self._engine, KEY):
                method(self._engine, *(dict(each) if isinstance(each, dict) else each for each in arguments))

    def _methods(self, event: str) -> Iterator[tuple[str, Any]]:
        return ((path, getattr(each, event)) for path, each in self._objects if hasattr(each, event))


def _made(path: str, kind: type) -> Any:
    try:
        return kind()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{KEY} {path} cannot be made without arguments: {in_one_line(error)}") from error
