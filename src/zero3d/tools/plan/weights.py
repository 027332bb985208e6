"""Chooses what `zero.weights=auto` becomes: 16-bit weights kept beside their masters, or cast in each gather. No torch.

    kept   a shard of weights stays; masters are cast once a step, when they are updated
    cast   none stays; masters are cast in every gather of a step

The bits are the same, so that time alone decides. What casts a step has beyond its update's one read and write a
device's memory beside products of matrices. They are worth it where they take less than a hundredth of these:

    casts     (gathers - 1) x bytes of a cast x elements of a rank's shard  /  bandwidth of the device's memory
    products  operations of a rank in a step                                /  its rate

A run asks its plan. An engine alone knows no operations, and keeps weights.
"""

from __future__ import annotations

from typing import NamedTuple

from zero3d.account.transients import cast_bytes
from zero3d.spec.offload import AUTO
from zero3d.spec.rules import refusals
from zero3d.spec.zero import CAST, KEPT
from zero3d.tools.plan.decided import node_of, policy_of
from zero3d.tools.plan.kernels import KERNELS, digest, step_operations
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan

WORTH = 0.01  # of the products' seconds, which more casts may take


class Casts(NamedTuple):
    """Describes what a rank casts in a step beyond its update's, and its products of matrices, in seconds.

    times     casts of its shard
    nbytes    that one of them reads and writes
    seconds   of all of them
    products  seconds
    """

    times: int
    nbytes: float
    seconds: float
    products: float

    @property
    def choice(self) -> str:
        """Return kept or cast."""
        return CAST if self.seconds < WORTH * self.products else KEPT

    def __str__(self) -> str:
        casts = "1 more cast takes" if self.times == 1 else f"{self.times} more casts take"
        share = "less than a hundredth" if self.choice == CAST else "a hundredth or more"
        return (
            f"{casts} {self.seconds:.3g} s of a step by the plan's rates ({self.nbytes / 1e9:.3g} GB each), "
            f"{share} of the {self.products:.3g} s of its matrix products"
        )


def with_weights(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with its weights kept or cast."""
    return plan if plan.zero.weights != AUTO else plan.replace(weights=_chosen(model, plan, cluster)[0])


def weights_note(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> str:
    """Return in a line what auto becomes in a plan, and the arithmetic behind it."""
    chosen, why = _chosen(model, plan, cluster)
    return f"zero.weights=auto: {chosen}: {why}"


def _chosen(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> tuple[str, str]:
    if why := _why_kept(plan):
        return KEPT, why
    casts = casts_of(model, plan, cluster)
    return casts.choice, str(casts)


def _why_kept(plan: ParallelPlan) -> str:
    """Return why weights cannot be cast in gathers that a run makes anyway; "" where they can."""
    if plan.shard == 1:
        return "one rank has all weights, and gathers none"
    if not policy_of(plan).gathers:
        return "weights stay whole for a step, as below stage 3 and with zero.release=every_step"
    cast = plan.replace(weights=CAST)
    return next((why for _, why in refusals(cast)), "")


def casts_of(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> Casts:
    """Return what a rank casts in a step beyond its update's, and its products, by the rates of the cluster's card."""
    gpu, rates = cluster.gpu, KERNELS.rates_of(cluster.gpu)
    trained = digest(model).trainable / (plan.tp * plan.pp * plan.shard)
    nbytes = cast_bytes(policy_of(plan)) * trained
    once = node_of(plan, cluster.on_host) > 1 and plan.ep == 1  # experts that ep shares out have no second shard
    times = 0 if once else 2 * plan.accumulate - 1
    products = step_operations(model, plan) / plan.world / (rates.matrix * gpu.flops)
    return Casts(times, nbytes, times * nbytes / (rates.memory * gpu.bandwidth), products)
