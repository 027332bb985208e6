"""Where a rank computes: the device that the caller names, else its accelerator, else the cpu."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from zero3d.errors import MeshError

P2P_OFF = "NCCL_P2P_DISABLE"


class Launched(NamedTuple):
    """What a launcher says of this host.

    local_rank   this rank's number on it
    local_world  how many ranks it has, as far as is known
    own_device   whether this rank is shown one device alone, which its launcher has chosen for it
    """

    local_rank: int
    local_world: int
    own_device: bool


def choose_device(asked: str | torch.device | None, launched: Launched) -> torch.device:
    """Return where this rank computes, with its index, and make it the current device. Raises MeshError.

    Streams and NCCL go by the current device, not by that of a tensor.
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked is not None:
        device = torch.device(asked)
        if kind is None or device.type != kind.type:
            return device
        if not has_float64(kind):
            raise MeshError(
                f"{device} was asked for, and {kind.type} here has no float64, in which ranks add losses and norms: "
                'zero3d.Mesh(device="cpu").'
            )
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        if device.index is None and index == 0:  # as it is before anyone has chosen
            index = _own_index(kind, launched)
    elif kind is None or not has_float64(kind):
        return torch.device("cpu")
    else:
        index = _own_index(kind, launched)
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def count_devices() -> int:
    """Return how many accelerators of this host ranks would compute on."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.accelerator.device_count() if kind is not None and has_float64(kind) else 0


def has_float64(kind: torch.device) -> bool:
    """Return whether an accelerator computes in float64, as weights of losses and norms between ranks do."""
    if kind.type == "xpu":
        return bool(torch.xpu.get_device_properties().has_fp64)
    return kind.type != "mps"


def _own_index(kind: torch.device, launched: Launched) -> int:
    """Return this rank's accelerator. Raises MeshError where its host has fewer than ranks."""
    count, ranks = torch.accelerator.device_count(), max(launched.local_rank + 1, launched.local_world)
    if count == 1 and launched.own_device:
        return 0
    if ranks > count:
        devices = f"{count} {kind.type} device{'s' if count > 1 else ''}"
        raise MeshError(
            f"this host has {ranks} ranks and {devices}, {ranks - count} too few (LOCAL_RANK={launched.local_rank}): "
            f"start {count} on each host (--nproc-per-node={count}), or say where each computes: "
            'zero3d.Mesh(device="cpu") or another device.'
        )
    return launched.local_rank


def without_peer_access(device: torch.device) -> str | None:
    """Return a line about GPUs of this host that cannot read each other's memory; None where all can, or there is one.

    NCCL then sends through the host's memory, which is slower, and on some boards hangs where it tries peer access.
    """
    if device.type != "cuda" or os.environ.get(P2P_OFF) == "1":
        return None
    count = torch.cuda.device_count()
    apart = [
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if not apart:
        return None
    (one, other), pairs = apart[0], count * (count - 1) // 2
    return (
        f"GPUs {one} and {other} of {socket.gethostname()} have no peer access (P2P; {len(apart)} of {pairs} pairs): "
        f"NCCL sends through the host's memory. If ranks hang or results are wrong, set {P2P_OFF}=1; zero3d doctor "
        "--only p2p,nccl,acs says why"
    )


def claim_device(store: Store, device: torch.device, rank: int) -> None:
    """Refuse a device on which another rank computes: NCCL has one rank for each. Raises MeshError."""
    properties = torch.get_device_module(device).get_device_properties(device)
    if not hasattr(properties, "uuid"):
        return
    owner = store.compare_set(f"zero3d/device/{socket.gethostname()}/{properties.uuid}", "", str(rank)).decode()
    if owner != str(rank):
        raise MeshError(
            f"ranks {owner} and {rank} both compute on {device} of {socket.gethostname()}, and a device takes one "
            "rank: start as many ranks as there are devices, or show each rank one of its own."
        )
