"""Shared memory, the disk with and without O_DIRECT, free space, clocks."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from errno import EDQUOT, ENOSPC
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from zero3d.errors import ConfigError
from zero3d.offload.direct_file import DirectFile
from zero3d.tools.doctor.allreduce import against
from zero3d.tools.doctor.devices import present
from zero3d.tools.doctor.finding import BROKEN, GIB, MIB, OK, SKIPPED, WARNING, Finding, Request, amount, rate
from zero3d.tools.doctor.versions import ask

FILE = 32 * MIB
LITTLE_SHM, SHM_OF_GPUS, NO_SHM = 64 * MIB, GIB, 16 * MIB  # the first is a container's default
LITTLE_SPACE, NO_SPACE, FEW_FILES = 10 * GIB, GIB, 1000
CROOKED, WRONG = 2.0, 60.0  # seconds
LOOKED_AT = 2000  # files
MORE_SHM = (
    "docker run --shm-size=16g (or --ipc=host); Kubernetes: emptyDir, medium: Memory, at /dev/shm; as root: "
    "mount -o remount,size=16g /dev/shm"
)


def folder_of(request: Request) -> Path:
    """Return the folder on the disk that is meant. Raises ConfigError."""
    folder = Path(request.disk)
    if not folder.is_dir():
        raise ConfigError(f"--disk {request.disk}: there is no such folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--disk {request.disk}: nothing may be written there: choose another folder.")
    return folder


def shared_memory(request: Request) -> Finding:
    """Measure shared memory, and write to it."""
    if sys.platform != "linux" or not Path(request.shm).is_dir():
        return Finding(SKIPPED, f"no {request.shm} here")
    usage = shutil.disk_usage(request.shm)
    fault = ""
    try:
        with NamedTemporaryFile(dir=request.shm, prefix="zero3d-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, MIB)
    except OSError as error:
        fault = error.strerror or str(error)
    return judge_shm(usage.total, usage.free, fault, present())


def judge_shm(total: float, free: float, fault: str, devices: int) -> Finding:
    """Give the verdict. fault: why 1 MiB could not be written."""
    figures = {"total": total, "free": free}
    text = f"{amount(free)} of {amount(total)} are free"
    if fault or free < NO_SHM:
        why = f"1 MiB cannot be written: {fault}" if fault else f"at least {amount(NO_SHM)} are needed"
        return Finding(BROKEN, f"{text}; {why}", f"ls -la /dev/shm: leftovers may go. {MORE_SHM}", figures)
    if devices > 1 and total < SHM_OF_GPUS:
        text = f"{text}: little for {devices} GPUs, whose ranks exchange through it"
        return Finding(WARNING, text, MORE_SHM, figures)
    if total <= LITTLE_SHM:
        return Finding(WARNING, f"{text}: the default of a container, little for data workers", MORE_SHM, figures)
    return Finding(OK, text, figures=figures)


def disk(request: Request) -> Finding:
    """Write and read a file past the page cache, and write one through it."""
    folder = folder_of(request)
    try:
        with TemporaryDirectory(dir=folder, prefix=".zero3d-doctor-") as temporary:
            buffered = _buffered(Path(temporary) / "buffered")
            direct, written, read = _direct(Path(temporary) / "direct")
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            free = shutil.disk_usage(folder).free
            text = (
                f"{amount(2 * FILE)} cannot be written in {folder.resolve()}: {error.strerror}, {amount(free)} are free"
            )
            return Finding(BROKEN, text, "free some space, or another folder: --disk FOLDER", {"free": free})
        text = f"a file in {folder.resolve()} cannot be written and read: {error.strerror}"
        return Finding(BROKEN, text, "dmesg | tail; is the file system mounted read-only, or failing?")
    return judge_disk(direct, written, read, buffered, request)


def judge_disk(direct: bool, written: float, read: float, buffered: float, request: Request) -> Finding:
    """Give the verdict on bytes per second. direct: whether O_DIRECT was taken; buffered: written, with fsync."""
    both = 2 / (1 / written + 1 / read)
    figures = {"direct": direct, "written": written, "read": read, "buffered": buffered, "bandwidth": both}
    if not direct:
        text = f"no O_DIRECT here: {rate(written)} written, {rate(read)} read through the page cache, the host's memory"
        return Finding(
            WARNING, text, "offload to a folder on ext4 or xfs on a local disk: --disk FOLDER tries it", figures
        )
    text = f"O_DIRECT: {rate(written)} written, {rate(read)} read; without: {rate(buffered)} written with fsync"
    verdict, told = against(both, request, "disk", cpu=True)
    return Finding(
        verdict, text + told, "iostat -x 1 says who else uses it; or another disk" * (verdict != OK), figures
    )


def _memory() -> memoryview:
    memory = memoryview(mmap.mmap(-1, FILE))  # begins at a whole block, as direct I/O asks
    memory[:] = os.urandom(MIB) * (FILE // MIB)  # what no disk can make smaller
    return memory


def _buffered(path: Path) -> float:
    memory = _memory()
    begun = time.perf_counter()
    with path.open("wb") as file:
        file.write(memory)
        file.flush()
        os.fsync(file.fileno())
    pace = FILE / (time.perf_counter() - begun)
    path.unlink()
    return pace


def _direct(path: Path) -> tuple[bool, float, float]:
    memory = _memory()
    file = DirectFile(path, FILE)
    try:
        begun = time.perf_counter()
        file.write(memory, 0)
        file.sync()
        wrote = time.perf_counter()
        file.read(memory, 0)
        return file.direct, FILE / (wrote - begun), FILE / (time.perf_counter() - wrote)
    finally:
        file.close()


def space(request: Request) -> Finding:
    """Count free bytes and files."""
    folder = folder_of(request)
    usage = shutil.disk_usage(folder)
    status = os.statvfs(folder)
    return judge_space(usage.total, usage.free, status.f_files, status.f_favail, str(folder.resolve()))


def judge_space(total: float, free: float, files: int, free_files: int, where: str) -> Finding:
    """Give the verdict. files: what the file system may have in all, 0 where it does not say."""
    figures = {"total": total, "free": free, "files": files, "free_files": free_files}
    text = f"{amount(free)} of {amount(total)} are free in {where}"
    remedy = "zero3d ckpt prune OUTPUT removes old checkpoints; du -xh --max-depth=1 | sort -h; or another disk"
    if files and free_files < FEW_FILES:
        text = f"{text}, but only {free_files} of {files} files"
        return Finding(BROKEN, text, "remove folders of many small files: du --inodes -x | sort -n", figures)
    if free < NO_SPACE:
        return Finding(BROKEN, f"{text}: less than {amount(NO_SPACE)}", remedy, figures)
    if free < LITTLE_SPACE:
        return Finding(WARNING, f"{text}: a checkpoint takes about 14 bytes a parameter", remedy, figures)
    return Finding(OK, text, figures=figures)


def clocks(request: Request) -> Finding:
    """Compare this clock with the file system's and with files: none of them is from the future."""
    folder = folder_of(request)
    try:
        with NamedTemporaryFile(dir=folder, prefix=".zero3d-doctor-") as file:
            before = time.time()
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())
            stamp, after = os.stat(file.name).st_mtime, time.time()
    except OSError as error:
        return Finding(SKIPPED, f"no file can be written in {folder.resolve()}: {error.strerror}; see the row disk")
    ahead = stamp - after if stamp > after else min(0.0, stamp - before)
    newest, name = newest_file(folder)
    package = find_spec("zero3d")
    ours = Path(package.origin).stat().st_mtime if package is not None and package.origin else 0.0
    kept = ask("timedatectl", "show", "--property=NTPSynchronized", "--value", seconds=3.0).strip()
    return judge_clocks(ahead, newest - after, name, ours - after, kept)


def newest_file(folder: Path) -> tuple[float, str]:
    """Return the latest time of a file in a folder, and its name; of the first some thousand."""
    newest, name = 0.0, ""
    with os.scandir(folder) as entries:
        for _, entry in zip(range(LOOKED_AT), entries, strict=False):
            try:
                stamp = entry.stat(follow_symlinks=False).st_mtime
            except OSError:
                continue
            if stamp > newest:
                newest, name = stamp, entry.name
    return newest, name


def judge_clocks(ahead: float, file: float, name: str, ours: float, kept: str) -> Finding:
    """Give the verdict on seconds beyond this clock: of the file system, its newest file, zero3d's own files.

    kept  what systemd says of network time: yes, no, or nothing
    """
    figures = {"file_system": ahead, "newest_file": file, "synchronized": kept}
    told = {"yes": "kept by network time", "no": "not kept by network time"}.get(kept, "who keeps it is not known")
    if abs(ahead) > CROOKED:
        side = "ahead of" if ahead > 0 else "behind"
        verdict = BROKEN if abs(ahead) > WRONG else WARNING
        text = f"the file system's clock is {abs(ahead):.0f} s {side} this host's"
        return Finding(verdict, text, "timedatectl set-ntp true on this host and on the file server", figures)
    late, whose = max((file, name), (ours, "zero3d's own code"))
    if late > WRONG:
        text = f"{whose} is {_span(late)} in the future: this clock is behind, or the one that wrote it was ahead"
        remedy = "date -u; timedatectl set-ntp true. If the clock is right: touch that file"
        return Finding(WARNING, text, remedy, figures)
    return Finding(OK, f"this host and its file system agree to {max(abs(ahead), 0.01):.2f} s, {told}", figures=figures)


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
