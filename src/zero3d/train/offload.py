"""States off the device in a run: the choice for `auto` before the engine is built, and its part in a resumed run.

    a checkpoint says what its run had chosen      the same again, unless the file names another
    rank 0 has a plan                              by its bytes, activations included
    neither                                        by the engine's own rule (engine/auto_offload.py)

For states on the host of an accelerator the engine chooses the executor by measurement; the plan has its choice from
then on.

Whatever is chosen is kept in every checkpoint: a run that goes on has its states where they were, and updates them by
the same kernels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zero3d.checkpoint.fields import Field
from zero3d.checkpoint.manifest_parser import open_manifest
from zero3d.config import Config, offload_of
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.distributed.collectives import Comm
from zero3d.distributed.mesh import Mesh
from zero3d.engine.auto_offload import room_of
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError
from zero3d.spec.offload import AUTO
from zero3d.spec.text import size
from zero3d.spec.tiers import DEVICE
from zero3d.train.folder import Folder
from zero3d.train.loop_state import check_choice
from zero3d.train.planner import Planned

NO_CHOICE: Mapping[str, Any] = {}


def is_open(config: Config) -> bool:
    """Return whether anything is left to be chosen."""
    section = config.offload
    return section.optimizer == AUTO or (section.executor == AUTO and section.optimizer != "none")


def may_use_folder(config: Config) -> bool:
    """Return whether anything may be put into the output folder before the run claims it."""
    section = config.offload
    return section.directory is None and (section.uses_folder or section.optimizer == AUTO)


def choose(
    config: Config, mesh: Mesh, comm: Comm, checkpoint: Path | None, plan: Planned | str | None
) -> tuple[Config, list[str]]:
    """Return the configuration to build the engine of, and what was chosen in lines. All ranks call it.

    comm  of all ranks, on the host
    plan  of rank 0, everything on the device

    Raises OutOfBudget.
    """
    if not is_open(config):
        return config, []
    kept = NO_CHOICE if checkpoint is None else _of_rank_0(comm, saved_choice(checkpoint))
    key_of = {"fraction": "optimizer"}  # it is open where the place is
    kept = {name: value for name, value in kept.items() if getattr(config.offload, key_of.get(name, name)) == AUTO}
    lines: list[str] = []
    if kept:
        shown = ", ".join(f"{name} {value}" for name, value in kept.items())
        lines = [f"offload: {shown}: as auto chose before {checkpoint}; any other value is typed in place of auto"]
        config = with_choice(config, kept)
    if is_open(config):
        config, chosen = _by_plan(config, mesh, comm, plan)
        lines += chosen
    return config, lines


def with_choice(config: Config, choice: Mapping[str, Any]) -> Config:
    """Return a configuration with what was chosen in place of auto."""
    return replace(config, offload=replace(config.offload, **choice).settled)


# --- chosen by the plan -------------------------------------------------------------------------


def _by_plan(config: Config, mesh: Mesh, comm: Comm, plan: Planned | str | None) -> tuple[Config, list[str]]:
    """Choose on rank 0 for all ranks, by the least room of any; what it has no plan for is left to the engine."""
    room = room_of(mesh, offload_of(config))
    rows = comm.exchange(torch.tensor([room.device, -1 if room.host is None else room.host])).tolist()
    device, host = (min(column) for column in zip(*rows, strict=True))
    host = None if room.host is None else host
    least = room._replace(device=device, host=host, folder=True)  # in the output folder, if nowhere else
    nothing: tuple[Mapping[str, Any], list[str]] = NO_CHOICE, []
    choice, lines = agree(comm, lambda: plan.offload(config, mesh, least) if isinstance(plan, Planned) else nothing)
    return with_choice(config, _of_rank_0(comm, choice)), lines


def as_measured(config: Config, engine: Engine) -> Config:
    """Return the configuration with the executor that an engine has chosen by its measurements."""
    section, device = config.offload, engine.mesh.device.type
    if section.executor != AUTO or section.optimizer == "none" or device == "cpu":
        return config
    return with_choice(config, {"executor": engine.offload.executor})


# --- kept in checkpoints ------------------------------------------------------------------------


def choice_of(config: Config, engine: Engine) -> dict[str, Any] | None:
    """Return an engine's choice for `auto`, as a checkpoint keeps it; None where nothing was open."""
    if not is_open(config):
        return None
    section, chosen = config.offload, engine.offload
    place = {"optimizer": chosen.optimizer, "fraction": chosen.fraction} if section.optimizer == AUTO else {}
    return place | ({"executor": chosen.executor} if section.executor == AUTO else {})


def _of_rank_0(comm: Comm, choice: Mapping[str, Any]) -> Mapping[str, Any]:
    told: Mapping[str, Any] = json.loads(exchange_texts(comm, json.dumps(choice))[0])
    return told


def saved_choice(checkpoint: Path) -> Mapping[str, Any]:
    """Return the choice kept in a checkpoint; empty if it cannot be read: loading it reports the reason."""
    try:
        loop = open_manifest(checkpoint).value("loop")
        fields = Field(str(checkpoint), "loop", loop)
        if loop is None or not fields.has("offload"):
            return NO_CHOICE
        check_choice(fields.entry("offload"))
    except CheckpointError:
        return NO_CHOICE
    choice: Mapping[str, Any] = loop["offload"]
    return choice


# --- said ---------------------------------------------------------------------------------------


def described(engine: Engine) -> str | None:
    """Return a line about this rank's states off the device, with place and executor; None where there are none."""
    offload = engine.offload
    share = f" ({offload.fraction:g} of them)" if offload.fraction < 1 else ""
    kind = ", moments in bf16," if offload.moments == "bf16" else ""
    in_bf16 = " in bf16" if offload.gradient_dtype == "bf16" else ""
    parts = {
        f"optimizer states{share}{kind}": offload.optimizer,
        "weights": offload.params,
        f"gradients{in_bf16}": offload.gradients if offload.gradients_leave else "none",
        "inputs of recomputed blocks": offload.activations,
    }
    away = ", ".join(f"{name} on the {place}" for name, place in parts.items() if place != "none")
    if not away:
        return None
    held: dict[str, int] = {}
    for entry in engine.memory:
        if entry.place != DEVICE:
            held[entry.place] = held.get(entry.place, 0) + entry.measured
    bytes_ = ", ".join(f"{size(nbytes)} on the {place}" for place, nbytes in held.items())
    folder = f" in {offload.directory}" if offload.uses_folder else ""
    updated = f", updated on the {offload.executor}" if offload.optimizer != "none" else ""
    held_now = f"; of rank 0 {bytes_}{folder}" if bytes_ else ""  # inputs of blocks are there from the first step on
    return f"offload: {away}{updated}{held_now}"


# --- its folder ---------------------------------------------------------------------------------


def drop_leftovers(folder: Folder, engine: Engine, ended: bool) -> None:
    """Remove what is off the device on a disk in the output folder: an earlier run's, and when it has ended this one's.

    Checkpoints hold all of it. One rank of each machine calls it; the output folder is locked.
    """
    own = engine.offload.directory
    in_use = engine.offload.uses_folder and own is not None and Path(own).resolve() == folder.offload.resolve()
    if ended or not in_use:
        shutil.rmtree(folder.offload, ignore_errors=True)
