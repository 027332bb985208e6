"""The seconds of a step by part."""

from __future__ import annotations

from typing import NamedTuple


class PartTime(NamedTuple):
    """Holds the seconds of one part of a step: this rank's mean, and over ranks where they are known."""

    part: str
    seconds: float
    least: float | None
    mean: float | None
    largest: float | None
