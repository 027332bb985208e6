"""Ranks of a test session: forked when first asked for and kept, one fresh gloo group per case.

`run(world, case, *args)` calls a module-level function on ranks 0 .. world-1 and returns their
results. The first failure in time is raised with its traceback; on a timeout all ranks are
killed and the next case starts new ones. `alone(case, *args)` calls it in a new process without a
group, which ends then.

All workers of a session fork from the same two servers (`fork_server.py`). Two, because ranks of one would share the
seeds of hashes and of numpy: a loop over a set, or a draw that nobody seeded, would be the same on all ranks by chance.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import ClassVar

FORK_SERVERS = 2


class RankFailure(AssertionError):
    """A rank raised; `types` has every rank's exception name (or None)."""

    def __init__(self, message, types=()):
        super().__init__(message)
        self.types = list(types)


class ForkServers:
    """Starts the servers in a folder, in which their sockets are; they end with this process, or by `close`."""

    def __init__(self, folder):
        self.processes = []
        for address in sockets(folder):
            command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), address]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))

    def close(self):
        for process in self.processes:
            process.stdin.close()
            process.wait()


def sockets(folder):
    return [str(Path(folder) / f"fork-server-{number}") for number in range(FORK_SERVERS)]


class Forked:
    """A new process of a fork server: the connection to it, and its process ID once it is there."""

    def __init__(self, address):
        end = time.monotonic() + 60
        while True:  # the server may not listen yet
            try:
                self.connection = Client(address)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        self.pid = None

    def send(self, *job):
        if self.pid is None:
            self.pid = self.connection.recv()
        self.connection.send((sys.path, pickle.dumps(job)))

    def answer(self, deadline):
        """What came of the job. Raises EOFError where the process died or takes too long."""
        wait = deadline - time.monotonic()
        if not self.connection.poll(max(0.0, wait)):
            raise EOFError(f"it took more than {wait:.0f} s")
        return pickle.loads(self.connection.recv_bytes())

    def kill(self):
        """End it and all that it has started, and see it ended."""
        with suppress(EOFError, ConnectionError):
            if self.pid is None:
                self.pid = self.connection.recv()
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            while True:
                self.connection.recv_bytes()
        self.connection.close()


class RankPool:
    """Ranks of the fork servers in `folder`; without one, of its own."""

    cpu: ClassVar = Counter()  # seconds of all ranks of this process: to meet before cases, and in them

    def __init__(self, folder=None):
        self.folder = tempfile.TemporaryDirectory()
        self.servers = ForkServers(self.folder.name) if folder is None else None
        self.sockets = sockets(folder or self.folder.name)
        self.workers = []
        self.cases = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        if self.servers is not None:
            self.servers.close()
        self.folder.cleanup()

    def kill(self):
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def start(self, world):
        """The ranks below `world` that do not run yet."""
        for rank in range(len(self.workers), world):
            self.workers.append(Forked(self.sockets[rank % FORK_SERVERS]))

    def run(self, world, case, *args, timeout=600.0, group_timeout=120.0, check=True):
        """Results in rank order; with check=False pairs (result, exception text or None)."""
        self.start(world)
        self.cases += 1
        store = str(Path(self.folder.name) / f"store-{self.cases}")
        deadline = time.monotonic() + timeout
        answers = []
        try:
            for rank, worker in enumerate(self.workers[:world]):
                worker.send(rank, world, case, args, store, group_timeout)
            for worker in self.workers[:world]:
                answers.append(worker.answer(deadline))
        except (EOFError, ConnectionError) as error:
            self.kill()
            told = [a["traceback"] for a in answers if a["error"]]
            raise RankFailure(f"rank {len(answers)} of {world} gave no answer ({error})\n" + "\n".join(told)) from error
        for each in answers:
            self.cpu.update(each["cpu"])
        if not all(a["started"] for a in answers):  # torch counts group names: these workers' counts may differ now
            self.kill()
        if not check:
            return [(a["result"], a["error"]) for a in answers]
        return results_of(answers)

    def alone(self, case, *args, timeout=600.0):
        """The result of case(*args) in a process that does nothing else."""
        process = Forked(self.sockets[0])
        try:
            process.send(0, 0, case, args, None, None)
            answer = process.answer(time.monotonic() + timeout)
        except (EOFError, ConnectionError) as error:
            raise RankFailure(f"the process gave no answer ({error})") from error
        finally:
            process.kill()
        self.cpu.update(answer["cpu"])
        return results_of([answer])[0]


def results_of(answers):
    failed = sorted((a for a in answers if a["error"]), key=lambda a: a["time"])
    if failed:
        raise RankFailure(failed[0]["traceback"], [a["error"] for a in answers])
    return [a["result"] for a in answers]
