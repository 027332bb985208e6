"""Losses that are far above the recent ones. No torch.

Far is FAR spreads above the median of the last WINDOW losses, the spread being that of a normal distribution by their
median absolute deviation, and not less than LEAST, of the median or as it is. A falling loss has a median above it, so
a warm-up is no spike; neither median nor deviation moves with a few outliers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

WINDOW, ENOUGH = 64, 32  # steps, and how many of them must be there
FAR, LEAST = 16.0, 0.1
NORMAL = 1.4826  # a normal distribution's standard deviation, in median absolute deviations


class Spike(NamedTuple):
    """A loss far above the recent ones, and the median of the recent ones."""

    loss: float
    usual: float
    steps: int


def find_spike(recent: Sequence[float], loss: float) -> Spike | None:
    """Return a spike if a loss is far above recent ones."""
    if len(recent) < ENOUGH:
        return None
    usual = median(recent)
    spread = NORMAL * median(abs(each - usual) for each in recent)
    above = max(FAR * spread, LEAST * abs(usual), LEAST)
    return Spike(loss, usual, len(recent)) if loss > usual + above else None


class SpikeWatch:
    """Owns the recent losses of a run, and tells of every spike once: not of the high steps that follow its first."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._told = False

    def look(self, loss: float) -> Spike | None:
        """Take a step's loss; return the spike that begins with it. What is not finite is not counted."""
        if not math.isfinite(loss):
            return None
        spike = find_spike(self._recent, loss)
        self._recent.append(loss)
        begins = spike is not None and not self._told
        self._told = spike is not None
        return spike if begins else None
