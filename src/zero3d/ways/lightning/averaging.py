"""Lightning's callbacks that average weights: what they read and write of the module is whole then.

They go through `module.parameters()` on every rank, at moments of their own: `StochasticWeightAveraging` at epochs,
`WeightAveraging` (and `EMAWeightAveraging`) after steps and around validation. An engine's `ema` averages in shards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning.pytorch import callbacks

from zero3d.ways.lightning.checkpoints import CURRENT

AVERAGING = {  # methods that read or write parameters
    "StochasticWeightAveraging": ("update_parameters", "transfer_weights"),
    "WeightAveraging": ("_swap_models", "_copy_average_to_current", "on_load_checkpoint"),
}
Whole = Callable[[], AbstractContextManager[None]]


def let_average(callback: Any, whole: Whole) -> None:
    """Have a callback that averages find parameters whole: `whole` makes them so."""
    for kind, names in AVERAGING.items():
        if isinstance(callback, getattr(callbacks, kind, ())):
            for name in names:
                _put(callback, name, whole)
            if hasattr(average := getattr(callback, "_average_model", None), "update_parameters"):
                _put(average, "update_parameters", whole)


def _put(owner: Any, name: str, whole: Whole) -> None:
    """Put a method of an object into a block in which parameters are whole, in the place of an earlier one."""
    if hasattr(vars(owner).get(name), "_is_whole"):
        delattr(owner, name)
    original = getattr(owner, name, None)
    if original is None:
        return

    @wraps(original)
    def method(*given: Any, **named: Any) -> Any:
        with whole():
            if name == "on_load_checkpoint":
                given = _with_state(*given)
            return original(*given, **named)

    method._is_whole = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _with_state(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return what a callback is given to load, with the weights that the engine has loaded already."""
    if checkpoint.get(CURRENT) == {}:
        checkpoint = checkpoint | {CURRENT: module.state_dict()}
    return trainer, module, checkpoint
