"""An all-reduce among processes of this machine: whether it ends, whether the sum is right, how fast it is.

    outcome = reduce_among(2, "gloo", seconds=20)          forks: torch is imported once, accelerators not yet used
    python -m zero3d.tools.doctor.allreduce nccl 8 SECONDS   the same as a command, one line of JSON: for NCCL, whose
                                                             variables must be set before it is loaded

The ranks meet in a file, not in a socket. Every rank adds its number; the sum is known. Bandwidth is that of a ring:
2 (n-1)/n bytes in the seconds of one call.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request, environment, rate
from zero3d.tools.doctor.network import addresses_of, refuse_interface
from zero3d.watchdog.own_files import private_folder

RANKS = 2
BYTES = 16 << 20
REPEATS = 5
SLOW = 0.5  # of what was measured before
LONGER = 30.0  # seconds that ranks wait beyond the parent's limit: it alone says that they hang, and ends them
STARTED, JOINED, DONE = "started", "joined", "done"


@dataclass(frozen=True)
class Outcome:
    """How an all-reduce went.

    seconds    of one call, 0 where it did not end
    bandwidth  bytes per second
    fault      empty where all is well: hang, crash, wrong
    text       what happened, for people
    """

    seconds: float = 0.0
    bandwidth: float = 0.0
    fault: str = ""
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def gloo(request: Request) -> Finding:
    """Reduce over 2 ranks of this machine's CPU, on loopback or the interface that is asked for."""
    interface = request.interface or environment("GLOO_SOCKET_IFNAME") or ("lo" if sys.platform == "linux" else "")
    if interface:
        if refuse_interface("GLOO_SOCKET_IFNAME", interface, addresses_of()) is not None:
            return Finding(SKIPPED, f"{interface} cannot be used: the row of the network says why")
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    outcome = reduce_among(RANKS, "gloo", 20.0)
    where = f"over {RANKS} gloo ranks" + (f" on {interface}" if interface else "")
    if outcome.fault:
        remedy = "GLOO_SOCKET_IFNAME=lo; with it still: a firewall on this host, or torch itself"
        return Finding(BROKEN, f"an all-reduce {where} {outcome.text}", remedy, outcome.as_dict())
    text = f"{BYTES >> 20} MiB {where}: {1e3 * outcome.seconds:.0f} ms, {rate(outcome.bandwidth)}"
    verdict, told = against(outcome.bandwidth, request, "inside", cpu=True)
    remedy = "end other jobs on these cores, or measure again: zero3d calibrate" if verdict != OK else ""
    return Finding(verdict, text + told, remedy, outcome.as_dict())


def against(found: float, request: Request, which: str, cpu: bool) -> tuple[str, str]:
    """Compare a rate with the calibrated one: a verdict, and what is added to the text."""
    expected = request.expected.get(which)
    if not expected or (which != "disk" and (request.device == "cpu") != cpu):
        return OK, ""
    told = f", {found / expected:.2f} of the calibrated {rate(expected)}"
    return (WARNING, told) if found < SLOW * expected else (OK, told)


def reduce_among(ranks: int, backend: str, seconds: float) -> Outcome:
    """Reduce among that many forked processes of this machine; all of them are gone when it returns."""
    import torch.distributed  # noqa: F401 (once, before the fork)

    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with private_folder("zero3d-doctor-") as folder:
        workers, ends = [], {}
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, f"{folder}/store", rank, ranks, backend, seconds)
            workers.append(context.Process(target=_rank, args=arguments, daemon=True))
            ends[ours] = rank
            workers[-1].start()
            theirs.close()
        try:
            return judge(_collect(ends, time.monotonic() + seconds), seconds)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join(2.0)


def judge(said: Mapping[int, list[Any]], seconds: float) -> Outcome:
    """Make an outcome of what each rank said: phases, then a number of seconds and a sum, or an error."""
    for rank, words in sorted(said.items()):
        if isinstance(words[-1], str) and words[-1] not in (STARTED, JOINED, DONE):
            return Outcome(fault="crash", text=f"fails on rank {rank}: {words[-1]}")
    last = {rank: words[-1] if words else "" for rank, words in said.items()}
    stuck = [rank for rank in sorted(said) if last[rank] != DONE]
    if stuck:
        joined = [rank for rank in sorted(said) if JOINED in said[rank]]
        silent = [rank for rank in sorted(said) if rank not in joined]
        if silent:
            return Outcome(
                fault="hang", text=f"does not begin: rank {_listed(silent)} has not joined in {seconds:.0f} s"
            )
        return Outcome(fault="hang", text=f"hangs: rank {_listed(stuck)} still in it {seconds:.0f} s after the start")
    figures = [words[-2] for words in said.values()]
    wrong = [rank for rank, (_, right) in zip(sorted(said), figures, strict=True) if not right]
    if wrong:
        return Outcome(fault="wrong", text=f"ends with a wrong sum on rank {_listed(wrong)}")
    taken = max(figure[0] for figure in figures)
    return Outcome(taken, 2 * (len(said) - 1) / len(said) * BYTES / taken if len(said) > 1 else 0.0)


def _listed(ranks: list[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, ranks[:-1])), str(ranks[-1]))))


def _collect(ends: dict[Connection, int], deadline: float) -> dict[int, list[Any]]:
    """Return what ranks say until they are done, dead or late."""
    said: dict[int, list[Any]] = {rank: [] for rank in ends.values()}
    open_ends = dict(ends)
    while open_ends and time.monotonic() < deadline:
        for end in wait(list(open_ends), max(0.0, deadline - time.monotonic())):
            assert isinstance(end, Connection)
            rank = open_ends[end]
            try:
                said[rank].append(end.recv())
            except (EOFError, OSError):
                if DONE not in said[rank]:
                    said[rank].append("its process died")
                del open_ends[end]
                continue
            if said[rank][-1] == DONE:
                del open_ends[end]
        if any(
            words and isinstance(words[-1], str) and words[-1] not in (STARTED, JOINED, DONE) for words in said.values()
        ):
            break
    return {rank: words or [STARTED] for rank, words in said.items()}


def _rank(say: Connection, store: str, rank: int, world: int, backend: str, seconds: float) -> None:
    """Be one rank: join, reduce a few times, tell the sum and the time."""
    try:
        say.send(STARTED)
        _reduce(say, store, rank, world, backend, seconds)
        say.send(DONE)
    except Exception as error:  # noqa: BLE001 (the parent tells it)
        say.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    say.close()
    os._exit(0)


def _reduce(say: Connection, store: str, rank: int, world: int, backend: str, seconds: float) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    patience = timedelta(seconds=seconds + LONGER)
    dist.init_process_group(backend, store=FileStore(store, world), rank=rank, world_size=world, timeout=patience)
    message = torch.empty(BYTES // 4, device=device)
    dist.barrier()
    say.send(JOINED)
    say.send(timed_sum(dist.all_reduce, message, rank, range(world), REPEATS))


def timed_sum(reduce: Any, message: Any, rank: int, ranks: Iterable[int], repeats: int) -> tuple[float, bool]:
    """Return the median seconds of an all-reduce of ranks' numbers, and whether every element was right every time."""
    import torch

    times, right = [], True
    expected = float(sum(each + 1 for each in ranks))
    for _ in range(repeats):
        message.fill_(rank + 1)
        if message.device.type != "cpu":
            torch.get_device_module(message.device).synchronize()
        begun = time.perf_counter()
        reduce(message)
        if message.device.type != "cpu":
            torch.get_device_module(message.device).synchronize()
        times.append(time.perf_counter() - begun)
        right = bool((message == expected).all()) and right
    return median(times[1:]), right


def command(backend: str, ranks: int, seconds: float) -> list[str]:
    """Return the command that prints an outcome as a line of JSON."""
    return [sys.executable, "-P", "-m", __name__, backend, str(ranks), f"{seconds:g}"]


def main(words: list[str]) -> None:
    """Print the outcome of an all-reduce: BACKEND RANKS SECONDS."""
    print(json.dumps(reduce_among(int(words[1]), words[0], float(words[2])).as_dict()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
