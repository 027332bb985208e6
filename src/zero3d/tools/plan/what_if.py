"""What if: the plans that differ from one in a single setting, what each does to memory and to the step. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

from zero3d.account.transients import reduction_of
from zero3d.config.keys import KEYS
from zero3d.distributed.choice import ALL_TO_ALL, NATIVE
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.offload import AUTO
from zero3d.spec.tiers import ACTIVATIONS as INPUTS, OPTIMIZER, PARAMS, TIERS, tiers_of
from zero3d.spec.zero import KEPT, NODE
from zero3d.tools.plan.decided import algorithm_on, policy_of, usual_unit
from zero3d.tools.plan.network import Groups
from zero3d.tools.plan.search import ACTIVATIONS, LONG, SOONER, Row, ep_refused, pipeline_moments, shard_refused
from zero3d.tools.plan.sequence import sp_refused
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, Memory, ModelSpec, ParallelPlan

Settings = Mapping[str, Any]
KEEPS = {"zero.weights": KEPT}  # what goes with states off the device, from which no gather casts
SAME = 5e-4  # part of a plan's memory: a smaller change is none


class Moved(NamedTuple):
    """Says what has moved a peak most: a category of what is alive at it, and by how many bytes. instant: the new one.

    Where another instant is the fullest now, the category's bytes at both are compared.
    """

    instant: str
    category: str
    nbytes: float

    @classmethod
    def of(cls, before: Memory, now: Memory) -> Moved | None:
        """Return what has moved most in the direction of the whole; None where this is as it was, or is known alone."""
        change = now.allocated - before.allocated
        names = {**before.parts, **now.parts}
        if not names or abs(change) < SAME * before.allocated:
            return None
        by = {name: now.parts.get(name, 0.0) - before.parts.get(name, 0.0) for name in names}
        category = max(by, key=lambda name: by[name] if change > 0 else -by[name])
        return cls(now.instant, category, by[category])


class WhatIf(NamedTuple):
    """One knob turned: what it does to memory (bytes) and to the step (seconds), and the estimate then.

    moved  what moved the peak of memory; None where it stays
    """

    change: str
    plan: ParallelPlan
    memory: float
    seconds: float
    estimate: Estimate
    moved: Moved | None

    @property
    def rounds(self) -> bool:
        """Return whether values of the key round what is sent or kept."""
        return KEYS[self.change.partition(": ")[0]].advice.rounds


def what_if(row: Row, model: ModelSpec, cluster: ClusterSpec, evaluate: Evaluate) -> list[WhatIf]:
    """Turn every single knob of a plan once; those that buy the most memory per second come first."""
    changes = []
    for settings in _knobs(row.plan, model, cluster):
        plan = row.plan.replace(**settings)
        with suppress(ConfigError):  # of what the engine refuses
            estimate = evaluate(model, cluster, plan)
            memory = estimate.memory.allocated - row.estimate.memory.allocated
            seconds = estimate.seconds.mid - row.estimate.seconds.mid
            moved = Moved.of(row.estimate.memory, estimate.memory)
            changes.append(WhatIf(_change(settings), plan, memory, seconds, estimate, moved))
    return sorted(changes, key=lambda knob: knob.memory / max(knob.seconds / row.estimate.seconds.mid, 1e-3))


def faster(
    knobs: Sequence[WhatIf], row: Row, usable: Callable[[ParallelPlan], float], cluster: ClusterSpec
) -> list[WhatIf]:
    """Return single changes that are faster and fit with their margin, the fastest first. usable: bytes for a plan."""
    least = (1 - SOONER) * row.estimate.seconds.mid
    fit = (
        knob
        for knob in knobs
        if knob.estimate.memory.device <= usable(knob.plan) and not knob.estimate.memory.lacks(cluster)
    )
    return sorted((knob for knob in fit if knob.estimate.seconds.mid < least), key=lambda knob: knob.seconds)


def _change(settings: Settings) -> str:
    """Write the first setting as a configuration says it."""
    key, value = next(iter(settings.items()))
    words = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    return f"{key}: {'null' if value is None else words}"


def _knobs(plan: ParallelPlan, model: ModelSpec, cluster: ClusterSpec) -> Iterator[Settings]:
    """Yield what every knob changes: first its key as in a configuration, then what cannot stay beside it."""
    for activations in ACTIVATIONS:
        if activations != plan.activations:
            off = {"offload.activations": "none", "mesh.partition_activations": False}
            yield {"activations": activations, **({} if activations == "full" else off)}
    for stage in (plan.zero.stage - 1, plan.zero.stage + 1):
        if stage in (0, 1, 2, 3) and plan.dp > 1 and (stage == 3 or plan.offload.params == "none"):
            yield {"zero.stage": stage, "release": "auto", "reduce": "auto", **pipeline_moments(stage, plan.pp)}

    for micro, accumulate in ((plan.micro_batch * 2, plan.accumulate / 2), (plan.micro_batch / 2, plan.accumulate * 2)):
        if micro == int(micro) and accumulate == int(accumulate) and (plan.pp == 1 or accumulate >= plan.pp):
            yield {"train.micro_batch": int(micro), "train.accumulate": int(accumulate)}
    for ep in (plan.ep // 2, plan.ep * 2):
        splits = Schedule.of(plan.schedule).splits_backward
        if (ep == 1 and plan.ep > 1) or (
            ep > 1 and not (plan.mesh.sequence_parallel or splits or ep_refused(model, plan.dp, ep))
        ):
            yield {"mesh.ep": ep}
    for sp in (plan.sp // 2, plan.sp * 2):
        if _takes(sp, plan, model):
            yield _over(sp, plan)
    inside = cluster.per_node // plan.tp
    if inside < plan.dp:
        shard = None if plan.shard < plan.dp else inside
        if shard is None or shard_refused(plan.dp, plan.ep, plan.sp, shard) is None:
            yield {"mesh.shard": shard, **({"slow_wire": "same", "slow_rounding": "nearest"} if shard is None else {})}
    yield from _declared("mesh", plan)
    if plan.tp > 1 and model.length % plan.tp == 0 and plan.ep == plan.sp == 1:
        yield {"mesh.sequence_parallel": not plan.mesh.sequence_parallel}
    if plan.precision == "bf16":
        yield {"zero.master": "fp32" if plan.zero.master == "split" else "split"}
    yield from _tier_knobs(plan)
    if plan.activations != "none":
        yield {"offload.activations": "none" if plan.offload.activations_leave else tiers_of(INPUTS)[0]}
        if plan.tp > 1 and not plan.mesh.sequence_parallel:
            yield {"mesh.partition_activations": not plan.mesh.partition_activations}
    gathers = plan.zero.stage == 3 and plan.dp > 1 and plan.zero.release != "every_step"
    if gathers and Groups.of(plan, cluster).shard.nodes > 1:
        yield {"zero.second_shard": NODE if plan.zero.second_shard is None else None}
    yield from _declared("zero", plan)
    yield {"train.compile": not plan.compile}
    if plan.zero.reduce_dtype == "fp32" and plan.dp > 1:
        yield {"zero.reduce_dtype": "bf16"}
    now = algorithm_on(plan, cluster.on_host)
    way = ALL_TO_ALL if now == NATIVE else NATIVE
    if (
        plan.dp > 1
        and not plan.zero.exact
        and _travels(plan, now) != _travels(plan, way)
        and plan.precision in ("bf16", "fp16")
    ):
        yield {"zero.reduce_scatter": way}


def _declared(section: str, plan: ParallelPlan) -> Iterator[Settings]:
    """Yield what the section's declarations say that advice tries of keys."""
    for name, key in KEYS.items():
        if name.startswith(f"{section}.") and key.advice.where(plan):
            usual = attrgetter(name)(plan) == key.default
            yield {name: key.advice.tried if usual else key.default, **key.advice.reset}


def _travels(plan: ParallelPlan, algorithm: str) -> int:
    """Return the bytes in which a gradient reaches its owner."""
    return reduction_of(usual_unit(plan, algorithm), 1).travels


def _takes(sp: int, plan: ParallelPlan, model: ModelSpec) -> bool:
    """Return whether a plan can have another sp and the same sequences a step."""
    if sp < 1 or plan.mesh.sequence_parallel or plan.replay or (plan.sp == 1 and model.length < LONG):
        return False
    fits = sp == 1 or sp_refused(model, plan.dp, plan.tp, sp, mixers=plan.mesh.sp_mixers) is None
    return fits and plan.accumulate * sp % plan.sp == 0


def _over(sp: int, plan: ParallelPlan) -> Settings:
    """Return the settings for another sp: as many sequences a step, of fewer or more rows."""
    return {"mesh.sp": sp, "train.accumulate": plan.accumulate * sp // plan.sp}


def _tier_knobs(plan: ParallelPlan) -> Iterator[Settings]:
    """Yield what the knobs of the section `offload` change."""
    for place in ("none", *TIERS):
        if place != plan.offload.optimizer and place in ("none", *tiers_of(OPTIMIZER)):
            here = {
                "offload.moments": "fp32",
                "offload.fraction": 1.0,
                "offload.gradients": AUTO,
                "offload.gradient_dtype": "fp32",
            }
            yield {"offload.optimizer": place, **(here if place == "none" else KEEPS)}
        movable = plan.zero.stage == 3 and policy_of(plan).release != "every_step"
        if place != plan.offload.params and movable and place in ("none", *tiers_of(PARAMS)):
            yield {"offload.params": place, **({} if place == "none" else KEEPS)}
    yield from _declared("offload", plan)
    if plan.offload.optimizer != "none":
        yield {"offload.fraction": plan.offload.fraction / 2}
