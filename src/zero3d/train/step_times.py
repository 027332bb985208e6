"""What each part of a step takes, over all ranks: fields of records, and the line at a run's end. No torch.

    forward_s, forward_s_least, forward_s_largest    seconds in a step: mean, least and largest of all ranks

They are the means of the steps since the last record that had any, but for the session's first, which allocates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from zero3d.zero.step_parts import PARTS, WORDS, OverRanks, PartTime

SHOWN = 0.005  # of a step: what takes less is not in the line


def fields(over_ranks: OverRanks, ranks: int) -> dict[str, float]:
    """Return the fields of a record: parts that took any time; of one rank the mean alone."""
    found = {}
    for place, part in enumerate(PARTS):
        if over_ranks.largest[place] > 0:
            found[f"{part}_s"] = over_ranks.mean[place]
            if ranks > 1:
                found |= {f"{part}_s_{name}": getattr(over_ranks, name)[place] for name in ("least", "largest")}
    return found


class Times:
    """Adds up the fields of records. Each has a mean of the steps since the last one, and counts as so many."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(PARTS, (0.0, 0.0, 0.0))  # mean, least, largest
        self._steps = 0
        self._before: int | None = None  # the step of the last record with such fields

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record of a run or a session. A field that is no number counts as one that is not there."""
        if self._before is None:
            self._before = record["step"] + 1  # the first step counts in none
        if not any(f"{part}_s" in record for part in PARTS):
            return
        many = max(1, record["step"] - self._before)
        for part, sums in self._sums.items():
            mean = _seconds(record, f"{part}_s", 0.0)
            figures = (mean, *(_seconds(record, f"{part}_s_{end}", mean) for end in ("least", "largest")))
            self._sums[part] = tuple(total + many * each for total, each in zip(sums, figures, strict=True))
        self._steps, self._before = self._steps + many, record["step"]

    def rows(self) -> list[PartTime]:
        """Return the means of a step, in the order of its parts; `seconds` is the mean of all ranks."""
        found = []
        for part, sums in self._sums.items():
            mean, least, largest = (total / max(1, self._steps) for total in sums)
            if mean:
                found.append(PartTime(part, mean, least, mean, largest))
        return found


def _seconds(record: Mapping[str, Any], name: str, missing: float) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and isfinite(value) else missing


def of_history(history: Iterable[Mapping[str, Any]]) -> list[PartTime]:
    """Return the means of a step by part over all records of a session."""
    times = Times()
    for record in history:
        times.add(record)
    return times.rows()


def where_it_went(times: Sequence[PartTime]) -> Iterator[str]:
    """Yield the line that says where a step's time went, if that is known."""
    whole = sum(each.seconds for each in times)
    if not whole:
        return
    parts = [_part(each, whole) for each in times if each.seconds >= SHOWN * whole]
    yield f"a step of {whole:.3g} s: {', '.join(parts)}"


def _part(each: PartTime, whole: float) -> str:
    least, largest = (round(100 * (value or 0.0) / whole) for value in (each.least, each.largest))
    by_rank = f" ({least} to {largest} by rank)" if largest > least else ""
    return f"{WORDS.get(each.part, each.part)} {100 * each.seconds / whole:.0f} %{by_rank}"
