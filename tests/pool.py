"""A session-wide pool of ranks: spawned when first asked for and kept, one fresh gloo group per case.

`run(world, case, *args)` calls a module-level function on ranks 0 .. world-1 and returns their
results. The first failure in time is raised with its traceback; on a timeout all ranks are
killed and the next case starts new ones.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path


class RankFailure(AssertionError):
    """A rank raised; `types` has every rank's exception name (or None)."""

    def __init__(self, message, types=()):
        super().__init__(message)
        self.types = list(types)


class RankPool:
    def __init__(self):
        self.workers = []
        self.folder = tempfile.TemporaryDirectory()
        self.cases = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.folder.cleanup()

    def kill(self):
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers = []

    def start(self, world):
        """The ranks below `world` that do not run yet."""
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self.workers), world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, world, case, *args, timeout=120.0, group_timeout=60.0, check=True):
        """Results in rank order; with check=False pairs (result, exception text or None)."""
        self.start(world)
        self.cases += 1
        store = str(Path(self.folder.name) / f"store-{self.cases}")
        job = pickle.dumps((world, case, args, store, group_timeout))
        for _, connection in self.workers[:world]:
            connection.send_bytes(job)
        deadline = time.monotonic() + timeout
        answers = []
        for rank, (_, connection) in enumerate(self.workers[:world]):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError(f"no answer within {timeout:.0f} s")
                answers.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, ConnectionError) as error:
                self.kill()
                told = [a["traceback"] for a in answers if a["error"]]
                raise RankFailure(f"rank {rank} of {world} gave no answer ({error})\n" + "\n".join(told)) from error
        if not all(a["started"] for a in answers):  # torch counts group names: these workers' counts may differ now
            self.kill()
        if not check:
            return [(a["result"], a["error"]) for a in answers]
        failed = sorted((a for a in answers if a["error"]), key=lambda a: a["time"])
        if failed:
            raise RankFailure(failed[0]["traceback"], [a["error"] for a in answers])
        return [a["result"] for a in answers]


def serve(rank, connection):
    """A rank's loop."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=group_timeout),
            )
            dist.barrier()  # gloo connects rank by rank: one that leaves at once fails those still connecting
            answer["started"] = True
            answer["result"] = case(*args)
        except BaseException as error:
            answer.update(error=f"{type(error).__name__}: {error}", traceback=f"rank {rank}: {traceback.format_exc()}")
        answer["time"] = time.monotonic()
        connection.send_bytes(pickle.dumps(answer))
        if dist.is_initialized():
            dist.destroy_process_group()
