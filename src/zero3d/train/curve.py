"""The averages of a curve, the range that a picture of it shows, and the curve as text for a terminal. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from zero3d.train.spikes import NORMAL

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille: 4 rows of 2 dots per character
LEAST, MOST, STRETCHES = 10, 100, 200  # steps of half a window; half windows in a run
POINTS = 21  # of which a slope is taken
NOISE = 2.0  # standard errors of a slope, which are noise
HIGHEST, USUAL = 3.0, 0.99  # times what so many of the values span: values above that are cut off
FEW = 10  # values of which none is cut off


def smooth(values: Sequence[float]) -> list[float]:
    """Return averages over a window around each step, a hundredth of all: the mean of the window's middle third.

    Where losses fall it lags behind nothing, and no single value pulls it. Values that are not finite are passed over;
    before the first and behind the last finite one there is no average.

    Half a window before either end a whole window is no longer there: from the last whole one on the average goes on
    straight, along that window's slope (the median of the slopes of all pairs: Theil 1950, Sen 1968), as far as it is
    more than noise. The price: a turn in the last few steps is seen late.
    """
    first, last = _ends(values)
    before, behind = [math.nan] * first, [math.nan] * (len(values) - last)
    return [*before, *_averages(values[first:last]), *behind] if last else [math.nan] * len(values)


def last_average(values: Sequence[float]) -> tuple[float, int]:
    """Return the mean of the middle third of the last values, and how many these are: of the last whole window."""
    first, last = _ends(values)
    window = values[max(first, last - 2 * _half(last - first) - 1) : last]
    inside = sorted(filter(math.isfinite, window))
    return (_middle_third(inside) if inside else math.nan), len(window)


def _ends(values: Sequence[float]) -> tuple[int, int]:
    """Return the places of the first finite value and behind the last; zeros where there is none."""
    known = [place for place, value in enumerate(values) if math.isfinite(value)]
    return (known[0], known[-1] + 1) if known else (0, 0)


def _half(many: int) -> int:
    return min(max(LEAST, many // STRETCHES), MOST, max(0, many - 1) // 3)


def _middle_third(ordered: Sequence[float]) -> float:
    third = len(ordered) // 3
    return fmean(ordered[third : len(ordered) - third])


def _averages(values: Sequence[float]) -> list[float]:
    half = _half(len(values))
    whole = 2 * half + 1
    inside = sorted(filter(math.isfinite, values[:whole]))
    found = []
    for middle in range(half, len(values) - half):
        if middle > half:
            if math.isfinite(goes := values[middle - half - 1]):
                del inside[bisect_left(inside, goes)]
            if math.isfinite(comes := values[middle + half]):
                insort(inside, comes)
        found.append(_middle_third(inside) if inside else math.nan)
    front = _straight(values[:whole], found[0], range(-half, 0))
    back = _straight(values[-whole:], found[-1], range(1, half + 1))
    return [*front, *found, *back]


def _straight(window: Sequence[float], average: float, places: range) -> list[float]:
    """Return averages at places from a window's middle, along its slope, within its values."""
    inside = [value for value in window if math.isfinite(value)]
    slope = _slope(window)
    rest = [value - slope * place for place, value in enumerate(window) if math.isfinite(value)]
    center = median(rest)
    scatter = NORMAL * median(abs(value - center) for value in rest)
    error = NOISE * scatter * math.sqrt(12 / len(window) ** 3)  # of a line's slope
    share = max(0.0, 1 - (error / slope) ** 2) if slope else 0.0
    middle = center + slope * (len(window) - 1) / 2 if math.isnan(average) else average
    return [min(max(middle + share * slope * place, min(inside)), max(inside)) for place in places]


def _slope(window: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs, of long windows those of the medians of so many stretches."""
    many = max(1, len(window) // POINTS)
    points = []
    for start in range(0, len(window) - many + 1, many):
        if known := [value for value in window[start : start + many] if math.isfinite(value)]:
            points.append((start, median(known)))
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[n + 1 :]]
    return median(slopes) if slopes else 0.0


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
