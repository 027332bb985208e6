"""What `auto` in `offload` means for an engine, from the bytes that its ranks are about to hold and may take.

place      before the first unit is built; all ranks choose what the rank with the least room must have
executor   when the optimizer is there: the host updates Adam and AdamW alone. Where the device is a CPU it does
           so with the fused kernel, the same bits; elsewhere by arithmetic (memory/auto_place.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from zero3d.engine.foundation import Foundation
from zero3d.errors import ConfigError
from zero3d.memory.auto_place import LINK, MEMORY, Need, Placed, Rates, Room, auto_place, choose_executor
from zero3d.memory.blocks import padded
from zero3d.memory.budget import host_budget, parse_size
from zero3d.memory.offload import AUTO, DEVICE, HOST, Offload
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.precision import NAMES
from zero3d.zero.host_update import AdamRule
from zero3d.zero.layout import ROOT
from zero3d.zero.policy import Policy
from zero3d.zero.stages import NO_BYTES, REMAINDER, WINDOW, engine_bytes, frozen_bytes

DEPTH = 3  # buffers of a ring
USABLE = 0.95  # of a device's free memory: fragments, and what no formula counts, take the rest
PLACES = ("none", "host", "disk")  # from the fastest


class Settled(NamedTuple):
    """Settings of an engine in which nothing is open any more. why: the arithmetic of what was, in lines."""

    offload: Offload
    why: tuple[str, ...] = ()


def settle_place(base: Foundation, specs: Sequence[UnitSpec]) -> Settled:
    """Choose where optimizer states are, all ranks alike. Raises OutOfBudget. One exchange of a few numbers."""
    offload = base.options.zero.offload
    if offload.optimizer != AUTO:
        return Settled(offload)
    placed = _furthest(base, bytes_needed(base, specs), room_of(base, offload))
    why = f"offload.optimizer=auto: {placed.optimizer}, fraction {placed.fraction:g}: {placed.why}"
    return Settled(replace(offload, optimizer=placed.optimizer, fraction=placed.fraction), (why,))


def settle_executor(base: Foundation, settled: Settled, optimizer: Optimizer) -> Settled:
    """Choose who updates optimizer states that have left the device. optimizer: torch's, of the engine."""
    offload = settled.offload
    if offload.optimizer == "none":
        return Settled(replace(offload, executor=DEVICE), settled.why)
    if offload.executor != AUTO:
        return settled
    name, why = _executor(base, offload, optimizer)
    return Settled(replace(offload, executor=name), (*settled.why, f"offload.executor=auto: {name}: {why}"))


# --- place --------------------------------------------------------------------------------------


def bytes_needed(base: Foundation, specs: Sequence[UnitSpec]) -> Need:
    """Return what this rank is about to hold on its device, padding apart; of activations nothing is known."""
    policy, n, offload = base.resolved.policy, base.axes.dp.size, base.options.zero.offload
    states, longest, sizes = NO_BYTES, 0, {spec.name: 0 for spec in specs}
    share = n if policy.stage.shards_optimizer else 1
    for spec in specs:
        numel = sum(p.numel() for p in spec.params.values())
        sizes[spec.name] = numel * spec.dtype.itemsize
        if any(p.requires_grad for p in spec.params.values()):
            width = state_width(policy, spec.dtype)
            states += engine_bytes(
                policy.stage.number, n, NAMES[spec.dtype], policy.release, policy.reduce, policy.accumulate, width,
                base.options.zero.exact,
            ).times(numel)  # fmt: skip
            longest = max(longest, width * min(-(-numel // share), update_bucket(base.axes.arena.device.type)))
        else:
            states += frozen_bytes(policy.stage.number, n, spec.dtype.itemsize, policy.release).times(numel)
    moving = sizes.get(ROOT, 0) + (2 + WINDOW) * max((size for name, size in sizes.items() if name != ROOT), default=0)
    scratch = 4 * update_bucket(base.axes.arena.device.type) if policy.split_master else 0
    others = {
        "weights": 0 if offload.params != "none" else ceil(states.parameters),
        "gradients": 0 if offload.gradients == HOST else ceil(states.gradients),
        "gathered units": moving if policy.stage.shards_parameters else 0,
        "gradients of units": moving if policy.reduce == "every_micro_batch" else 0,
    }
    passing = 0 if offload.executor == HOST else DEPTH * padded(longest) + scratch
    return Need(ceil(states.optimizer), longest, passing, others)


def state_width(policy: Policy, weight: torch.dtype) -> int:
    """Return the bytes of optimizer states per parameter: what is stored of its master, and two moments."""
    wide = policy.master.itemsize
    master = 0 if weight == policy.master else REMAINDER if policy.split_master else wide
    return master + 2 * wide


def room_of(base: Foundation, offload: Offload) -> Room:
    """Return what this rank may take now: of its device what is free, of the host a fair share."""
    device, mesh = base.axes.arena.device, base.resolved.mesh
    limit = None if offload.host_budget is None else parse_size(offload.host_budget)
    host = host_budget(mesh.local_world or mesh.world, limit).nbytes
    disk = offload.directory is not None
    if device.type == "cpu":
        return Room(host, None, disk)
    return Room(int(USABLE * torch.get_device_module(device).mem_get_info(device)[0]), host, disk)


def _furthest(base: Foundation, need: Need, room: Room) -> Placed:
    """Return the choice of the rank whose states must go furthest, on all ranks."""
    host = -1 if room.host is None else room.host
    row = [need.states, need.record, need.passing, room.device, host, *need.others.values()]
    world = base.axes.world
    rows = world.exchange(torch.tensor(row, dtype=torch.float64, device=base.resolved.mesh.device))
    told = [int(value) for value in world.read(rows.flatten(), row * world.size)]
    choices = []
    for start in range(0, len(told), len(row)):
        states, record, passing, device, host, *others = told[start : start + len(row)]
        of_rank = Need(states, record, passing, dict(zip(need.others, others, strict=True)))
        choices.append(auto_place(of_rank, Room(device, None if host < 0 else host, room.disk)))
    return max(choices, key=lambda placed: (PLACES.index(placed.optimizer), placed.fraction))


# --- executor -----------------------------------------------------------------------------------


def _executor(base: Foundation, offload: Offload, optimizer: Optimizer) -> tuple[str, str]:
    try:
        for group in optimizer.param_groups:
            AdamRule.of(optimizer, group)
    except ConfigError:
        return DEVICE, f"the host updates Adam and AdamW without amsgrad, and this is {type(optimizer).__name__}"
    mesh, policy = base.resolved.mesh, base.resolved.policy
    if base.axes.arena.device.type == "cpu":
        fused = all(group["fused"] for group in optimizer.param_groups)
        kernel = f"{'a' if fused else 'no'} fused kernel"
        return (HOST if fused else DEVICE), f"the device is a CPU, and {type(optimizer).__name__} has {kernel} there"
    width = 2 * (2 if offload.moments == "bf16" else policy.master.itemsize)
    width += state_width(policy, base.resolved.precision.dtype) - 2 * policy.master.itemsize
    ranks = mesh.local_world or mesh.world
    return choose_executor(width * 10**9, 10**9, Rates(LINK, MEMORY / ranks))
