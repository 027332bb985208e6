"""Adam's update on the host: chunk by chunk beside whole tensors, and beside a copy of as many bytes.

    chunks         `HostExecutor`: casts inside chunks, one thread of Python per core
    whole tensors  torch's fused AdamW and the same casts, each a pass of its own over memory, by torch's threads
    DeepSpeed      DeepSpeedCPUAdam and its two casts, where it is installed: fp32 masters only
    copy           of half the bytes, which reads and writes as many as the update

Bytes are what an update must read and write, once each; gradients are bf16. Buffers are made beforehand for all ways.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloading.turns import at_least, in_turns, rates
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import cast_scratch
from zero3d.offload.host_adam import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.offload.rounding import Draw, noise_table, round_to_bf16
from zero3d.precision import cast_all, join_master, split_master

RULE = AdamRule(lr=1e-4, weight_decay=0.01)
PIECE = 1 << 22  # elements of a parameter
TARGET = 1.1  # of whole tensors' speed


class Form(NamedTuple):
    """How states are held, and the bytes of an element that an update reads and writes."""

    split: bool
    moments: torch.dtype
    moved: int


FORMS = {
    "fp32 master": Form(False, torch.float32, 28),
    "split master": Form(True, torch.float32, 26),
    "split, bf16 moments": Form(True, torch.bfloat16, 18),
}


class Whole:
    """Owns what an update of whole tensors needs beside the bucket: fp32 copies, all of full length."""

    def __init__(self, bucket: BucketStates, pieces: list[BucketPiece]) -> None:
        count = len(bucket.grad)
        self.bucket, self.pieces = bucket, pieces
        self.grad, self.scratch = torch.empty(count), torch.empty(count)
        self.master = torch.empty(count) if bucket.master.dtype == torch.int16 else bucket.master
        narrow = (bucket.exp_avg, bucket.exp_avg_sq)
        self.moments = [each if each.dtype == torch.float32 else torch.empty(count) for each in narrow]
        self.table, self.step = noise_table(bucket.grad.device), torch.tensor(2.0)

    def __call__(self) -> None:
        """Update all, pass by pass."""
        bucket, narrow = self.bucket, (self.bucket.exp_avg, self.bucket.exp_avg_sq)
        assert bucket.weights is not None
        if self.master is not bucket.master:
            join_master(bucket.weights, bucket.master, self.master)
        self.grad.copy_(bucket.grad)
        for own, wide in zip(narrow, self.moments, strict=True):
            if own is not wide:
                wide.copy_(own)
        self.adam()
        for moment, (own, wide) in enumerate(zip(narrow, self.moments, strict=True)):
            if own is not wide:
                round_to_bf16(wide, own, Draw(0, 2, moment), 0, self.table, self.scratch)
        if self.master is not bucket.master:
            split_master(self.master, bucket.weights, bucket.master, self.scratch)
        else:
            cast_all([(self.master, bucket.weights)], self.scratch[: cast_scratch(len(self.master), "cpu")])

    def adam(self) -> None:
        """Call torch's kernel on every piece."""
        tensors = (self.master, self.grad, *self.moments)
        RULE.update(self.step, [[each[piece.start : piece.stop] for piece in self.pieces] for each in tensors])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return rates of every form of states with one thread and with several."""
    count = int(arguments.gigabytes * 1e9 / FORMS["fp32 master"].moved) // 16 * 16
    result: dict[str, Any] = {"rows": {}, "seconds": {}, "targets": [], "elements": count}
    for threads in (1, max(2, arguments.threads)):
        torch.set_num_threads(threads)
        for name, form in FORMS.items():
            bucket, moved = bucket_of(form, count), form.moved * count
            pieces = [BucketPiece(start, min(start + PIECE, count), RULE) for start in range(0, count, PIECE)]
            with closing(HostExecutor(threads, Arena(torch.device("cpu"), "host"))) as executor:
                ways = ways_of(executor, bucket, pieces, moved)
                seconds = in_turns(ways, arguments.rounds)
            rows = rates(seconds, dict.fromkeys(ways, moved))
            for row in rows.values():
                row["of a copy"] = row["GB/s"] / rows["copy"]["GB/s"]
                row["of whole tensors"] = row["GB/s"] / rows["whole tensors"]["GB/s"]
            if not form.split:
                rows.setdefault("DeepSpeed", {"GB/s": "not installed"})
            label = f"{name}, {threads} thread{'s' * (threads > 1)}"
            result["rows"] |= {f"{label}: {way}": row for way, row in rows.items()}
            result["seconds"] |= {f"{label}: {way}": times for way, times in seconds.items()}
            result["targets"].append(at_least(label, rows["chunks"]["of whole tensors"], TARGET))
    torch.set_num_threads(arguments.threads)
    return result


def ways_of(
    executor: HostExecutor, bucket: BucketStates, pieces: list[BucketPiece], moved: int
) -> dict[str, Callable[[], object]]:
    """Return what takes turns on one bucket."""
    here, there = (torch.ones(moved // 2, dtype=torch.uint8) for _ in range(2))
    ways: dict[str, Callable[[], object]] = {
        "chunks": partial(executor.update, bucket, pieces, 2), "whole tensors": Whole(bucket, pieces),
    }  # fmt: skip
    if bucket.master.dtype == torch.float32 and importlib.util.find_spec("deepspeed"):
        ways["DeepSpeed"] = deepspeed_update(bucket)
    return ways | {"copy": lambda: there.copy_(here)}


def deepspeed_update(bucket: BucketStates) -> Callable[[], None]:
    """Return DeepSpeed's update of the same master with moments of its own."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    master = torch.nn.Parameter(bucket.master)
    optimizer = DeepSpeedCPUAdam([master], lr=RULE.lr, weight_decay=RULE.weight_decay, adamw_mode=True)
    grad = torch.empty_like(bucket.master)

    def update() -> None:
        assert bucket.weights is not None
        master.grad = grad.copy_(bucket.grad)
        optimizer.step()
        bucket.weights.copy_(master.data)

    return update


def bucket_of(form: Form, count: int) -> BucketStates:
    """Return states of so many elements, as after some steps, and their gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.randn(count, generator=generator).mul_(scale)

    master, weights = normal(0.02), torch.empty(count, dtype=torch.bfloat16)
    if form.split:
        remainder = torch.empty(count, dtype=torch.int16)
        split_master(master, weights, remainder)
        master = remainder
    moments = [normal(1e-3).to(form.moments), normal(1e-3).square_().to(form.moments)]
    return BucketStates(master, weights, *moments, normal(1e-3).bfloat16())
