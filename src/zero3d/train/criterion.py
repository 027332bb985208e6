"""Which evaluation is the best one, and when a run has waited long enough for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero3d.config import Evaluate
from zero3d.config.hints import nearest
from zero3d.errors import ConfigError

HELD_OUT = "validation_loss"
OF_AVERAGES = f"ema_{HELD_OUT}"


@dataclass(frozen=True)
class Waiting:
    """Says how long a run has waited for a better value: the best so far, if any, and evaluations since that one."""

    best: float | None
    since: int


@dataclass(frozen=True)
class Criterion:
    """Chooses among evaluations by one value of them. What is not finite is never the best.

    patience  evaluations in a row without a new best after which a run ends; None: it never does
    """

    name: str = HELD_OUT
    highest: bool = False
    patience: int | None = None

    @classmethod
    def of(cls, choice: Evaluate) -> Criterion:
        """Return what a configuration asks for."""
        return cls(choice.best, choice.highest, choice.patience)

    def __str__(self) -> str:
        return f"{'highest' if self.highest else 'lowest'} {self.name}"

    def value(self, record: Mapping[str, Any]) -> float | None:
        """Return the value of a record; None where it has none that is finite."""
        value = record.get(self.name)
        return float(value) if value is not None and math.isfinite(value) else None

    def check(self, found: Mapping[str, float]) -> None:
        """Refuse to choose by a value that an evaluation does not have. Raises ConfigError."""
        if self.name not in found and self.name != HELD_OUT:
            raise ConfigError(
                f"evaluate.best={self.name} is none of what an evaluation gives: {', '.join(found)}. Type "
                f"evaluate.best={nearest(self.name, found) or next(iter(found), HELD_OUT)}."
            )

    def improves(self, value: float | None, best: float | None) -> bool:
        """Say whether a value is better than the best so far."""
        if value is None or best is None:
            return value is not None
        return value > best if self.highest else value < best

    def wait(self, waiting: Waiting | None, record: Mapping[str, Any]) -> Waiting:
        """Return for how long a run has waited after one more evaluation."""
        value, before = self.value(record), waiting or Waiting(None, 0)
        better = self.improves(value, before.best)
        return Waiting(value, 0) if better else Waiting(before.best, before.since + 1)

    def is_over(self, waiting: Waiting | None) -> bool:
        """Say whether a run has waited long enough."""
        return self.patience is not None and waiting is not None and waiting.since >= self.patience

    def why_over(self, waiting: Waiting) -> str:
        """Say in words why a run ends before its last step."""
        than = "finite" if waiting.best is None else f"{'above' if self.highest else 'below'} {waiting.best:g}"
        return f"{self.name} has not been {than} in {waiting.since} evaluations (evaluate.patience)"
