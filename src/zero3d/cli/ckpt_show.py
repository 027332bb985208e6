"""`zero3d ckpt show`: what a checkpoint holds, as plain data."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import Any

from zero3d.checkpoint.stored_states import StoredStates, statistics
from zero3d.errors import CheckpointError, short


def contents(stored: StoredStates, pattern: str | None) -> dict[str, Any]:
    """Return what a checkpoint holds; with a pattern its parameters of such names, of a single one statistics.

    Raises CheckpointError.
    """
    manifest = stored.manifest
    optimizer = manifest.value("optimizer")
    names = [name for name in stored.parameters if pattern is None or fnmatchcase(name, pattern)]
    if not names:
        near = [name for name in stored.parameters if pattern is not None and pattern.strip("*") in name][:3]
        meant = f"type {', '.join(near)}" if near else f"names are like {next(iter(stored.parameters), 'none')}"
        raise CheckpointError(f"{stored.folder} has no parameter {short(pattern)!r}: {meant}.")
    single = names[0] if len(names) == 1 else None
    return {
        "path": stored.folder,
        "step": manifest.step,
        "format": manifest.format,
        "mesh": manifest.mesh._asdict(),
        "ranks": manifest.mesh.world,
        "about": dict(manifest.about),
        "elements": {
            "all": sum(prod(each.shape) for each in stored.parameters.values()),
            "trainable": sum(prod(each.shape) for each in stored.parameters.values() if each.trainable),
        },
        "count": len(stored.parameters),
        "base": manifest.value("base") and {**manifest.value("base"), "parameters": len(manifest.left_out)},
        "parameters": [_parameter(stored, name) for name in names],
        "pattern": pattern,
        "statistics": None
        if single is None
        else {state: statistics(stored, single, state)._asdict() for state in stored.states.get(single, {})},
        "optimizer": {"class": optimizer["class"], "groups": optimizer["groups"], "scalars": dict(stored.scalars)},
        "scheduler": manifest.value("scheduler"),
        "loss_scale": manifest.value("loss_scale"),
        "exact": manifest.value("exact"),
        "loop": manifest.value("loop"),
        "ranks_own": [
            {
                "rank": rank,
                "buffers": {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in own.buffers.items()},
                "random": sorted({*own.streams, *own.python_rng}),
            }
            for rank, own in enumerate(stored.own)
        ],
    }


def _parameter(stored: StoredStates, name: str) -> dict[str, Any]:
    spec = stored.parameters[name]
    states = stored.states.get(name, {})
    return {
        "name": name,
        "shape": spec.shape,
        "dtype": spec.dtype,
        "trainable": spec.trainable,
        "base": spec.in_base,
        "states": {state: str(dtype).removeprefix("torch.") for state, dtype in states.items()},
    }
