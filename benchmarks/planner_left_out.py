"""Errors on rows that nothing was fitted on: one set of published rows left out at a time.

    constants that were fitted on the set
        on other sets, too      fitted anew on those
        on this one alone       the default, what a system without rows gets (constants.py)
    all others                  as they are
    -> the set's points, predicted with these; its errors stand beside those of the fitted constants

A set is one publication's (ZeRO-3 and Megatron rows of one table are one). A fit looks for the least sum over sets of
their mean errors, errors being logarithms of predicted over published, and takes these for straight lines in the
logarithms of the constants:

    log(predicted / published)  =  as it is now  +  slope x log(constant / its value now)

Slopes are differences, measured once. A pull towards defaults decides what rows leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planner_constants import EVERY, Planner
from planner_tables import Point

from zero3d.tools.plan.constants import Constant, Key, Rows

Predict = Callable[[Planner, Iterable[str]], list[Point]]  # points of these sets
Floats = NDArray[np.float64]
STEP = log(1.05)  # of a constant, for its slope
PULL = 0.02  # of a constant by its logarithm's distance from the default's, beside errors
ROUNDS, LEAST = 60, 1e-3  # of weighing errors by what they were; the least error that weighs
FITTED = [constant for constant in EVERY if constant.fitted_on and not constant.lender]


def fitted_on(name: str) -> list[Constant]:
    """Return the constants that saw a set; those that are lent follow their lender."""
    return [constant for constant in FITTED if any(rows.set == name for rows in constant.fitted_on)]


class Slopes:
    """Holds the errors of every set that constants were fitted on, and how they move with each constant.

    errors  by set and kind, logarithms; slopes: of these, by constant
    """

    def __init__(self, predict: Predict) -> None:
        sets = sorted({rows.set for constant in FITTED for rows in constant.fitted_on})
        self.errors = _by_kind(predict(Planner(), sets))
        self.slopes: dict[Key, dict[tuple[str, str], Floats]] = {}
        for constant in FITTED:
            own = sorted({rows.set for rows in constant.fitted_on})
            moved = _by_kind(predict(Planner({constant.key: constant.value * exp(STEP)}), own))
            self.slopes[constant.key] = {key: (found - self.errors[key]) / STEP for key, found in moved.items()}

    def fit(self, constants: Sequence[Constant], without: str | None, shifts: Mapping[Key, float]) -> dict[Key, float]:
        """Return the values of some constants by the rows that they were fitted on, one set's left out.

        shifts  of other constants, logarithms
        """
        kinds = sorted(
            {(r.set, r.kind) for c in constants for r in c.fitted_on if r.set != without} & self.errors.keys()
        )
        if not kinds:
            return {c.key: c.value for c in constants}
        base, matrix, share = [], [], []
        for kind in kinds:
            rows = self.errors[kind] + sum(
                (step * self.slopes[key][kind] for key, step in shifts.items() if kind in self.slopes[key]), 0.0
            )
            columns = [self.slopes[c.key].get(kind, np.zeros_like(rows)) for c in constants]
            base.append(rows)
            matrix.append(np.stack(columns, 1))
            share.append(np.full(len(rows), 1 / len(rows)))
        steps = _least(np.concatenate(base), np.concatenate(matrix), np.concatenate(share), _pulls(constants))
        return {c.key: _bounded(c, c.value * exp(float(step))) for c, step in zip(constants, steps, strict=True)}


def _by_kind(points: Iterable[Point]) -> dict[tuple[str, str], Floats]:
    """Return the logarithms of predicted over published, by set and kind."""
    listed: dict[tuple[str, str], list[float]] = {}
    for point in points:
        if point.kind in ("memory", "time"):
            listed.setdefault((point.set, point.kind), []).append(log(point.predicted / point.actual))
    return {key: np.array(values) for key, values in listed.items()}


def _pulls(constants: Sequence[Constant]) -> Floats:
    """Return how far each constant is from its default, by logarithms; nothing where that is 0."""
    return np.array([log(c.value / c.default) if c.default else 0.0 for c in constants])


def _least(errors: Floats, slopes: Floats, share: Floats, pulls: Floats) -> Floats:
    """Find the steps of least sum of weighed absolute errors, by least squares of errors over what they were."""
    steps = np.zeros(slopes.shape[1])
    pull = PULL * np.eye(len(steps))
    for _ in range(ROUNDS):
        left = np.abs(errors + slopes @ steps)
        weights = share / np.maximum(left, LEAST)
        normal = slopes.T @ (weights[:, None] * slopes) + pull
        steps = -np.linalg.solve(normal, slopes.T @ (weights * errors) + PULL * pulls)
    return steps


def _bounded(constant: Constant, value: float) -> float:
    """Return a value that a constant can have: a share is at most 1, and none is above its double or below a half."""
    low, high = constant.value / 2, constant.value * 2
    return min(max(value, low), 1.0 if constant.unit.startswith("of ") else high)


@cache
def slopes_of(predict: Predict) -> Slopes:
    """Measure the slopes of all constants, once."""
    return Slopes(predict)


def without(name: str, predict: Predict) -> dict[Key, float]:
    """Return the values of the constants that saw a set, as if it did not exist."""
    slopes, seen = slopes_of(predict), fitted_on(name)
    alone = {c: c.default or 0.0 for c in seen if all(rows.set == name for rows in c.fitted_on)}
    shifts = {c.key: log(value / c.value) for c, value in alone.items() if value and c.value}
    anew = [constant for constant in seen if constant not in alone]
    return {c.key: value for c, value in alone.items()} | (slopes.fit(anew, name, shifts) if anew else {})


def asked_for(predict: Predict) -> dict[Key, float]:
    """Return the values that all rows together ask for."""
    return slopes_of(predict).fit(FITTED, None, {})


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
        for constant in FITTED
    ]
