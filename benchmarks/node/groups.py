"""What communicators take of a device: bytes in use beside the allocator's, before and after axes are opened."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from campaign.account import Account, Place
from ranks import over_ranks

from node.launches import launched, start_of
from zero3d import Mesh
from zero3d.engine.foundation import Axes
from zero3d.tools.plan.memory import communicators
from zero3d.tools.plan.spec import ParallelPlan


def meshes(ranks: int) -> list[dict[str, int]]:
    """Return the degrees to be measured, from one axis to all."""
    found = [{"dp": ranks}, {"tp": ranks}]
    if ranks >= 4:
        found += [{"dp": ranks, "shard": ranks // 2}, {"dp": ranks // 4, "tp": 2, "pp": 2}]
    return found


def groups(place: Place, account: Account) -> None:
    """Open the axes of each mesh in fresh processes, with two communicators for states and with one."""
    if place.on_cpu:
        account.skipped("bytes of communicators", "gloo has none on a device")
    asked = [(degrees, each) for degrees in meshes(place.ranks) for each in (2, 1)]
    launches = [asked] if place.on_cpu else [[one] for one in asked]  # fresh processes: none has a communicator yet
    start = start_of(place, len(launches))
    for launch in launches:
        names = [name_of(*one) for one in launch]
        rows = launched(account, names, start, all_opened, launch)
        for name, (degrees, each), row in zip(names, launch, rows or (), strict=rows is not None):
            plan = ParallelPlan(stage=3, communicators=each, **degrees)
            row["planned"] = communicators(plan, place.ranks)
            account.ran(name, row)
            if row["bytes"]:
                account.goal(f"communicators of {name}: used / planned", 1.0, row["bytes"] / row["planned"], most=True)


def name_of(degrees: dict[str, int], each: int) -> str:
    """Return the name of a case."""
    return f"{', '.join(f'{axis} {size}' for axis, size in degrees.items())}: {each} for states"


def all_opened(device: torch.device, asked: list[tuple[dict[str, int], int]]) -> list[dict[str, Any]]:
    """On a rank: open the axes of each mesh."""
    return [opened(device, degrees, each) for degrees, each in asked]


def opened(device: torch.device, degrees: dict[str, int], each: int) -> dict[str, Any]:
    """On a rank: open the axes; groups of each, and the bytes of the rank that has given most."""
    mesh = Mesh(**degrees, device=device)
    mesh.communicators = each
    before = taken(device)
    Axes.of(mesh, "auto")
    used = over_ranks([taken(device) - before], dist.ReduceOp.MAX, device)[0]
    mesh.close()
    return {"groups": mesh.degrees.process_groups(each), "bytes": used}


def taken(device: torch.device) -> float:
    """Return bytes in use of the device that the allocator does not have; 0 on the CPU."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device))
