"""Settles what all units of a run have in common: settings without anything left open, and groups of ranks.

settings                                                become
zero.release, offload.params, zero.gather_wire, pp      `release`: every_use | every_step
zero.reduce, zero.stage, pp                             `reduce`: every_micro_batch | every_step
precision, zero.reduce_dtype                            `compute`, `master`, `wire`
train.accumulate, zero.exact, pp                        `summands`
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from zero3d.blueprint.layout import GROUP
from zero3d.blueprint.stages import Stage, resolve_policies, splits_master, stage_row
from zero3d.distributed.block_bytes import BLOCK
from zero3d.distributed.choice import NATIVE, PAIRWISE, sends_terms, travels
from zero3d.spec.dtypes import BF16, BY_NAME, FP32, FP64, Dtype, master_of
from zero3d.spec.mesh import EXACT
from zero3d.spec.offload import Offload
from zero3d.spec.sections import Spec
from zero3d.spec.zero import CAST, SAME, Zero

REMAINDER = 2  # bytes of a split master beside its bf16 weight


class Group(NamedTuple):
    """Ranks that something is cut over, or summed over, and how they do that (distributed/choice.py)."""

    size: int = 1
    algorithm: str = NATIVE

    def travels(self, kept: Dtype, made: Dtype, wire: Dtype) -> Dtype:
        """Return the dtype in which values that are to be reduced in `wire` reach their owner (`choice.travels`)."""
        return travels(self.algorithm, kept, made, wire)

    @property
    def slots(self) -> int:
        """Return how many slots a message has: one for each rank, or for each other rank where messages go in pairs."""
        return self.size - 1 if self.algorithm == PAIRWISE else self.size

    def sends_terms(self, dtype: Dtype) -> bool:
        """Return whether what travels in this dtype are all ranks' terms, and not their sum."""
        return sends_terms(self.algorithm, dtype.itemsize)


class Policy(NamedTuple):
    """Says how all units of a run behave: its settings, without anything left open.

    row        of the stage table
    release    the moment at which gathered parameters are released: every_use | every_step
    reduce     the moment at which gradients are reduced: every_micro_batch | every_step
    summands   micro-batches whose gradients a rank sums in a step
    compute    dtype of weights that are cast
    master     dtype of masters and reduced gradients
    wire       dtype in which gradients are reduced; they travel in a narrower dtype if that rounds nothing
    exact      gradients are summed in one tree over the global list of micro-batches
    splits     masters of weights in another dtype are stored as the weights and a remainder
    coded      weights travel to gathers in blocks of 8 bits
    from_masters  weights are cast from their masters in each gather, where these are wider: no shard of them stays
    params     shards of weights are off the device
    gradients  reduced gradients wait for the update off the device
    held       dtype of gradients that wait off the device
    slow       the form in which sums travel between copies of shards
    stochastic codes of that form are rounded stochastically
    apart      gradients of each rank whose tokens came to experts are kept apart
    block      elements that a shard never divides, for values that travel in blocks
    poison     released storages are filled with NaN: finds early releases
    """

    row: Stage
    release: str
    reduce: str
    summands: int
    compute: Dtype
    master: Dtype
    wire: Dtype
    exact: bool = False
    splits: bool = False
    coded: bool = False
    from_masters: bool = False
    params: bool = False
    gradients: bool = False
    held: Dtype = FP32
    slow: str = SAME
    stochastic: bool = False
    apart: bool = True
    block: int = GROUP
    poison: bool = False

    @classmethod
    def of(cls, spec: Spec) -> Policy:
        """Return what settings come to. Raises ConfigError for what a stage cannot do."""
        accumulate = spec.accumulate if spec.zero.exact else min(2, spec.accumulate)
        return _resolve(spec.zero, spec.offload, spec.precision, spec.pp, accumulate, spec.mesh.experts == EXACT)

    @property
    def gathers(self) -> bool:
        """Return whether weights are gathered for each of their uses: they come and go."""
        return self.row.shards_parameters and self.release != "every_step"

    @property
    def gradients_may_leave(self) -> bool:
        """Return whether reduced gradients may wait off the device: shards that come after every micro-batch."""
        return self.row.shards_gradients and self.often and not self.exact

    @property
    def narrow(self) -> bool:
        """Return whether reduced gradients wait in a narrower dtype than they are summed in."""
        return self.held.itemsize < self.master.itemsize

    @property
    def casts(self) -> bool:
        """Return whether stored masters are cast to weights by `precision.cast_all`, which takes scratch."""
        return self.compute == BF16 and not self.splits

    def stored(self, weight: int) -> int:
        """Return the bytes per parameter that are stored of masters beside weights of `weight` bytes."""
        wide = self.master.itemsize
        return 0 if weight == wide else REMAINDER if self.splits else wide

    @property
    def often(self) -> bool:
        """Return whether gradients are reduced after every micro-batch."""
        return self.reduce == "every_micro_batch"


@lru_cache(maxsize=1 << 12)
def _resolve(zero: Zero, offload: Offload, precision: str, pp: int, accumulate: int, apart: bool) -> Policy:
    row, compute = stage_row(zero.stage), BY_NAME[precision]
    by_tiles = zero.gather_budget is not None and row.shards_parameters
    asked = "every_use" if by_tiles else zero.release_of(offload.release(zero.release))
    release, reduce = resolve_policies(row, asked, zero.reduce, pp)
    master = master_of(precision)
    return Policy(
        row,
        release,
        reduce,
        max(2, accumulate) if zero.exact and pp > 1 else accumulate,  # those before the last are summed apart
        compute,
        master,
        wire=FP64 if compute == FP64 else BY_NAME[zero.reduce_dtype],
        exact=zero.exact,
        splits=splits_master(zero.master, precision),
        coded=zero.gather_wire != SAME,
        from_masters=zero.weights == CAST,
        params=offload.params != "none",
        gradients=offload.gradients_leave,
        held=BF16 if offload.gradient_dtype == "bf16" else master,
        slow=zero.slow_wire,
        stochastic=zero.slow_rounding == "stochastic",
        apart=apart,
        block=BLOCK if zero.gather_wire != SAME or zero.sums_in_blocks else GROUP,
    )


class Ranks(NamedTuple):
    """The ranks among which units are shared out.

    shard    ranks over which states are cut
    eshard   ranks over which states of experts are cut, if ep shares experts out
    copies   ranks that have the same shards
    ep       number of ranks that share experts out
    node     neighbours that keep a second shard of gathered weights together; 1: nobody does
    """

    shard: Group = Group()
    eshard: Group = Group()
    copies: Group = Group()
    ep: int = 1
    node: int = 1
