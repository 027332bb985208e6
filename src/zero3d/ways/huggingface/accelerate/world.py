"""Ranks of a launcher are processes of Accelerate's, on CPUs too.

Accelerate counts a launcher's ranks where they have accelerators, or are told to compute on the CPU (`cpu=True`,
`use_cpu=True`). Elsewhere it takes each for a run of its own, which reads all data, while an engine adds up their
gradients.

Ranks that share sequences (sp), or the matrices of a block (tp), are handed the same data: as many parts of it there
are as `alike` of them make one. Replicas of shards have data of their own.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zero3d.distributed.devices import count_devices
from zero3d.distributed.mesh import Mesh
from zero3d.errors import ConfigError


def must_say_cpu() -> bool:
    """Return whether ranks of a launcher compute on CPUs, which Accelerate has to be told."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and count_devices() == 0


def refuse_other_world(processes: int, remedy: str) -> None:
    """Raise ConfigError where there are more ranks than processes that Accelerate knows of.

    remedy  what to type instead
    """
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if processes != ranks:
        raise ConfigError(
            f"{ranks} ranks were launched, and here there {'is' if processes == 1 else 'are'} {processes}: each would "
            f"train on the data of all. {remedy}"
        )


def alike(parallelism: Any, mesh: Mesh | None) -> int:
    """Return how many ranks in a row are handed the same data, by a ParallelismConfig of Accelerate's or by a mesh.

    Raises ConfigError for both, and for what a ParallelismConfig asks for beside sp_size.
    """
    if parallelism is None:
        return 1 if mesh is None else mesh.world // mesh.degrees.rows // mesh.pp
    if mesh is not None:
        raise ConfigError(
            "parallelism_config and options={'mesh': ...} would cut the model twice: leave one of them out."
        )
    for name, instead in (
        ("cp_size", "the sequence axis is sp_size: pass that"),
        ("tp_size", "pass options={'mesh': zero3d.Mesh(tp=...)}"),
    ):
        if (degree := getattr(parallelism, name)) > 1:
            raise ConfigError(f"ParallelismConfig({name}={degree}) is not supported: {instead}.")
    return int(parallelism.sp_size)


def shards(parallelism: Any) -> int | None:
    """Return over how many neighbours states are cut, by a ParallelismConfig with replicas; None: over all."""
    if parallelism is None or parallelism.dp_replicate_size == 1:
        return None
    return int(parallelism.dp_shard_size * parallelism.sp_size)


def check_parts(processes: int, same: int, parallelism: Any, dispatches: bool | None) -> None:
    """Raise ConfigError where ranks that are handed the same data do not fit the processes, or how these get it.

    same  how many ranks in a row are handed the same
    """
    if processes % same:
        raise ConfigError(
            f"ParallelismConfig(sp_size={same}) and {processes} processes: {processes} / {same} is not whole. Start a "
            f"multiple of {same}."
        )
    parts = processes // same
    copies = 1 if parallelism is None else parallelism.dp_replicate_size
    if copies > 1 and copies * (given := parallelism.dp_shard_size) != parts:
        raise ConfigError(
            f"ParallelismConfig(dp_replicate_size={copies}, dp_shard_size={given}, sp_size={same}) and {processes} "
            f"processes: {copies} x {given} is not {processes} / {same} = {parts}. Pass dp_shard_size={parts} / "
            "dp_replicate_size."
        )
    if copies == 1 and parallelism is not None and (given := parallelism.dp_shard_size) not in (1, parts):
        raise ConfigError(
            f"ParallelismConfig(dp_shard_size={given}, sp_size={same}) and {processes} processes: dp_shard_size is "
            f"{processes} / {same} = {parts}, or left out."
        )
    if same > 1 and dispatches:
        raise ConfigError(
            "dispatch_batches=True has rank 0 read a batch and cut it for all ranks, and some are to have the same: "
            "leave it out."
        )
