"""What crosses between the host and the stand-in accelerator, and what the host waits for, by line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from instruments import accelerator

HERE, TORCH = Path(__file__).parent, Path(torch.__file__).parent


@dataclass
class HostTraffic:
    """Counts by (what, line): `copies` between the devices, `waits` of the host for the device, copies among them."""

    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, what: str, waits: bool) -> None:
        at = what, _line()
        if what.startswith(("host to", "device to")):
            self.copies[at] += 1
        if waits:
            self.waits[at] += 1

    def clear(self) -> None:
        """Forget what was counted."""
        self.copies.clear()
        self.waits.clear()

    def table(self) -> str:
        """Return the waits as text, most first."""
        return "\n".join(f"{n:4d} {what:24s} {line}" for (what, line), n in self.waits.most_common())


@contextmanager
def counted() -> Iterator[HostTraffic]:
    """Count inside the block."""
    traffic, before = HostTraffic(), accelerator.Log.listener
    accelerator.Log.listener = traffic.note
    try:
        yield traffic
    finally:
        accelerator.Log.listener = before


def _line() -> str:
    """Return file:line and function of the innermost running frame that is not torch's or an instrument's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(TORCH) and path.parent != HERE:
            parts = path.parts
            at = next((i for i, part in enumerate(parts) if part in ("zero3d", "transformers") and i), len(parts) - 1)
            return f"{'/'.join(parts[at:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
