"""What published rows say of ranges: margins of memory, how far apart plans are told apart, what a first run narrows.

margins   by kind of run, the share above its plan that nine in ten memories do not exceed
apart     by how much planned seconds must differ for nine in ten pairs to be ranked as they were measured
narrowed  of one system: the smallest run fixes a factor of seconds, and larger ones are planned with that
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil
from typing import Any

from planner_tables import Point

SURE = 0.95
MANY = 30  # rows of a kind of run, of which nine in ten say its margin; of fewer the largest does


def margins_of(points: Iterable[Point]) -> dict[str, dict[str, Any]]:
    """Return, by kind of run, the share above its plan that nine in ten points of memory do not exceed, and how many.

    Of few rows, it is what none exceeds. Sets without a gate are left out.
    """
    above: dict[str, list[float]] = defaultdict(list)
    for point in points:
        if point.kind == "memory" and "no gate" not in point.set:
            above[point.run].append(max(0.0, point.actual / point.predicted - 1))
    return {run: {"rows": len(each), "share": _margin(sorted(each))} for run, each in sorted(above.items())}


def _margin(values: Sequence[float]) -> float:
    """Return the least value that nine in ten do not exceed; of few values, the largest."""
    return _ninth(values) if len(values) >= MANY else values[-1]


def _ninth(values: Sequence[float]) -> float:
    """Return the least value that nine in ten do not exceed."""
    return values[ceil(0.9 * len(values)) - 1]


def apart_of(points: Iterable[Point]) -> float | None:
    """Return the difference of planned seconds from which on 19 of 20 pairs are ranked as they ran; None: none.

    Pairs are of runs of one model in one set, whose published seconds differ by more than repeats do.
    """
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        if point.kind == "time" and point.group and "no gate" not in point.set:
            groups[point.set, point.group].append(point)
    repeats = {name: max(repeats_of(g) for key, g in groups.items() if key[0] == name) for name, _ in groups}
    pairs = [pair for (name, _), group in groups.items() for pair in pairs_of(group, repeats[name])]
    gaps = sorted(((abs(b.predicted / a.predicted - 1), b.predicted > a.predicted) for a, b in pairs), reverse=True)
    right, least = 0, None
    for count, (gap, ranked) in enumerate(gaps, 1):
        right += ranked
        if right < SURE * count:
            break
        least = gap
    return least


def repeats_of(group: Sequence[Point]) -> float:
    """Return by how much the slowest and the fastest run of one configuration differ at most."""
    runs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for point in group:
        runs[point.settings].append(point.actual)
    return max(max(actual) / min(actual) - 1 for actual in runs.values())


def pairs_of(group: Sequence[Point], least: float) -> list[tuple[Point, Point]]:
    """Return the pairs of configurations whose runs differ by more than `least`, the faster one first."""
    ordered = sorted(group, key=lambda point: point.actual)
    return [(a, b) for a, b in combinations(ordered, 2) if b.actual / a.actual - 1 > least and a.settings != b.settings]


def narrowed(points: Iterable[Point]) -> list[dict[str, Any]]:
    """Return errors of seconds, as planned and corrected, of each set with runs of one model on more and fewer GPUs.

    Of the runs of the same model on fewer GPUs those on most of them say by how much their own plans were off, and the
    plan on more GPUs is corrected by their mean, as a run's profile corrects it. Sets with a doubt or without a gate
    are left out.
    """
    models: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        if point.kind == "time" and point.gpus and "(" not in point.set:
            models[point.set, point.model].append(point)
    sets: dict[str, list[tuple[Point, float]]] = defaultdict(list)
    for (name, _), inside in sorted(models.items()):
        sets[name] += [(larger, factor) for larger in inside if (factor := _factor(larger, inside))]
    found = []
    for name, pairs in sets.items():
        if pairs:
            before, after = ([abs(p.predicted * by / p.actual - 1) for p, by in each]
                             for each in ([(p, 1.0) for p, _ in pairs], pairs))  # fmt: skip
            means = {"before": sum(before) / len(before), "after": sum(after) / len(after)}
            found.append({"set": name, "rows": len(pairs), **means, "errors": sorted(after)})
    return found


def spread_of(found: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over sets of the error that nine in ten corrected plans do not exceed, None without any."""
    errors = sorted(_ninth(each["errors"]) for each in found)
    return errors[len(errors) // 2] if errors else None


def _factor(larger: Point, runs: Sequence[Point]) -> float | None:
    """Return published over planned seconds of the largest runs that are smaller than this one, None without any."""
    fewer = [run for run in runs if run.gpus < larger.gpus]
    nearest = [run for run in fewer if run.gpus == max(each.gpus for each in fewer)]
    return sum(run.actual / run.predicted for run in nearest) / len(nearest) if nearest else None
