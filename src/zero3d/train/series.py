"""The curves of a run by its records, and what happened at which step: what run.png and a run's page draw. No torch.

loss          of each step, NaN where it had none
held_out      losses at the steps that were evaluated
rate, norm, speed    learning rate, norm of the gradients, tokens per second
memory, reserved     bytes on the device of rank 0
saves         steps of which a checkpoint was saved: the record behind a save has its seconds, a session that went on
              names the one that it came from, and report.json has all of the last session, the one at its end, too
skipped       steps that were not applied
slow          steps whose record names a slow rank
resumed       the last step before a session that went on from a checkpoint
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

LARGEST = 1e30  # of values that can be drawn


@dataclass
class Series:
    """Holds the values of each record; `steps` has the step of each."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    reserved: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], saves: object = ()) -> Self:
        """Return the curves of a run's records. saves: steps that the last session has saved, as in report.json."""
        found = cls()
        for record in records:
            found.add(record)
        found.add_saves(saves)
        return found

    def add_saves(self, steps: object) -> None:
        """Add steps that were saved, as far as they are steps of the run."""
        known = [step for step in steps if isinstance(step, int)] if isinstance(steps, (list, tuple)) else []
        last = self.steps[-1] if self.steps else 0
        self.saves = sorted({*self.saves, *(step for step in known if 0 < step <= last)})

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record; a value that is not there is NaN."""
        step = record["step"]
        self.steps.append(step)
        self.loss.append(_value(record, "loss"))
        self.rate.append(_value(record, "lr"))
        self.norm.append(_value(record, "grad_norm"))
        self.speed.append(_value(record, "tokens_per_s"))
        self.memory.append(_value(record, "memory_bytes"))
        self.reserved.append(_value(record, "reserved_bytes"))
        if math.isfinite(held_out := _value(record, "validation_loss")):
            self.held_out.append((step, held_out))
        if record.get("save_seconds") is not None:
            self.saves.append(step - 1)
        if not record.get("applied", True):
            self.skipped.append(step)
        if record.get("slowest_rank") is not None:
            self.slow.append(step)
        if isinstance(before := record.get("resumed_from"), int):
            self.resumed.append(before)
            self.saves.append(before)


def _value(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if value is not None and abs(value) < LARGEST else math.nan
