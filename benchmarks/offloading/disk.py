"""A rank's records on a disk: read, updated and written through the ring, beside what the disk can do.

    dd read, dd write     `dd` with direct I/O in blocks of 8 MiB: one request at a time
    read, write           all records by a disk slab, one after the other: 8 requests at a time
    both                  the same at once, by a thread each: nothing is waited for but the disk
    pipeline              through a ring of three buffers: read k + 1 | update k | write k - 1
    update                what stands for an optimizer, alone: one pass over a record

A round moves the same bytes each way, after which the disk has them (fdatasync). The disk's limit for reading and
writing so much is the faster of `read` then `write` and `both`, in medians of the same run.
"""

from __future__ import annotations

import argparse
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from offloading.turns import at_least, in_turns, rates
from zero3d.errors import ConfigError
from zero3d.memory.budget import host_budget
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.disk_tier import DiskStore
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.offload.ring import Ring, ring_buffers

TARGET = 0.80  # of the disk's limit
RECORDS = 16
BLOCK = 8 << 20
CPU = torch.device("cpu")
FIELDS = (torch.int16, torch.float32, torch.float32)  # remainder, two moments


class Bed:
    """A disk slab with records, two rings' worth of memory, and files for dd, in one folder."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        elements = max(nbytes // RECORDS // 10 // 16 * 16, 16)
        self.records = [Record(f"bucket {i}", tuple((dtype, elements) for dtype in FIELDS)) for i in range(RECORDS)]
        self.nbytes = sum(record.nbytes for record in self.records)
        self.slab = DiskSlab(folder, 0, {record.name: record.nbytes for record in self.records}, "benchmark")
        buffers = ring_buffers(self.records)
        memory = HostSlab({"ring": buffers, "plain": buffers[:2]}, CPU, host_budget(1)).memory
        self._reading, self._writing = memory["plain"]
        self._ring = Ring(DiskStore(self.slab), self.records, memory["ring"])
        self._files = {name: folder / f"dd-{name}" for name in ("read", "write")}
        self._step = -1
        self.write()
        self.dd("read", writes=True)  # the file that it reads

    def dd(self, name: str, writes: bool) -> None:
        """Move the bytes of all records by dd, with direct I/O where the slab has it."""
        file = self._files[name]
        blocks = max(self.nbytes // BLOCK, 1)
        if writes:
            ways = ["if=/dev/zero", f"of={file}", "conv=notrunc,fdatasync", *["oflag=direct"] * self.slab.direct]
        else:
            ways = [f"if={file}", "of=/dev/null", *["iflag=direct"] * self.slab.direct]
        words = ["dd", *ways, f"bs={BLOCK}", f"count={blocks}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{' '.join(words)} failed: {done.stderr.strip()}")

    def read(self) -> None:
        """Read all records."""
        for index in range(RECORDS):
            self.slab.read(index, self._reading.numpy().data)

    def write(self) -> None:
        """Write all records, and commit them."""
        for index in range(RECORDS):
            self.slab.write(index, self._writing.numpy().data)
        self._commit()

    def _commit(self) -> None:
        self._step += 1
        self.slab.commit(self._step)
        self.slab.confirm(self._step)

    def both(self) -> None:
        """Read and write all records at once."""
        reader = threading.Thread(target=self.read)
        reader.start()
        self.write()
        reader.join()

    def pipeline(self) -> None:
        """Read, update and write all records through the ring, and commit them."""
        for index in range(RECORDS):
            fields = self._ring.fetch(index)
            if index + 1 < RECORDS:
                self._ring.ahead(index + 1)
            update(fields)
            self._ring.retire(index)
        self._ring.drain()
        self._commit()

    def update(self) -> None:
        """Update as many records as the pipeline does, in memory."""
        for index in range(RECORDS):
            update(self.records[index].views(self._reading))

    def close(self) -> None:
        """End the ring and close the slab."""
        self._ring.close()
        self.slab.close()


def update(fields: list[torch.Tensor]) -> None:
    """Stand for an optimizer's step: read and write each moment once."""
    for moment in fields[1:]:
        moment.mul_(0.9)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s of each way, bytes read plus bytes written, and what the pipeline reaches."""
    bed = Bed(arguments.scratch, int(arguments.gigabytes * 1e9))
    ways: dict[str, Callable[[], object]] = {
        "dd read": lambda: bed.dd("read", writes=False),
        "dd write": lambda: bed.dd("write", writes=True),
        "read": bed.read,
        "write": bed.write,
        "both": bed.both,
        "pipeline": bed.pipeline,
        "update": bed.update,
    }
    try:
        seconds = in_turns(ways, arguments.rounds)
    finally:
        bed.close()
    moved = {name: bed.nbytes * (2 if name in ("both", "pipeline", "update") else 1) for name in ways}
    blocks = max(bed.nbytes // BLOCK, 1) * BLOCK
    moved |= dict.fromkeys(("dd read", "dd write"), blocks)
    return {
        "direct": bed.slab.direct,
        "bytes": bed.nbytes,
        "rows": rates(seconds, moved),
        "seconds": seconds,
        "targets": list(targets({name: median(times) for name, times in seconds.items()})),
    }


def targets(took: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield what is judged, from median seconds."""
    limit = min(took["read"] + took["write"], took["both"])
    yield at_least("pipeline, of the disk's limit for the same bytes", limit / took["pipeline"], TARGET)
    yield at_least("pipeline, of dd's rate", (took["dd read"] + took["dd write"]) / took["pipeline"], 1.0)
    for name in ("read", "write"):
        yield at_least(f"{name}, of dd's rate", took[f"dd {name}"] / took[name], 1.0)
