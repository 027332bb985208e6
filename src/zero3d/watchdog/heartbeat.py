"""What a rank is doing, in a file of 392 bytes that it maps into its memory and its monitor reads.

    offset  bytes
         0      8  sequence   odd while the record is written; every beat makes it larger
         8      8  depth      calls under way, one inside another, that may wait for peers
        16      8  pid
        24      8  step       the optimizer step under way
        32      8  number     of the last such call, among those of its axis and operation; 0: they are not counted
        40      8  peer       the only rank of that axis that it waits for, by its place there; -1: all of them
        48     16  axis       of that call
        64     24  operation
        88    144  unit
       232     32  phase      `TRAINING`, or the name of something that may take long
       264    128  work       what it does outside of such calls: the forward of a unit

Texts are UTF-8, filled up with zeros. A beat costs about a microsecond and no system call. All of a rank's state is in
the record, so that several openings in one process agree. What is said once (the rank's axes, the limits of
time, the run's folder) is beside it, as JSON in `rank-R.json`.

    phases      any but `TRAINING` and `ENDED`: the rank may be silent for `health.slow_timeout`, and so may its peers
    nobody      a rank without a monitor has a record that nobody reads
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, NamedTuple, Self

from zero3d.reading import parse_object
from zero3d.watchdog.own_files import create_own, open_own, read_own, write_whole

WATCH = "ZERO3D_WATCH"  # the variable by which a rank finds the folder of its host's monitor
SIZE = 392
TRAINING, ENDED = "training", "ended"
_SEQUENCE, _DEPTH, _PID, _STEP, _CALL, _PHASE, _WORK = 0, 8, 16, 24, 32, 232, 264
_WHOLE = Struct("<qqqqqq16s24s144s32s128s")
_NUMBER, _HEAD, _OF_CALL = Struct("<q"), Struct("<qq"), Struct("<qq184s")
_OF_PHASE, _OF_WORK = Struct("<32s"), Struct("<128s")
_NAMES = Struct("<16s24s144s")
_MOST_FACTS = 16 << 20  # bytes of what a rank tells once
_MOST_PID = 1 << 31
_TRIES = 5  # looks at a record that changes while it is read
ALL = -1  # in the place of a peer


class Beat(NamedTuple):
    """One record as it was read."""

    sequence: int
    depth: int
    pid: int
    step: int
    number: int
    peer: int
    axis: str
    op: str
    unit: str
    phase: str
    work: str


class Heartbeat:
    """Owns one rank's record; `inside` is a context manager of its own, since calls end in the order of a stack.

    waited  seconds of this process inside of such calls, so far
    """

    def __init__(self, file: Path | None, memory: mmap.mmap | None = None) -> None:
        self._file, self._memory = file, mmap.mmap(-1, SIZE) if memory is None else memory
        self._names: dict[tuple[str, str, str], bytes] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self.waited = self._since = 0.0

    @classmethod
    def begin(cls, folder: Path | None, rank: int, phase: str) -> Self:
        """Make the record of this process in a monitor's folder (None, or one that is full: nobody's)."""
        with suppress(OSError):
            if folder is not None:
                file = folder / f"rank-{rank}"
                fresh = file.with_name(f"{file.name}.new")
                with os.fdopen(create_own(fresh), "wb+") as record:
                    record.write(bytes(SIZE))  # of a full disk it says so: writing to its memory would be fatal
                    record.flush()
                    memory = mmap.mmap(record.fileno(), SIZE)
                _WHOLE.pack_into(memory, 0, 2, 0, os.getpid(), 0, 0, ALL, b"", b"", b"", phase.encode(), b"")
                fresh.replace(file)
                return cls(file, memory)
        return cls(None)

    @classmethod
    def join(cls, folder: str | None, rank: int) -> Self:
        """Open the record that this process has begun; nobody's where it has not."""
        with suppress(OSError, ValueError):
            if folder is not None:
                file = Path(folder) / f"rank-{rank}"
                with os.fdopen(open_own(file, os.O_RDWR), "rb+") as record:
                    memory = mmap.mmap(record.fileno(), SIZE)
                if _NUMBER.unpack_from(memory, _PID)[0] == os.getpid():
                    return cls(file, memory)
        return cls(None)

    def inside(self, axis: str, op: str, unit: str, number: int = 0, peer: int | None = None) -> Self:
        """Say that this rank begins a call that may wait for peers, or for one; leaving the context says it is over."""
        self.enter(axis, op, unit, number, peer)
        return self

    def enter(self, axis: str, op: str, unit: str, number: int, peer: int | None) -> None:
        """Say that this rank begins such a call."""
        memory, key = self._memory, (axis, op, unit)
        names = self._names.get(key) or self._named(key)
        sequence, depth = _HEAD.unpack_from(memory, 0)
        if depth == 0:
            self._since = time.perf_counter()
        _HEAD.pack_into(memory, 0, sequence | 1, depth + 1)
        _OF_CALL.pack_into(memory, _CALL, number, ALL if peer is None else peer, names)
        _NUMBER.pack_into(memory, 0, (sequence | 1) + 1)

    def leave(self) -> None:
        """Say that the call is over that began last."""
        sequence, depth = _HEAD.unpack_from(self._memory, 0)
        if depth == 1:
            self.waited += time.perf_counter() - self._since
        _HEAD.pack_into(self._memory, 0, sequence | 1, depth - 1)
        _NUMBER.pack_into(self._memory, 0, (sequence | 1) + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def next_message(self, axis: str, op: str, what: str, peer: int) -> None:
        """Say which message of a peer comes next; whether this rank waits for it, its stack tells."""
        texts = _NAMES.pack(axis.encode(), op.encode(), what.encode())
        sequence, depth = _HEAD.unpack_from(self._memory, 0)
        _HEAD.pack_into(self._memory, 0, sequence | 1, depth)
        _OF_CALL.pack_into(self._memory, _CALL, 0, peer, texts)
        _NUMBER.pack_into(self._memory, 0, (sequence | 1) + 1)

    def count(self, axis: str, op: str) -> int:
        """Return the number of the next call of this operation on this axis, from 1."""
        self._counts[axis, op] = number = self._counts.get((axis, op), 0) + 1
        return number

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many calls have begun, by axis and operation."""
        return dict(self._counts)

    @property
    def waits(self) -> bool:
        """Return whether this rank is in a call that may wait for peers."""
        return bool(_HEAD.unpack_from(self._memory, 0)[1] > 0)

    @property
    def beats(self) -> int:
        """Return a number that every change of the record makes larger."""
        return int(_NUMBER.unpack_from(self._memory, _SEQUENCE)[0])

    def work(self, what: bytes) -> None:
        """Say what this rank does next, outside of calls that may wait."""
        self._write(_OF_WORK, _WORK, what)

    @property
    def step(self) -> int:
        """The optimizer step under way."""
        return int(_NUMBER.unpack_from(self._memory, _STEP)[0])

    @step.setter
    def step(self, step: int) -> None:
        self._write(_NUMBER, _STEP, step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce, inside, what may take long, or `TRAINING`; what was before comes back."""
        before = bytes(self._memory[_PHASE:_WORK])
        self._write(_OF_PHASE, _PHASE, name.encode())
        try:
            yield
        finally:
            self._write(_OF_PHASE, _PHASE, before)

    @property
    def long_phase(self) -> str:
        """Name of the phase under way that may take long; nothing in training."""
        name = bytes(self._memory[_PHASE:_WORK]).rstrip(b"\0").decode(errors="replace")
        return "" if name in (TRAINING, ENDED) else name

    def end(self) -> None:
        """Say that this rank leaves on its own."""
        self._write(_OF_PHASE, _PHASE, ENDED.encode())

    def tell(self, **facts: Any) -> None:
        """Write once what does not change, beside the record; earlier facts of other names stay."""
        if self._file is not None:
            with suppress(OSError):  # the disk may be what is full
                write_whole(self._file.with_suffix(".json"), json.dumps(read_facts(self._file) | facts))

    @property
    def told(self) -> dict[str, Any]:
        """Return what this rank has told; nothing where nobody hears it."""
        return {} if self._file is None else read_facts(self._file)

    def _named(self, key: tuple[str, str, str]) -> bytes:
        self._names[key] = names = _NAMES.pack(*(text.encode() for text in key))
        return names

    def _write(self, kind: Struct, offset: int, value: object) -> None:
        """Write one field between two changes of the sequence; whatever happens, it ends even."""
        sequence = _NUMBER.unpack_from(self._memory, _SEQUENCE)[0] | 1
        _NUMBER.pack_into(self._memory, _SEQUENCE, sequence)
        kind.pack_into(self._memory, offset, value)
        _NUMBER.pack_into(self._memory, _SEQUENCE, sequence + 1)


def read_beat(record: bytes | mmap.mmap) -> Beat:
    """Read a record that its rank may be writing: again, where it was."""
    for _ in range(_TRIES):
        before = _NUMBER.unpack_from(record, _SEQUENCE)[0]
        fields = _WHOLE.unpack_from(record, 0)
        if before % 2 == 0 and _NUMBER.unpack_from(record, _SEQUENCE)[0] == before:
            break
    texts = (text.rstrip(b"\0").decode(errors="replace") for text in fields[6:])
    return Beat(*fields[:6], *texts)


def read_record(file: Path) -> Beat | None:
    """Read a rank's file; None of anything but a record of this user's, which only its rank makes whole."""
    with suppress(OSError):
        record = read_own(file, SIZE + 1)
        if len(record) == SIZE:
            beat = read_beat(record)
            return beat if 0 < beat.pid < _MOST_PID else None
    return None


def read_facts(record: Path) -> dict[str, Any]:
    """Return what the rank of a record has told; nothing where it has not, or not yet."""
    with suppress(OSError, ValueError):
        return parse_object(read_own(record.with_suffix(".json"), _MOST_FACTS).decode())
    return {}
