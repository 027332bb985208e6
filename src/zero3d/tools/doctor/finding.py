"""What a probe is asked, and what it answers.

ok        nothing to do
warning   works, and will be slow, or break under more load
broken    a run would fail or hang here
skipped   could not be looked at, or there is nothing to look at: why
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zero3d.errors import FAULT

OK, WARNING, BROKEN, SKIPPED = "ok", "warning", "broken", "skipped"
VERDICTS = (OK, SKIPPED, WARNING, BROKEN)  # the worst last
UNANSWERED = "unanswered"  # in figures: seconds in which no answer came, which a busy machine may have caused
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """One probe's answer.

    text      what was found, with the arithmetic
    remedy    what to type or to change; nothing where all is well
    figures   the numbers in it, for programs
    """

    verdict: str
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What the user asked about.

    disk        folder on the disk that is meant
    interface   network interface that ranks shall use; empty: what libraries would choose
    hosts       names of other hosts, each with or without :PORT
    port        where rank 0 shall listen, 0 for any
    shm         folder of shared memory
    expected    rates of `zero3d calibrate` in bytes per second: disk, inside, across
    device      the expected rates' device: cpu, or a card's name
    """

    disk: str = "."
    interface: str = ""
    hosts: tuple[str, ...] = ()
    port: int = 0
    shm: str = "/dev/shm"
    expected: Mapping[str, float] = field(default_factory=dict)
    device: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def worst(findings: Mapping[str, Finding]) -> str:
    """Return the worst verdict, ok where nothing was skipped for want of something that is there."""
    verdicts = [finding.verdict for finding in findings.values()]
    found = max(verdicts, key=VERDICTS.index, default=OK)
    return OK if found == SKIPPED else found


def exit_code(findings: Mapping[str, Finding]) -> int:
    """Return 1 where something is broken, else 0."""
    return FAULT if worst(findings) == BROKEN else 0


def rate(figure: float) -> str:
    """Return bytes per second for people."""
    return f"{figure / 1e9:.2f} GB/s" if figure >= 1e8 else f"{figure / 1e6:.3g} MB/s"


def amount(nbytes: float) -> str:
    """Return bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def environment(name: str) -> str:
    """Return a variable of the environment, empty where it is not set."""
    return os.environ.get(name, "")
