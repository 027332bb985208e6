"""What each part of a step takes, over all ranks: fields of records, and the line at a run's end. No torch.

    forward_s, forward_s_least, forward_s_largest    seconds in a step: mean, least and largest of all ranks

They are the means of the steps since the last record that had any, but for the session's first, which allocates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def of_history(history: Iterable[Mapping[str, Any]]) -> list[PartTime]:
    """Return the parts' means over all records that have them, in the order of a step; `seconds` is the mean."""
    windows = [record for record in history if any(f"{part}_s" in record for part in PARTS)]
    found = []
    for part in PARTS:
        mean, least, largest = (
            sum(record.get(f"{part}_s{end}", record.get(f"{part}_s", 0.0)) for record in windows) / max(1, len(windows))
            for end in ("", "_least", "_largest")
        )
        if mean:
            found.append(PartTime(part, mean, least, mean, largest))
    return found


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
