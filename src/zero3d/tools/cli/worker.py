"""One worker: runs a rank's work, leaves its exception where its launcher looks for it, and exits.

error file    the exception as JSON, in torchrun's format, whose launcher reads it, too
exit code     2 for a Zero3dError about the input, 128 + signal after a stop, else 1 (`zero3d.errors`)
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from zero3d.errors import OrderError, Zero3dError
from zero3d.train.stop import SIGNALS, Stopped
from zero3d.watchdog.heartbeat import WATCH, Heartbeat
from zero3d.watchdog.joined import start_monitor
from zero3d.watchdog.orphans import follow_parent
from zero3d.watchdog.own_files import write_whole
from zero3d.watchdog.place import open_folder, remove_if_left
from zero3d.watchdog.stacks import dump_on_signal

LAUNCHED = "ZERO3D_LAUNCHED"  # our launcher's process, for workers whose failure it reports
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the name by which torchrun passes it, too
OUTPUT = "output-folder"  # the file in which worker 0 names it
LAST_WORDS = 1.0  # seconds in which workers may end on their own, and say why, after one has failed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc malloc.h
MMAP_BYTES, TRIM_BYTES = 32 << 20, 1 << 30  # 32 MiB is the most that glibc accepts for mmap
PR_SET_PDEATHSIG = 1  # linux/prctl.h
UNWATCHED = (
    "the watchdog does not watch the ranks of this host, so health.timeout has no effect: it can create its folder "
    "neither in /dev/shm nor in the temporary folder, or another user has its name (ls -ld /dev/shm/zero3d-watch-*)"
)
STARTING = "start-up"  # the phase until training announces others
# What ranks of one attempt and one host have alike, beside their parent.
SAME_ATTEMPT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "GROUP_RANK",
)


def quiet_environment() -> None:
    """Keep notes of torch's C++ side off the terminal; call before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def as_worker(action: Callable[[], None], limits: Mapping[str, float] | None = None) -> NoReturn:
    """Run one rank's work, leave its exception where its launcher looks for it, and exit.

    limits  `timeout` and `slow_timeout` of its host's monitor (`zero3d.watchdog`), which waits for ever without them

    The exit runs no destructors: they would wait for peers that may be gone, and a gloo thread that
    drops a tensor while the interpreter shuts down aborts the process.
    """
    if LAUNCHED in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    faulthandler.enable()
    heartbeat = begin_heartbeat(limits or {})
    raise_malloc_thresholds()
    try:
        action()
        code = 0
    except Stopped as stop:
        for number in SIGNALS:  # the peers leave, too, and launchers then signal those that remain
            signal.signal(number, signal.SIG_IGN)
        code = 128 + stop.signal
        if os.environ.get("RANK", "0") == "0":
            print(describe_stop(stop), file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (reported here or by the launcher)
        code = leave_exception(error)
    heartbeat.end()
    if LAUNCHED in os.environ and WATCH in os.environ:
        remove_if_left(Path(os.environ[WATCH]))
    leave(code)


def end_with(error: Zero3dError) -> NoReturn:
    """End this process with an error, from another thread than that of its work."""
    leave(leave_exception(error))


def leave(code: int) -> NoReturn:
    """Exit at once, with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)


def begin_heartbeat(limits: Mapping[str, float]) -> Heartbeat:
    """Begin this rank's record where its host's monitor reads it; start one where another launcher started the ranks.

    From here on SIGUSR2 makes this process write its stacks, and the death of its launcher is noticed.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(os.environ[WATCH]) if WATCH in os.environ else None
    if LAUNCHED not in os.environ and "RANK" in os.environ:
        folder = open_folder(os.getppid(), [os.environ.get(name, "") for name in SAME_ATTEMPT])
        if folder is None and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"warning: {UNWATCHED}", file=sys.stderr)
    if folder is None:
        return Heartbeat.begin(None, rank, STARTING)
    os.environ[WATCH] = str(folder)
    with suppress(OSError):
        dump_on_signal(folder, rank)
        heartbeat = Heartbeat.begin(folder, rank, STARTING)
        heartbeat.tell(world=int(os.environ.get("WORLD_SIZE", "1")), **limits)
        if LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
            start_monitor(folder, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if LAUNCHED in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:  # else a shell may leave it on its own
            follow_parent(folder, rank, int(os.environ.get(LAUNCHED, os.getppid())))
        return heartbeat
    if LAUNCHED in os.environ:
        die_with_launcher()
    return Heartbeat.begin(None, rank, STARTING)


def report_output(folder: Path) -> None:
    """Let our launcher know the output folder that the run has chosen, for the command that goes on."""
    if LAUNCHED in os.environ:
        with suppress(OSError):  # the disk may be what is full
            write_whole(Path(os.environ[ERROR_FILE]).parent / OUTPUT, str(folder))


def describe_stop(stop: Stopped) -> str:
    """Say what is kept; our launcher says the rest."""
    if LAUNCHED in os.environ:
        return str(stop)
    return f"stopped by {signal.Signals(stop.signal).name}: {stop}; --resume auto continues"


def leave_exception(error: BaseException) -> int:
    """Write an exception in the error file, or for want of our launcher on stderr; return the exit code.

    An error on purpose is one line, any other a callstack with 1. What another rank raised is reported there. Peers
    that lose this rank find the reason, and the code, in the note that it leaves.
    """
    error = _reason_of(error)
    clear = isinstance(error, Zero3dError)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, Zero3dError):
        code = error.exit_code
        if error.from_rank is not None:
            return code
    summary, callstack = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    if ERROR_FILE in os.environ:
        extra = {"py_callstack": "" if clear else callstack, "timestamp": str(int(time.time()))}
        report = json.dumps({"message": {"message": summary, "extraInfo": extra}})
        with suppress(OSError):  # the disk may be what is full
            _write_atomically(Path(os.environ[ERROR_FILE]), report)
    if LAUNCHED not in os.environ and code != 130:
        print(summary if clear else callstack, file=sys.stderr)
    if "torch" in sys.modules and code != 130:
        notify_peers(summary.partition("\n\n")[0], code)  # of a report its head
    return code


def _reason_of(error: BaseException) -> BaseException:
    """Return the OrderError for which waits were ended, where torch raised its own in a call of the program's."""
    lost = type(error) is RuntimeError and any(word in str(error).lower() for word in ("connection", "pair closure"))
    if not lost or "torch" not in sys.modules:
        return error
    from zero3d.distributed.axis import read_note

    kind, _, text = read_note().partition(": ")
    return OrderError(text) if kind == OrderError.__name__ else error


def _write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: torchrun reads it as soon as it is there, and dies of half of one."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # a link in its place would lead elsewhere
    fresh.write_text(text)
    fresh.replace(path)


def notify_peers(summary: str, code: int) -> None:
    """Leave the note that peers quote when they lose this rank. A store whose host has vanished may never answer."""
    from zero3d.distributed.axis import leave_note

    notice = threading.Thread(target=leave_note, args=(summary, code), daemon=True)
    notice.start()
    notice.join(LAST_WORDS)


def die_with_launcher() -> None:
    """Let the kernel ask this process to stop when its launcher is gone, where no thread of its own can follow it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_malloc_thresholds() -> None:
    """Let glibc keep freed unit storages instead of giving their pages back and faulting them in again.

    Affects storages of up to 32 MiB on the CPU; without glibc it does nothing.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
