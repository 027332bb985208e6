"""Side streams, on which gathers and reductions run beside compute.

A prefetched unit's memory is allocated on the compute stream, its gather issued before the
current unit's kernels are enqueued, and its memory freed only after compute's last use is
enqueued; compute has then waited for the lane, so no `record_stream` is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """A side stream on an accelerator; on the CPU only its log, if one is given."""

    def __init__(self, name: str, device: torch.device, log: list[tuple[str, str]] | None = None) -> None:
        self._name = name
        self._log = log
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    @contextmanager
    def issue(self, unit: str) -> Iterator[None]:
        """Enqueue on the side stream, after everything compute has enqueued so far."""
        self.note("issue", unit)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def join(self, unit: str) -> None:
        """Let compute wait for what this lane has enqueued."""
        self.note("join", unit)
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def note(self, what: str, unit: str) -> None:
        """Write the log that tests read."""
        if self._log is not None:
            self._log.append((f"{self._name}.{what}", unit))
