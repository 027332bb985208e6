"""Errors on rows that nothing was fitted on: one set of published rows left out at a time.

    constants that were fitted on the set
        on other sets, too      fitted anew on those: the value of least mean error, by golden sections
        on this one alone       the default, what a system without rows gets (constants.py)
    all others                  as they are
    -> the set's points, predicted with these; its errors stand beside those of the fitted constants

A set is one publication's (ZeRO-3 and Megatron rows of one table are one). A fit looks from half
the default to twice, from 0 to 1 where the default is 0. Several constants are fitted in turns, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from planner_constants import EVERY, Planner
from planner_tables import Point

from zero3d.plan.constants import Constant, Key, Rows

Predict = Callable[[Planner, Iterable[str]], list[Point]]  # points of these sets
SECTIONS, ROUNDS = 8, 2
GOLDEN = (5**0.5 - 1) / 2


def fitted_on(name: str) -> list[Constant]:
    """Constants that saw a set; those that are lent follow their lender."""
    return [each for each in EVERY if not each.lender and any(rows.set == name for rows in each.fitted_on)]


def without(name: str, predict: Predict) -> dict[Key, float]:
    """Values of the constants that saw a set, as if it did not exist."""
    seen = fitted_on(name)
    others = {each: tuple(rows for rows in each.fitted_on if rows.set != name) for each in seen}
    values = {each.key: float(each.default or 0.0) for each in seen}
    anew = [each for each in seen if others[each]]
    for _ in range(ROUNDS if len(anew) > 1 else 1):
        for each in anew:
            values[each.key] = _fit(each, others[each], values, predict)
    return values


def _fit(each: Constant, rows: tuple[Rows, ...], values: Mapping[Key, float], predict: Predict) -> float:
    """The value of least mean error on these rows."""
    low, high = (each.default / 2, each.default * 2) if each.default else (0.0, 1.0)

    def error(tried: float) -> float:
        return _error(rows, {**values, each.key: tried}, predict)

    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = error(a), error(b)
    for _ in range(SECTIONS):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = error(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = error(b)
    return a if at_a <= at_b else b


def _error(rows: tuple[Rows, ...], values: Mapping[Key, float], predict: Predict) -> float:
    wanted = {(each.set, each.kind) for each in rows}
    points = predict(Planner(values), {name for name, _ in wanted})
    found = [abs(point.predicted / point.actual - 1) for point in points if (point.set, point.kind) in wanted]
    return sum(found) / len(found) if found else 0.0


def responding(each: Constant, rows: Rows, predict: Predict) -> int:
    """How many of these rows say something about a constant: those whose prediction it changes.

    A run that fits bounds memory from above, so each says something.
    """
    other = each.default if each.default != each.value else 2 * each.value
    base, moved = (predict(Planner(values), {rows.set}) for values in ({}, {each.key: float(other or 0.0)}))
    pairs = [(a, b) for a, b in zip(base, moved, strict=True) if a.kind == rows.kind]
    return sum(rows.kind == "fits" or a.predicted != b.predicted for a, b in pairs)


def accounts(predict: Predict, sets: Mapping[str, dict[Key, float]]) -> list[dict[str, Any]]:
    """Every fitted constant: its rows that respond, and its values without each of its sets."""
    return [
        {
            "system": each.system,
            "name": each.name,
            "rows": [{**rows._asdict(), "count": responding(each, rows, predict)} for rows in each.fitted_on],
            "without": {name: values[each.key] for name, values in sets.items() if each.key in values},
        }
        for each in EVERY
        if each.fitted_on and not each.lender
    ]
