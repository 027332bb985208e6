"""DeepSpeed's schedules of the learning rate: names, options and their values where they are left out.

Facts of DeepSpeed 0.19 (runtime/lr_schedules.py). What `null` means here: the peak is optimizer.lr, all steps are the
run's, steps of warm-up are schedule.warmup's, and a second half is as the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from zero3d.config.hints import nearest
from zero3d.errors import short

Option = float | str | bool | None
WARM_UP: Mapping[str, Option] = {"warmup_num_steps": 1000, "warmup_type": "log"}
BETWEEN: Mapping[str, Option] = {"warmup_min_lr": 0.0, "warmup_max_lr": None}
OPTIONS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "WarmupLR": {**BETWEEN, **WARM_UP},
        "WarmupDecayLR": {**BETWEEN, "warmup_max_lr": 0.001, **WARM_UP, "total_num_steps": None},
        "WarmupCosineLR": {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **WARM_UP, "total_num_steps": None},
        "OneCycle": {
            "cycle_min_lr": None,
            "cycle_max_lr": None,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
    }
)
POSITIVE = ("warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
NEEDED = ("cycle_min_lr", "cycle_max_lr")
NULLS = ("total_num_steps", "warmup_num_steps", "warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count")
SWITCHES = ("cycle_momentum", "lr_range_test_staircase")
WARM_UPS = ("log", "linear")


def option_problems(name: str, given: Mapping[str, Option]) -> Iterator[str]:
    """Yield what is wrong with the options of a schedule."""
    known = OPTIONS[name]
    for key, value in given.items():
        if key not in known:
            near = nearest(key, known)
            yield f"{name} has no option {short(key)}. " + (
                f"Did you mean {near}?" if near else f"It has {', '.join(known)}."
            )
        elif key == "warmup_type":
            if value not in WARM_UPS:
                yield f"{key} is {' or '.join(WARM_UPS)}; found {short(repr(value))}."
        elif key in SWITCHES:
            if not isinstance(value, bool):
                yield f"{key} is true or false; found {short(repr(value))}."
        elif value is None:
            if key not in NULLS:
                yield f"{key} is a number; found null."
        elif isinstance(value, (bool, str)) or value < 0 or (key in POSITIVE and value == 0):
            yield f"{key} is a number {'above' if key in POSITIVE else 'from'} 0; found {short(repr(value))}."
    yield from (f"{name} needs {key}." for key in NEEDED if key in known and key not in given)


def with_defaults(name: str, given: Mapping[str, Option]) -> dict[str, Any]:
    """Return all options of a schedule."""
    return {**OPTIONS[name], **given}
