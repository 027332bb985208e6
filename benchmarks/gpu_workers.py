"""What the ranks of `gpu_check.py` do; every function gets its device first and returns JSON-able values."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from model import Shape, batch, build_gpt
from peers import Plain, Setting, Zero3d
from ranks import over_ranks, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero3d import Engine
from zero3d.distributed import collectives
from zero3d.zero.streams import Lane

STAGES = (0, 1, 2, 3)
Event = tuple[str, str]


class Run(NamedTuple):
    """A short training.

    batch  sequences per step over all ranks
    plain  also train without any engine
    """

    shape: Shape
    batch: int
    seq: int
    steps: int
    precision: str = "fp32"
    plain: bool = False


class Curve(TypedDict):
    """Mean loss over ranks and gradient norm (before clipping) of every step."""

    losses: list[float]
    norms: list[float]


def setting_of(device: torch.device, run: Run) -> Setting:
    """What all variants of a run are built from; no reduced-precision matrix products in fp32."""
    torch.set_float32_matmul_precision("highest")
    return Setting(partial(build_gpt, run.shape), device, run.precision)


def own_batch(device: torch.device, run: Run, step: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a step's global batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids, targets = batch(step, run.batch, run.seq, run.shape.vocab, device)
    return ids.chunk(ranks)[rank], targets.chunk(ranks)[rank]


def train(engine: Engine, device: torch.device, run: Run) -> Curve:
    """Train; reads values every step."""
    curve = Curve(losses=[], norms=[])
    for step in range(run.steps):
        loss = engine(*own_batch(device, run, step))
        engine.backward(loss)
        curve["norms"].append(float(engine.step().grad_norm))
        curve["losses"].append(over_ranks([float(loss.detach())], dist.ReduceOp.SUM, device)[0] / dist.get_world_size())
    return curve


def stage_curves(device: torch.device, run: Run) -> dict[str, Curve]:
    """Every stage from the same weights on the same batches, and a plain loop if asked for."""
    setting = setting_of(device, run)
    curves = {f"stage {stage}": train(Zero3d(setting, stage).engine, device, run) for stage in STAGES}
    if run.plain:
        plain = Plain(setting)
        losses = [float(plain.step(*own_batch(device, run, step))) for step in range(run.steps)]
        curves["plain"] = Curve(losses=losses, norms=next(iter(curves.values()))["norms"])  # only losses are compared
    return curves


def native_collectives(device: torch.device) -> list[str]:
    """zero3d's native calls in a group of one rank: what is not copied through unchanged.

    An engine on one rank communicates nothing, so the calls are made here by themselves.
    """
    faults = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        expected = torch.arange(4096, device=device).to(dtype)
        full = expected.clone()
        collectives._all_gather(full, full.view(1, -1)[0])  # in place, as units are gathered
        if not torch.equal(full, expected):
            faults.append(f"in-place all-gather of {dtype}")
        out = torch.empty_like(expected)
        work = collectives._reduce_scatter(out, expected.clone(), dist.ReduceOp.SUM, async_op=True)
        work.wait()
        if not torch.equal(out, expected):
            faults.append(f"reduce-scatter of {dtype}")
    return faults


# --- streams ------------------------------------------------------------------------------------


def stream_log(device: torch.device, run: Run) -> dict[str, Any]:
    """Train stage 3 with logging lanes, and stage 0 beside it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    setting = setting_of(device, run)
    with sdpa_kernel(SDPBackend.MATH):
        reference = train(Zero3d(setting, 0).engine, device, run)
        engine = Zero3d(setting, 3).engine
        log: list[Event] = []
        engine.gathers._lane = Lane("gather", engine.arena, log)
        engine.reductions._lane = Lane("reduce", engine.arena, log)
        curve = train(engine, device, run)
    synchronize(device)
    pairs = zip(curve["losses"] + curve["norms"], reference["losses"] + reference["norms"], strict=True)
    apart = [abs(a - b) / abs(b) for a, b in pairs]
    return {
        "events": len(log),
        "faults": order_faults(log),
        "ahead": count_ahead(log),
        "difference": max(apart) if all(value == value for value in apart) else float("nan"),
        "identical": curve == reference,
        "log": [" ".join(event) for event in log[-400:]],
    }


def order_faults(log: list[Event]) -> list[str]:
    """Events that break issue -> join -> free, by unit; a reduction is not freed, a cancelled gather neither."""
    allowed = {
        "gather.issue": (None, "gather.free", "gather.join"),
        "gather.join": ("gather.issue", "gather.join"),
        "gather.free": ("gather.join",),
        "reduce.issue": (None, "reduce.join"),
        "reduce.join": ("reduce.issue",),
    }
    last: dict[Event, str] = {}
    faults = []
    for position, (event, unit) in enumerate(log):
        lane = event.partition(".")[0]
        before = last.get((lane, unit))
        if before not in allowed[event]:
            faults.append(f"event {position}: {event} of {unit} after {before or 'nothing'}")
        last[lane, unit] = event
    open_reductions = [unit for (lane, unit), event in last.items() if event == "reduce.issue"]
    return faults + [f"reduction of {unit} was never joined" for unit in open_reductions]


def count_ahead(log: list[Event]) -> int:
    """Gathers that were issued before another unit was joined, and joined after it."""
    waiting: dict[str, bool] = {}
    ahead = 0
    for event, unit in log:
        if event == "gather.issue":
            waiting[unit] = False
        elif event == "gather.join":
            ahead += waiting.pop(unit, False)
            waiting = dict.fromkeys(waiting, True)
    return ahead


# --- memory -------------------------------------------------------------------------------------


def device_memory(device: torch.device, run: Run, stage: int) -> dict[str, int]:
    """Bytes after a step on the card: by CUDA's allocator, by the arena, and as planned."""
    setting = setting_of(device, run)
    Plain(setting).step(*own_batch(device, run, 0))  # libraries take their workspaces
    before = allocated(device)
    engine = Zero3d(setting, stage).engine
    built = allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    train(engine, device, run)
    peak = torch.cuda.max_memory_allocated(device) - before
    return {
        "planned": sum(entry.planned or 0 for entry in engine.memory),
        "arena": sum(entry.measured for entry in engine.memory),
        "allocated": allocated(device) - before,
        "allocated_when_built": built,
        "peak": peak,
    }


def allocated(device: torch.device) -> int:
    """Bytes of live tensors, cuBLAS workspaces apart (torch takes those from the same allocator)."""
    gc.collect()
    synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)
