"""Side streams, on which gathers and reductions run beside compute.

A prefetched unit's gather is issued before the current unit's kernels are enqueued, and its memory freed only after
compute's last use is enqueued; compute has then waited for the side stream, so no `record_stream` is needed.

All transient memory is of compute's pool: an allocator keeps one for each stream, and memory of one cannot serve
another. Memory freed by compute may still be in use on compute's stream. A side stream may have it all the same: when
it was entered, it waited for all work that compute had enqueued, and compute is given nothing while it is open
(`Pool`). Memory that a side stream borrowed and gave back lives until compute has waited for it: the pool would hand it
to compute at once. The side stream itself may borrow it again before that.

Compute waits for the work enqueued for a unit, not for all work of a side stream: behind it stand copies and encodings
of units gathered ahead, and no compute would hide them.

    side stream    | copy k | copy k+1 | copy k+2 |
    compute                 | use k               | use k+1 ...     join(k) waits for copy k alone
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Pending
from zero3d.distributed.unit_order import LEAVING
from zero3d.memory.arena import Arena, GivenBack
from zero3d.memory.threads import Threads

PRIORITY = -1  # high: a collective that is ready does not wait behind compute's kernels


class SideStream:
    """A side stream on an accelerator; on the CPU only its log, if one is given.

    _ends   where the last work for each unit ends: its number among all that was issued, and an event
    _used   buffers that were given back on it since compute waited for that
    """

    def __init__(self, name: str, arena: Arena, log: list[tuple[str, str]] | None = None) -> None:
        self._name = name
        self._arena = arena
        self._log = log
        self._stream = torch.Stream(arena.device, priority=PRIORITY) if arena.device.type != "cpu" else None
        self._issued = 0
        self._ends: dict[str, tuple[int, torch.Event]] = {}
        self._used = GivenBack()

    @property
    def beside_compute(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    def issue(self, unit: str, *others: str) -> AbstractContextManager[None]:
        """Enqueue on the side stream inside, after everything compute has enqueued so far; on the CPU do nothing.

        others  units for which this work is enqueued, too: `join` of one of them waits for all of it
        """
        self.note("issue", unit)
        return nullcontext() if self._stream is None else self._entered(self._stream, (unit, *others))

    @contextmanager
    def _entered(self, stream: torch.Stream, units: Sequence[str]) -> Iterator[None]:
        compute = torch.accelerator.current_stream(self._arena.device)
        self._issued += 1
        self._used.number = self._issued
        self._arena.stream, self._arena.used = Pool(compute), self._used
        stream.wait_stream(compute)
        try:
            with stream:
                yield
        finally:
            self._arena.stream, self._arena.used = nullcontext(), None
            event = torch.Event(self._arena.device)
            event.record(stream)
            self._ends.update(dict.fromkeys(units, (self._issued, event)))

    def join(self, unit: str) -> None:
        """Let compute wait for a unit's enqueued work and all work before it, but for nothing behind it."""
        self.note("join", unit)
        if self._stream is not None and unit in self._ends:
            number, event = self._ends[unit]
            torch.accelerator.current_stream(self._arena.device).wait_event(event)
            self._used.let_go(number)

    def note(self, what: str, unit: str) -> None:
        """Write the log that tests read."""
        if self._log is not None:
            self._log.append((f"{self._name}.{what}", unit))


class Pool:
    """Allocates from a stream's pool inside, and enqueues nothing on the stream.

    With `torch.use_deterministic_algorithms(True)` torch fills new memory with NaN, on this stream. A side stream that
    has waited for this one earlier would not wait for the fill, and the fill could overwrite its results.
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


class ToHost:
    """Copies to the host's memory beside compute, on a stream of its own, and calls what works there on threads.

    On the CPU copies are made at once.

    A copied tensor is let go of when LEAVING others have come after it, and compute has waited for its copy by then:
    compute between two copies hides them.

    behind   whether sources wait for that, as on an accelerator they must
    threads  of this rank on the host
    """

    def __init__(self, device: torch.device, behind: bool, threads: int = 1) -> None:
        self._device, self._behind = device, behind
        self._threads = Threads(threads, "host-gradients") if device.type != "cpu" else None
        if self._threads is not None:  # a sum has the same bits whatever their number
            run_alone(self._threads, threads)
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._under_way: deque[tuple[torch.Event | None, Callable[[], None]]] = deque()

    def copy(self, into: Tensor, source: Tensor, let_go: Callable[[], None]) -> None:
        """Copy what compute has written so far; `let_go` gives the source up."""
        self._finish(LEAVING - 1)
        event = None
        if self._stream is None:
            into.copy_(source)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                into.copy_(source, non_blocking=True)
            event = torch.Event(self._device)
            event.record(self._stream)
        self._under_way.append((event, let_go))
        if not self._behind:
            self.finish()

    def follow(self) -> None:
        """Let the current stream wait for all copies, whose memory it is about to read."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Let compute wait for all copies, and let go of what they read."""
        self._finish(0)

    def of_each(self, call: Callable[[Tensor], Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return what a call gives of each piece in the host's memory: one thread has a piece, the longest first."""
        assert self._threads is not None
        order = sorted(range(len(pieces)), key=lambda place: -pieces[place].numel())
        futures = {place: self._threads.submit(call, pieces[place]) for place in order}
        return [futures[place].result() for place in range(len(pieces))]

    def _finish(self, left: int) -> None:
        while len(self._under_way) > left:
            event, let_go = self._under_way.popleft()
            if event is not None:
                torch.accelerator.current_stream(self._device).wait_event(event)
            let_go()


def run_alone(threads: Threads, count: int, prepare: Callable[[int], object] = int) -> None:
    """Have torch's kernels run on each of `count` threads alone; `prepare` is called on each with its number.

    Torch's number of threads stays as it was for everybody else. Set in a thread, it holds there and in threads started
    later, so it is put back when all have started.
    """
    before, together = torch.get_num_threads(), threading.Barrier(count, timeout=60)

    def start() -> None:
        torch.get_num_threads()  # a thread's first question takes over what holds for all: later it would undo the next
        torch.set_num_threads(1)
        prepare(together.wait())

    for started in [threads.submit(start) for _ in range(count)]:
        started.result()
    torch.set_num_threads(before)


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has done what was enqueued on the current stream, such as copies to the host."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def compute_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which the caller computes; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def wait_on(stream: torch.Stream | None, pending: Pending) -> None:
    """Let a stream wait for a pending operation, and the current stream for that one: also where another asks first."""
    current = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or current is None or current == stream:
        pending.wait()
        return
    with stream:
        pending.wait()
    current.wait_stream(stream)
