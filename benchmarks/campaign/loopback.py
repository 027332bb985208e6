"""A data axis of one rank that calls its backend's collectives, on groups of this rank alone.

An engine on one rank communicates nothing: everywhere a size of 1 is asked for first. The data axis of `Loopback`
has the size `One`, a 1 that equals no number and exceeds itself. So the engine takes the path of many ranks, with the
algorithm, streams, buffers, events and calls that go with it, and what comes back is what was sent: every figure stays
that of an engine without it, to the bit. The other two axes stay alone: at degree 1 nothing is cut that they could
carry.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from campaign.account import Account, Place
from campaign.training import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    MIDDLE,
    STAGES,
    Run,
    compare,
    engine_of,
    run_of,
    train,
    train_plainly,
)
from zero3d import make_deterministic
from zero3d.distributed import algorithms, choice, collectives
from zero3d.distributed.axis import Axis
from zero3d.distributed.choice import ALL_TO_ALL, NATIVE
from zero3d.distributed.groups import EARLY, new_group, timeout, warm_up
from zero3d.distributed.mesh import Mesh

NEXT = {"fp32": FP32_TOLERANCE, "bf16": BF16_TOLERANCE}


class One(int):
    """The size of an axis of one rank that is not to be told from a larger one by comparing."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return int(self) >= other

    __hash__ = int.__hash__


def as_on_nccl(backend: str, *rest: Any) -> str:
    """Return the name of an axis' algorithm by its rule, where gloo is NCCL."""
    return choice.choose_algorithm("nccl" if backend == "gloo" else backend, *rest)


class Loopback(Mesh):
    """A mesh of one rank whose data axis has process groups. On gloo it takes the algorithms that NCCL has."""

    def __init__(self, device: str) -> None:
        collectives.choose_algorithm = as_on_nccl
        super().__init__(device=device)

    def open_axis(self, name: str) -> Axis:
        """Make an axis of this rank, the data axis with two groups, as `Mesh` makes those of many ranks."""
        if name != "dp":
            return super().open_axis(name)
        gathers, reductions = (new_group(name, [0], self.device, everyone=True) for _ in range(2))
        axis = Axis(name, 0, One(1), gathers, reductions, device=self.device)
        axis.patience = EARLY * timeout(self.device).total_seconds()
        warm_up(axis)
        atexit.register(axis.close)  # before torch.distributed ends, as `Mesh` does for larger axes
        return axis


def nccl(place: Place, account: Account) -> None:
    """Collectives by themselves, then every stage with looped axes against the same without, and a plain loop."""
    make_deterministic(place.device)
    run = run_of(place, account, MIDDLE)
    alone, looped = Mesh(device=place.device), Loopback(place.device)
    account.ran("backend", looped.data.backend)
    native_collectives(account, alone.device)
    for precision in ("fp32", "bf16"):
        of_precision = run._replace(precision=precision)
        plain = train_plainly(alone.device, of_precision)
        stage_0 = train(engine_of(alone, of_precision, 0), of_precision)
        if precision == "bf16":  # peers.Plain sums what it clips in fp32, from gradients in bf16
            plain["norms"] = stage_0["norms"]
        compare(account, f"{precision} stage 0, plain loop", stage_0, plain, NEXT[precision])
        for micro_batches in (1, 2):
            for stage in STAGES:
                compare_looped(account, (alone, looped), of_precision._replace(accumulate=micro_batches), stage)
    for stage in STAGES:
        in_bf16 = run._replace(precision="bf16")
        compare_looped(account, (alone, looped), in_bf16, stage, reduce_scatter=NATIVE)
        compare_looped(account, (alone, looped), in_bf16._replace(accumulate=2), stage, exact=True)


def compare_looped(
    account: Account, meshes: tuple[Mesh, Loopback], run: Run, stage: int, exact: bool = False,
    reduce_scatter: str = "auto",
) -> None:  # fmt: skip
    """Train with axes that return at once and with looped ones; equal bits are due, and calls by NCCL's algorithm."""
    alone, looped = (engine_of(mesh, run, stage, exact, reduce_scatter=reduce_scatter) for mesh in meshes)
    what = f"{run.precision} stage {stage}, {run.accumulate} micro-batches{', exact' if exact else ''}"
    what += ", native" if reduce_scatter == NATIVE else ""
    found, due = looped.dp.algorithm, NATIVE if reduce_scatter == NATIVE else ALL_TO_ALL
    account.ran(f"{what}: algorithm", found, "" if found == due else f"many ranks would reduce by {due}")
    compare(account, what, train(looped, run), train(alone, run), 0.0)
    calls = sum(entry.calls for entry in looped.traffic)
    account.ran(f"{what}: calls", calls, "" if calls else "the axes called nothing")


def native_collectives(account: Account, device: torch.device) -> None:
    """Make zero3d's native calls in a group of one rank; what is not copied through unchanged is wrong."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        expected = torch.arange(4096, device=device).to(dtype)
        full = expected.clone()
        algorithms._all_gather(full, full.view(1, -1)[0])  # in place, as units are gathered
        account.ran(f"in-place all-gather of {dtype}", "done", same(full, expected))
        out = torch.empty_like(expected)
        work = algorithms._reduce_scatter(out, expected.clone(), dist.ReduceOp.SUM, async_op=True)
        work.wait()
        account.ran(f"reduce-scatter of {dtype}", "done", same(out, expected))
        received = torch.empty_like(expected)
        dist.all_to_all_single(received.view(torch.uint8), expected.view(torch.uint8))
        account.ran(f"all-to-all of {dtype}", "done", same(received, expected))


def same(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return what is wrong with a copy."""
    return "" if torch.equal(found, expected) else "what came back is not what was sent"
