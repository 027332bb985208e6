"""DeepSpeed's JSON and its loop on our engine: the same run, or one line that says why not.

keys        every key of DeepSpeed 0.19: what it becomes here, that it has no effect, or why it is refused
document    the JSON itself, read and checked against these keys
translate   its values as keys of a configuration
merge       together with the caller's own file and overrides, which fill "auto" and must not contradict
report      what was made of it, as lines, as a commented YAML file and as the tables of docs/deepspeed.md
drop_in     `initialize`, for programs that are written for DeepSpeed (with torch; the others are without)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.integrations.deepspeed.drop_in import DeepSpeedEngine as DeepSpeedEngine, initialize as initialize

__all__ = ["DeepSpeedEngine", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.integrations.deepspeed' has no attribute {name!r}")
    return getattr(import_module("zero3d.integrations.deepspeed.drop_in"), name)
