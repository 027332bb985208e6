"""Workers of this machine through torch's elastic agent, and how a worker's failure is told once.

launcher    starts --ranks workers (this same command with RANK set), prints the first failure
worker 0    owns the terminal; the other workers' output goes to files that die with the run
failure     a worker leaves its exception in the agent's error file and exits with 2 for a
            Zero3dError, else with 1
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from zero3d.errors import Zero3dError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCHED = "ZERO3D_LAUNCHED"  # set for workers whose launcher tells their failure
LAST_LINES = 20  # shown of a worker that died without an exception
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc malloc.h
MMAP_BYTES, TRIM_BYTES = 32 << 20, 1 << 30  # 32 MiB is the most that glibc accepts for mmap


def quiet_environment() -> None:
    """Keep notes of torch's C++ side off the terminal; call before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def launch(words: Sequence[str], ranks: int) -> int:
    """Run `zero3d WORDS` on `ranks` workers of this machine; the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent would tell every failure in its own words, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[LAUNCHED] = "1"
    with TemporaryDirectory(prefix="zero3d-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "zero3d.cli.main", *words)
        except ChildFailedError as error:
            return tell(error.failures, Path(logs))
        except SignalException as stop:
            print(f"stopped by {signal.Signals(stop.sigval).name}; all workers are stopped", file=sys.stderr)
            return 128 + int(stop.sigval)
    return 0


def tell(failures: Mapping[int, ProcessFailure], logs: Path) -> int:
    """Print the first failure on stderr; the exit code."""
    rank, failure = min(failures.items(), key=lambda item: _moment(item[1]))
    told = failure.message
    if isinstance(told, dict) and failure.exitcode == 2:
        print(told["message"], file=sys.stderr)
        return 2
    if isinstance(told, dict):
        print(f"rank {rank} failed:\n{told['extraInfo']['py_callstack'].rstrip()}", file=sys.stderr)
        return 1
    print(f"rank {rank} died without an exception: {told}", file=sys.stderr)
    for path in logs.rglob(f"{failure.local_rank}/stderr.log"):
        for line in path.read_text(errors="replace").splitlines()[-LAST_LINES:]:
            print(line, file=sys.stderr)
    return 1


def _moment(failure: ProcessFailure) -> tuple[bool, float]:
    """Sorts the cause before its consequences: deaths by a signal (but the agent's own SIGTERM), then by time."""
    killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    file = Path(failure.error_file)
    return not killed, file.stat().st_mtime if file.is_file() else float("inf")


def as_worker(action: Callable[[], None]) -> NoReturn:
    """Run one rank's work, leave its exception where the agent looks for it, and exit.

    The exit runs no destructors: they would wait for peers that may be gone, and a gloo thread that
    drops a tensor while the interpreter shuts down aborts the process.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    raise_malloc_thresholds()
    handler = get_error_handler()
    handler.initialize()
    code = 0
    try:
        action()
    except BaseException as error:  # noqa: BLE001 (told here or by the launcher)
        handler.record_exception(error)
        code = 2 if isinstance(error, Zero3dError) else 1
        if LAUNCHED not in os.environ:
            print(f"{type(error).__name__}: {error}" if code == 2 else traceback.format_exc(), file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)


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
