"""What if: the plans that differ from one in a single setting, what each does to memory and to the step. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from zero3d.distributed.choice import ALL_TO_ALL, NATIVE
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.search import ACTIVATIONS, Evaluate, Row, ep_refused, pipeline_moments
from zero3d.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan
from zero3d.plan.states import policies, settled, wire_width
from zero3d.spec.offload import HOST


class WhatIf(NamedTuple):
    """One knob turned: what it does to memory (bytes) and to the step (seconds), and the estimate then."""

    change: str
    plan: ParallelPlan
    memory: float
    seconds: float
    estimate: Estimate


def what_if(row: Row, model: ModelSpec, cluster: ClusterSpec, evaluate: Evaluate) -> list[WhatIf]:
    """Turn every single knob of a plan once; those that buy the most memory per second come first."""
    changes = []
    for change, plan in _neighbours(row.plan, model, cluster):
        with suppress(ConfigError):  # of what the engine refuses
            estimate = evaluate(model, cluster, plan)
            memory = estimate.memory.allocated - row.estimate.memory.allocated
            changes.append(WhatIf(change, plan, memory, estimate.seconds.mid - row.estimate.seconds.mid, estimate))
    return sorted(changes, key=lambda knob: knob.memory / max(knob.seconds / row.estimate.seconds.mid, 1e-3))


def _neighbours(plan: ParallelPlan, model: ModelSpec, cluster: ClusterSpec) -> Iterable[tuple[str, ParallelPlan]]:
    """Yield the plans that differ from `plan` in one knob, each with what changed as a configuration says it."""
    for activations in ACTIVATIONS:
        if activations != plan.activations:
            off: dict[str, Any] = {"offload_activations": "none", "partition_activations": False}
            yield (
                f"activations: {activations}",
                replace(plan, activations=activations, **({} if activations == "full" else off)),
            )
    for stage in (plan.stage - 1, plan.stage + 1):
        if stage in (0, 1, 2, 3) and plan.dp > 1:
            moments = {"release": "auto", "reduce": "auto", **pipeline_moments(stage, plan.pp)}
            if stage == 3 or plan.params == "none":
                yield f"zero.stage: {stage}", replace(plan, stage=stage, **moments)

    for micro, accumulate in ((plan.micro_batch * 2, plan.accumulate / 2), (plan.micro_batch / 2, plan.accumulate * 2)):
        if micro == int(micro) and accumulate == int(accumulate) and (plan.pp == 1 or accumulate >= plan.pp):
            changed = replace(plan, micro_batch=int(micro), accumulate=int(accumulate))
            yield f"train.micro_batch: {int(micro)}", changed
    for ep in (plan.ep // 2, plan.ep * 2):
        splits = Schedule.of(plan.schedule).splits_backward
        if (ep == 1 and plan.ep > 1) or (
            ep > 1 and not (plan.sequence_parallel or splits or ep_refused(model, plan.dp, ep))
        ):
            yield f"mesh.ep: {ep}", replace(plan, ep=ep)
    if plan.ep > 1 and not plan.exact:
        how = "exact" if plan.experts == "fast" else "fast"
        yield f"mesh.experts: {how}", replace(plan, experts=how)
    if plan.tp > 1 and model.length % plan.tp == 0 and plan.ep == 1:
        other = not plan.sequence_parallel
        yield f"mesh.sequence_parallel: {str(other).lower()}", replace(plan, sequence_parallel=other)
    if plan.precision == "bf16":
        master = "fp32" if plan.master == "split" else "split"
        yield f"zero.master: {master}", replace(plan, master=master)
    yield from _tier_neighbours(plan)
    if plan.activations != "none":
        place = "none" if plan.offload_activations == HOST else HOST
        yield f"offload.activations: {place}", replace(plan, offload_activations=place)
        if plan.tp > 1 and not plan.sequence_parallel:
            parts = not plan.partition_activations
            yield f"mesh.partition_activations: {str(parts).lower()}", replace(plan, partition_activations=parts)
    if plan.reduce_dtype == "fp32" and plan.dp > 1:
        yield "zero.reduce_dtype: bf16", replace(plan, reduce_dtype="bf16")
    now = settled(plan, cluster)
    way = replace(plan, reduce_scatter=ALL_TO_ALL if now.reduce_scatter == NATIVE else NATIVE)
    if (
        plan.dp > 1
        and not plan.exact
        and wire_width(now, 2) != wire_width(way, 2)
        and plan.precision in ("bf16", "fp16")
    ):
        yield f"zero.reduce_scatter: {way.reduce_scatter}", way


def _tier_neighbours(plan: ParallelPlan) -> Iterator[tuple[str, ParallelPlan]]:
    """Yield the plans that differ in what leaves the device."""
    for place in ("none", "host", "disk"):
        if place != plan.offload:
            moved: dict[str, Any] = {"moments": "fp32", "fraction": 1.0} if place == "none" else {}
            yield f"offload.optimizer: {place}", replace(plan, offload=place, **moved)
        if place != plan.params and plan.stage == 3 and policies(plan)[0] != "every_step":
            yield f"offload.params: {place}", replace(plan, params=place)
    if plan.offload != "none":
        moments = "fp32" if plan.moments == "bf16" else "bf16"
        yield f"offload.moments: {moments}", replace(plan, moments=moments)
        yield f"offload.fraction: {plan.fraction / 2:g}", replace(plan, fraction=plan.fraction / 2)
