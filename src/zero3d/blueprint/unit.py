"""Decides one unit's plan on a rank: its row of the stage table, the buffers that are kept, the dtypes that travel.

weights                 kept whole       at stages 0 to 2; for a step; where one rank has all of the unit
                        in a shard       at stage 3, and whole from a gather to its release
                        in masters       the same, where a gather casts these: no shard of weights is kept
gradients, local        kept             where they are summed before a reduction, or one rank has them all
                        come and go      with each backward, where they are reduced after every micro-batch
gradients, the shard    in place         this rank's slot of local gradients that are kept in its dtype
                        apart            everywhere else
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.stages import Stage, counter_buffers, stage_row
from zero3d.spec.dtypes import Dtype


class Kind(NamedTuple):
    """Describes the facts of a unit that decide about it; its sizes do not.

    dtype      of its weights
    trainable  they get gradients
    experts    they belong to experts, which receive tokens from all ranks that share experts out
    """

    dtype: Dtype
    trainable: bool = True
    experts: bool = False


class GradientPlan(NamedTuple):
    """Says how a unit's gradients are kept and reduced.

    local     dtype of gradients taken from autograd
    travels   dtype in which gradients of one backward reach their owner
    sums      dtype in which the sums of several backwards do, and sums over copies of shards
    kept      a buffer of local gradients stays between steps; else one comes and goes with each backward
    shard     the shard has memory of its own; else it is this rank's slot of whole buffers
    counters  of exact mode: buffers of sums that wait for their other half, whole ones unless `shard`
    """

    local: Dtype
    travels: Dtype
    sums: Dtype
    kept: bool
    shard: bool
    counters: int = 0

    def widened(self, master: Dtype) -> GradientPlan:
        """Return the plan from a step's second backward on, whose gradients are added in the masters' dtype.

        What a single backward's travel in stays: ranks agree on it, and not all of them may have had a second one.
        """
        return self._replace(local=master, shard=False) if self.kept else self


class UnitPlan(NamedTuple):
    """The plan of a unit, for each rank that has a shard of it.

    row        of the stage table; for experts it may differ from the policy's
    ranks      the ranks that units are shared out among
    cut        the ranks that this unit is cut over
    sources    ranks whose tokens give gradients that are kept apart: each has a row of the local buffer
    node       neighbours that keep a second shard of gathered weights together; 1: nobody does
    coded      weights travel to gathers in blocks of 8 bits
    from_masters  weights are cast from their masters in each gather, and no shard of them stays
    whole      weights stay allocated between uses
    gradients  None of a unit that is frozen
    """

    kind: Kind
    policy: Policy
    ranks: Ranks
    row: Stage
    cut: Group
    sources: int
    node: int
    coded: bool
    from_masters: bool
    whole: bool
    gradients: GradientPlan | None

    @property
    def trained(self) -> UnitPlan:
        """Return what the unit is when it is frozen no longer. Weights that are whole stay so."""
        kind, policy = self.kind._replace(trainable=True), self.policy
        trained = decide(kind, policy, self.ranks)
        return decide(kind, policy._replace(from_masters=False), self.ranks) if self.whole > trained.whole else trained

    @property
    def widened(self) -> UnitPlan:
        """Return what the unit is from a step's second backward on (`GradientPlan.widened`)."""
        assert self.gradients is not None
        return self._replace(gradients=self.gradients.widened(self.policy.master))

    @property
    def adds_up(self) -> bool:
        """Return whether all micro-batches' gradients add up in the shard as they come, as nobody else has any."""
        return self.gradients is not None and self.gradients.kept and self.policy.often

    def of_steps(self, summands: int) -> UnitPlan:
        """Return what the unit is in steps of so many micro-batches."""
        return decide(self.kind, self.policy._replace(summands=summands), self.ranks)


@lru_cache(maxsize=1 << 12)
def decide(kind: Kind, policy: Policy, ranks: Ranks) -> UnitPlan:
    """Return what a unit of this kind is."""
    shared_out = kind.experts and ranks.ep > 1
    cut = ranks.eshard if kind.experts else ranks.shard
    row = policy.row
    from_masters = policy.from_masters and kind.trainable and kind.dtype != policy.master
    by_use = policy.coded or policy.params or from_masters  # a gather is more than a view of a shard
    if shared_out and cut.size == 1 and row.shards_parameters and not by_use:
        row = stage_row(2)  # nobody else has these experts: nothing is gathered
    coded = policy.coded and row.shards_parameters and kind.dtype.is_floating_point
    only_here = cut.size == 1 and not by_use and not policy.poison
    whole = not row.shards_parameters or policy.release == "every_step" or only_here
    sources = ranks.ep if kind.experts and policy.apart else 1
    node = ranks.node if row.shards_parameters and not shared_out else 1
    gradients = _gradients(kind, row, cut, sources, policy) if kind.trainable else None
    from_masters = from_masters and not whole
    return UnitPlan(kind, policy, ranks, row, cut, sources, node, coded, from_masters, whole, gradients)


def _gradients(kind: Kind, row: Stage, cut: Group, sources: int, policy: Policy) -> GradientPlan:
    if policy.exact:
        return _exact_gradients(kind, row, sources, policy)
    dtype, master = kind.dtype, policy.master
    sums = policy.wire if policy.wire.itemsize >= dtype.itemsize else master
    alone = cut.size == sources == 1 and not policy.gradients  # they add up in the shard, as they come
    kept = alone or not policy.often
    wide = kept and (policy.summands > 1 or not row.shards_optimizer or policy.often)
    local = master if wide else dtype
    if sources > 1:
        return GradientPlan(local, sums, sums, kept, not (kept and local == master))
    travels = cut.travels(local, dtype if policy.summands == 1 else local, sums)
    if not kept and cut.size > 1 and travels.itemsize > local.itemsize:
        local = travels  # cast as they come, not all once more on their way
    return GradientPlan(local, travels, sums, kept, not (kept and local == master))


def _exact_gradients(kind: Kind, row: Stage, sources: int, policy: Policy) -> GradientPlan:
    """Return the plan of exact mode, whose local gradients are of one micro-batch and in the weights' dtype."""
    alone, per_step = policy.summands == 1, not policy.often
    travels = kind.dtype if (alone or not per_step) and sources == 1 else policy.master
    whole = per_step and not (alone and row.shards_optimizer)
    return GradientPlan(kind.dtype, travels, policy.master, False, not whole, counter_buffers(policy.summands))
