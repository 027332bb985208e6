"""A profiler's trace of a few steps on every rank, and of all ranks in one file, for Perfetto or chrome://tracing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from zero3d.config import Profile
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.train.traces import merge, of_rank


class Tracer:
    """Traces steps after + 1 .. after + steps of this session and writes trace-rank-R.json.

    written  whether this session has written it
    """

    def __init__(self, choice: Profile, folder: Path, rank: int) -> None:
        self._first, self._last = choice.after, choice.after + choice.steps
        self._path = of_rank(folder, rank)
        self._active = choice.steps > 0
        self._seen = 0
        self._profile: profile | None = None
        self.written = False

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
            self.written = True


def merged(tracer: Tracer, folder: Path, world: Comm, hosts: Sequence[str]) -> Path | None:
    """Merge the ranks' traces on rank 0 when all have written theirs; None where no step was traced, or it cannot be.

    All ranks call it. Where ranks do not share the folder, those of rank 0's host are in it.
    """
    if not tracer.written:
        return None
    agree(world, lambda: None)  # all have written
    if world.rank:
        return None
    try:
        return merge(folder, hosts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # a full disk, a file of another form
        warnings.warn(f"traces of ranks are not merged ({error}): {folder}/trace-rank-*.json are there", stacklevel=2)
        return None
