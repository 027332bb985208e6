"""The averages of a curve, the range that a picture of it shows, and the curve as text for a terminal. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from statistics import fmean, median

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille: 4 rows of 2 dots per character
LEAST, MOST, STRETCHES = 10, 100, 200  # steps of half a window; half windows in a run
POINTS = 21  # of which a slope is taken
NOISE = 4.0  # times the scatter of a window, by which two slopes may differ over its length
HIGHEST, USUAL = 3.0, 0.99  # times what so many of the values span: values above that are cut off
FEW = 10  # values of which none is cut off


def smooth(values: Sequence[float]) -> list[float]:
    """Return averages over a window around each step, a hundredth of all: the mean of the window's middle third.

    Where losses fall it lags behind nothing, and no single value pulls it. Values that are not finite are passed over;
    before the first and behind the last finite one there is no average.

    Near either end a part of the window is missing, and the middle of the rest is not the step: its average is moved
    there along its slope, the median of the slopes of all pairs (Theil 1950, Sen 1968). If that of a whole window at
    this end is another by no more than noise, it is the less steep of both. The price: a turn in the last few steps is
    seen late.
    """
    known = [place for place, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return [math.nan] * len(values)
    first, last = known[0], known[-1] + 1
    before, behind = [math.nan] * first, [math.nan] * (len(values) - last)
    return [*before, *_averages(values[first:last]), *behind]


def _averages(values: Sequence[float]) -> Iterator[float]:
    half = min(max(LEAST, len(values) // STRETCHES), MOST, (len(values) - 1) // 3)
    whole = 2 * half + 1
    slopes = _slope(values[:whole]), _slope(values[-whole:])
    inside = sorted(filter(math.isfinite, values[:half]))  # what of the window is finite
    for i in range(len(values)):
        if i + half < len(values) and math.isfinite(comes := values[i + half]):
            insort(inside, comes)
        if i > half and math.isfinite(goes := values[i - half - 1]):
            del inside[bisect_left(inside, goes)]
        if not inside:
            yield math.nan
            continue
        third = len(inside) // 3
        average = fmean(inside[third : len(inside) - third])
        start = max(0, i - half)
        window = values[start : i + half + 1]
        if len(window) < whole:
            middle = fmean(start + place for place, value in enumerate(window) if math.isfinite(value))
            average += _slope_at_end(window, slopes[i >= half]) * (i - middle)
            average = min(max(average, inside[0]), inside[-1])
        yield average


def _slope(window: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs, of long windows those of the medians of so many stretches."""
    many = max(1, len(window) // POINTS)
    points = []
    for start in range(0, len(window) - many + 1, many):
        if known := [value for value in window[start : start + many] if math.isfinite(value)]:
            points.append((start, median(known)))
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[n + 1 :]]
    return median(slopes) if slopes else 0.0


def _slope_at_end(window: Sequence[float], other: float) -> float:
    """Return a window's slope; where it does not differ from the other by more than noise, the less steep of both.

    Of two that noise alone may have made, one that rises and the other falls, it is none.
    """
    slope = _slope(window)
    known = [value - slope * place for place, value in enumerate(window) if math.isfinite(value)]
    center = median(known)
    scatter = median(abs(value - center) for value in known)
    if abs(slope - other) * len(window) > NOISE * scatter:
        return slope
    return min(slope, other, key=abs) if slope * other > 0 else 0.0


def limits(values: Sequence[float], averages: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return the least and the largest value that a panel shows; None where there is none.

    Some high values far above all others, as of a diverged step, are left out: the rest could not be seen below them.
    """
    known = sorted(filter(math.isfinite, values))
    if not known:
        return None
    low, most = known[0], known[max(0, math.ceil(USUAL * len(known)) - 1)]
    most = max([most, *filter(math.isfinite, averages)]) if len(known) > FEW else known[-1]
    high = known[-1] if known[-1] - low <= HIGHEST * (most - low) else most
    return low, high


def as_text(values: Sequence[float], width: int = 64, height: int = 10) -> Iterator[str]:
    """Yield lines of a plot of `values` against 1, 2, ...; each character holds 2 x 4 dots."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    for x in range(columns):
        value = values[min(x * len(values) // columns, len(values) - 1)]
        if math.isfinite(value):
            y = round((high - value) / ((high - low) or 1.0) * (rows - 1))
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    for i, row in enumerate(cells):
        label = f"{high - (high - low) * i / max(height - 1, 1):6.2f}" if i % 3 == 0 else " " * 6
        yield f"{label} ┤{''.join(chr(0x2800 + bits) for bits in row)}"
    yield f"{'':6} └{'─' * width}"
    yield f"{'':8}1{len(values):>{width - 1}}"
