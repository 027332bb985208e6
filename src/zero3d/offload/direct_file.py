"""A file of fixed size that is read and written past the page cache, many blocks at once. No torch.

direct    O_DIRECT: disk and memory of the caller, nothing between; offsets, lengths and addresses in whole blocks
buffered  where a file system has no direct I/O: through the page cache, which is told to forget what is on the disk

A transfer is cut into chunks of 8 MB for 8 threads, for each direction its own: a disk is fast with many requests
under way, and the interpreter is not held meanwhile. All chunks have ended when a call returns or raises, so that its
memory is the caller's again. Errors are OSError, with the path.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from zero3d.memory.blocks import BLOCK
from zero3d.memory.threads import Threads

CHUNK = 8 << 20
THREADS = 8
DIRECT: int = getattr(os, "O_DIRECT", 0)
MODE = 0o644
NOT_THERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that reserve nothing

Transfer = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


class DirectFile:
    """Owns an open file and the threads that read and write it.

    direct  whether it is read and written past the page cache
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open a file of this size, behind no link, and reserve all of it on the disk.

        Raises OSError, ENOSPC for a full disk.
        """
        self.path = path
        fresh = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
        try:
            os.ftruncate(self._file, nbytes)
            _reserve(self._file, nbytes, path)
        except OSError:
            os.close(self._file)
            if fresh:  # what it has got of a full disk
                path.unlink(missing_ok=True)
            raise
        self.direct = bool(DIRECT) and nbytes > 0 and self._go_direct()
        self._readers, self._writers = (Threads(THREADS, f"zero3d-{name}") for name in ("read", "write"))
        self.close = weakref.finalize(self, _close, self._file, self._readers, self._writers)

    def _go_direct(self) -> bool:
        """Open the file anew for direct I/O; say whether the file system has it."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | DIRECT)
        except OSError:
            return False
        try:
            os.preadv(file, [memoryview(mmap.mmap(-1, BLOCK))], 0)  # some take the flag and refuse what comes then
            os.dup2(file, self._file, inheritable=False)
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill memory from the file. Raises OSError."""
        self._move(self._readers, os.preadv, memory, offset)
        self._forget(offset, len(memory))

    def write(self, memory: memoryview, offset: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Write memory to the file; `sync` has it on the disk. Calls `meanwhile` while chunks go. Raises OSError."""
        self._move(self._writers, os.pwritev, memory, offset, meanwhile)

    def _move(
        self,
        pool: Threads,
        transfer: Transfer,
        memory: memoryview,
        offset: int,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        starts = range(0, len(memory), CHUNK)
        if len(starts) == 1:
            meanwhile()
            self._move_all(transfer, memory, offset)
            return
        chunks = [pool.submit(self._move_all, transfer, memory[at : at + CHUNK], offset + at) for at in starts]
        meanwhile()
        wait(chunks)
        for chunk in chunks:
            chunk.result()

    def _move_all(self, transfer: Transfer, memory: memoryview, offset: int) -> None:
        """Call until all is moved: one call may move less. Raises OSError where a call moves nothing more."""
        done = 0
        while done < len(memory):
            reached = done + transfer(self._file, [memory[done:]], offset + done)
            if self.direct and reached < len(memory):
                reached -= reached % BLOCK  # direct I/O goes on at a whole block
            if reached <= done:
                what = f"only {done} of {len(memory)} bytes were moved at byte {offset}"
                raise OSError(errno.EIO, what, str(self.path))
            done = reached

    def sync(self) -> None:
        """Have the disk take everything written. Raises OSError."""
        getattr(os, "fdatasync", os.fsync)(self._file)
        self._forget(0, 0)

    def _forget(self, offset: int, nbytes: int) -> None:
        """Have the page cache let go of a part of the file, 0 bytes for all from there on: others need it more."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _reserve(file: int, nbytes: int, path: Path) -> None:
    """Have the file system set all blocks of a file aside. Raises OSError, ENOSPC where there are too few."""
    try:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
            return
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
    if shutil.disk_usage(path.parent).free < nbytes - os.fstat(file).st_blocks * 512:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _close(file: int, *pools: Threads) -> None:
    for pool in pools:
        pool.close()  # it has nothing to do: whoever moves something waits for it
    os.close(file)
