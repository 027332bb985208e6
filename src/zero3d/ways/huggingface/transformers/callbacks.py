"""Callbacks of TRL that read all weights after a step: at stage 3 these are whole while they do.

They know of DeepSpeed's shards alone. A callback of the user's own says
`with trainer.accelerator.engine.full_params():` itself: without it the read is an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from zero3d.engine.engine import Engine

Due = Callable[[Any, tuple[Any, ...]], bool]  # of a callback, and what its method is given


def _always(callback: Any, given: tuple[Any, ...]) -> bool:
    return True


def _averages(callback: Any, given: tuple[Any, ...]) -> bool:
    """Return whether a callback of averages reads weights after this step."""
    since = given[1].global_step - callback.update_after
    return bool(since >= 0 and since % callback.update_freq == 0)


READERS: Mapping[str, Mapping[str, Due]] = {  # TRL's classes, their methods, and when these read weights
    "SyncRefModelCallback": {"sync_target_model": _always},  # called where it is due
    "BEMACallback": {"on_train_begin": _always, "on_step_end": _averages},
}


def let_read(callbacks: list[Any], engine: Callable[[], Engine | None]) -> None:
    """Have weights be whole where callbacks of TRL's read them: `engine` returns the one that trains by then."""
    for callback in callbacks:
        for kind in type(callback).__mro__:
            of_trl = kind.__module__.partition(".")[0] == "trl"
            for name, due in READERS.get(kind.__name__, {}).items() if of_trl else ():
                if not hasattr(vars(callback).get(name), "__wrapped__"):
                    vars(callback)[name] = _with_weights(callback, getattr(callback, name), due, engine)


def _with_weights(
    callback: Any, method: Callable[..., Any], due: Due, engine: Callable[[], Engine | None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def with_weights(*given: Any, **named: Any) -> Any:
        now = engine()
        reads = now is not None and now.stage == 3 and due(callback, given)
        with now.full_params() if reads and now is not None else nullcontext():
            return method(*given, **named)

    return with_weights
