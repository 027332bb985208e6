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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from zero3d.config import Config
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.memory.arena import STATES
from zero3d.spec.text import size
from zero3d.tools.advice.planned_run import PlannedRun
from zero3d.tools.plan.corrected import profile
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.spec import ClusterSpec, Estimate
from zero3d.train.device_memory import fullest, memory_bytes
from zero3d.watchdog.heartbeat import TRAINING
from zero3d.watchdog.own_files import write_whole

CHECKED_STEP = 3  # the step after which a run is held against its plan; a shorter run is not planned
SPELT_OUT = MappingProxyType({"fixed": "fixed overhead", "rest": "other kernels"})  # parts whose names say little
PROFILED_STEP = 10  # the step after which its profile is written
PROFILE = "profile.json"


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
