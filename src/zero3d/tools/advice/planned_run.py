"""A run as the planner sees it: its model, the cluster, the plan and what that needs and takes.

It says what `auto` becomes before the engine is built, and what to change when memory has run out.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero3d.account.transients import passing_bytes
from zero3d.blueprint.auto import Need, Room, auto_place
from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.models.trained import open_trained
from zero3d.spec.offload import AUTO
from zero3d.spec.tiers import DEVICE, TIERS
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import base_of, check_card, cluster, named, read_file
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.relief import device_bytes, host_bytes, reliefs
from zero3d.tools.plan.search import Row
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan
from zero3d.tools.plan.tier_time import chosen_executor, executor_note, record_width
from zero3d.tools.plan.weights import weights_note, with_weights
from zero3d.tools.sim.mixer_kernels import installed
from zero3d.tools.sim.model_spec import trace
from zero3d.train.folder import Folder
from zero3d.train.memory_report import Advice, Remedy, Shortage
from zero3d.train.offload import with_choice
from zero3d.train.planner import Planned

NOTABLE = 0.01  # part of what is missing that a setting saves at least
TILED = "train.tiled_loss=true helps, too: it keeps tiles of the logits instead of {:.1f} GB"


@dataclass(frozen=True)
class PlannedRun(Planned):
    """Holds a configuration as the planner sees it, with everything on the device where `auto` is still open."""

    model: ModelSpec
    cluster: ClusterSpec
    plan: ParallelPlan
    estimate: Estimate

    def again(self, config: Config, mesh: Mesh) -> PlannedRun | str:
        """Return the plan of the same model under another configuration."""
        model, hardware = self.model, self.cluster
        plan = plan_of(config, mesh.world)
        return _made(lambda: PlannedRun(model, hardware, plan, evaluate(model, hardware, plan)))

    # --- what auto becomes ----------------------------------------------------------------------

    def offload(self, config: Config, mesh: Mesh, room: Room) -> tuple[dict[str, Any], list[str]]:
        """Choose a place by its bytes, activations included, and then who updates there, by the cluster's rates."""
        lines: list[str] = []
        choice = self._place(config, mesh, room, lines)
        return choice | self._executor(with_choice(config, choice), mesh, lines), lines

    def _place(self, config: Config, mesh: Mesh, room: Room, lines: list[str]) -> dict[str, Any]:
        if config.offload.optimizer != AUTO:
            return {}
        placed = auto_place(self.need(config, mesh), room)
        lines.append(f"offload.optimizer=auto: {placed.optimizer}, fraction {placed.fraction:g}: {placed.why}")
        return {"optimizer": placed.optimizer, "fraction": placed.fraction}

    def _executor(self, config: Config, mesh: Mesh, lines: list[str]) -> dict[str, Any]:
        """Choose for states in slots of a tier by the cluster's rates; on a CPU it is no question of time."""
        section = config.offload
        slots = TIERS[section.optimizer].slots if section.optimizer in TIERS else 1
        if section.executor != AUTO or slots == 1 or mesh.device.type == "cpu":
            return {}
        chosen = chosen_executor(plan_of(config, mesh.world), self.cluster)
        lines.append(f"offload.executor=auto: {executor_note(chosen, self.cluster)}")
        return {"executor": chosen.offload.executor}

    def need(self, config: Config, mesh: Mesh) -> Need:
        """Return what the fullest rank needs at its fullest instant, as it is planned with everything on the device."""
        parts = {name: int(nbytes) for name, nbytes in self.estimate.memory.parts.items()}
        states, kind = parts.pop("optimizer", 0), mesh.device.type
        settings = plan_of(config, mesh.world)
        width = max(record_width(settings, DEVICE, matrix) for matrix in (True, False))
        record = min(states, width * update_bucket(kind))
        passing = passing_bytes(config.offload.executor, record, kind, policy_of(settings).splits)
        return Need(states, record, passing, {self.estimate.memory.instant: parts})

    def weights(self, config: Config, mesh: Mesh) -> tuple[str, str]:
        """Return whether weights are kept or cast in gathers, and why in a line."""
        settings = plan_of(config, mesh.world)
        chosen = with_weights(self.model, settings, self.cluster).zero.weights
        return chosen, weights_note(self.model, settings, self.cluster)

    # --- when memory has run out ----------------------------------------------------------------

    def advise(self, shortage: Shortage, ranks: int, config: Config, folder: Folder | None) -> Advice:
        """Return the planner's settings for what is missing. ranks: of a host."""
        memory, on_cpu = self.estimate.memory, self.cluster.gpu.name == CPU
        on_device = shortage.place == DEVICE
        bytes_of = device_bytes if on_device else host_bytes(ranks, on_cpu)
        peak = bytes_of(memory)
        planned_peak = memory.device if on_device else peak  # a run that died early would have taken more
        missing = max(shortage.missing, planned_peak - (shortage.limit or planned_peak))
        row = Row(self.plan, self.estimate)
        found = [
            Remedy(relief.settings, relief.saved, relief.slower, relief.enough)
            for relief in reliefs(row, self.model, self.cluster, evaluate, missing, bytes_of)
            if relief.saved >= NOTABLE * missing
        ]
        notes = []
        logits = 4.0 * self.plan.micro_batch * self.model.length * self.model.vocab / self.plan.tp
        if on_device and config.train.tiled_loss is not True and logits > 0.05 * peak:
            notes.append(TILED.format(logits / 1e9))
        words = ["zero3d", "train", str(folder.config), *found[0].settings] if found and folder is not None else []
        command = shlex.join([*words, "--resume", "auto"]) if words else ""
        return Advice(found, int(missing), int(peak), command, notes=tuple(notes))


# --- made ---------------------------------------------------------------------------------------


def plan_run(config: Config, model: nn.Module, mesh: Mesh) -> PlannedRun | str:
    """Return the plan of a run, or why there is none in a line."""
    return _made(lambda: _planned(config, model, mesh))


def plan_late(config: Config, mesh: Mesh) -> PlannedRun | str:
    """Return the plan of a run on any rank, of a model built once more without weights, or why there is none."""
    return _made(
        lambda: _planned(config, open_trained(replace(config, model=replace(config.model, init="random"))).module, mesh)
    )


def _planned(config: Config, model: nn.Module, mesh: Mesh) -> PlannedRun:
    hardware = run_cluster(config, mesh)
    plan = plan_of(config, mesh.world)
    kernels = () if mesh.device.type == "cpu" else installed(model)
    autocast = mesh.device.type if config.autocast else None
    spec = trace(model, config.data.length, config.model.path, bool(config.data.packing), kernels, autocast)
    return PlannedRun(spec, hardware, plan, evaluate(spec, hardware, plan))


def _made(make: Callable[[], PlannedRun]) -> PlannedRun | str:
    """Return a plan, or why there is none in a line."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (a model's own, above all: no plan of it is no reason not to train it)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"no plan to compare this run with: {reason}"


def run_cluster(config: Config, mesh: Mesh) -> ClusterSpec:
    """Return the ranks of this run, as `plan.cluster` or the catalogue know them. Raises ConfigError."""
    file, where = config.plan.cluster, mesh.device
    device = CPU if where.type == "cpu" else torch.get_device_module(where).get_device_name(where)
    here = CPU if where.type == "cpu" else named(device)
    known = {} if file is None else read_file(file)
    if file is not None and here is not None:
        check_card(file, known, here, "this machine has")
    name = base_of(known) or here
    if name is None:
        raise ConfigError(f"{device} is not in the catalogue: pass plan.cluster=FILE, as zero3d calibrate writes it.")
    return cluster(name, mesh.world, mesh.world // (mesh.local_world or mesh.world), file)
