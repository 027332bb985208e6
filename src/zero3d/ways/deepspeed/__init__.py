"""DeepSpeed's JSON and its loop on our engine: the same run, or one line that says why not.

keys         every key of DeepSpeed 0.19: what it becomes here, that it has no effect, or why it is refused
document     the JSON itself, read and checked against these keys
translate    its values as keys of a configuration
merge        together with the caller's own file and overrides, which fill "auto" and must not contradict
report       what was made of it, as lines, as a commented YAML file and as the tables of docs/deepspeed-reference.md
optimizer_kinds  the optimizers that a JSON may name, and where
names        what programs call of DeepSpeed and is not here, and what to use
imports      its modules that programs import: an alias or refused

For programs that are written for DeepSpeed, with torch; the others are without:

drop_in      `initialize`, `init_distributed`, `add_config_arguments`
engine       its engine: the loop
questions    what the engine says of itself
batches      train_batch and eval_batch
checkpoints  checkpoints, and weights alone; client_state: what a program keeps in one
utils, zero  its modules of these names: fp32 parameters, gradients and states; GatheredParameters
runtime      its package of this name; memory_usage: runtime.utils
accelerator  get_accelerator(), which is torch.accelerator by its names
ops          its package of this name; adam: ops.adam, whose classes are torch's
optimizers   the optimizer of a JSON for a program; lion: one of them
owners       which engine a parameter belongs to
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero3d.ways.deepspeed.imports import install
from zero3d.ways.deepspeed.names import ALIASES, refusing

if TYPE_CHECKING:
    from zero3d.ways.deepspeed.drop_in import (
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from zero3d.ways.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize"]
__version__ = "0.19.8"
_PLACES = {
    **dict.fromkeys(("initialize", "init_distributed", "add_config_arguments"), "drop_in"),
    "DeepSpeedEngine": "engine",
    "get_accelerator": "accelerator",
    "log_dist": "utils",
}


_refused = refusing("deepspeed")


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name in ("utils", "zero", "runtime", "accelerator", "ops"):
        return import_module(f"{__name__}.{name}")
    if name in ALIASES:
        return import_module(ALIASES[name])
    if name == "DeepSpeedConfigError":
        return import_module("zero3d.errors").ConfigError
    return _refused(name)


install()
