"""A session-wide pool of ranks: forked when first asked for and kept, one fresh gloo group per case.

`run(world, case, *args)` calls a module-level function on ranks 0 .. world-1 and returns their
results. The first failure in time is raised with its traceback; on a timeout all ranks are
killed and the next case starts new ones. `alone(case, *args)` calls it in a new process without a
group, which ends then.

fork server a process that has imported what ranks need and does nothing but fork them; imports
            are most of a rank's start, and a killed rank's successor pays none
two of them because ranks of one would share the seeds of hashes and of numpy: a loop over a set,
            or a draw that nobody seeded, would be the same on all ranks by chance
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path

FORK_SERVERS = 2
IMPORTS = (
    "pytest",
    "zero3d.engine.engine",
    "zero3d.train.run",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "qwen3", "qwen3_moe")),
)


class RankFailure(AssertionError):
    """A rank raised; `types` has every rank's exception name (or None)."""

    def __init__(self, message, types=()):
        super().__init__(message)
        self.types = list(types)


class RankPool:
    def __init__(self):
        self.fork_servers = []
        self.workers = []
        self.folder = tempfile.TemporaryDirectory()
        self.cases = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for server in self.fork_servers:
            server.close()
        self.folder.cleanup()

    def kill(self):
        for connection in self.workers:
            connection.close()
        for server in self.fork_servers:
            server.kill()
        self.workers = []

    def fork_server(self, rank):
        """The one that ranks of this parity come from."""
        self.fork_servers += [ForkServer() for _ in range(len(self.fork_servers), min(rank + 1, FORK_SERVERS))]
        return self.fork_servers[rank % FORK_SERVERS]

    def start(self, world):
        """The ranks below `world` that do not run yet."""
        for rank in range(min(world, FORK_SERVERS)):
            self.fork_server(rank)  # they import at the same time
        for rank in range(len(self.workers), world):
            self.workers.append(self.fork_server(rank).fork(rank))

    def run(self, world, case, *args, timeout=600.0, group_timeout=120.0, check=True):
        """Results in rank order; with check=False pairs (result, exception text or None)."""
        self.start(world)
        self.cases += 1
        store = str(Path(self.folder.name) / f"store-{self.cases}")
        job = pickle.dumps((world, case, args, store, group_timeout))
        for connection in self.workers[:world]:
            connection.send_bytes(job)
        deadline = time.monotonic() + timeout
        answers = []
        for rank, connection in enumerate(self.workers[:world]):
            try:
                answers.append(answer_of(connection, deadline))
            except (EOFError, ConnectionError) as error:
                self.kill()
                told = [a["traceback"] for a in answers if a["error"]]
                raise RankFailure(f"rank {rank} of {world} gave no answer ({error})\n" + "\n".join(told)) from error
        if not all(a["started"] for a in answers):  # torch counts group names: these workers' counts may differ now
            self.kill()
        if not check:
            return [(a["result"], a["error"]) for a in answers]
        return results_of(answers)

    def alone(self, case, *args, timeout=600.0):
        """The result of case(*args) in a process that does nothing else."""
        connection = self.fork_server(0).fork(0)
        try:
            connection.send_bytes(pickle.dumps((0, case, args, None, None)))
            return results_of([answer_of(connection, time.monotonic() + timeout)])[0]
        except (EOFError, ConnectionError) as error:
            self.kill()
            raise RankFailure(f"the process gave no answer ({error})") from error
        finally:
            connection.close()


def answer_of(connection, deadline):
    """What a rank sends. Raises EOFError where it died or takes too long."""
    wait = deadline - time.monotonic()
    if not connection.poll(max(0.0, wait)):
        raise EOFError(f"it took more than {wait:.0f} s")
    return pickle.loads(connection.recv_bytes())


def results_of(answers):
    failed = sorted((a for a in answers if a["error"]), key=lambda a: a["time"])
    if failed:
        raise RankFailure(failed[0]["traceback"], [a["error"] for a in answers])
    return [a["result"] for a in answers]


class ForkServer:
    """A process of ours that has imported IMPORTS and forks ranks."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve_forks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def fork(self, rank):
        """The connection to a new rank."""
        ours, theirs = multiprocessing.Pipe()
        self.connection.send((rank, theirs))
        theirs.close()
        return ours

    def kill(self):
        """End all of its ranks, and see them ended."""
        self.connection.send(None)
        self.connection.recv()

    def close(self):
        self.connection.close()
        self.process.join()


def serve_forks(connection):
    """A fork server's loop. It has one thread, as a process that forks must."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in IMPORTS:
        import_module(name)
    gc.freeze()  # ranks would look through all that was imported again and again, and copy its pages
    pids = []
    with suppress(EOFError):
        while True:
            if asked := connection.recv():
                pids.append(fork(*asked))
            else:
                end(pids)
                connection.send(None)
    end(pids)


def fork(rank, connection):
    pid = os.fork()
    if pid == 0:
        try:
            serve(rank, connection)
        except BaseException:
            traceback.print_exc()
        os._exit(0)  # whatever happens, it does not go on as a fork server
    connection.close()
    return pid


def end(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    pids.clear()


def serve(rank, connection):
    """A rank's loop."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            world, case, args, store, group_timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer = {"result": None, "error": None, "started": False}
        try:
            if world:
                join(rank, world, store, group_timeout)
            answer["started"] = True
            answer["result"] = case(*args)
        except BaseException as error:
            answer.update(error=f"{type(error).__name__}: {error}", traceback=f"rank {rank}: {traceback.format_exc()}")
        answer["time"] = time.monotonic()
        connection.send_bytes(pickle.dumps(answer))
        if dist.is_initialized():
            dist.destroy_process_group()


def join(rank, world, store, timeout):
    """A new gloo group of the first `world` ranks. However long they take to meet: `timeout` is for what follows."""
    import torch.distributed as dist

    store = dist.FileStore(store, world)
    store.set(f"here {rank}", "")
    store.wait([f"here {each}" for each in range(world)], timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    dist.barrier()  # gloo connects rank by rank: one that leaves at once fails those still connecting
