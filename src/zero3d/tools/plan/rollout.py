"""Reinforcement learning by formula: a synchronisation of weights with those who sample, and what a step is split into.

    sampling    new tokens one after another, for all completions at once, by the GPUs that train
    streaming   all weights once, as `Engine.send_weights` sends them, by the link between trainer and sampler
    training    steps of the plan over all completions

A token's seconds are the larger of reading weights and caches once and of its operations, by a card's data sheet: no
sampler is faster. Units are gathered, joined and sent in turn, a bucket on its way while the next is filled, so
that the slower of gathers and link counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from zero3d.errors import ConfigError
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.network import Groups, gather_seconds, send_seconds
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan

SAMPLED = 2  # bytes of a weight, and of a key or value, of those who sample
ROOM = constant("samplers", "room")
SHARED, INSIDE, ACROSS = "shared memory of a host", "between GPUs of a host", "between hosts"
EXAMPLE = "prompts=64,samples=16,new=1024"


@dataclass(frozen=True)
class Rollout:
    """Describes what is sampled for a step: `samples` completions of each of `prompts`, `new` tokens each."""

    prompts: int
    samples: int
    new: int

    @classmethod
    def of(cls, text: str) -> Rollout:
        """Read "prompts=64,samples=16,new=1024". Raises ConfigError."""
        found = dict(part.partition("=")[::2] for part in text.split(","))
        names = ("prompts", "samples", "new")
        if set(found) != set(names) or not all(value.isdecimal() and int(value) for value in found.values()):
            raise ConfigError(f"--rl {text!r}: type whole numbers from 1, as in --rl {EXAMPLE}.")
        return cls(*(int(found[name]) for name in names))

    @property
    def sequences(self) -> int:
        """Count the completions."""
        return self.prompts * self.samples


@dataclass(frozen=True)
class Synchronisation:
    """The bytes that a stream sends, and seconds until those who sample have them, by link."""

    nbytes: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Split:
    """Seconds of a step of reinforcement learning, at least.

    sampler  GPUs of one copy of the model that samples
    steps    of the plan, to train on all completions
    """

    sampling: float
    streaming: Synchronisation
    training: float
    sampler: int
    steps: int


def synchronisation(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> Synchronisation:
    """Price a stream of all weights in the run's dtype from rank 0.

    Gathers   over dp at stage 3; over tp; from later pipeline stages to rank 0
    SHARED    off the GPU into buckets, and onto the other one, at the same time
    """
    nbytes = float(model.params * plan.compute.itemsize)
    groups = Groups.of(plan, cluster)
    share = nbytes / plan.pp / plan.tp
    joined = gather_seconds(nbytes / plan.pp, groups.tp, cluster)
    if plan.zero.stage == 3:
        joined += gather_seconds(share, groups.dp, cluster)
    far = cluster.inside if groups.hop_inside else cluster.across
    moved = (plan.pp - 1) * send_seconds(nbytes / plan.pp, far)
    links = {SHARED: nbytes / cluster.host_link}
    links[INSIDE] = send_seconds(nbytes, cluster.inside)
    links[ACROSS] = send_seconds(nbytes, cluster.across)
    return Synchronisation(nbytes, {name: max(plan.pp * joined + moved, out) for name, out in links.items()})


def split(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, estimate: Estimate, rollout: Rollout) -> Split:
    """Return what a step is split into, where the plan's GPUs sample and train in turns."""
    gpu = cluster.gpu
    weights = float(SAMPLED * model.params)
    sampler = max(1, ceil(weights / (ROOM * gpu.memory)))
    together = ceil(rollout.sequences / max(1, plan.world // sampler))
    cache = SAMPLED * 2 * len(model.blocks) * model.kv_heads * model.hidden / max(1, model.heads) * rollout.new / 2
    read = (weights + together * cache) / gpu.bandwidth
    met = sum(part.numel if part.active is None else part.active for part in model.parts)
    computed = 2.0 * together * met / gpu.flops
    steps = ceil(rollout.sequences / (plan.rows * plan.micro_batch * plan.accumulate))
    return Split(
        rollout.new * max(read, computed) / sampler,
        synchronisation(model, plan, cluster),
        steps * estimate.seconds.mid,
        sampler,
        steps,
    )
