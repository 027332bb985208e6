"""A rank on the cores that are near its device, on hosts with several sockets.

    /sys/bus/pci/devices/0000:3b:00.0/numa_node    the memory node of a device; -1: there is one alone
    /sys/devices/system/node/node1/cpulist         its cores, such as 48-95,144-191

Linux places a page on the node of the core that first writes it. So what a rank pins or updates on the host is near its
device as well, and half of the ranks do not copy over the link between the sockets. Cores that a launcher has given
stay the most that a rank has; ranks of one node share its cores as before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

SYSTEM = Path("/sys")


def bind_to_device(device: torch.device) -> str | None:
    """Let this thread, and those that it starts from now on, run on the cores near a GPU. Return a line for people.

    None where nothing changes: on a CPU, on a host with one node, or on cores that are near already.
    """
    address = pci_address(device)
    if address is None or not hasattr(os, "sched_setaffinity"):
        return None
    node, cores = near(SYSTEM, address)
    own = os.sched_getaffinity(0)
    if not cores or own <= cores:
        return None
    if not own & cores:
        return (
            f"cores: {device} is on memory node {node}, and its rank may run on none of the {len(cores)} cores there: "
            "let the launcher give ranks cores near their GPUs (srun --gpu-bind=closest, torchrun --numa-binding=node)"
        )
    os.sched_setaffinity(0, own & cores)
    return f"cores: ranks run near their GPUs; {device} on the {len(own & cores)} of {len(own)} cores of node {node}"


def pci_address(device: torch.device) -> str | None:
    """Return a GPU's address as the kernel writes it; None of another device, or where torch does not know it."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def near(system: Path, address: str) -> tuple[int, set[int]]:
    """Return the memory node of a device and its cores; none where the kernel names no node."""
    with suppress(OSError, ValueError):
        node = int((system / "bus" / "pci" / "devices" / address / "numa_node").read_text())
        if node >= 0:
            return node, _cores((system / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text())
    return -1, set()


def _cores(listed: str) -> set[int]:
    """Return the numbers in a list such as 0-3,8."""
    ends = [part.partition("-") for part in listed.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}
