"""Side streams, on which gathers and reductions run beside compute.

A prefetched unit's gather is issued before the current unit's kernels are enqueued, and its memory freed only after
compute's last use is enqueued; compute has then waited for the side stream, so no `record_stream` is needed.

All transient memory is of compute's pool: an allocator keeps one for each stream, and memory of one cannot serve
another. What compute has freed may still be in use on its stream. A side stream may have it all the same: it has
waited for what compute had enqueued when the side stream was entered, and compute is given nothing while it is open
(`Pool`). What a side stream borrowed and gave back lives until compute has waited for it: the pool would hand it to
compute at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Pending
from zero3d.memory.arena import Arena

PRIORITY = -1  # high: a collective that is ready does not wait behind compute's kernels


class SideStream:
    """A side stream on an accelerator; on the CPU only its log, if one is given."""

    def __init__(self, name: str, arena: Arena, log: list[tuple[str, str]] | None = None) -> None:
        self._name = name
        self._arena = arena
        self._log = log
        self._stream = torch.Stream(arena.device, priority=PRIORITY) if arena.device.type != "cpu" else None
        self._used: list[Tensor] = []  # buffers that were given back on it since compute waited for it

    @property
    def beside_compute(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    @contextmanager
    def issue(self, unit: str) -> Iterator[None]:
        """Enqueue on the side stream, after everything compute has enqueued so far."""
        self.note("issue", unit)
        if self._stream is None:
            yield
            return
        compute = torch.accelerator.current_stream(self._arena.device)
        self._arena.stream, self._arena.used = Pool(compute), self._used
        self._stream.wait_stream(compute)
        try:
            with self._stream:
                yield
        finally:
            self._arena.stream, self._arena.used = nullcontext(), None

    def join(self, unit: str) -> None:
        """Let compute wait for what this side stream has enqueued."""
        self.note("join", unit)
        if self._stream is not None:
            torch.accelerator.current_stream(self._arena.device).wait_stream(self._stream)
            self._used.clear()

    def note(self, what: str, unit: str) -> None:
        """Write the log that tests read."""
        if self._log is not None:
            self._log.append((f"{self._name}.{what}", unit))


class Pool:
    """Allocates from a stream's pool inside, and enqueues nothing on the stream.

    With `torch.use_deterministic_algorithms(True)` torch fills what it allocates with NaN, on this stream: a side
    stream that has waited for the stream before would not wait for that, and lose what it writes there.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream, self._fills = stream, False

    def __enter__(self) -> None:
        options: Any = torch.utils.deterministic
        self._fills, options.fill_uninitialized_memory = options.fill_uninitialized_memory, False
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        options: Any = torch.utils.deterministic
        options.fill_uninitialized_memory = self._fills


class ThreadStream:
    """A stream for another thread's work beside compute; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def follow(self) -> None:
        """Let it wait for what compute has enqueued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def entered(self) -> AbstractContextManager[object]:
        """Enqueue on it inside."""
        return nullcontext() if self._stream is None else self._stream


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has done what was enqueued on the current stream, such as copies to the host."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def compute_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which the caller computes; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def wait_on(stream: torch.Stream | None, pending: Pending) -> None:
    """Let a stream wait for what is under way, and the current one for that: also where another one asks first."""
    current = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or current is None or current == stream:
        pending.wait()
        return
    with stream:
        pending.wait()
    current.wait_stream(stream)
