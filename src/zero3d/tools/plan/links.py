"""Ways to train over slow links between hosts: what each sends, how long a step takes then, which is the fastest.

    way                 settings                        what crosses hosts in a step           another rounding
    ------------------  ------------------------------  -------------------------------------  ----------------
    flat                states over all of dp           gathers and gradients of every use     -
    8-bit gathers       zero.gather_wire=int8           half of the gathers' bytes             of weights
    second shard        zero.second_shard=RANKS         gathers after an update, gradients     -
    both                                                half of these                          of weights
    shard               mesh.shard=RANKS of a host      sums of shards, once a step            -
    shard, bf16 sums    with zero.slow_wire=bf16        half of these                          of sums
    shard, int8 sums    with zero.slow_wire=int8        a quarter                              of sums
    shard, int4 sums    with zero.slow_wire=int4        an eighth                              of sums

RANKS are those of a host. With one micro-batch a step, two hosts send no more bytes for a second shard than for a
shard. And gathers and gradients travel beside computation, sums of shards behind all of it: a second shard is faster by
what that hides. With more micro-batches it sends gradients for each of them, and a shard sends sums once.

Seconds are `evaluate`'s for the links of the cluster, measured or from a data sheet. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from zero3d.config.keys import KEYS
from zero3d.errors import ConfigError, MeshError
from zero3d.tools.plan.search import shard_refused
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, ModelSpec, ParallelPlan

WORTH = 0.97  # of the seconds of a simpler way, beyond which another one is not taken
SUMS, ROUNDING = "zero.slow_wire", "zero.slow_rounding"
SETTINGS = ("mesh.shard", "zero.second_shard", "zero.gather_wire", SUMS)  # of ways
FORMS = [form for form in KEYS[SUMS].choices if form != KEYS[SUMS].default]
CODED = {"zero.gather_wire": "int8"}


class Way(NamedTuple):
    """A way to train, what it changes of the flat one, and what it needs. rounds: numbers that are sent are rounded."""

    name: str
    settings: Mapping[str, Any]
    rounds: bool
    estimate: Estimate


def ways(
    model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, evaluate: Evaluate, any_stage: bool = False
) -> list[Way]:
    """Price every way to train with the other settings of a plan, the simplest first; what is refused is left out.

    any_stage  what is of stage 3 alone is priced there, where the plan has another
    """
    flat, found = plan.replace(**{key: KEYS[key].default for key in (*SETTINGS, ROUNDING)}), list[Way]()
    for name, settings in _settings(flat, cluster, any_stage and plan.pp == 1):
        with suppress(ConfigError, MeshError):
            estimate = evaluate(model, cluster, flat.replace(**settings))
            found.append(Way(name, settings, any(KEYS[key].advice.rounds for key in settings), estimate))
    return found


def _settings(plan: ParallelPlan, cluster: ClusterSpec, any_stage: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "flat", {}
    inside = cluster.per_node // plan.tp
    if not crosses(plan, cluster):
        return
    if plan.zero.stage == 3 or any_stage:
        stage = {} if plan.zero.stage == 3 else {"zero.stage": 3}
        second = stage | {"zero.second_shard": inside}
        yield "8-bit gathers", stage | CODED
        yield "second shard", second
        yield "second shard, 8-bit gathers", second | CODED
    if plan.zero.stage and shard_refused(plan.dp, plan.ep, plan.sp, inside) is None:
        shard = {"mesh.shard": inside}
        yield f"shard {inside}", shard
        for form in FORMS:
            yield f"shard {inside}, {form} sums", shard | {SUMS: form}


def crosses(plan: ParallelPlan, cluster: ClusterSpec) -> bool:
    """Return whether a plan's data-parallel axis has ranks on several hosts, and several on each."""
    return 1 < cluster.per_node // plan.tp < plan.dp


def fastest(found: Sequence[Way], cluster: ClusterSpec, limit: float, narrow: bool) -> Way:
    """Return the fastest way that fits; a simpler one where it is not worth more. The first where none fits.

    limit   bytes of a device that may be used
    narrow  whether ways count that round numbers to send less
    """
    best = found[0]
    for way in found:
        memory, allowed = way.estimate.memory, narrow or not way.rounds
        fits = memory.device <= limit and not memory.lacks(cluster)
        full = best.estimate.memory.device > limit or bool(best.estimate.memory.lacks(cluster))
        if allowed and fits and (full or way.estimate.seconds.mid < WORTH * best.estimate.seconds.mid):
            best = way
    return best


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as a command line takes them."""
    return [f"{key}={value}" for key, value in settings.items()]
