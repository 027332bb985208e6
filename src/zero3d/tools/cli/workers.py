"""Workers of this machine as their launcher sees them: started, waited for, stopped, a failure reported once.

launcher    starts --ranks workers (this same command with RANK set) and hosts their store
worker 0    owns the terminal; the other workers' output goes to files that die with the run
failure     a worker leaves its exception in its error file (`worker.py`); the launcher ends the others, which cannot
            go on without it
stop        SIGTERM, Ctrl-C or a hang-up at the launcher: one SIGTERM to each worker, which takes
            the time it needs to save and exits with 128 + 15; Ctrl-C again kills them

Why not torch's elastic agent: docs/decisions/0009-our-own-workers.md.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zero3d.config import Mesh, degrees_of
from zero3d.distributed.degrees import SLOT, least_ranks
from zero3d.errors import FAULT
from zero3d.memory.segments import ask_for_growing_segments
from zero3d.tools.cli.oom import describe_kill, oom_kills
from zero3d.tools.cli.worker import ERROR_FILE, LAST_WORDS, LAUNCHED, OUTPUT
from zero3d.train.stop import BEFORE, SIGNALS, Stopped, StopRequest
from zero3d.watchdog.block import DEATH, STALL, observe
from zero3d.watchdog.heartbeat import ENDED, WATCH
from zero3d.watchdog.monitor import Monitor
from zero3d.watchdog.own_files import no_room_told, private_folder, read_own
from zero3d.watchdog.place import open_folder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

MAIN = "zero3d.tools.cli.main"
RANKS = 2  # workers of a machine without accelerators
ERROR_NAME = "error.json"  # in a worker's folder
WATCHED = "watch"  # the folder of the workers' heartbeats, beside theirs where it has no better place
POLL = 0.05  # seconds between two looks at the workers
DIED, BLAMED = "died without an exception", "ended by the watchdog"
LAUNCH_OPTIONS = ("--ranks", "--json")  # of a command line, what says nothing about the training
BACKLOG = 2048  # workers that may connect at once, as torch has it
MOST_READ = 1 << 20  # bytes of a file that a worker leaves
LAST_LINES = 20  # shown of a worker that died without an exception
STOPPED = frozenset(128 + number for number in SIGNALS)  # exit codes of workers that saved and left


def ranks_here(mesh: Mesh) -> int:
    """Count workers for a bare machine: the mesh's product where dp is given, else one per accelerator, else 2.

    Without accelerators as many as the degrees that are given need, if that is more.
    """
    least = least_ranks(degrees_of(mesh))
    if mesh.dp is not None:
        return least
    from zero3d.distributed.devices import count_devices

    return count_devices() or max(RANKS, least)


@dataclass
class Worker:
    """Holds one process and the folder of what it leaves behind; `blamed` is why the watchdog ended the run for it."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    blamed: str = ""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a death by a signal; None while it runs."""
        return self.process.poll()

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0, *STOPPED)

    @property
    def ending(self) -> str:
        """How it ended, where that was not as it should."""
        code = self.code
        return f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"

    @property
    def vanished(self) -> bool:
        """Whether it died without a word of its own, and not because it was asked to stop."""
        return self.failed and self.code != -signal.SIGTERM and not (self.folder / ERROR_NAME).is_file()


def launch(words: Sequence[str], ranks: int, *, module: str = MAIN, saves: bool = True) -> int:
    """Run `python -m module WORDS` on `ranks` workers of this machine and wait for them.

    saves  whether the work saves anything, of which a stop then speaks

    Returns 0, a failure's exit code (1, or 2 for a Zero3dError), or 128 + the signal that stopped the run.
    """
    kills = oom_kills()
    with StopRequest() as request, private_folder() as folder:
        try:
            workers, failed = run_workers(words, range(ranks), folder, request, module)
        except KeyboardInterrupt:
            return killed_twice(saves)
        except Stopped as stop:
            return stopped_before(stop.signal, saves)
        return conclude(workers, failed, request.signal, words, kills, saves)


def run_workers(
    words: Sequence[str], slots: Sequence[int], folder: Path, request: StopRequest, module: str
) -> tuple[list[Worker], list[Worker]]:
    """Run one worker in each of these slots of the machine; return all of them, over by now, and those that failed.

    Raises Stopped for a signal that comes before the first of them is started.
    """
    with request.at_once():
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        watched = open_folder(os.getpid(), [folder.name]) or folder / WATCHED
    watched.mkdir(exist_ok=True)
    try:
        shared = environment(len(slots), listening.getsockname()[1], watched)
        with running_workers(words, module, shared, folder, slots) as workers:
            store = host_store(listening)
            failed = supervise(workers, request, Monitor(watched))
            del store  # not before all have ended
            return workers, failed
    finally:
        shutil.rmtree(watched, ignore_errors=True)


def killed_twice(saves: bool = True) -> int:
    """Say that a second Ctrl-C has killed the workers; return the exit code."""
    print(f"killed by a second Ctrl-C{'; what was saved before is still there' * saves}", file=sys.stderr)
    return 128 + signal.SIGINT


def stopped_before(number: int, saves: bool = True) -> int:
    """Report that a signal ended the command where no worker had anything to save; return the exit code."""
    print(f"stopped by {signal.Signals(number).name}{f' {BEFORE}' * saves}", file=sys.stderr)
    return 128 + number


def host_store(listening: socket.socket) -> TCPStore:
    """Open the store in which workers find each other, reachable from this machine alone.

    TCPStore("127.0.0.1") listens on all interfaces, and whoever reaches it may write to it: it is given a socket. Who
    connects to that earlier waits, so that torch is imported here while workers import it, too.
    """
    from torch._C._distributed_c10d import TCPStore

    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def environment(ranks: int, port: int, watched: Path) -> dict[str, str]:
    """Return the variables that all workers share; the store is the launcher's, so no port is taken in between."""
    shared = {
        **os.environ,
        WATCH: str(watched),
        LAUNCHED: str(os.getpid()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores
    ask_for_growing_segments(shared)
    if sys.platform == "linux":
        for library in ("GLOO", "NCCL"):  # who listen on an outer interface otherwise
            shared.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    return shared


@contextmanager
def running_workers(
    words: Sequence[str], module: str, shared: dict[str, str], folder: Path, slots: Sequence[int]
) -> Iterator[list[Worker]]:
    """Start the workers; whatever happens, none of them is left running."""
    workers: list[Worker] = []
    try:
        for rank, slot in enumerate(slots):
            workers.append(start_worker(rank, words, module, shared | {SLOT: str(slot)}, folder / str(rank)))
        yield workers
    finally:
        for worker in workers:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # with its data workers
        for worker in workers:
            worker.process.wait()


def start_worker(rank: int, words: Sequence[str], module: str, shared: dict[str, str], folder: Path) -> Worker:
    """Start one worker; only what rank 0 prints goes to the terminal."""
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(folder / ERROR_NAME)}
    with no_room_told(folder.parent):
        folder.mkdir()
        output = (folder / "output").open("wb")
    with output:
        if rank == 0:
            return Worker(rank, start_process(words, module, shared | of_rank), folder)
        return Worker(rank, start_process(words, module, shared | of_rank, output, output), folder)


def start_process(
    words: Sequence[str],
    module: str = MAIN,
    environment: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module WORDS` in a session of its own: what the terminal sends is for this process alone.

    Every run and every rank that a command of ours starts is started here. Tests put a fork in its place, of a process
    that has imported.
    """
    command = [sys.executable, "-P", "-m", module, *words]  # no file here takes the place of a module
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)


def supervise(workers: Sequence[Worker], request: StopRequest, monitor: Monitor) -> list[Worker]:
    """Wait for all workers, pass a request to stop on to each once; return those that failed.

    Where they stall, or one dies, the watchdog says who waits for whom. After a stall these are the ranks that it
    blames, or all; the caller ends them.
    """
    stopping = False
    while any(worker.code is None for worker in workers) and not any(worker.failed for worker in workers):
        if request.signal is not None and not stopping:
            stopping = True
            for worker in workers:
                worker.process.terminate()
        if monitor.look():
            return blame(workers, monitor)
        time.sleep(POLL)
    if any(worker.failed for worker in workers):
        hear_last_words(workers, None if stopping else monitor)
    return [worker for worker in workers if worker.failed]


def hear_last_words(workers: Sequence[Worker], monitor: Monitor | None) -> None:
    """Give workers time to end after one has failed; say once which one died, with the stacks of those still there.

    One that was killed may be seen after a peer that has lost it: the kernel takes its memory first.
    """
    end = time.monotonic() + LAST_WORDS
    while True:
        if monitor is not None:
            beats = monitor.beats()
            vanished = {worker.rank: worker.ending for worker in workers if worker.vanished}
            # One that ended by itself has left its exception, or another rank tells it.
            dead = {rank: how for rank, how in vanished.items() if rank in beats and beats[rank].phase != ENDED}
            if dead:
                observe(DEATH, monitor, dead).write()
                monitor = None
        if all(worker.code is not None for worker in workers) or time.monotonic() > end:
            return
        time.sleep(POLL)


def blame(workers: Sequence[Worker], monitor: Monitor) -> list[Worker]:
    """Write the watchdog's block after a stall; return the workers that others wait for, or all."""
    block = observe(STALL, monitor)
    block.write()
    guilty = {state.rank for state in block.culprits} or {worker.rank for worker in workers}
    found = [worker for worker in workers if worker.rank in guilty]
    for worker in found:
        worker.blamed = block.cause
    return found


def conclude(
    workers: Sequence[Worker],
    failed: Sequence[Worker],
    stop_signal: int | None,
    words: Sequence[str],
    kills: int | None = None,
    saves: bool = True,
) -> int:
    """Say on stderr how the run ended, unless it is done; return the exit code. kills: `oom_kills` when it began."""
    command = resume_command(words, chosen_output(workers[0]))
    stopped = any(worker.code in STOPPED for worker in workers)
    # Workers that stopped without a signal to this process were signalled themselves.
    stop_signal = signal.SIGTERM if stop_signal is None and stopped else stop_signal
    if stop_signal is not None and any(worker.code == -signal.SIGTERM for worker in failed):
        return stopped_before(stop_signal, saves)
    if failed:
        return report_failure(failed, command if words[0] == "train" else "", kills)
    if stop_signal is None or not stopped:
        return 0
    print(f"stopped by {signal.Signals(stop_signal).name}; resume with: {command}", file=sys.stderr)
    return 128 + stop_signal


def resume_command(words: Sequence[str], chosen: str = "") -> str:
    """Return the command that continues `zero3d WORDS`. chosen: the folder it chose, where WORDS name none."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith(("--resume=", "--overwrite")):
            kept.append(word)
    if chosen:  # its config.yaml has the overrides, and the folder's name
        kept = [kept[0], f"{chosen}/config.yaml", *(word for word in kept[1:] if word.startswith(LAUNCH_OPTIONS))]
    return shlex.join(["zero3d", *kept, "--resume", "auto"])


def chosen_output(worker: Worker) -> str:
    """Return the output folder that a run chose for itself (`report_output`); nothing where it was given one."""
    return _read(worker.folder / OUTPUT)


def report_failure(failed: Sequence[Worker], command: str = "", kills: int | None = None) -> int:
    """Print the first failure on stderr, for a worker that died also how to go on; return the exit code."""
    first = first_failure(failed)
    if (report := _report(first)) is not None:
        callstack = report["extraInfo"]["py_callstack"].rstrip()
        print(f"rank {first.rank} failed:\n{callstack}" if callstack else report["message"], file=sys.stderr)
        return 2 if first.code == 2 else 1
    if first.blamed:
        print(f"{BLAMED}: {first.blamed}", file=sys.stderr)
        return _go_on(command)
    assert first.code is not None
    how = f"exit code {first.code}" if first.code > 0 else describe_kill(-first.code, kills)
    print(f"rank {first.rank} {DIED}: {how}", file=sys.stderr)
    if first.rank > 0:
        for line in _read(first.folder / "output", its_end=True).splitlines()[-LAST_LINES:]:
            print(line, file=sys.stderr)
    return _go_on(command)


def _go_on(command: str) -> int:
    """Say how to go on after a death or a stall; return the exit code."""
    if command:
        print(f"go on from the last checkpoint with: {command}", file=sys.stderr)
    return FAULT


def first_failure(failed: Sequence[Worker]) -> Worker:
    """Return the worker whose failure the others' follow from."""
    return min(failed, key=_cause_first)


def message_of(worker: Worker) -> str:
    """Return the exception that a worker has left, as "NAME: text"; nothing of one that died without."""
    report = _report(worker)
    return "" if report is None else str(report["message"])


def _report(worker: Worker) -> dict[str, Any] | None:
    """Return the exception that a worker has left in its error file; None where it has left none."""
    text = _read(worker.folder / ERROR_NAME)
    return json.loads(text)["message"] if text else None


def _read(file: Path, its_end: bool = False) -> str:
    """Return the first or last MOST_READ bytes of what a worker has left, nothing where that is no file of ours."""
    with suppress(OSError):
        start = max(0, file.lstat().st_size - MOST_READ) if its_end else 0
        return read_own(file, MOST_READ, start).decode(errors="replace")
    return ""


def _cause_first(worker: Worker) -> tuple[bool, float]:
    """Sort the cause before its consequences: deaths by a signal, then exceptions by time."""
    file = worker.folder / ERROR_NAME
    killed = worker.code is not None and worker.code < 0
    return not killed, file.stat().st_mtime if file.is_file() else float("inf")
