"""Fresh processes in one process group, all started alike: one thread each, the same malloc; what is typed for them."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

from zero3d.tools.cli.worker import leave, raise_malloc_thresholds

# glibc's mallopt parameters (malloc.h)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ENDING_S = 20.0  # for a process that was killed to be gone


@dataclass(frozen=True)
class Start:
    """How processes start.

    backend  "gloo" | "nccl"
    device   "cpu"; "cuda" (one card per rank); "cuda:0" (all ranks on one card)
    malloc   "default" | "keep" (zero3d's `raise_malloc_thresholds`) | "map" (`map_tensors`)
    """

    ranks: int
    backend: str = "gloo"
    device: str = "cpu"
    malloc: str = "keep"
    timeout_s: float = 3600.0

    def device_of(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return torch.device(f"cuda:{rank}" if self.device == "cuda" else self.device)


def map_tensors() -> None:
    """Tell glibc to map every block from 64 KiB on by itself and unmap it when it is freed.

    Slow; the resident set then follows what is alive to the page. Without glibc it does nothing.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        library.mallopt(M_TRIM_THRESHOLD, 1 << 16)


SET_MALLOC: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "keep": raise_malloc_thresholds,
    "map": map_tensors,
}


def command_line(doc: str | None, ranks: int = 2, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser of what all measurements on ranks take; a script's docstring begins with what it is."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--ranks", type=positive, default=ranks)
    parser.add_argument("--rounds", type=positive, default=rounds, help="counted measurements of each")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    return parser


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def run_ranks(start: Start, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(device, *arguments)` on every rank of fresh processes; rank 0's JSON-able result.

    Raises what a rank raised, with its traceback, or TimeoutError.
    """
    with started(start, function, *arguments) as (context, folder):
        wait_for(context, function.__name__, start)
        return json.loads((folder / "result.json").read_text())


@contextmanager
def started(start: Start, function: Callable[..., Any], *arguments: Any) -> Iterator[tuple[ProcessContext, Path]]:
    """Fresh processes that run `function`, and the folder for rank 0's result; none outlives the block."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _run_rank, (start, folder, function, arguments), nprocs=start.ranks, join=False, start_method="spawn"
        )
        try:
            yield context, Path(folder)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
            for process in context.processes:  # a card's memory is free again when its process is gone
                process.join(ENDING_S)


def wait_for(context: ProcessContext, what: str, start: Start) -> None:
    """Wait until all ranks have ended; raises as `run_ranks` does."""
    deadline = time.monotonic() + start.timeout_s
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} on {start.ranks} ranks took over {start.timeout_s:g} s")


def _run_rank(rank: int, start: Start, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    device = start.device_of(rank)
    os.environ["LOCAL_RANK"] = str(rank if device.index is None else device.index)
    torch.set_num_threads(1)
    SET_MALLOC[start.malloc]()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(start.backend, init_method=store, rank=rank, world_size=start.ranks)
    result = function(device, *arguments)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    leave(0)  # groups that FSDP2 keeps have threads, and one that drops a tensor of an ending interpreter aborts it


def synchronize(device: torch.device) -> None:
    """Wait for the device's enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    """Combine a list of numbers element by element over all ranks."""
    combined = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(combined, op=op)
    return combined.tolist()
