"""DeepSpeed's schedules of the learning rate, number for number: WarmupLR and its decays, OneCycle, LRRangeTest.

DeepSpeed's schedulers count from -1, and are stepped after the optimizer: the first step is made with the rate of one
that was never stepped, the second with that of count 0. So `step` s here (0 for the first) is count s - 1 there.
The cycle: Smith, "A disciplined approach to neural network hyper-parameters" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zero3d.config.deepspeed_schedules import OPTIONS, with_defaults

BETA2 = 0.99  # of every group whose momentum is cycled


def deepspeed_rate(name: str, given: Mapping[str, Any], peak: float, steps: int, warmup: int) -> Callable[[int], float]:
    """Return the learning rate at step 0, 1, ... of `steps`.

    given         options that are not left out; peak, warmup: optimizer.lr and steps of warm-up, for options that are
                  null
    """
    options = with_defaults(name, given)
    if name == "LRRangeTest":
        return lambda step: _range_test(options, step)
    if name == "OneCycle":
        return lambda step: _cycle(options, step)
    options = {
        key: {"total_num_steps": steps, "warmup_num_steps": warmup, "warmup_max_lr": peak}[key]
        if value is None
        else value
        for key, value in options.items()
    }
    warm = max(2, int(options["warmup_num_steps"]))

    def rate(step: int) -> float:
        count = step - 1
        if name == "WarmupCosineLR":
            return peak * _cosine(options, count, warm)
        low, high = options["warmup_min_lr"], options["warmup_max_lr"]
        share = _share(options, count, warm, decays=name == "WarmupDecayLR") if count >= 0 else 0.0
        return float(low + (high - low) * share)

    return rate


class CycleOfBetas(NamedTuple):
    """Adam's betas that move against the rate. first: of groups at the beginning; at: the cycle's at step 0, 1, ..."""

    first: tuple[float, float]
    at: Callable[[int], tuple[float, float]]


def deepspeed_betas(name: str, given: Mapping[str, Any]) -> CycleOfBetas | None:
    """Return the betas of a cycle that moves them; None where they stay."""
    if name not in OPTIONS or name != "OneCycle" or not (options := with_defaults(name, given))["cycle_momentum"]:
        return None

    def betas(step: int) -> tuple[float, float]:
        low, high = options["cycle_min_mom"], options["cycle_max_mom"]
        if step - 1 < sum(_sizes(options)):
            return high - (high - low) * _height(options, step), BETA2
        if not options["decay_step_size"] or not options["decay_mom_rate"]:
            return high, BETA2
        return high * (1 + options["decay_mom_rate"] * _after(options, step)), BETA2

    return CycleOfBetas((options["cycle_min_mom"], BETA2), betas)


def _warming(options: Mapping[str, Any], count: int, warm: int) -> float:
    """Return how far warm-up has come."""
    return math.log(count + 1) / math.log(warm) if options["warmup_type"] == "log" else count / warm


def _share(options: Mapping[str, Any], count: int, warm: int, decays: bool) -> float:
    """Return how much of the way from the lowest to the highest rate there is at a count."""
    if count < warm:
        return _warming(options, count, warm)
    total = options["total_num_steps"] if decays else 0
    return float(max(0.0, (total - count) / max(1.0, total - warm))) if decays else 1.0


def _cosine(options: Mapping[str, Any], count: int, warm: int) -> float:
    if count < 0:
        return 0.0
    if count < warm:
        low = options["warmup_min_ratio"]
        return float(low + _warming(options, count, warm) * (1.0 - low))
    done = min(1.0, (count - warm + 1) / max(1, options["total_num_steps"] - warm))
    low = options["cos_min_ratio"]
    return float(max(0.0, low + (1.0 - low) * (1.0 + math.cos(math.pi * done)) / 2))


def _range_test(options: Mapping[str, Any], step: int) -> float:
    if step == 0:
        return float(options["lr_range_test_min_lr"])
    intervals = step / options["lr_range_test_step_size"]
    if options["lr_range_test_staircase"]:
        intervals = math.floor(intervals)
    return float(options["lr_range_test_min_lr"] * (1 + options["lr_range_test_step_rate"] * intervals))


def _cycle(options: Mapping[str, Any], step: int) -> float:
    low, high = options["cycle_min_lr"], options["cycle_max_lr"]
    if step == 0 or step - 1 < sum(_sizes(options)):
        return float(low + (high - low) * _height(options, step))
    if not options["decay_step_size"] or not options["decay_lr_rate"]:
        return float(low)
    return float(low / (1 + options["decay_lr_rate"] * _after(options, step)))


def _sizes(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the steps of a cycle's halves."""
    first, second = options["cycle_first_step_size"], options["cycle_second_step_size"]
    return float(first), float(first if second is None else second)


def _height(options: Mapping[str, Any], step: int) -> float:
    """Return how far up its cycle a step is, from 0 to 1, on a stair where there are some."""
    first, second = _sizes(options)
    total = first + second
    x, top = 1.0 + step / total - math.floor(1 + step / total), first / total
    up = x <= top
    height = x / top if up else (x - 1) / (top - 1)
    stairs = options["cycle_first_stair_count"]
    if not up and options["cycle_second_stair_count"] is not None:
        stairs = options["cycle_second_stair_count"]
    if stairs <= 0:
        return float(height)
    at = step % total
    return float(math.floor(at * stairs / first if at <= first else (total - at) * stairs / second) / stairs)


def _after(options: Mapping[str, Any], step: int) -> float:
    """Return intervals of the decay since the cycle ended."""
    return float((step - sum(_sizes(options))) / options["decay_step_size"])
