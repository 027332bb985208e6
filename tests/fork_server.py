"""A process that has imported what tests need, and forks: `python fork_server.py SOCKET`.

Imports are most of a process's start, and a fork pays none. Who connects to the socket talks to a new process from then
on: it sends its process ID, and does what it is sent, one job after another, until the connection ends (`pool.py`).

The server imports when it is first asked. It ends with its standard input, that is, with the process that started it,
and ends all that it has forked. It has one thread, as a process that forks must.
"""

import gc
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Listener

IMPORTS = (
    "pytest",
    "torch._dynamo",  # with the first optimizer that is made
    "zero3d.tools.advice.plan_check",
    "zero3d.tools.cli.main",
    "zero3d.engine.engine",
    "zero3d.pipeline.runner",
    "zero3d.train.run",
    "peft",
    "transformers.trainer",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("llama", "gpt2", "qwen3", "qwen3_moe", "llava", "clip")
    ),
    "PIL.Image",
)


def main(address):
    """Fork for everybody who connects, until stdin ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    listener = Listener(address, backlog=64)
    listening = listener._listener._socket
    pids = set()
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        with listener.accept() as connection:
            if "torch" not in sys.modules:
                import_all()
            pids = {pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)}
            pids.add(fork(connection, listening))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def import_all():
    """Import what ranks need; what is there then is never collected, and its pages are never copied."""
    gc.disable()
    for name in IMPORTS:
        import_module(name)
    collect_rarely()


def collect_rarely():
    """Never look through what is there by now, and seldom through the rest: it took a tenth of a rank's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def fork(connection, listening):
    """Fork a process that serves this connection; return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        listening.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # its end is the server's
        connection.send(os.getpid())
        serve(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # whatever happens, it does not go on as a fork server


def serve(connection):
    """Do jobs and send what came of them until the connection ends."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            sys.path[:], job = connection.recv()  # where its test file was found
            rank, world, case, args, store, group_timeout = pickle.loads(job)
        except EOFError:
            return
        answer = {"result": None, "error": None, "started": False}
        began = met = cpu_seconds()
        try:
            if world:
                join(rank, world, store, group_timeout)
            answer["started"], met = True, cpu_seconds()
            answer["result"] = case(*args)
        except BaseException as error:
            answer.update(error=f"{type(error).__name__}: {error}", traceback=f"rank {rank}: {traceback.format_exc()}")
        answer["time"] = time.monotonic()
        answer["cpu"] = {"meeting": met - began, "ranks": cpu_seconds() - met}
        connection.send_bytes(pickle.dumps(answer))
        if dist.is_initialized():
            dist.destroy_process_group()
        job = case = args = answer = None  # nothing of it is kept
        gc.collect()  # an engine left in a cycle keeps its groups, each with a thread that wakes 100 times a second
        gc.freeze()  # what is left is of modules: the next collection does not look through it again


def join(rank, world, store, timeout):
    """Make a new gloo group of the first `world` ranks. However long they take to meet: `timeout` is for what follows."""
    import torch.distributed as dist

    store = dist.FileStore(store, world)
    store.set(f"here {rank}", "")
    store.wait([f"here {each}" for each in range(world)], timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    dist.barrier()  # gloo connects rank by rank: one that leaves at once fails those still connecting


def cpu_seconds():
    """Return the CPU seconds of this process, and of those of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main(sys.argv[1])
