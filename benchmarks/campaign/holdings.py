"""Bytes on the device after a step: by the engine's formula, by the arena, and by CUDA's allocator."""

from __future__ import annotations

import gc
from fractions import Fraction

import torch
from peers import Plain
from ranks import synchronize

from campaign.account import Account, Place
from campaign.training import MIDDLE, STAGES, Run, engine_of, own_batch, run_of, setting_of, train
from zero3d.distributed.mesh import Mesh
from zero3d.memory.arena import STATES
from zero3d.zero.stages import engine_bytes

SLACK, SLACK_BYTES = 0.01, 2 << 20  # of the plan: the allocator rounds every block up


def memory(place: Place, account: Account) -> None:
    """Build and train every stage; states are to be the formula's, and the device's bytes the states'."""
    run = run_of(place, account, MIDDLE._replace(precision="bf16"))
    mesh = Mesh(device=place.device)
    if place.on_cpu:
        account.skipped("allocated, reserved", "the CPU has no allocator that keeps account")
    for stage in STAGES:
        row = held(mesh, run, stage)
        account.ran(f"stage {stage}", row, wrong(row))


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
