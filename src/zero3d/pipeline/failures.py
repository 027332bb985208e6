"""Failure of a pipeline's rank: all ranks raise the error of the chunk, and none goes on.

    the chunk's rank  the error itself if raised on purpose, else "model chunk 1 of 2 ..., failed: ValueError: ..."
    its peers         lose it, or wait in vain: their error quotes the note that it left (distributed/axis.py)
    all that saw it   raise at once from then on: messages of the failed step may still be under way, and
                      the next step would take them for its own

Outside of the chunks a ConfigError is no failure, raised on all ranks alike before anything is sent, nor are a
NonFiniteError and a CorruptionError, after everything has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from zero3d.distributed.axis import Axis, leave_note, read_note
from zero3d.errors import FAULT, ConfigError, CorruptionError, NonFiniteError, Zero3dError

_LOG = logging.getLogger("torch.distributed.pipelining.schedules")  # writes whole schedules after an error


class Failures:
    """The first failure of a pipeline of `chunks` model chunks, as this rank sees it."""

    def __init__(self, axis: Axis, chunks: int) -> None:
        self._axis, self._chunks = axis, chunks
        self._first: Exception | None = None
        self.check()

    def check(self) -> None:
        """Raise Zero3dError if this pipeline, or another one over the same ranks of the mesh, failed before."""
        if self._axis.broken:
            raise Zero3dError(
                f"this pipeline failed before ({self._axis.broken}): its ranks no longer agree on where they are; "
                "restart from the last checkpoint (engine.load in new processes, or zero3d train --resume auto)."
            )

    @contextmanager
    def in_chunk(self, chunk: int) -> Iterator[None]:
        """Name this chunk in an error inside; peers lose this rank then, and quote the first failure."""
        try:
            yield
        except Exception as error:
            if self._first is None:
                where = f"model chunk {chunk} of {self._chunks} of the pipeline, on rank {self._axis.rank} of axis pp"
                text = f"{where}, failed: {type(error).__name__}: {error}"
                leave_note(text, getattr(error, "exit_code", FAULT))
                self._first = error if isinstance(error, Zero3dError) else Zero3dError(text)
            raise

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guard the ranks' common work inside: after a failure the pipeline is broken, and `check` raises.

        Raises the error of a chunk itself instead of torch's error about it.
        """
        self.check()
        was_disabled = _LOG.disabled
        _LOG.disabled = True
        try:
            yield
        except BaseException as error:
            if isinstance(error, (ConfigError, NonFiniteError, CorruptionError)) and self._first is None:
                raise
            text = f"rank {self._axis.rank} of axis pp failed: {type(error).__name__}: {error}"
            leave_note(text, getattr(error, "exit_code", FAULT))
            self._axis.broken = read_note() or text
            if self._first is None or self._first is error:
                raise
            raise self._first from error
        finally:
            _LOG.disabled = was_disabled
