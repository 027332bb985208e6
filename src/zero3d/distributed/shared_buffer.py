"""A receive buffer of one rank: other ranks of its host write into it instead of sending messages.

    rank 0 of an axis                                    another rank
    a memory file: process, number, mark      ->         opens /proc/PROCESS/fd/NUMBER, maps it, and looks for the mark
                                              <-         whether it is there
    closes the file, whose mappings remain

    | mark, to the end of a page | memory: slot 0 | slot 1 | ... |       a slot for each rank, which it writes itself

A rank of another host, or of another container, finds no such process, or another mark, and goes on sending. The file
has no name, so that processes that are killed leave nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 4096  # bytes; a multiple of the width of every dtype
NAME = "zero3d-receive-buffer"
NOWHERE = (0, 0, 0)


class SharedBuffer:
    """Owns memory of this rank that others of its host may write into.

    memory   [nbytes] uint8
    address  process, file and mark, by which `attach` finds the memory until `close`; NOWHERE if nobody can, as on
             other devices than the CPU
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.address: Sequence[int] = NOWHERE
        shared = self._shared(nbytes) if nbytes and device.type == "cpu" else None
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device) if shared is None else shared

    def _shared(self, nbytes: int) -> Tensor | None:
        """Return new memory and keep its address here; None where the system has no memory files, or no more."""
        try:
            file = os.memfd_create(NAME)
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(file, PAGE + nbytes)
            whole = _mapped(file, nbytes)
        except OSError:
            os.close(file)
            return None
        mark = secrets.randbits(62)
        whole[:8].view(torch.int64).fill_(mark)
        self.address = (os.getpid(), file, mark)
        return whole[PAGE:]

    def close(self) -> None:
        """Let nobody attach any more; who has done so keeps the memory."""
        if self.address is not NOWHERE:
            os.close(self.address[1])
            self.address = NOWHERE


def attach(address: Sequence[int], nbytes: int) -> Tensor | None:
    """Return the first bytes of another rank's memory, or None where that is not of this host."""
    process, number, mark = address
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return None
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        whole = _mapped(file, nbytes)
    except (OSError, ValueError):  # of another host's rank, whose process here has the same number
        return None
    finally:
        os.close(file)
    return whole[PAGE:] if whole[:8].view(torch.int64).item() == mark else None


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, PAGE + nbytes), dtype=torch.uint8)
