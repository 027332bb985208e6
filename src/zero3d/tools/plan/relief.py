"""Which settings of a plan would need less memory, and what each costs in time: advice where a run does not fit.

    single       every knob of `what_if` that lowers the bytes asked about and rounds nothing more than before
    together     where none is enough alone: the one that saves most, then the next, up to `MOST` in all

Enough first, the least loss of time before others; then what saves most. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zero3d.spec.tiers import TIERS
from zero3d.tools.plan.search import Row
from zero3d.tools.plan.spec import ClusterSpec, Evaluate, Memory, ModelSpec, ParallelPlan
from zero3d.tools.plan.what_if import WhatIf, what_if

Bytes = Callable[[Memory], float]  # those that are short
MOST = 4  # settings changed together


class Relief(NamedTuple):
    """Settings to change, and what that does.

    settings  as a command line takes them: activations=full
    saved     bytes
    slower    part of the step's time that it takes longer, below 0 where it is faster
    enough    it saves what is missing
    """

    settings: tuple[str, ...]
    plan: ParallelPlan
    saved: float
    slower: float
    enough: bool


def device_bytes(memory: Memory) -> float:
    """Return the most live bytes of the fullest rank's device."""
    return memory.allocated


def host_bytes(ranks: int, on_cpu: bool) -> Bytes:
    """Return what counts the bytes of a host with so many ranks. on_cpu: their device is the host itself."""
    return lambda memory: memory.host + (ranks * memory.allocated if on_cpu else 0)


def reliefs(
    row: Row, model: ModelSpec, cluster: ClusterSpec, evaluate: Evaluate, missing: float, bytes_of: Bytes
) -> list[Relief]:
    """Return what would help a plan that is short of `missing` bytes, the best first."""
    have, seconds = bytes_of(row.estimate.memory), row.estimate.seconds.mid

    def relief(settings: dict[str, str], changed: Row) -> Relief:
        saved = have - bytes_of(changed.estimate.memory)
        words = tuple(f"{key}={value}" for key, value in settings.items())
        return Relief(words, changed.plan, saved, changed.estimate.seconds.mid / seconds - 1, saved >= missing)

    def turned(before: Row, settings: dict[str, str]) -> list[tuple[dict[str, str], Row]]:
        """Turn every knob once; what then takes more elsewhere than there is, is left out."""
        knobs = (knob for knob in what_if(before, model, cluster, evaluate) if _is_admissible(knob, row, cluster))
        return [(settings | _settings(knob, before.plan), Row(knob.plan, knob.estimate)) for knob in knobs]

    options = turned(row, {})
    found = [relief(*option) for option in options]
    for _ in range(MOST - 1):
        if not options or any(each.enough for each in found):
            break
        settings, changed = min(options, key=lambda option: bytes_of(option[1].estimate.memory))
        options = turned(changed, settings)
        together = [relief(*option) for option in options]
        found += [each for each in together if each.enough]
    else:
        found += sorted(together, key=lambda each: -each.saved)[:1]
    kept = {
        (each.saved, each.slower): each
        for each in reversed(found)
        if each.saved > 0 and not any(_is_better(other, each) for other in found)
    }
    return sorted(kept.values(), key=lambda each: (not each.enough, each.slower if each.enough else -each.saved))


def _is_admissible(knob: WhatIf, row: Row, cluster: ClusterSpec) -> bool:
    """Return whether a knob rounds nothing more, and what it needs is there, or was needed before."""
    now, before = knob.estimate.memory, row.estimate.memory
    on_device = now.device <= max(cluster.gpu.memory, before.device)
    held = before.by_tier()
    off_it = all(
        nbytes <= max(cluster.figure(TIERS[name].capacity), held[name]) for name, nbytes in now.by_tier().items()
    )
    return on_device and off_it and not knob.rounds


def _is_better(one: Relief, other: Relief) -> bool:
    """Return whether one saves as much as the other and costs less."""
    return one.saved >= other.saved and one.slower < other.slower and len(one.settings) <= len(other.settings)


def _settings(knob: WhatIf, before: ParallelPlan) -> dict[str, str]:
    """Return a knob as a configuration says it: a step has as many sequences, and weights may change."""
    key, _, value = knob.change.partition(": ")
    accumulates, weights = key in ("train.micro_batch", "mesh.sp"), knob.plan.zero.weights
    return (
        {key: value}
        | ({"train.accumulate": str(knob.plan.accumulate)} if accumulates else {})
        | ({"zero.weights": weights} if weights != before.zero.weights else {})
    )
