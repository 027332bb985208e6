"""A profiler's trace of a few steps, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from zero3d.config import Profile


class Tracer:
    """Traces steps after + 1 .. after + steps of this session on rank 0 and writes trace-rank-0.json."""

    def __init__(self, choice: Profile, folder: Path, rank: int) -> None:
        self._first, self._last = choice.after, choice.after + choice.steps
        self._path = folder / f"trace-rank-{rank}.json"
        self._active = choice.steps > 0 and rank == 0
        self._seen = 0
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def step(self) -> None:
        """Count a finished step; start or stop the trace where it is due."""
        self._seen += 1
        if self._seen == self._last:
            self._stop()
        self._start()

    def _start(self) -> None:
        if self._active and self._seen == self._first and self._profile is None:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds)
            self._profile.start()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile, self._active = None, False
