"""Files to documents of tokens, in this process or in several: the same documents in the same order.

    this process      read -> batches of records -> ... -> documents, in the order of the records
    N spawned ones                            \\ encode /

Only encoding is shared out: reading stays in one place, so a record's place in its file, the order and the first error
are the same with any number of processes. At most AHEAD batches a process are under way, whatever the files' size.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from zero3d.data.encode import Counts, Encoded, Encoder, batches
from zero3d.data.files import Source
from zero3d.data.records import Record, read
from zero3d.errors import DataError, Zero3dError
from zero3d.memory.cgroups import usable_cores

AHEAD = 3  # batches per process that are read before they are wanted
WORTH = 1 << 26  # bytes of data that are worth a process: it takes seconds to start
EVERY = 5.0  # seconds between lines
MEGA = 1_000_000

Batch = tuple[Path, list[Record]]


@dataclass(frozen=True)
class Tokenizing:
    """How data are tokenized, and who hears of it.

    processes  None: by the cores there are and the size of the data
    made       called with every document
    say        called with lines for people, where it takes long
    """

    processes: int | None = None
    made: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda line: None

    def documents(self, sources: Sequence[Source], encoder: Encoder) -> Iterator[tuple[Path, Encoded]]:
        """Yield each document with its file. Raises DataError, ConfigError."""
        progress = TokenizingProgress(sources, self.say)
        processes = processes_for(sources, encoder, self.processes)
        groups = _read(sources, progress)
        encoded = _alone(groups, encoder) if processes == 1 else _shared(groups, encoder, processes)
        for path, documents in encoded:
            for document in documents:
                yield path, document
                self.made()
                progress.count(document.last)


QUIETLY = Tokenizing()


class TokenizingProgress:
    """Tells how far it is: nothing for EVERY seconds, then a line after as many each.

    Bytes are those read; of compressed formats it is their share of rows.
    """

    def __init__(
        self, sources: Sequence[Source], say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = sum(source.path.stat().st_size for source in sources)
        self._say, self._clock = say, clock
        self._read = self._documents = 0
        self._began = self._told = clock()

    def passed(self, read: int) -> None:
        """Note that so many bytes more have been read."""
        self._read += read

    def count(self, ended: bool) -> None:
        """Note a document, or a piece of one that has not ended."""
        self._documents += ended
        now = self._clock()
        if now - self._told >= EVERY:
            self._told = now
            self._say(self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """Return what is told after so many seconds."""
        read, total = min(self._read, self._total), self._total
        left = round(seconds * (total - read) / max(read, 1))
        return (
            f"tokenizing: {self._documents:,} documents, {read / MEGA:,.0f} of {total / MEGA:,.0f} MB "
            f"({read / max(total, 1):.0%}), {read / MEGA / seconds:,.1f} MB/s, {left // 60}:{left % 60:02} left"
        )


def processes_for(sources: Sequence[Source], encoder: Encoder, asked: int | None) -> int:
    """Return how many processes encode: those asked for, else as many as there are cores and data are worth.

    Arrays of token ids have nothing to encode, and bytes are tokens nearly as fast as they are read.
    """
    size = sum(source.path.stat().st_size for source in sources if source.format != "npy")
    if not size or (asked is None and encoder.of_bytes):
        return 1
    return asked or max(1, min(usable_cores(), size // WORTH))


def _read(sources: Sequence[Source], progress: TokenizingProgress) -> Iterator[Batch]:
    for source in sources:
        for batch in batches(read(source, progress.passed)):
            yield source.path, batch


def _alone(groups: Iterator[Batch], encoder: Encoder) -> Iterator[tuple[Path, Iterator[Encoded]]]:
    for path, batch in groups:
        yield path, encoder.encode(batch)


def _shared(groups: Iterator[Batch], encoder: Encoder, processes: int) -> Iterator[tuple[Path, list[Encoded]]]:
    """Yield the documents of each batch in their order; an error comes where its batch would have come."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (encoder,))
    waiting: deque[tuple[Path, Future[tuple[list[Encoded], Counts]]]] = deque()
    unread: Zero3dError | None = None
    try:
        while unread is None or waiting:
            try:
                while unread is None and len(waiting) < AHEAD * processes:
                    path, batch = next(groups)
                    waiting.append((path, pool.submit(_encode, batch)))
            except StopIteration:
                if not waiting:
                    return
            except Zero3dError as error:  # those before it may have one, which comes first
                unread = error
                continue
            path, future = waiting.popleft()
            documents, counts = future.result()
            encoder.counts.add(counts)
            yield path, documents
        raise unread
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that tokenizes was ended from outside (data.processes={processes}), as a host that runs out of "
            "memory does, or a tokenizer that aborts: start again, with a smaller data.processes. If it happens with "
            "one, too, set data.tokenizer to another folder."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of this worker


def _start(encoder: Encoder) -> None:
    """Begin a worker: one core is its share, signals are for the rank, and it ends with the rank."""
    global _encoder
    _encoder = encoder
    torch.set_num_threads(1)  # for processors of images
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # read by the library itself, when it encodes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(batch: list[Record]) -> tuple[list[Encoded], Counts]:
    """Return a batch's documents, in half the bytes, and what was counted of its records."""
    _encoder.counts = Counts()
    documents = [each._replace(ids=each.ids.astype(numpy.int32)) for each in _encoder.encode(batch)]
    return documents, _encoder.counts
