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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from planner_constants import EVERY, Planner
from planner_tables import Point

from zero3d.plan.constants import Constant, Key, Rows

Predict = Callable[[Planner, Iterable[str]], list[Point]]  # points of these sets
SECTIONS, ROUNDS = 8, 2
GOLDEN = (5**0.5 - 1) / 2


def fitted_on(name: str) -> list[Constant]:
    """Return the constants that saw a set; those that are lent follow their lender."""
    return [
        constant for constant in EVERY if not constant.lender and any(rows.set == name for rows in constant.fitted_on)
    ]


def without(name: str, predict: Predict) -> dict[Key, float]:
    """Return the values of the constants that saw a set, as if it did not exist."""
    seen = fitted_on(name)
    others = {constant: tuple(rows for rows in constant.fitted_on if rows.set != name) for constant in seen}
    values = {constant.key: float(constant.default or 0.0) for constant in seen}
    anew = [constant for constant in seen if others[constant]]
    for _ in range(ROUNDS if len(anew) > 1 else 1):
        for constant in anew:
            values[constant.key] = _fit(constant, others[constant], values, predict)
    return values


def _fit(constant: Constant, rows: tuple[Rows, ...], values: Mapping[Key, float], predict: Predict) -> float:
    """Find the value of least mean error on these rows."""
    low, high = (constant.default / 2, constant.default * 2) if constant.default else (0.0, 1.0)

    def error(tried: float) -> float:
        return _error(rows, {**values, constant.key: tried}, predict)

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
    wanted = {(row.set, row.kind) for row in rows}
    points = predict(Planner(values), {name for name, _ in wanted})
    errors = [abs(point.predicted / point.actual - 1) for point in points if (point.set, point.kind) in wanted]
    return sum(errors) / len(errors) if errors else 0.0


def responding(constant: Constant, rows: Rows, predict: Predict, base: Sequence[Point]) -> int:
    """Count the rows that say something about a constant: those whose prediction it changes from `base`.

    A run that fits bounds memory from above, so each says something.
    """
    other = constant.default if constant.default != constant.value else 2 * constant.value
    moved = predict(Planner({constant.key: float(other or 0.0)}), {rows.set})
    pairs = [(a, b) for a, b in zip(base, moved, strict=True) if a.kind == rows.kind]
    return sum(rows.kind == "fits" or a.predicted != b.predicted for a, b in pairs)


def accounts(predict: Predict, sets: Mapping[str, dict[Key, float]]) -> list[dict[str, Any]]:
    """Return every fitted constant: its rows that respond, and its values without each of its sets."""
    bases = cache(lambda name: predict(Planner({}), {name}))
    return [
        {
            "system": constant.system,
            "name": constant.name,
            "rows": [
                {**rows._asdict(), "count": responding(constant, rows, predict, bases(rows.set))}
                for rows in constant.fitted_on
            ],
            "without": {name: values[constant.key] for name, values in sets.items() if constant.key in values},
        }
        for constant in EVERY
        if constant.fitted_on and not constant.lender
    ]
