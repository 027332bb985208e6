"""Bytes on the device after a step: by the engine's formula, by the arena, and by CUDA's allocator.

And over many steps of varying lengths, with inputs of recomputed blocks on the host: what the allocator has reserved
beside what was ever allocated is bounded and does not grow (ZeRO's M_D, constant buffers its C_B).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch
from peers import CLIP, Plain, Setting, adamw
from ranks import synchronize
from torch import Tensor, nn

from campaign.account import Account, Place
from campaign.training import MIDDLE, STAGES, Run, engine_of, one_loss, own_batch, run_of, setting_of, train
from zero3d import Engine
from zero3d.account.states import engine_bytes
from zero3d.activations.recomputation import recompute
from zero3d.distributed.mesh import Mesh
from zero3d.memory.arena import STATES

SLACK, SLACK_BYTES = 0.01, 2 << 20  # of the plan: the allocator rounds every block up
STEPS, CPU_STEPS, WARM = 200, 50, 20  # of varying lengths; after how many the allocator has seen what there is
LENGTHS = 24  # so many different ones: attention's kernels are planned for each
GROWTH = 0.1  # of what is reserved from then on
APART, APART_BYTES = 0.1, 64 << 20  # of what is reserved, over what was ever allocated, beside a plain loop


def memory(place: Place, account: Account) -> None:
    """Build and train every stage; states are to be the formula's, and the device's bytes the states'."""
    run = run_of(place, account, MIDDLE._replace(precision="bf16"))
    mesh = Mesh(device=place.device)
    if place.on_cpu:
        account.skipped("allocated, reserved", "the CPU has no allocator that keeps account")
    for stage in STAGES:
        row = held(mesh, run, stage)
        account.ran(f"stage {stage}", row, wrong(row))
    run = run._replace(steps=CPU_STEPS if place.on_cpu else STEPS)
    row = varied(mesh, run)
    account.ran(f"{run.steps} steps of varying lengths", row, grown(row))


def varied(mesh: Mesh, run: Run) -> dict[str, int]:
    """Return bytes before and after many steps of varying lengths, the longest first; of a plain loop beside."""
    device, row = mesh.device, dict[str, int]()
    setting = setting_of(device, run)
    if device.type == "cuda":  # how far apart reserved and allocated come in such a course without an engine
        plain = Plain(replace(setting, build=lambda: recomputed(setting)))
        row |= {f"plain_{key}": value for key, value in course(run, device, plain.step, dict).items()}
        del plain
    engine = Engine(
        recomputed(setting), stage=3, mesh=mesh, precision=run.precision, clip_norm=CLIP, optimizer=adamw,
        offload={"activations": "host"},
    )  # fmt: skip

    def step(ids: Tensor, targets: Tensor) -> None:
        one_loss(engine, ids, targets)
        engine.step()

    def lent() -> dict[str, int]:
        held = {entry.category: entry.measured for entry in engine.memory}
        return {"lent": sum(held.values()) - held["activations"], "on_host": held["activations"]}

    return row | course(run, device, step, lent)


def recomputed(setting: Setting) -> nn.Module:
    """Make the model of a setting with its blocks recomputed in backward."""
    model = setting.build()
    recompute(model, "full")
    return model


def course(
    run: Run, device: torch.device, step: Callable[[Tensor, Tensor], object], lent: Callable[[], dict[str, int]]
) -> dict[str, int]:
    """Take many steps of varying lengths, the longest first; return bytes after some of them, by `lent` and CUDA's."""
    draw, row = random.Random(0), dict[str, int]()
    lengths = [draw.randint(run.seq // 8, run.seq) for _ in range(LENGTHS)]
    by_allocator(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(run.steps):
        length = draw.choice(lengths) if number else run.seq
        step(*own_batch(device, run._replace(seq=length), number))
        if number in (0, WARM, run.steps - 1):
            held = lent()
            if device.type == "cuda":
                held["reserved"] = torch.cuda.memory_reserved(device)
            row |= {f"{key}_after_{number + 1}": value for key, value in held.items()}
    if device.type == "cuda":
        row["peak_allocated"] = torch.cuda.max_memory_allocated(device)
    return row


def grown(row: dict[str, int]) -> str:
    """Return what has grown over many steps of varying lengths, or is further apart than in a plain loop."""
    first, last = (f"after_{number}" for number in (WARM + 1, STEPS))
    for what in ("lent", "on_host"):
        counts = {value for key, value in row.items() if key.startswith(what)}
        if len(counts) > 1:
            return f"{what} has changed: {sorted(counts)}"
    if "peak_allocated" in row:
        before, after, peak = row[f"reserved_{first}"], row[f"reserved_{last}"], row["peak_allocated"]
        if after > (1 + GROWTH) * before:
            return f"reserved has grown from {before} to {after} bytes"
        plain = row[f"plain_reserved_{last}"] / row["plain_peak_allocated"]
        if after > plain * (1 + APART) * peak + APART_BYTES:
            return (
                f"{after} bytes are reserved, {after / peak:.2f} times what was ever allocated, where a plain loop has "
                f"{plain:.2f}"
            )
    return ""


def wrong(row: dict[str, int]) -> str:
    """Return what is wrong with the bytes of a stage."""
    planned = row["engine_bytes"] + row["padding"]
    if row["arena"] != planned:
        return f"the arena holds {row['arena']} bytes, engine_bytes and padding are {planned}"
    lent = planned + row["transient"]
    if "allocated" in row and abs(row["allocated"] - lent) > SLACK * lent + SLACK_BYTES:
        return f"CUDA holds {row['allocated']} bytes, the arena {lent}"
    return ""


def held(mesh: Mesh, run: Run, stage: int) -> dict[str, int]:
    """Return bytes of one engine after a few steps."""
    device = mesh.device
    Plain(setting_of(device, run)).step(*own_batch(device, run, 0))  # libraries take their workspaces
    before = by_allocator(device)
    engine = engine_of(mesh, run, stage)
    built = by_allocator(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    train(engine, run)
    params = sum(unit.layout.numel for unit in engine.units)
    lent = {entry.category: entry.measured for entry in engine.memory}
    states = {category: held for category, held in lent.items() if category in STATES}
    by_formula: Fraction = engine_bytes(stage, 1, run.precision).total * params
    row = {"engine_bytes": int(by_formula), "padding": states["padding"], "arena": sum(states.values())}
    row["transient"] = sum(lent.values()) - row["arena"]
    row |= {f"{key}_when_built": built[key] - before[key] for key in built}
    if device.type == "cuda":
        row["peak_allocated"] = torch.cuda.max_memory_allocated(device) - before["allocated"]
        row["peak_reserved"] = torch.cuda.max_memory_reserved(device) - before["reserved"]
    after = by_allocator(device)
    return row | {key: after[key] - before[key] for key in after}


def by_allocator(device: torch.device) -> dict[str, int]:
    """Return what CUDA's allocator has given out and what it keeps, cuBLAS' workspaces and empty blocks apart."""
    gc.collect()
    if device.type != "cuda":
        return {}
    synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
