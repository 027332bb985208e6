"""The largest preset that the plan says fits, at stage 3: beside FSDP2, over tp and pp, and beside its plan.

All start from the same bf16 weights, made on each device, and hold sharded fp32 masters: zero3d's engine, and FSDP2 as
peers.py has it, whose shards are cast to fp32. Blocks are recomputed in both, AdamW is fused, norms are clipped. A step
is timed behind a barrier, and is as long as that of the slowest rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from campaign.account import Account, Place
from peers import CLIP, Fsdp2, Setting, adamw
from ranks import Start, over_ranks, synchronize
from torch import Tensor, nn
from torch.profiler import profile

from node.launches import launched, start_of
from zero3d import Engine, Mesh
from zero3d.activations.recomputation import recompute
from zero3d.models.presets import PRESETS
from zero3d.tools.plan.estimate import Estimate, evaluate
from zero3d.tools.plan.hardware import cluster, named
from zero3d.tools.plan.margin import MARGIN
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan

TRACES = "ZERO3D_CLUSTER_TRACES"  # the folder for traces, if any is wanted
LARGEST = ("llama-3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b")
LENGTH, ACCUMULATE = 4096, 4
CPU_MODEL, CPU_LENGTH = "demo", 64
WARM_UP, FEWEST, TRACED = 3, 5, 2  # steps
WAYS: dict[str, dict[str, int]] = {"zero3d": {}, "fsdp2": {}, "tp": {"tp": 2}, "pp": {"pp": 2}}
STAGE = {"pp": 1}  # with its micro-batches in flight, weights are gathered once a step
NEAR = 0.05  # of planned bytes and seconds


def largest(place: Place, account: Account) -> None:
    """Choose the preset, train it in the ways that the part is named after, and compare with its plan."""
    ways = place.part.partition(".")[2].split("-")
    for way in ways:
        measure(place, account, way, start_of(place, len(ways), "keep"))


def measure(place: Place, account: Account, way: str, start: Start) -> None:
    """Train in one way."""
    name, length, machine = CPU_MODEL, CPU_LENGTH, cluster("cpu", place.ranks)
    if not place.on_cpu:
        card = named(torch.cuda.get_device_name()) or "a100-80"
        machine, length = cluster(card, place.ranks, 1), LENGTH
        name = chosen(machine, length)
    account.ran(f"{way}: model", {"preset": name, "length": length, "micro_batch": 1, "accumulate": accumulate_of(way)})
    row = launched(account, [f"{way}: measured"], start, trained, way, name, length, place.seconds)
    if row is None:
        return
    account.ran(f"{way}: measured", row, "" if row["loss"] < row["first_loss"] else "the loss did not fall")
    if way == "fsdp2":
        return
    plan = plan_of(way, place.ranks)
    priced = estimate(machine, plan, name, length)
    planned = {"allocated": priced.memory.allocated, "device": priced.memory.device, "seconds": priced.seconds.mid}
    account.ran(f"{way}: planned", planned)
    if not place.on_cpu:
        account.goal(
            f"{name}, {way}: peak allocated / planned, apart",
            NEAR,
            abs(row["allocated"] / planned["allocated"] - 1),
            most=True,
        )
        account.goal(
            f"{name}, {way}: seconds / planned, apart", NEAR, abs(row["median_s"] / planned["seconds"] - 1), most=True
        )


def chosen(machine: ClusterSpec, length: int) -> str:
    """Return the largest preset whose plan fits the card with the planner's margin."""
    for name in LARGEST:
        if (1 + MARGIN) * estimate(
            machine, plan_of("zero3d", machine.gpus), name, length
        ).memory.device <= machine.gpu.memory:
            return name
    return LARGEST[-1]


def estimate(machine: ClusterSpec, plan: ParallelPlan, name: str, length: int) -> Estimate:
    """Return what the planner says of a way."""
    return evaluate(spec_of(name, length), machine, plan)


@cache
def spec_of(name: str, length: int) -> ModelSpec:
    """Return what the planner knows of a preset."""
    from zero3d.tools.sim.model_spec import open_spec

    return open_spec(name, length)


def plan_of(way: str, ranks: int) -> ParallelPlan:
    """Return the plan of a way."""
    degrees = WAYS[way]
    dp = ranks // (degrees.get("tp", 1) * degrees.get("pp", 1))
    return ParallelPlan(dp=dp, stage=STAGE.get(way, 3), accumulate=accumulate_of(way), activations="full", **degrees)


def accumulate_of(way: str) -> int:
    """Return how many micro-batches a step has."""
    return ACCUMULATE if way == "pp" else 1


def trained(device: torch.device, way: str, name: str, length: int, seconds: float) -> dict[str, Any]:
    """On a rank: time steps for so long, at least five after three to warm up; then trace two on rank 0."""
    model = built(name, device)
    row = dist.get_rank()
    if way == "fsdp2":
        step = fsdp2(model, device)
    else:
        mesh = Mesh(**WAYS[way], device=device)
        step, row = zero3d(model, way, mesh), mesh.row
    tokens = model.config.vocab_size

    def once(number: int) -> float:
        generator = torch.Generator().manual_seed(1000 * (number % WARM_UP) + row)  # a few batches, again and again
        return step(torch.randint(tokens, (accumulate_of(way), length), generator=generator).to(device))

    times: list[float] = []
    losses: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < WARM_UP + FEWEST or over_ranks([time.monotonic()], dist.ReduceOp.MAX, device)[0] < deadline:
        if len(times) == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        begun = time.perf_counter()
        losses.append(once(len(times)))
        synchronize(device)
        times.append(over_ranks([time.perf_counter() - begun], dist.ReduceOp.MAX, device)[0])
    counted = times[WARM_UP:]
    rows = dist.get_world_size() if way == "fsdp2" else Mesh(**WAYS[way], device=device).degrees.rows
    per_s = rows * accumulate_of(way) * length / median(counted)
    found = {"median_s": median(counted), "steps": len(counted), "tokens_per_s_gpu": per_s / dist.get_world_size()}
    found |= {"first_loss": losses[0], "loss": losses[-1], **peaks(device)}
    trace(once, f"{name}-{way}")
    return found


def zero3d(model: nn.Module, way: str, mesh: Mesh) -> Callable[[Tensor], float]:
    """Return the step of zero3d's engine."""
    recompute(model, "full")
    schedule: dict[str, Any] = {"schedule": "1f1b"} if mesh.pp > 1 else {}
    engine = Engine(
        model, stage=STAGE.get(way, 3), mesh=mesh, precision="bf16", optimizer=adamw, clip_norm=CLIP,
        accumulate=accumulate_of(way), **schedule,
    )  # fmt: skip

    def step(ids: Tensor) -> float:
        return float(engine.train_batch([{"input_ids": part, "labels": part} for part in ids.chunk(len(ids))]))

    return step


class Causal(nn.Module):
    """A language model whose call returns the mean loss of the next tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids [B, T], targets [B, T] -> mean loss."""
        loss: Tensor = self.inner(input_ids=ids, labels=targets).loss
        return loss


def fsdp2(model: nn.Module, device: torch.device) -> Callable[[Tensor], float]:
    """Return the step of FSDP2 (peers.py)."""
    variant = Fsdp2(Setting(partial(Causal, model), device, recompute=True, narrow=True), reshard=True)

    def step(ids: Tensor) -> float:
        losses = over_ranks([float(variant.step(ids, ids))], dist.ReduceOp.SUM, device)
        return losses[0] / dist.get_world_size()

    return step


def built(name: str, device: torch.device) -> nn.Module:
    """Make the preset in bf16 on the device, the same weights on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**PRESETS[name])
    config.use_cache = False
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def peaks(device: torch.device) -> dict[str, float]:
    """Return the most bytes that a rank has allocated and reserved, and those in use of its device."""
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    mine = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), total - free]
    allocated, reserved, used = over_ranks([float(each) for each in mine], dist.ReduceOp.MAX, device)
    return {"allocated": allocated, "reserved": reserved, "device": used}


def trace(once: Callable[[int], float], name: str) -> None:
    """Run two more steps under torch's profiler; rank 0 writes its trace."""
    folder = os.environ.get(TRACES)
    if not folder:
        return
    if dist.get_rank():
        for number in range(TRACED):
            once(number)
        return
    with profile() as profiler:
        for number in range(TRACED):
            once(number)
    Path(folder).mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(Path(folder) / f"{name}.json.gz"))
