"""Bytes of buffers that come and go in a step: whole units, reductions, records on their way, scratch. No torch.

whole units    stage 3's gathered weights, local gradients: the root's units all the time, blocks' at a hand-over,
               and those on their way
a reduction    received gradients, and gradients that are cast to travel, in slots of a shard each

               sums by the backend    1 slot, or none where a sum arrives in its final place
               terms of 16 bits       a slot for each rank, added up by their owner
               a cast                 a slot for each rank, where gradients travel in another dtype than their own

messages       of units that are gathered in blocks of 8 bits: one is decoded, AHEAD on their way
copies         of shards, over which a step's sums are taken: terms of IN_FLIGHT shards on their way, one being added up
records        a ring of DEPTH buffers of the longest one; STAGED of its gradients where these are kept on the host
scratch        fp32 values that an update, a cast or a norm works on at a time
logits         of a loss that is not made in tiles: as computed, in fp32, and in fp32 twice for their gradient
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from zero3d.account.states import FP32
from zero3d.blueprint.blueprint import BlueprintUnit
from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.unit import UnitPlan
from zero3d.distributed.block_bytes import BITS, CODE_BITS, all_get_terms, coding_scratch, message_bytes, term_bytes
from zero3d.distributed.choice import PAIRWISE
from zero3d.distributed.unit_order import AHEAD, IN_FLIGHT, LEAVING, ROOT
from zero3d.memory.blocks import padded
from zero3d.memory.scratch import cast_scratch, update_bucket, update_scratch
from zero3d.spec.tiers import HOST
from zero3d.spec.zero import SAME

LOGITS_BUDGET = 4_000_000_000  # bytes; train.tiled_loss=auto makes no logits that take more. One number for all devices
STAGED = 2  # buckets' gradients on the device that are kept on the host: one is used, one comes
DEPTH = 3  # buffers through which records pass: one is read, one is used, one goes back


def whole_units(sizes: Iterable[tuple[str, int]], at_once: int = 2, under_way: int = IN_FLIGHT) -> int:
    """Return an upper bound of the bytes of units that are whole at the same time, from the name and bytes of each.

    A block's units, of several dtypes or frozen and trained, are used together.

    at_once    blocks in use, or filling, at a hand-over
    under_way  units on their way; none of them is whole if messages are decoded when they are used

    >>> whole_units([("root", 1), ("a", 10), ("a/frozen", 15), ("b", 20)])
    91
    """
    owners: dict[str, int] = {}
    largest = 0
    for name, size in sizes:
        owner = name.partition("/")[0]
        owners[owner] = owners.get(owner, 0) + size
        largest = max(largest, size if owner != ROOT else 0)
    root = owners.pop(ROOT, 0)
    return root + at_once * max(owners.values(), default=0) + under_way * largest


def coded_messages(elements: int, device: str) -> int:
    """Return the bytes of gathers under way in blocks of 8 bits, and of scratch in which one is decoded.

    elements  of the largest unit, padding among them
    """
    return (1 + AHEAD) * message_bytes(elements, CODE_BITS) + FP32 * coding_scratch(elements, device)


class Reduction(NamedTuple):
    """Describes how the gradients of one unit travel.

    slots    of a message: one for each rank, or for each other rank where messages go in pairs
    travels  bytes of an element on its way
    casts    gradients have another dtype before they travel
    terms    each rank's gradients arrive, not their sum
    lands    the sum arrives where it stays
    """

    slots: int
    travels: int
    casts: bool
    terms: bool
    lands: bool

    def nbytes(self, shard: int) -> int:
        """Return the bytes of the buffers of one reduction, to shards of `shard` elements."""
        received = self.slots if self.terms else int(not self.lands)
        return (received + self.slots * self.casts) * shard * self.travels


def adds_to_shard(unit: UnitPlan, micro_batches: int) -> bool:
    """Return whether a reduction of a step of so many micro-batches may be added to what the shard has already."""
    return micro_batches > 1 and (unit.cut.algorithm == PAIRWISE or unit.policy.often)


def reduction_of(unit: UnitPlan, micro_batches: int) -> Reduction:
    """Return how the gradients of a trained unit travel in steps of so many micro-batches."""
    assert unit.gradients is not None
    plan, exact, ranks = unit.gradients, unit.policy.exact, unit.cut
    leaves = unit.policy.master if unit.sources > 1 else plan.local  # those of several sources are summed first
    return Reduction(
        ranks.slots,
        plan.travels.itemsize,
        casts=not exact and plan.travels != leaves,
        terms=exact or ranks.sends_terms(plan.travels),
        lands=plan.travels == unit.policy.master and not adds_to_shard(unit, micro_batches),
    )


def sum_of_sources(unit: UnitPlan, elements: int) -> int:
    """Return the bytes in which gradients of several sources are summed before they travel, of so many elements each.

    Gradients that are wide already are summed in the first source's row, except in exact sums, which are a tree.
    """
    assert unit.gradients is not None
    master = unit.policy.master
    apart = unit.sources > 1 and (unit.policy.exact or unit.gradients.local != master)
    return apart * elements * master.itemsize


def reduction_bytes(plan: UnitPlan, layout: UnitLayout, micro_batches: int) -> tuple[int, int]:
    """Return the most bytes of one reduction: what travels, until it is over; shards, while terms are added up.

    messages     a rank's own slot stays: (N-1)/N of a unit received and, if it travels in another dtype, cast to go
    all-to-all   terms in 16 bits, and exact ones: a unit received, a unit cast
    sums         all others: a unit cast; a shard received, unless it lands where it stays

    Experts' gradients of several sources are summed to a unit in the reduced dtype first, exact ones in a tree.
    Terms are added up in a shard from the second micro-batch on; exact ones in as many as the tree over ranks is deep.
    """
    shard, master = layout.shard, plan.policy.master
    n, exact = plan.cut.size, plan.policy.exact
    whole = sum_of_sources(plan, layout.total)
    tree = exact * whole * plan.sources.bit_length()
    if n == 1:
        return whole, exact * shard * master.itemsize + tree
    how = reduction_of(plan, micro_batches)
    moving = how.nbytes(shard)
    deep = n.bit_length() if exact else int(how.terms and adds_to_shard(plan, micro_batches))
    return whole + moving, deep * shard * master.itemsize + tree


def reductions_bytes(units: Iterable[BlueprintUnit], micro_batches: int) -> int:
    """Return an upper bound of the bytes of trained units' reductions under way, of which one is being added up."""
    both = [reduction_bytes(plan, layout, micro_batches) for _, plan, layout in units]
    return IN_FLIGHT * max((moving for moving, _ in both), default=0) + max((adding for _, adding in both), default=0)


def local_bytes(unit: UnitPlan, elements: int) -> int:
    """Return the bytes of a unit's local gradients that come and go with a backward, of so many elements."""
    of = unit.gradients
    return 0 if of is None or of.kept else unit.sources * elements * of.local.itemsize


def gathered_at_once(units: Iterable[BlueprintUnit], device: str, with_root: Collection[str] = ()) -> tuple[int, int]:
    """Return upper bounds of bytes of gathered weights: of whole units, and of messages in blocks and their scratch.

    with_root  names of units that are gathered as long as the root is
    The latter include casts of masters that find no room in other ranks' slots of the gathered unit.
    """
    released = [(name, plan, layout) for name, plan, layout in units if not plan.whole]
    coded = [layout.total for _, plan, layout in released if plan.coded]
    owners = [ROOT if name in with_root else name for name, *_ in released]
    sizes = [
        (owner, layout.total * plan.kind.dtype.itemsize)
        for owner, (_, plan, layout) in zip(owners, released, strict=True)
    ]
    ahead = 0 if len(coded) == len(sizes) else AHEAD  # a unit that travels in blocks is whole when it is used
    messages = coded_messages(max(coded), device) if coded else 0
    casts = max((cast_apart(plan, layout, device) for _, plan, layout in released), default=0)
    return whole_units(sizes, under_way=ahead), messages + casts


def cast_apart(unit: UnitPlan, layout: UnitLayout, device: str) -> int:
    """Return the bytes for casts of masters before a gather, beside the gathered unit."""
    if not unit.from_masters or (unit.cut.size > 1 and not unit.coded):
        return 0
    scratch = unit.policy.casts * FP32 * cast_scratch(layout.shard, device)
    return unit.coded * unit.kind.dtype.itemsize * layout.shard + scratch


def sum_over_copies(unit: UnitPlan) -> CopySum:
    """Return how shards like a trained unit's are summed over the ranks that have copies of them."""
    assert unit.gradients is not None
    copies, travels, wide = unit.ranks.copies, unit.gradients.sums, unit.policy.master
    terms = copies.sends_terms(travels)
    plain = Reduction(copies.slots, travels.itemsize, travels != wide, terms, lands=True)
    return CopySum(copies.size, unit.policy.slow, plain, wide.itemsize)


class CopySum(NamedTuple):
    """Describes how shards are summed over the ranks that have copies of them.

    ranks  that have each shard
    form   in which terms travel (`zero.slow_wire`)
    plain  how parts of a shard are reduced where terms travel as they are; of others its slots alone count
    wide   bytes of an element of a sum
    """

    ranks: int
    form: str
    plain: Reduction
    wide: int

    @property
    def _whole(self) -> bool:
        """Return whether every rank gets all terms of a shard, and not of its part alone."""
        return all_get_terms(self.ranks, BITS[self.form])

    def _part(self, shard: int) -> int:
        return shard if self.form != SAME and self._whole else shard // self.ranks

    def held(self, shard: int) -> int:
        """Return the bytes of a sum under way: outgoing and incoming terms."""
        part = self._part(shard)
        if self.form == SAME:
            return self.plain.nbytes(part)
        slots = self.ranks + (0 if self._whole else self.plain.slots)
        return slots * term_bytes(part, self.form)

    def adding(self, shard: int, device: str) -> int:
        """Return the bytes in which terms that have come are decoded and added up on a device of this type."""
        part = self._part(shard)
        return 0 if self.form == SAME else self.wide * part + FP32 * coding_scratch(part, device)


def sums_of_copies(shards: Sequence[int], how: CopySum, device: str) -> int:
    """Return the most bytes in which shards of so many elements are summed over copies, in any order of their units."""
    if how.ranks == 1:
        return 0
    longest = sorted(shards, reverse=True)
    adding = max((how.adding(shard, device) for shard in longest[:1]), default=0)
    return sum(map(how.held, longest[:IN_FLIGHT])) + adding


def ring_bytes(longest: int) -> int:
    """Return the bytes of a ring of buffers for records of at most `longest` bytes."""
    return DEPTH * padded(longest)


def passing_bytes(executor: str, record: int, device: str, splits: bool, temporaries: int = 0) -> int:
    """Return a device's bytes for records that pass through it: a ring, and fp32 masters of split ones.

    record       bytes of the longest one
    temporaries  values that the optimizer makes of each element while it updates one
    """
    if executor == HOST:
        return 0
    longest = update_bucket(device)
    return ring_bytes(record) + record_scratch(longest, device, splits) + FP32 * temporaries * longest


def gradient_staging(elements: int, policy: Policy) -> int:
    """Return the bytes in which gradients come back that wait off the device, of such buckets: one ahead."""
    return STAGED * policy.held.itemsize * elements if policy.gradients else 0


def arriving_bytes(shards: Sequence[int], policy: Policy) -> int:
    """Return the bytes of sums that are to wait off the device, of shards in the order of their reductions.

    The last ones are under way, with earlier sums to be added to them in the dtype of waiting sums; the ones before are
    leaving.
    """
    if not policy.gradients:
        return 0
    wide, narrow = policy.master.itemsize, policy.held.itemsize * policy.narrow
    under_way, leaving = shards[-IN_FLIGHT:], shards[-IN_FLIGHT - LEAVING : -IN_FLIGHT]
    return sum(under_way) * (wide + narrow) + sum(leaving) * (narrow or wide)


def norm_scratch(pieces: Iterable[int], policy: Policy, threads: int) -> int:
    """Return the bytes in which norms are taken of gradients that wait on the host, in pieces of so many elements.

    The host's kernel widens a piece that waits in fewer bits. Each thread has one at a time, the longest first.
    """
    return policy.narrow * policy.master.itemsize * sum(sorted(pieces, reverse=True)[:threads])


def record_scratch(
    elements: int, device: str, splits: bool, rounded: bool = False, casts: bool = False, narrow: bool = False
) -> int:
    """Return the bytes in which a record of so many elements is updated on a device of this type.

    These are fp32 copies of 16-bit values and the noise that rounds moments, or the scratch of a master's cast.

    splits   masters are in halves
    rounded  moments are in bf16
    casts    masters are cast to weights by `precision.cast_all`
    narrow   gradients come from the host in bf16
    """
    widened = splits + 2 * rounded + narrow
    return FP32 * (widened * elements + max(rounded * elements, cast_scratch(elements, device) if casts else 0))


def cast_bytes(policy: Policy) -> int:
    """Return the bytes of memory that the cast of a master to a weight on an accelerator reads and writes.

    To bf16: ties are raised in scratch, which is read again (decision 51); else the master and the weight alone.
    """
    return 18 if policy.casts else policy.master.itemsize + policy.compute.itemsize


def master_scratch(elements: int, device: str, splits: bool) -> int:
    """Return the bytes for the cast of so many masters on the device to weights, or for the update of split ones."""
    return FP32 * (update_scratch if splits else cast_scratch)(elements, device)


def step_scratch(masters: int, longest: int, device: str, policy: Policy, temporaries: int) -> int:
    """Return the bytes in which so many masters on the device are updated and cast to weights.

    longest      elements of the longest piece of a parameter
    temporaries  values that the optimizer makes of each element of a portion; masters in halves are beside these
    """
    cast = (policy.splits or policy.casts) * master_scratch(masters, device, policy.splits)
    made = policy.master.itemsize * temporaries * min(masters, max(update_bucket(device), longest))
    return cast + made if policy.splits else max(cast, made)


def logits_bytes(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the bytes of the logits of so many tokens at the peak of their loss.

    itemsize  of the dtype that the head computes in
    """
    return tokens * vocabulary * (itemsize + 3 * FP32)


def average_scratch(longest: int, device: str, wide: int) -> int:
    """Return the bytes in which averages of weights are updated and shown; longest: elements of a unit's share."""
    return wide * update_scratch(longest, device)
