"""Ways of one part in turns, timed, and what becomes of the seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every counted call by way: one round warms up, and each way is first in turn."""
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begun)
    return {name: times[1:] for name, times in seconds.items()}


def rates(seconds: Mapping[str, list[float]], moved: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return the rows of a part: median seconds, and GB/s for the bytes that a way has moved."""
    return {
        name: {"median s": median(times), "GB/s": moved[name] / 1e9 / median(times)} for name, times in seconds.items()
    }


def at_least(what: str, reached: float, target: float) -> dict[str, Any]:
    """Return a target that is met by reaching it."""
    return {"what": what, "reached": reached, "target": target, "met": reached >= target}
