"""The memory of the host that a rank's tiers live in: one anonymous mapping of exactly the size they need.

    HostSlab({"optimizer states": records, "buffers": ring}, device, budget)

        budget --refuses--> OutOfBudget
        mmap, private ---> huge pages where there are ---> all pages touched ---> registered with CUDA's driver
        | record | record | ... | record |     carved into views, each at a multiple of 4096 bytes

Why not torch's pinned memory: its allocator rounds up to powers of two and never gives back.

Pages are touched at once, on every device. Granted memory is then really there: a step does not wait for the kernel to
clear pages, and a host short of memory says so at the start. They are zeroed by the kernel, and lie on the memory node
of the thread that built the slab.

The mapping lives as long as its last view: a view that outlives the slab stays valid. When the last one goes, the
device is waited for, the memory unregistered, then unmapped. Forked children do not have it: copy-on-write would copy
pages under the device's feet, and twice the memory would be taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EINVAL
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import OutOfBudget
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget
from zero3d.offload.records import Record
from zero3d.spec.sizes import decimal

POPULATE_WRITE = 23  # Linux 5.14's MADV_POPULATE_WRITE, which Python does not name
AT_ONCE = 1 << 30  # bytes that are touched before other threads and signals have their turn
UNKNOWN = -1
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class HostSlab:
    """Owns one mapping of the host's memory, carved into records.

    nbytes  of the mapping: every record in whole blocks of 4096 bytes
    memory  the bytes of every record, by part and in its order
    views   the fields of every record over the same bytes
    pinned  whether the device's driver knows the memory, so that copies need not wait
    """

    def __init__(
        self, parts: Mapping[str, Sequence[Record]], device: torch.device, budget: HostBudget | None = None
    ) -> None:
        asked = {part: sum(padded(record.nbytes) for record in records) for part, records in parts.items()}
        if budget is not None:
            budget.check(asked)
        self.nbytes = sum(asked.values())
        region = _Region.of(self.nbytes) if self.nbytes else None
        self.pinned = region is not None and device.type == "cuda"
        if region is not None and self.pinned:
            region.register(device)
        self.memory: dict[str, list[Tensor]] = {part: [] for part in parts}
        start = 0
        for part, records in parts.items():
            for record in records:
                self.memory[part].append(_carve(region, start, record.nbytes))
                start += padded(record.nbytes)
        self.views = {
            part: [record.views(memory) for record, memory in zip(records, self.memory[part], strict=True)]
            for part, records in parts.items()
        }


def _carve(region: _Region | None, start: int, nbytes: int) -> Tensor:
    """Return bytes of a region as a tensor, which keeps the region alive."""
    if region is None or not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(region, dtype=torch.uint8, count=nbytes, offset=start)


class _Region(mmap.mmap):
    """Anonymous memory of this process, unregistered and unmapped when the last tensor over it is gone."""

    process = UNKNOWN
    registered: torch.device | None = None

    @classmethod
    def of(cls, nbytes: int) -> _Region:
        """Map and touch so many bytes. Raises OutOfBudget where the system does not give them."""
        try:
            region = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            region.process = os.getpid()
            region._touch()
        except OSError as error:
            raise OutOfBudget(
                f"the system gives no {decimal(nbytes)} ({nbytes} bytes) of memory ({error.strerror}): look at the "
                "limits of `ulimit -v` and /proc/sys/vm/overcommit_memory, or lower offload.fraction."
            ) from error
        return region

    def _touch(self) -> None:
        """Have all pages there, large ones where the system has some. Raises OSError."""
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError):  # a kernel without it
                if hasattr(mmap, advice):
                    self.madvise(getattr(mmap, advice))
        try:
            for start in range(0, len(self), AT_ONCE):
                self.madvise(POPULATE_WRITE, start, min(AT_ONCE, len(self) - start))
        except OSError as error:
            if error.errno != EINVAL:  # else the kernel is older, or another system's
                raise
            torch.frombuffer(self, dtype=torch.uint8).zero_()

    def register(self, device: torch.device) -> None:
        """Tell CUDA's driver of the memory: copies to and from it are asynchronous then. Raises OutOfBudget."""
        whole = torch.frombuffer(self, dtype=torch.uint8)
        with torch.cuda.device(device):
            runtime = _runtime()
            failed = runtime.cudaHostRegister(whole.data_ptr(), len(self), PORTABLE)
        if int(failed):
            raise OutOfBudget(
                f"CUDA's driver registers no {decimal(len(self))} of the host's memory (cudaHostRegister: "
                f"{runtime.cudaGetErrorString(failed)}): lower offload.fraction, or raise what this process may lock."
            )
        self.registered, self.address = device, whole.data_ptr()

    def __del__(self) -> None:
        """Let the driver forget the memory before it is unmapped, which the base class does next."""
        if self.process != os.getpid():  # a forked child, which has no such memory: there may be other there now
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        elif self.registered is not None and not sys.is_finalizing():  # at its end the driver forgets all
            with torch.cuda.device(self.registered):
                torch.cuda.synchronize()
                _runtime().cudaHostUnregister(self.address)


def _runtime() -> Any:
    """Return CUDA's runtime as torch has it, HIP's under the same names."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
