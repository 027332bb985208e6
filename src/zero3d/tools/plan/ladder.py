"""The ladder of ZeRO stages and offload for one model and N ranks, in the order of its own bytes.

    rung          on the device, bytes per parameter       moved to the host
    ------------  ---------------------------------------  ------------------
    1             2 + 4 + 12/N                             -
    2             2 + 4/N + 12/N                           -
    2 + offload   2 + 4/N                                  12/N
    3             (2 + 4 + 12)/N                           -
    3 + offload   (2 + 4)/N                                12/N

The practice report's rule of thumb climbs them in this order: 1, 2, 2 + offload, 3, 3 + offload, each needing less
memory than the one before. That holds only while stage 2 with offload keeps more than stage 3. Its 2 Psi do not
shrink with N, and stage 3's do: by the paper's bytes 2 + 2/N = 16/N, by the engine's 2 + 4/N = 18/N, both at N = 7
(and 2 Psi alone against 16 Psi/N at N = 8). With fewer ranks stage 3 needs more, and comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zero3d.spec.offload import AUTO
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.tiers import OPTIMIZER, tiers_of
from zero3d.tools.plan.kernels import faster_blocks
from zero3d.tools.plan.margin import Margin, Range
from zero3d.tools.plan.search import LONG, Target, shares
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, ModelSpec, ParallelPlan
from zero3d.tools.plan.time import faster_reduction

RULE = ("1", "2", "2 + offload", "3", "3 + offload")  # the practice report's order
AWAY = tiers_of(OPTIMIZER)[0]
RUNGS = {"1": (1, "none"), "2": (2, "none"), "2 + offload": (2, AWAY), "3": (3, "none"), "3 + offload": (3, AWAY)}


class Rung(NamedTuple):
    """One way to hold the states.

    margin  of its own kind of run: with states off the device it is another one
    lacks   bytes of the margin for which a GPU has no room; all of it and more where the plan itself does not fit
    fits    with the activations of this plan and the margin, on a GPU and on a node's tiers
    """

    name: str
    plan: ParallelPlan
    estimate: Estimate
    margin: Margin
    lacks: float
    fits: bool


def ladder(model: ModelSpec, cluster: ClusterSpec, target: Target, evaluate: Evaluate) -> list[Rung]:
    """Price all rungs, every GPU on the data axis, blocks recomputed, from the most bytes of states to the fewest.

    Blocks are compiled, and multiply in fp8, as in plans that are searched. Moments of 8 bits stay on the device:
    they have no rung off it. Long sequences are on as many ranks as share them.
    """
    sp = max(shares(model, cluster.gpus, 1))
    plan = ParallelPlan(
        dp=cluster.gpus,
        sp=sp,
        accumulate=max(1, target.sequences * sp // cluster.gpus),
        precision=cluster.gpu.precision,
        activations="full",
        tiled_loss=model.length >= LONG or AUTO,
        optimizer=target.optimizer,
        linear=target.linear,
        compile=bool(target.compile),
    )
    if target.compile is None:
        plan = faster_blocks(model, plan, cluster)
    rungs = []
    for name, (stage, offload) in RUNGS.items():
        if offload != "none" and OPTIMIZERS[target.optimizer].coded:
            continue
        rung_plan = faster_reduction(model, plan.replace(stage=stage, offload=offload), cluster)
        estimate, margin = evaluate(model, cluster, rung_plan), target.margin_for(model, rung_plan)
        lacks = max(0.0, Range.of(estimate.memory.device, margin.share).high - target.room)
        rungs.append(Rung(name, rung_plan, estimate, margin, lacks, not lacks and not estimate.memory.lacks(cluster)))
    return sorted(rungs, key=lambda rung: -rung.estimate.memory.states)


def differs(rungs: Sequence[Rung]) -> str | None:
    """Say where the computed order is not the rule's, None where it is."""
    order = [rung.name for rung in rungs]
    rule = [name for name in RULE if name in order]
    if order == rule:
        return None
    return f"the rule of thumb says {', '.join(rule)}; by bytes it is {', '.join(order)} here"
