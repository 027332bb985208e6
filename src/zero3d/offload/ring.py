"""A ring of buffers on the device through which records of a store pass: one is read, one is used, one goes back.

    ring.ahead(k + 1)           begin to bring it; nobody waits
    views = ring.fetch(k)       its fields on the device, as soon as compute gets there
    views = ring.put(k)         the same of a record that compute is to write as a whole: nothing is read
    ...                         compute uses and changes them
    ring.retire(k)              begin to take it back; nobody waits

              time ->
    in        read 0 | read 1 | read 2  | read 3  |
    compute            use 0  | use 1   | use 2   | ...
    out                       | write 0 | write 1 |

    store \\ device   accelerator                                        CPU
    host             in, out: a stream each, copies of pinned memory    in, out: a thread each, copies
    disk             threads: disk <-> pinned staging <-> stream        threads: disk <-> buffer

    An accelerator may copy from and to a ring of the host's buffers itself, too: who does says so (`used`).

A buffer is used again when it is back, a record read again when it is back: on an accelerator streams wait for events,
threads for each other. The ring allocates no memory: it is given its buffers. Whatever a thread or a copy raises comes
out of the next call, and says of which record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import Protocol, Self

import numpy
import torch
from torch import Tensor

from zero3d.account.transients import DEPTH
from zero3d.memory.blocks import padded
from zero3d.memory.threads import Threads
from zero3d.offload.records import Record


def ring_buffers(records: Sequence[Record], depth: int = DEPTH) -> list[Record]:
    """Return the buffers that a ring for these records needs, as records of bytes for a host slab."""
    largest = padded(max((record.nbytes for record in records), default=0))
    return [Record(f"ring {number}", ((torch.uint8, largest),)) for number in range(depth)]


class Buffer:
    """Memory of one record on the device, and how far the record in it has come.

    staging  memory of the host that a disk reads and writes for it, on an accelerator
    record   the number of the record in it, or of the last one
    came     whether the record is there, or its copy enqueued before the event `arrived`
    left     the same for its way back, with the event `gone`; compute no longer uses the record after `used`
    copies   for memory of the host: events after which a device has copied from or to the record in it
    """

    def __init__(self, memory: Tensor, staging: Tensor | None) -> None:
        self.memory, self.staging = memory, staging
        self.record: int | None = None
        self.came: Future[None] = Future()
        self.left: Future[None] = Future()
        for future in (self.came, self.left):
            future.set_result(None)
        self.copies: list[torch.Event] = []
        self.arrived = torch.Event(memory.device)
        self.used = torch.Event(memory.device)
        self.gone = torch.Event(memory.device)

    @property
    def host(self) -> Tensor:
        """Return the host's memory of it."""
        return self.memory if self.staging is None else self.staging

    def wait_for_copies(self) -> None:
        """Wait until no device copies from or to it."""
        for event in self.copies:
            event.synchronize()


class Store(Protocol):
    """Where records are when they are not in a ring: each tier's is in its file.

    waits  whether the host waits for it, even where the device is an accelerator
    """

    waits: bool

    def load(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Copy a record into a buffer, or enqueue that."""

    def store(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Copy a buffer to the record, or enqueue that."""


class HostStore:
    """Records in the host's memory, as a host slab has carved it."""

    waits = False

    def __init__(self, memory: Sequence[Tensor]) -> None:
        self._memory = memory

    def load(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Copy a record into a buffer."""
        copy_bytes(buffer.memory[:nbytes], self._memory[index])

    def store(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Copy a buffer to the record."""
        copy_bytes(self._memory[index], buffer.memory[:nbytes])


def copy_bytes(into: Tensor, source: Tensor) -> None:
    """Copy bytes on the current stream; on the CPU by this thread alone, while others have the interpreter."""
    if into.device.type == source.device.type == "cpu":
        numpy.copyto(into.numpy(), source.numpy())
    else:
        into.copy_(source, non_blocking=True)


class Ring:
    """Moves records between one store and the buffers it was given, which it owns until it is closed."""

    def __init__(
        self, store: Store, records: Sequence[Record], buffers: Sequence[Tensor], staging: Sequence[Tensor] = ()
    ) -> None:
        """Take over uint8 buffers of the device; staging: as many of the host, for a disk and an accelerator."""
        assert min(memory.numel() for memory in buffers) >= max(record.nbytes for record in records)
        self._store, self._records = store, records
        self._device = buffers[0].device
        on_cpu = self._device.type == "cpu"
        self._buffers = [Buffer(memory, staging[number] if staging else None) for number, memory in enumerate(buffers)]
        self._idle = deque(self._buffers)
        self._wanted: deque[int] = deque()
        self._held: dict[int, Buffer] = {}
        self._used: set[int] = set()  # of those held, fetched or put
        self._in, self._out = (None if on_cpu else torch.Stream(self._device) for _ in range(2))
        if not on_cpu:
            for buffer in self._buffers:  # compute may still have to do with what was in this memory
                buffer.used.record(torch.accelerator.current_stream(self._device))
        self._threads = [Threads(1, f"zero3d-ring-{name}") for name in ("in", "out")] if on_cpu or store.waits else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ahead(self, index: int) -> None:
        """Bring a record as soon as a buffer is free; nothing happens where it is there or on its way."""
        if index not in self._held and index not in self._wanted:
            self._wanted.append(index)
            self._start()

    def fetch(self, index: int) -> list[Tensor]:
        """Return a record's fields on the device, valid for what compute does next, until it is retired."""
        self.ahead(index)
        if index not in self._held:
            self._make_room(index)
        self._raise_failure()
        self._used.add(index)
        assert index in self._held, (
            f"record {self._records[index].name}: all {len(self._buffers)} buffers hold others: "
            f"{', '.join(self._records[held].name for held in self._held)}"
        )
        buffer = self._held[index]
        buffer.came.result()
        if self._in is not None:
            torch.accelerator.current_stream(self._device).wait_event(buffer.arrived)
        return self._records[index].views(buffer.memory)

    def put(self, index: int) -> list[Tensor]:
        """Return the fields of a free buffer that becomes a record, whatever its store has of it; retire it, too."""
        assert self._idle
        assert index not in self._held
        buffer = self._idle.popleft()
        for future in (buffer.came, buffer.left):
            future.result()
        if self._in is not None:
            for event in (buffer.arrived, buffer.gone):
                torch.accelerator.current_stream(self._device).wait_event(event)
            self._in.wait_event(buffer.gone)  # nobody knows any more which record it was that a read must wait for
        buffer.record = index
        self._held[index] = buffer
        self._used.add(index)
        return self._records[index].views(buffer.memory)

    def used(self, index: int, device: torch.device) -> None:
        """Let a thread that next reads or writes this record's memory, which is the host's, wait for a device's stream.

        That is the current one; this thread goes on.
        """
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        self._held[index].copies.append(event)

    @property
    def idle(self) -> int:
        """Return how many buffers hold nothing that is wanted or used."""
        return len(self._idle)

    def retire(self, index: int, changed: bool = True) -> None:
        """Take a record back to its store, and let go of its buffer; one that is not changed is not written."""
        buffer = self._held.pop(index)
        if index not in self._used:
            self._give_up(buffer)
        self._used.discard(index)
        if self._out is not None:
            buffer.used.record(torch.accelerator.current_stream(self._device))
        if changed:
            buffer.left = self._run(1, self._take_back, buffer, index)
        self._idle.append(buffer)
        self._start()
        self._raise_failure()

    def drain(self) -> None:
        """Wait until all that was retired is in its store. Raises what went wrong."""
        for buffer in self._buffers:
            buffer.left.result()
            if self._out is not None:
                buffer.gone.synchronize()

    def close(self) -> None:
        """Wait for all that is under way and end the threads; the buffers are the caller's again."""
        self._wanted.clear()
        wait([future for buffer in self._buffers for future in (buffer.came, buffer.left)])
        for thread in self._threads:
            thread.close()
        for stream in (self._in, self._out):
            if stream is not None:
                stream.synchronize()

    def _make_room(self, index: int) -> None:
        """Let go of a record that was brought ahead and has not been used, for one that is needed now."""
        self._wanted.remove(index)
        self._wanted.appendleft(index)
        unused = next((held for held in self._held if held not in self._used), None)
        if unused is not None:
            buffer = self._held.pop(unused)
            buffer.came.result()
            self._give_up(buffer)
            self._idle.append(buffer)
            self._start()

    def _give_up(self, buffer: Buffer) -> None:
        """Let writes wait for the read of a record that compute has never waited for."""
        if self._out is not None:
            self._out.wait_event(buffer.arrived)

    def _start(self) -> None:
        """Begin to bring what is wanted, as far as there are buffers."""
        while self._wanted and self._idle:
            index, buffer = self._wanted.popleft(), self._idle.popleft()
            before = [other for other in self._buffers if other is buffer or other.record == index]
            buffer.record = index
            self._held[index] = buffer
            buffer.came = self._run(0, self._bring, buffer, index, before, [other.left for other in before])

    def _run(self, direction: int, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Call in the thread of a direction, or here where a stream does the work."""
        if self._threads:
            return self._threads[direction].submit(work, *arguments)
        done: Future[None] = Future()
        try:
            work(*arguments)
            done.set_result(None)
        except Exception as error:  # noqa: BLE001  comes out of the call that waits for it, as a thread's does
            done.set_exception(error)
        return done

    def _bring(self, buffer: Buffer, index: int, before: Sequence[Buffer], left: Sequence[Future[None]]) -> None:
        """Read a record into a buffer after the buffer's last record has left, and after earlier writes of this one."""
        for future in left:
            future.result()
        buffer.wait_for_copies()
        buffer.copies.clear()
        if self._in is not None:
            for other in before:
                self._in.wait_event(other.used)
                self._in.wait_event(other.gone)
        with self._on(self._in, index):
            self._store.load(index, self._records[index].nbytes, buffer)
        if self._in is not None:
            buffer.arrived.record(self._in)

    def _take_back(self, buffer: Buffer, index: int) -> None:
        """Write a record from a buffer after compute has used it."""
        buffer.wait_for_copies()
        if self._out is not None:
            self._out.wait_event(buffer.used)
        with self._on(self._out, index):
            self._store.store(index, self._records[index].nbytes, buffer)
        if self._out is not None:
            buffer.gone.record(self._out)

    @contextmanager
    def _on(self, stream: torch.Stream | None, index: int) -> Iterator[None]:
        """Move a record inside, on a stream of an accelerator; an error says which record."""
        try:
            with nullcontext() if stream is None else stream:
                yield
        except Exception as error:
            error.add_note(f"while record {self._records[index].name} was moved")
            raise

    def _raise_failure(self) -> None:
        """Raise what has gone wrong on the way back."""
        for buffer in self._buffers:
            if buffer.left.done():
                buffer.left.result()
