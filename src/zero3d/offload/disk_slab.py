"""A rank's records on a disk: two slots for each, of which one is always whole. No torch.

    DIRECTORY/
      rank-00003.states     | slot 0: record 0 | record 1 | ... | slot 1: record 0 | record 1 | ... |
      rank-00003.commit     which step is whole, and in which slot (commit_file.py)
      rank-00003.lock       while a process uses them (file_lock.py)

    write(record) ...   into the slot that is not committed, all records of a step
    commit(k)           the disk has them; from now on slot s holds step k, the other one step k-1
    confirm(k)          all ranks have committed k: k-1 may be overwritten, so writing may go on
    discard()           the commit is of no use any more, since something else writes records: no step is whole

A process that ends at any byte leaves step k-1 or k whole on each rank. After a restart all ranks go on from a step
that every rank has (`common_step`). A rank that is one step further still has the step before: it could not overwrite
that one until all others were as far. Once they are, the older step may be half overwritten, though the commit still
names it. Nothing is written before the ranks have agreed on a step (`resume`).

A record is read from its last written place, committed or not. One that cannot be written keeps its former
contents. Its checksum is taken on the way, from the memory being written, and committed with its step; `verify`
compares it before a run goes on from another process' step. Memory begins at a whole block and takes whole blocks
(blocks.py), as that of a host slab does.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Self

import psutil
import xxhash

from zero3d.errors import CheckpointError, ConfigError, OutOfBudget, remedy_of
from zero3d.memory.blocks import BLOCK, padded
from zero3d.memory.file_lock import FileLock, holder
from zero3d.offload import commit_file
from zero3d.offload.commit_file import DIGITS, Commit
from zero3d.offload.direct_file import DirectFile
from zero3d.spec.sizes import decimal

IN_MEMORY = ("tmpfs", "ramfs")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ELSEWHERE = "choose another with offload.directory=FOLDER"
AT_ONCE = 64 << 20  # bytes that are read and compared at once


_open_here: set[Path] = set()  # locks that this process has


class DiskSlab:
    """Owns a rank's file of records, and says which step of it is whole.

    An error of a record or a commit leaves the committed step as it was.

    had_steps  whether there was a commit when it was opened: else all records begin as zeros
    resumed    the step that was gone back to, as long as nothing else is committed or written
    """

    def __init__(
        self, directory: Path, rank: int, records: Mapping[str, int], owner: str, discard: bool = False
    ) -> None:
        """Lock and open the files of a rank. records: bytes by name.

        owner    what a commit must say for its states to be this run's
        discard  begin without steps, whatever is there

        Raises ConfigError for a folder that cannot be used, OutOfBudget for a full disk, CheckpointError for a commit
        of others or a damaged one.
        """
        self.directory = directory.absolute()
        self._records = dict(records)
        self._names = list(records)
        self._about = owner, commit_file.digest(records)
        self._starts = list(accumulate((padded(nbytes) for nbytes in records.values()), initial=0))
        self.stem = self.directory / f"rank-{rank:05d}"
        self.path, self._commit_path = self.stem.with_suffix(".states"), self.stem.with_suffix(".commit")
        self._lock = FileLock()
        self._take(self.stem.with_suffix(".lock"))
        try:
            self._file = self._open(discard)
        except BaseException:
            self._release()
            raise
        self.had_steps = self._commit is not None
        self._target = 0 if self._commit is None else 1 - self._commit.slot  # the slot that is written
        self._newest = [1 - self._target] * len(records)
        self._written: set[int] = set()
        self._sums = [""] * len(records)  # of those written
        self._confirmed = self._commit is None
        self.resumed: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Return the bytes on the disk: both slots, in whole blocks."""
        return 2 * self._starts[-1]

    @property
    def direct(self) -> bool:
        """Return whether it is read and written past the page cache."""
        return self._file.direct

    # --- opening ------------------------------------------------------------------------------------

    def _refuse_own(self, lock: Path) -> None:
        """Refuse files that this process has open: the system's locks are between processes. Raises ConfigError."""
        if lock in _open_here:
            gc.collect()  # an engine that nobody has any more may still have them
        if lock in _open_here:
            raise ConfigError(
                f"offload.directory {self.directory} is in use by another engine of this process: drop that one (del "
                f"engine), or {ELSEWHERE}."
            )

    def _take(self, lock: Path) -> None:
        """Make the folder and lock this rank's files. Raises ConfigError."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._refuse_own(lock.resolve())
            self._lock.acquire(lock)
            _open_here.add(lock.resolve())
        except BlockingIOError:
            who, end = holder(lock)
            raise ConfigError(
                f"offload.directory {self.directory} is in use by {who}: wait for that run, {end}, or {ELSEWHERE}."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"offload.directory {self.directory} cannot be written ({error.strerror}): {ELSEWHERE}."
            ) from error
        if self._lock.note is not None:
            warnings.warn(self._lock.note, stacklevel=4)
        if (kind := _file_system(self.directory)) in IN_MEMORY:
            warnings.warn(
                f"offload.directory {self.directory} is on {kind}, which is memory of the host and no disk: type "
                "offload.optimizer=host, or choose a folder on a disk.",
                stacklevel=4,
            )

    def _open(self, discard: bool) -> DirectFile:
        """Read what is committed, and reserve the file. Raises as the constructor does."""
        try:
            if discard:
                commit_file.remove(self._commit_path)
            self._commit = commit_file.read(self._commit_path, *self._about)
            there = self.path.stat().st_size if self.path.exists() else 0
            if self._commit is not None and there != self.nbytes:
                raise CheckpointError(
                    f"{self.path} has {there} bytes, and its commit is for {self.nbytes}: go on from a checkpoint in "
                    f"another folder (offload.directory=FOLDER), or remove {self.directory}."
                )
            if self._commit is None:
                self.path.unlink(missing_ok=True)  # records begin as zeros
            return DirectFile(self.path, self.nbytes)
        except OSError as error:
            asked = f"{self.path} takes {decimal(self.nbytes)} ({self.nbytes} bytes: two slots for each record)"
            if error.errno in FULL:
                free = decimal(shutil.disk_usage(self.directory).free)
                raise OutOfBudget(
                    f"{asked}, and the disk has {free} free ({error.strerror}): {remedy_of(error)}, lower "
                    f"offload.fraction, or {ELSEWHERE}."
                ) from error
            raise ConfigError(f"{asked}, and cannot be opened ({error.strerror}): {ELSEWHERE}.") from error

    # --- records ------------------------------------------------------------------------------------

    def read(self, index: int, memory: memoryview) -> None:
        """Fill memory, in whole blocks, with what a record holds now. Raises CheckpointError."""
        with self._told("read", index):
            self._file.read(*self._place(index, self._newest[index], memory))

    def write(self, index: int, memory: memoryview) -> None:
        """Write a record, from memory in whole blocks, for the step to come. Raises CheckpointError."""
        assert self._confirmed, f"{self.path}: a step is written before all ranks have committed the one before"
        self._written.discard(index)
        self._newest[index] = 1 - self._target  # until it is written whole
        taken, offset = self._place(index, self._target, memory)
        with self._told("written", index):
            self._file.write(taken, offset, lambda: self._sum(index, taken))
        self._newest[index] = self._target
        self._written.add(index)

    def _sum(self, index: int, memory: memoryview) -> None:
        """Take the checksum of a record's written bytes, without the padding of its last block."""
        self._sums[index] = xxhash.xxh3_64(memory[: self._records[self._names[index]]]).hexdigest()

    def newest(self, index: int) -> tuple[Path, int]:
        """Return the place of a record's newest contents: the file, and bytes from its beginning."""
        return self.path, self._newest[index] * self._starts[-1] + self._starts[index]

    def _place(self, index: int, slot: int, memory: memoryview) -> tuple[memoryview, int]:
        """Return the part of memory that a record takes, and where it is in the file."""
        nbytes = self._starts[index + 1] - self._starts[index]
        taken = memory.cast("B")[:nbytes]
        assert len(taken) == nbytes, f"record {self._names[index]} takes {nbytes} bytes, not {len(taken)}"
        if nbytes:
            address = ctypes.addressof(ctypes.c_char.from_buffer(taken))
            assert address % BLOCK == 0, f"record {self._names[index]}: its memory begins inside of a block"
        return taken, slot * self._starts[-1] + self._starts[index]

    @contextmanager
    def _told(self, what: str, index: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = self._names[index]
            whole = f"step {self.steps[0]} is whole there" if self.steps else "no step is whole there yet"
            raise CheckpointError(
                f"record {name} ({self._records[name]} bytes) cannot be {what}: {self.path}: {error.strerror}. "
                f"{whole}: {remedy_of(error)}, and go on from a checkpoint with --resume auto."
            ) from error

    # --- steps --------------------------------------------------------------------------------------

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the step committed last, and the one before, which is whole only if a rank lacks the last."""
        if self._commit is None:
            return ()
        return self._commit.step, *(() if self._commit.before is None else (self._commit.before,))

    def resume(self, step: int) -> None:
        """Go on from the `common_step` of all ranks; what was written since is void. Raises CheckpointError."""
        assert self._commit is not None, f"{self.path} holds no step"
        assert step in self.steps, f"{self.path} holds steps {self.steps}, not {step}"
        here, commit = step == self._commit.step, self._commit
        sums = commit.sums if here else commit.sums_before
        self._put(Commit(step, self._commit.slot if here else 1 - self._commit.slot, sums=sums))
        self._target = 1 - self._commit.slot
        self._newest = [self._commit.slot] * len(self._names)
        self._written.clear()
        self._confirmed, self.resumed = True, step

    def verify(self) -> bool:
        """Compare the records of the committed step with their checksums; return False where it has none.

        Reads all of them, and leaves everything as it is. Raises CheckpointError, which names the first damaged one.
        """
        commit = self._commit
        assert commit is not None, f"{self.path} holds no step"
        if not commit.sums:
            return False
        memory = memoryview(mmap.mmap(-1, AT_ONCE))
        for index, (name, nbytes) in enumerate(self._records.items()):
            start = commit.slot * self._starts[-1] + self._starts[index]
            where = f"{self.path}: record {name} of step {commit.step} (bytes {start} to {start + nbytes})"
            wanted = commit.sums[DIGITS * index : DIGITS * (index + 1)]
            try:
                found = self._sum_on_disk(start, nbytes, memory)
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read ({error.strerror}): {self._damaged}") from error
            if found != wanted:
                raise CheckpointError(
                    f"{where} is not what was written: its checksum is {found}, but should be {wanted}: {self._damaged}"
                )
        return True

    def _sum_on_disk(self, start: int, nbytes: int, memory: memoryview) -> str:
        hasher = xxhash.xxh3_64()
        for done in range(0, nbytes, AT_ONCE):
            part = min(AT_ONCE, nbytes - done)
            self._file.read(memory[: padded(part)], start + done)
            hasher.update(memory[:part])
        return hasher.hexdigest()

    @property
    def _damaged(self) -> str:
        """Say what to do about a damaged record."""
        return (
            f"have the disk looked at, remove {self.directory}, and go on from the last checkpoint with --resume auto."
        )

    def discard(self) -> None:
        """Say that no step is whole; every record keeps its contents. Raises CheckpointError."""
        try:
            commit_file.remove(self._commit_path)
        except OSError as error:
            raise CheckpointError(
                f"{self._commit_path} cannot be removed ({error.strerror}), and its step is of no use any more: "
                f"remove {self.directory} and go on from a checkpoint."
            ) from error
        self._commit = None
        self._confirmed = True
        self.resumed = None

    def commit(self, step: int) -> None:
        """Say that all records of a step are written; the disk has them when this returns. Raises CheckpointError."""
        missing = sorted(set(range(len(self._names))) - self._written)
        assert not missing, f"{self.path}: step {step} is committed without record {self._names[missing[0]]}"
        before, sums_before = (None, "") if self._commit is None else (self._commit.step, self._commit.sums)
        self._confirmed, self.resumed = False, None
        try:
            self._file.sync()
        except OSError as error:
            raise self._uncommitted(step, error) from error
        self._put(Commit(step, self._target, before, "".join(self._sums), sums_before))
        self._target = 1 - self._target
        self._written.clear()

    def _put(self, commit: Commit) -> None:
        try:
            commit_file.write(self._commit_path, commit, *self._about)
        except OSError as error:
            raise self._uncommitted(commit.step, error) from error
        self._commit = commit

    def _uncommitted(self, step: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"step {step} ({self.nbytes // 2} bytes) cannot be committed in {self._commit_path} ({error.strerror}): "
            f"{remedy_of(error)}, and go on from a checkpoint with --resume auto."
        )

    def confirm(self, step: int) -> None:
        """Say that all ranks have committed this step: the one before it may be overwritten."""
        assert self.steps[:1] == (step,), f"{self.path} has not committed step {step}"
        self._confirmed = True

    def close(self) -> None:
        """Close the files, which stay, and release the lock."""
        self._file.close()
        self._release()

    def _release(self) -> None:
        _open_here.discard(self.stem.with_suffix(".lock").resolve())
        self._lock.release()


def common_step(steps: Sequence[Sequence[int]]) -> int | None:
    """Return the step to go on from, given the `steps` of every rank; None where they have none in common.

    It is the last one of some rank: until that rank had committed another, no rank could overwrite this one.

    >>> common_step([(7, 6), (7, 6)]), common_step([(7, 6), (6, 5)]), common_step([(7, 5), (6, 5)])
    (7, 6, None)
    """
    last = [of_rank[0] for of_rank in steps if of_rank]
    return next((step for step in last if all(step in of_rank for of_rank in steps)), None)


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on, nothing where the system does not say."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    return next((mounts[path] for path in (resolved, *resolved.parents) if path in mounts), "")
