"""Parameters per second of Adam on the host, beside one call of torch's fused AdamW on the same memory and threads.

    torch       `torch.optim.AdamW(fused=True).step()` on all pieces, by torch's threads
    plain       `HostExecutor` on the same bucket: fp32 weights are their masters, and nothing is cast
    clipped     the same, with gradients clipped on the way, as an engine does where the norm asks for it
    bf16        clipped; fp32 masters are cast to bf16 weights
    split       clipped; masters in halves

Torch is not clipped, and casts nothing: a second pass over gradients is in the other rows alone.

A bucket has `CACHES` times what the last cache holds of masters, gradients and moments, in a host slab, as an engine's
records are. "CPU" compares the seconds of cores instead: other processes take none of those.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from offloading.turns import at_least
from offloading.update import RULE
from zero3d.memory.arena import Arena
from zero3d.offload.host_adam import BucketPiece, BucketStates, HostExecutor
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record

CACHES = 4
PIECE = 1 << 20  # elements of a parameter
CLIP = 0.7
TARGET = 0.9  # of torch's parameters per second
CPU = torch.device("cpu")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return rates with one thread and with several, in turns with torch's."""
    count = max(int(arguments.gigabytes * 1e9), CACHES * last_cache()) // 16 // PIECE * PIECE
    result: dict[str, Any] = {"rows": {}, "seconds": {}, "targets": [], "elements": count}
    before = torch.get_num_threads()
    for threads in (1, max(2, arguments.threads)):
        torch.set_num_threads(threads)
        with closing(HostExecutor(threads, Arena(CPU, "host"))) as executor:
            seconds = _timed(_ways(executor, count), arguments.rounds)
        label = f"{threads} thread{'s' * (threads > 1)}"
        torch_s = seconds["torch"]
        for way, times in seconds.items():
            of_torch, of_cpu = (median(a / b for a, b in zip(torch_s[i], times[i], strict=True)) for i in range(2))
            rate = count / 1e6 / median(times[0])
            result["rows"][f"{label}: {way}"] = {"M parameters/s": rate, "of torch": of_torch, "of torch, CPU": of_cpu}
            result["seconds"][f"{label}: {way}"] = times[0]
        result["targets"].append(at_least(label, result["rows"][f"{label}: plain"]["of torch"], TARGET))
    torch.set_num_threads(before)
    return result


def last_cache() -> int:
    """Return the bytes of this CPU's largest cache."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}[size[-1]] for size in sizes), default=32 << 20)


def _timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds of every counted call by way: those of a clock, and those of cores. One round warms up."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for turn in range(1 + rounds):
        for name, call in ways.items():
            begun, of_cpu = time.perf_counter(), time.process_time()
            call()
            if turn:
                seconds[name][0].append(time.perf_counter() - begun)
                seconds[name][1].append(time.process_time() - of_cpu)
    return seconds


def _ways(executor: HostExecutor, count: int) -> dict[str, Callable[[], object]]:
    """Return what takes turns on one bucket of so many elements."""
    fields = (*[(torch.float32, count)] * 4, (torch.bfloat16, count), (torch.int16, count))
    master, grad, exp_avg, exp_avg_sq, weights, remainder = HostSlab({"": [Record("", fields)]}, CPU).views[""][0]
    generator = torch.Generator().manual_seed(0)
    for values, scale in ((master, 0.02), (grad, 1e-3), (exp_avg, 1e-3), (exp_avg_sq, 1e-3)):
        values.normal_(generator=generator).mul_(scale)
    exp_avg_sq.square_()
    pieces = [BucketPiece(start, min(start + PIECE, count), RULE) for start in range(0, count, PIECE)]
    plain = BucketStates(master, None, exp_avg, exp_avg_sq, grad)

    def ours(bucket: BucketStates, *factors: float) -> Callable[[], object]:
        return partial(executor.update, bucket, pieces, 2, factors)

    return {
        "torch": _by_torch(pieces, plain),
        "plain": ours(plain),
        "clipped": ours(plain, CLIP),
        "bf16": ours(plain._replace(weights=weights), CLIP),
        "split": ours(plain._replace(master=remainder, weights=weights.clone().normal_().mul_(0.02)), CLIP),
    }  # fmt: skip


def _by_torch(pieces: list[BucketPiece], bucket: BucketStates) -> Callable[[], object]:
    """Return a step of torch's optimizer whose parameters and states are those of a bucket."""

    def cut(values: Tensor) -> list[Tensor]:
        return [values[piece.start : piece.stop] for piece in pieces]

    parameters = [torch.nn.Parameter(values) for values in cut(bucket.master)]
    optimizer = torch.optim.AdamW(parameters, lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)
    states = zip(parameters, cut(bucket.grad), cut(bucket.exp_avg), cut(bucket.exp_avg_sq), strict=True)
    for parameter, grad, exp_avg, exp_avg_sq in states:
        parameter.grad = grad
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step
