"""The planner's figures of a run, checked by its third step.

    before parameters are cut    rank 0 traces the model and prices the configuration on this cluster
    step 3                       allocated memory: planned 61.4 GB, measured 61.9 GB (+0.8 %), 63.0 GB reserved; a step:
                                 planned 97 s by the rates of cluster.json (measured), measured 103 s; largest planned
                                 part: matrices
    step 10                      profile.json in the output folder: the cluster with rates of this run's steps

    compared   on a GPU                                       on a CPU
    memory     most allocated, of the fullest rank            model states, of the fullest rank: its process has
                                                              Python and the data, too, which no plan counts
    step       the median of steps 2 and 3, the first being   the same, where plan.cluster names a file: of a CPU there
               one that warms up                             is no data sheet that means anything

A run of fewer than 3 steps pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.memory.arena import STATES
from zero3d.models.trained import open_trained
from zero3d.page.text import size
from zero3d.plan.corrected import profile
from zero3d.plan.emit import plan_of
from zero3d.plan.estimate import evaluate
from zero3d.plan.hardware import base_of, check_card, cluster, named, read_file
from zero3d.plan.network import CPU
from zero3d.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan
from zero3d.sim.model_spec import trace
from zero3d.train.device_memory import fullest, memory_bytes
from zero3d.watchdog.heartbeat import TRAINING
from zero3d.watchdog.own_files import write_whole

CHECKED_STEP = 3  # the step after which a run is held against its plan
SPELT_OUT = MappingProxyType({"fixed": "fixed overhead", "rest": "other kernels"})  # parts whose names say little
PROFILED_STEP = 10  # the step after which its profile is written
PROFILE = "profile.json"


@dataclass(frozen=True)
class PlannedRun:
    """Holds a configuration as the planner sees it."""

    model: ModelSpec
    cluster: ClusterSpec
    plan: ParallelPlan
    estimate: Estimate


def plan_run(config: Config, model: nn.Module, mesh: Mesh, steps: int) -> PlannedRun | str | None:
    """Return the plan of a run on rank 0, or why there is none in a line; None on other ranks and for a short run."""
    if steps < CHECKED_STEP or mesh.rank != 0:
        return None

    return _made(lambda: _planned(config, model, mesh))


def plan_late(config: Config, mesh: Mesh) -> PlannedRun | str:
    """Return the plan of a run on any rank, of a model built once more without weights, or why there is none."""
    return _made(
        lambda: _planned(config, open_trained(replace(config, model=replace(config.model, init="random"))).module, mesh)
    )


def _planned(config: Config, model: nn.Module, mesh: Mesh) -> PlannedRun:
    hardware = run_cluster(config, mesh)
    plan = plan_of(config, mesh.world)
    spec = trace(model, config.data.length, config.model.path, bool(config.data.packing))
    return PlannedRun(spec, hardware, plan, evaluate(spec, hardware, plan))


def plan_again(planned: PlannedRun | str | None, config: Config, mesh: Mesh) -> PlannedRun | str | None:
    """Return the plan of the same model under another configuration."""
    if not isinstance(planned, PlannedRun):
        return planned
    model, hardware = planned.model, planned.cluster
    plan = plan_of(config, mesh.world)
    return _made(lambda: PlannedRun(model, hardware, plan, evaluate(model, hardware, plan)))


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


class PlanCheck:
    """Checks a plan at step 3. All ranks have one, for they measure together; only rank 0 has a plan."""

    def __init__(self, config: Config, engine: Engine, planned: PlannedRun | None) -> None:
        assert config.output is not None  # named by now
        self._output = Path(config.output)
        self._file = config.plan.cluster
        self._engine = engine
        self._planned = planned

    def lines(self, history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the check after a step of this session: nothing but after the third. All ranks call it.

        After the tenth rank 0 writes the profile.
        """
        if len(history) == PROFILED_STEP and self._planned is not None:
            seconds = median(record["seconds"] for record in history[CHECKED_STEP:])
            run = self._planned
            with suppress(ConfigError, OSError):  # a step that no rate explains, a full disk: no profile then
                write_whole(self._output / PROFILE, profile(run.model, run.cluster, run.plan, seconds))
        if len(history) != CHECKED_STEP:
            return
        with self._engine.mesh.heartbeat.phase(TRAINING):  # it waits for peers, not for a disk
            measured, reserved = fullest(self._engine, checked_memory(self._engine))
        if self._planned is not None:
            seconds = median(record["seconds"] for record in history[1:])
            rates = rates_from(self._planned.cluster, self._file)
            yield check_line(self._planned.estimate, measured, seconds, reserved, rates)


def checked_memory(engine: Engine) -> int:
    """Return this rank's bytes that a plan's memory is compared with."""
    if engine.mesh.device.type == "cpu":
        return int(sum(engine.arena.held(category) for category in STATES if category != "padding"))
    return memory_bytes(engine)


def rates_from(cluster: ClusterSpec, file: str | None) -> str | None:
    """Say what a plan's seconds are from: a file's rates and how they were found, or the data sheet; None of a CPU."""
    if file is None:
        return None if cluster.gpu.name == CPU else "the data sheet"
    sources = cluster.provenance
    rates = sources.get("gpu.matrix") or sources.get("gpu.flops") or sources["gpu"]
    said = dict.fromkeys([rates, sources.get("step.fixed", rates)])  # rates and steps, where both were measured
    return f"the rates of {Path(file).name} ({', '.join(said)})"


def check_line(estimate: Estimate, measured: int, seconds: float, reserved: int | None, rates: str | None) -> str:
    """Return plan against actual in one line: bytes, seconds, and what most of the planned step goes into.

    reserved  by an accelerator's allocator; None on the CPU
    rates     what the planned seconds are from; None: nothing is known of the device, so they are not compared
    """
    on_cpu = reserved is None
    beside = "" if reserved is None else f", {size(reserved, keep_zero=True)} reserved"
    memory, kind = (
        (estimate.memory.states, "model states") if on_cpu else (estimate.memory.allocated, "allocated memory")
    )
    off = f" ({100 * (measured / memory - 1):+.1f} %)" if memory else ""  # all of it may be off the device
    largest = max(estimate.seconds.parts, key=lambda name: estimate.seconds.parts[name])
    part = SPELT_OUT.get(largest, largest)
    planned, found = (size(nbytes, keep_zero=True) for nbytes in (int(memory), measured))
    bytes_line = f"{kind}: planned {planned}, measured {found}{off}{beside}"
    if rates is None:
        return f"{bytes_line}; a step: measured {seconds:.3g} s (a CPU's is planned with plan.cluster alone)"
    return (
        f"{bytes_line}; a step: planned {estimate.seconds.mid:.3g} s by {rates}, measured {seconds:.3g} s; largest "
        f"planned part: {part}"
    )
