"""What a process may have, and what dead runs have left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from zero3d.errors import short
from zero3d.memory.file_lock import holder, is_held
from zero3d.tools.doctor.finding import BROKEN, OK, WARNING, Finding, Request, amount

try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

FEW, TOO_FEW = 1024, 128  # open files
PROCESSES = 512
LEAST_LOCKED = 64 << 10  # bytes that Linux gives everybody
LOCK = ".lock"  # of an output folder
OURS = ("zero3d.tools.cli.main", "zero3d.cli.main")  # what a worker's command line has, an older one's too
SHARED = ("torch_", "nccl-", "zero3d", "psm_")  # names in shared memory
MOST = 2000  # entries of a folder that are looked at
MUCH = 16 << 20  # bytes of shared memory that are worth a word
OLD = 600.0  # seconds after which shared memory that nobody maps is left over


def limits(request: Request) -> Finding:
    """Read the limits of this process, which ranks inherit."""
    if resource is None:
        return Finding(OK, "this system has no such limits")
    files, processes, locked = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return judge_limits(files, hard, processes, locked, any(Path("/sys/class/infiniband").glob("*")))


def judge_limits(files: int, hard: int, processes: int, locked: int, infiniband: bool) -> Finding:
    """Give the verdict; -1 is no limit. infiniband: there is a card that registers memory."""
    figures = {"open_files": files, "open_files_hard": hard, "processes": processes, "locked_memory": locked}
    said = {name: _said(value) for name, value in (("files", files), ("processes", processes))}
    bytes_locked = "unlimited" if locked < 0 else amount(locked) if locked >= 1 << 20 else f"{locked >> 10} kiB"
    text = f"{said['files']} open files, {said['processes']} processes, {bytes_locked} of locked memory"
    if 0 <= files < FEW:
        verdict = BROKEN if files < TOO_FEW else WARNING
        more = 65536 if hard < 0 or hard >= 65536 else hard
        remedy = (
            f"ulimit -n {more}"
            if more > files
            else "nofile in /etc/security/limits.conf, docker run --ulimit nofile=65536"
        )
        return Finding(verdict, f"{text}: a rank wants {FEW} open files", remedy, figures)
    if 0 <= locked < LEAST_LOCKED or (infiniband and locked >= 0):
        why = (
            "InfiniBand registers all that it sends"
            if infiniband
            else f"the least of Linux is {LEAST_LOCKED >> 10} kiB"
        )
        remedy = "ulimit -l unlimited: memlock in limits.conf, docker run --ulimit memlock=-1, LimitMEMLOCK of slurmd"
        return Finding(WARNING, f"{text}: {why}", remedy, figures)
    if 0 <= processes < PROCESSES:
        return Finding(WARNING, f"{text}: threads count, and a rank has dozens", "ulimit -u 4096", figures)
    return Finding(OK, text, figures=figures)


def _said(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"


def leftovers(request: Request) -> Finding:
    """Look for workers without a launcher, locks that are held, and shared memory that nobody maps."""
    orphans = list(orphaned())
    held = [path for path in locks(Path(request.disk)) if is_held(path)]
    left, nbytes = unmapped(Path(request.shm))
    figures = {"orphans": [each.pid for each in orphans], "locks": [str(path) for path in held], "shm": left}
    texts, remedies = [], []
    if orphans:
        each = orphans[0]
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.create_time()))
        count = f"{len(orphans)} zero3d process{'es' if len(orphans) > 1 else ''}"
        texts.append(f"{count} without a launcher, since {since}: {short(' '.join(each.cmdline()))}")
        remedies.append(f"kill {' '.join(str(each.pid) for each in orphans)}")
    if nbytes > MUCH:
        texts.append(f"{amount(nbytes)} of shared memory that nobody maps: {', '.join(left[:3])}")
        remedies.append(f"rm -r {' '.join(str(Path(request.shm) / name) for name in left[:3])}")
    if texts:
        return Finding(WARNING, "; ".join(texts), "; ".join(remedies), figures)
    if held:
        who, end = holder(held[0])
        return Finding(OK, f"{held[0].parent} is in use by {who}; to stop that run, {end}", figures=figures)
    return Finding(OK, "no process, lock or shared memory of a dead run", figures=figures)


def orphaned() -> Iterator[psutil.Process]:
    """Yield this user's zero3d workers whose launcher is gone."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            words = process.cmdline()
            if not any(name in words for name in OURS) or "doctor" in words or "RANK" not in process.environ():
                continue
            parent = process.parent()
            if parent is None or (_adopts(parent) and not _launches(parent)):
                yield process


def _adopts(process: psutil.Process) -> bool:
    """Say whether a process is one that the system gives orphans to."""
    return process.pid == 1 or process.name() == "systemd"


def _launches(process: psutil.Process) -> bool:
    """Say whether a container's first process is itself a launcher."""
    with suppress(psutil.Error, OSError):
        return any(word in " ".join(process.cmdline()) for word in ("zero3d", "torchrun", "torch.distributed"))
    return False


def locks(folder: Path) -> Iterator[Path]:
    """Yield lock files in a folder and in those right below it, of the first some thousand."""
    with suppress(OSError):
        if (folder / LOCK).is_file():
            yield folder / LOCK
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MOST), entries, strict=False):
                if entry.is_dir(follow_symlinks=False) and os.path.isfile(os.path.join(entry.path, LOCK)):
                    yield Path(entry.path) / LOCK


def unmapped(folder: Path) -> tuple[list[str], int]:
    """Return this user's files of torch, NCCL and zero3d in shared memory that no process maps, and their bytes."""
    old = {}
    with suppress(OSError):
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            if entry.name.startswith(SHARED) and status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD:
                old[entry.name] = status.st_size
    if not old:
        return [], 0
    for process in psutil.process_iter():
        with suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            old = {name: size for name, size in old.items() if f"{folder}/{name}" not in maps}
    return sorted(old), sum(old.values())
