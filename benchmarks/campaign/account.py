"""What a part writes down while it runs, so that nothing measured is lost when it hangs, crashes or is killed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ONE_A_RANK = "cuda"  # the device of a part whose ranks have a card each


@dataclass(frozen=True)
class Place:
    """Where a part runs.

    part         its name
    device       "cuda:0" | "cpu"; "cuda" for one a rank
    limit_s      when it is killed, from the start of its process
    seconds      how long it may measure, for parts whose time is a choice
    peak_tflops  the card's dense bf16 peak, if it was given
    ranks        processes that a part starts, each with a device of its own
    """

    part: str
    device: str
    limit_s: float
    seconds: float = 0.0
    peak_tflops: float | None = None
    ranks: int = 1

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU stands in for the card."""
        return self.device == "cpu"


class Account:
    """Owns the file of one part: what ran, what was skipped and why, what failed; whole at any moment.

    headlines  figures that stand at the top of the campaign's JSON, too
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {
            "ran": {}, "skipped": {}, "failed": {}, "headlines": {}, "goals": {},
        }  # fmt: skip
        self._write()

    def ran(self, what: str, found: Any, wrong: str = "") -> None:
        """Note what was found. `wrong` says why it must not be so; the part then fails, and goes on."""
        self._found["ran"][what] = found
        if wrong:
            self._found["failed"][what] = wrong
        self._write()

    def skipped(self, what: str, why: str) -> None:
        """Note what cannot run here."""
        self._found["skipped"][what] = why
        self._write()

    def goal(self, what: str, due: float, found: float, most: bool = False) -> None:
        """Note a figure that has a goal, at least `due`, or at most; whether it is met is a finding, not a fault."""
        self._found["goals"][what] = {"due": due, "found": found, "met": found <= due if most else found >= due}
        self._write()

    def headline(self, name: str, value: int) -> None:
        """Note a figure for the top of the JSON."""
        self._found["headlines"][name] = value
        self._write()

    def _write(self) -> None:
        write_json(self._path, self._found)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by `value` as JSON: readers see the old text or the new one, whoever is killed when."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
    fresh.replace(path)


def _finite(value: Any) -> Any:
    """Return `value` with words in the place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
