"""A rank's shard of a unit's reduced gradients: a reduction's result, from which the step updates.

    shard   [total/N]  reduced dtype; the sum over ranks of this rank's slice
    pieces             1-D views of parameters' parts in it, for the optimizer; made anew only where it moves

Where dp ranks have copies of shards (UnitParts.across), a reduction sums over the ranks that states are cut over. At
the end of a step its sums are summed once more over the copies: `sum_copies`.

Note 1, where the sum may live. When local gradients already have the reduced dtype and the whole buffer is kept, the
shard is this rank's slot of the buffer. Gradients that arrive after a reduction would overwrite it, so it is stashed
until the next reduction has been added.

Note 2, shards on the host (stages 2 and 3). A reduction goes to a bucket on the device. Where it adds, the shard's sum
comes back to the bucket first, on the side stream: the link has both ways at once, and a sum on the host would read and
write its memory twice as often as two copies do. The bucket then goes to the host beside compute, and is let go of
after the next one. The bits are those of a shard on the device. A shard that is narrower there, by choice, is rounded
on the device and crosses in its own dtype, both ways: its sum is rounded after every micro-batch.

Note 3, gradients that arrive after the shard was summed over copies (or while it is). Their reduction is a term of a
sum over all ranks, as the first one was, and not of the first sum. They have a bucket and a shard of their own, which
is summed over copies by itself and then added. The first sum is waited for in its turn, not when they arrive: every
rank may get them at another moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero3d.blueprint.layout import Piece, UnitLayout
from zero3d.blueprint.unit import GradientPlan, UnitPlan
from zero3d.distributed.axis import DONE, Pending
from zero3d.precision import torch_dtype
from zero3d.zero.gradient_memory import GradientMemory
from zero3d.zero.local_gradients import LocalGradients
from zero3d.zero.streams import ToHost
from zero3d.zero.unit_parts import UnitParts


class GradientShard(ABC):
    """Owns a shard of reduced gradients, the reduction to it, and its gather where every rank updates all (stage 0).

    shard      this rank's reduced gradients
    unit_plan  the unit's plan now: a second backward of a step, or more micro-batches, may have changed it
    _local     the local gradients, which are reduced; also the memory of a shard that has none of its own
    """

    def __init__(self, name: str, layout: UnitLayout, parts: UnitParts, local: LocalGradients) -> None:
        self._name = name
        self._layout = layout
        self._parts = parts
        self._local = local
        self._arena, self._wide = parts.arena, parts.wide
        self.unit_plan = parts.plan
        self.shard: Tensor
        self._pieces: list[Tensor] = []
        self._whole_pieces: list[Tensor] = []
        self._sum_of_sources: Tensor | None = None  # on its way to the reduction
        self._pending = DONE
        self._gathering: Pending | None = None  # since the sum was there
        self._keep()

    @abstractmethod
    def _keep(self) -> None:
        """Allocate the buffers that live between steps."""

    @property
    def plan(self) -> GradientPlan:
        """How gradients are kept and travel now."""
        assert self.unit_plan.gradients is not None
        return self.unit_plan.gradients

    # --- what is updated from -------------------------------------------------------------------

    def _put(self, shard: Tensor) -> None:
        self.shard, self._pieces = shard, []

    @property
    @abstractmethod
    def memory(self) -> list[GradientMemory]:
        """Memory of reduced gradients alone, of whatever lives from its first use in a step to the unit's update."""

    @property
    @abstractmethod
    def is_there(self) -> bool:
        """Return whether the shard has memory."""

    @abstractmethod
    def provide(self) -> None:
        """Have memory for the shard, which holds anything, where there is none yet."""

    def drain(self) -> None:
        """Give back all memory, after `reset`: nobody may read the shard before the next reduction."""
        for each in self.memory:
            each.drain()

    @property
    @abstractmethod
    def whole(self) -> Tensor:
        """All reduced gradients (stage 0): other ranks' are there after `gather`."""

    @property
    def owned(self) -> Tensor:
        """Reduced gradients of the elements that this rank updates: its shard, or at stage 0 the whole unit's."""
        if self._gathering is None:
            return self.shard
        self.wait()
        return self.whole

    @property
    def to_host(self) -> ToHost | None:
        """The copier of shards to the host, where they are kept there."""
        return self._parts.to_host

    def pieces(self) -> list[Tensor]:
        """Return this rank's pieces of the reduced gradients, in slot order."""
        if not self._pieces:
            self._pieces = _cut(self.shard, self._layout.pieces(self._parts.comm.rank))
        return self._pieces

    def owned_pieces(self) -> list[Tensor]:
        """Return the pieces of `owned`, in slot order."""
        if self._gathering is None:
            return self.pieces()
        self.wait()
        if not self._whole_pieces:
            self._whole_pieces = _cut(self.whole, self._layout.whole_pieces())
        return self._whole_pieces

    # --- a reduction ----------------------------------------------------------------------------

    @abstractmethod
    def make_way(self, reduced: bool) -> None:
        """Keep earlier sums apart from gradients that come now. reduced: the shard has been summed in this step."""

    @abstractmethod
    def reduce(self, single: bool) -> None:
        """Start summing the local gradients over ranks (`Gradients.reduce`)."""

    def _first_row(self, buffer: Tensor) -> Tensor:
        """Return the first row of a buffer, where the sources' sum may be made."""
        return buffer[: self._layout.total]

    def _of_sources(self, full: Tensor) -> Tensor:
        """Return the sum of all sources of local gradients."""
        return full if self.unit_plan.sources == 1 else self._add_sources(self._local.rows(full))

    @abstractmethod
    def _add_sources(self, rows: list[Tensor]) -> Tensor:
        """Return the sum of several sources, in the reduced dtype."""

    def add_up(self) -> None:
        """Wait for a reduction under way on the current stream, and add up there what has come."""
        self._pending.wait()

    def finish(self) -> None:
        """Complete a reduction under way."""
        self._pending.wait()
        self._drop_sum_of_sources()

    def _drop_sum_of_sources(self) -> None:
        if self._sum_of_sources is not None:
            self._arena.give_back("wire", self._sum_of_sources)
            self._sum_of_sources = None

    @abstractmethod
    def complete(self) -> None:
        """Complete the step's sum: nothing more comes."""

    def reset(self) -> None:
        """Forget this step's sums."""
        if self._gathering is not None:
            self._forget_gather()

    def follow(self, plan: UnitPlan) -> None:
        """Keep sums from now on as this plan says: local gradients have moved to a wider buffer."""
        self.unit_plan, self._whole_pieces = plan, []

    # --- stage 0 --------------------------------------------------------------------------------

    def gather(self, turn_only: bool) -> None:
        """Start giving every rank's sums to all where each updates all: the second half of an all-reduce.

        A sum is gathered once: this does nothing where that was begun.

        turn_only  the unit has taken late gradients since its sum was over, and needs nothing of it. It takes its turn:
                   peers that take theirs later gather that sum now
        """
        if self.unit_plan.row.shards_optimizer:
            return
        if turn_only:
            unused = self._arena.borrow("bucket", self._layout.total, self.shard.dtype)
            self._parts.comm.all_gather(unused, self._parts.slot(unused), self._name).wait()
            self._arena.give_back("bucket", unused)
        elif self._gathering is None:
            self._gathering = self._parts.comm.all_gather(self.whole, self.shard, self._name)

    def wait(self) -> None:
        """Wait for what is gathered."""
        if self._gathering is not None:
            self._gathering.wait()

    def _forget_gather(self) -> None:
        """Let a gather end whose sum is over, or was not the last."""
        self.wait()
        self._gathering = None

    # --- copies of shards -----------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Return whether the gradients that come now are late ones (Note 3)."""
        return False

    @property
    def differs_on_copies(self) -> bool:
        """Return whether a sum over the ranks that have copies of the shard is still to come."""
        return False

    def sum_copies(self, step: int) -> Pending:
        """Start summing the shard over the ranks that have copies of it (`Gradients.sum_copies`)."""
        return DONE


class RankOrderShard(GradientShard):
    """Owns a shard to which gradients of all ranks are reduce-scattered.

    _memory     of the shard's own; None: it is in the local buffer, or on the host
    _summed     the shard already holds a sum of this step
    _in_local   the shard is its slot of the local buffer (Note 1)
    _is_of_all  the shard is, or will be, summed over the ranks that have copies of it
    _late       the sum of late gradients (Note 3)
    """

    def _keep(self) -> None:
        self._in_local = not self.plan.shard
        self._host: HostShard | None = None
        self._summed = self._is_of_all = False
        self._stash: Tensor | None = None
        self._late: Tensor | None = None
        self._memory: GradientMemory | None = None
        parts, layout = self._parts, self._layout
        if self._in_local:
            self._put(parts.slot(self.whole))
        elif self._name in parts.kept:
            self._host = HostShard(parts.kept[self._name], parts)
            self._put(self._host.shard)
        else:
            self._memory = parts.gradient_memory(layout.shard, layout.used_per_shard, self._wide)
            self._put(self._memory.buffer)

    @property
    def memory(self) -> list[GradientMemory]:
        return [] if self._memory is None else [self._memory]

    @property
    def is_there(self) -> bool:
        if self._in_local:
            return self._local.is_open
        return self._memory is None or self._memory.there

    def provide(self) -> None:
        if self._memory is not None:
            self._memory.fill()
        elif self._in_local:
            self._local.open()

    @property
    def whole(self) -> Tensor:
        assert self._local.buffer is not None
        return self._first_row(self._local.buffer)

    @property
    def _in_place(self) -> bool:
        return self._in_local and not self._local.is_aside

    @property
    def is_late(self) -> bool:
        return self._late is not None

    def make_way(self, reduced: bool) -> None:
        if self._gathering is not None:
            self._forget_gather()
        if self._is_of_all and self._late is None:  # Note 3
            self._late, self._summed = self._arena.borrow("bucket", self.shard.numel(), self._wide), False
            self._local.filled.clear()
        if self._late is not None:
            if self._in_place:
                self._local.step_aside()
        elif reduced and self._in_place and not self.unit_plan.adds_up:
            self._stash = self._arena.borrow("bucket", self.shard.numel(), self.shard.dtype).copy_(self.shard)

    def reduce(self, single: bool) -> None:
        assert self._local.buffer is not None
        self.provide()
        wire = torch_dtype(self.plan.travels if single else self.plan.sums)
        add = self._summed and not self._in_place
        shard = self.shard if self._late is None else self._late
        if self._host is not None and self._late is None:
            shard = self._host.receive(self._wide, add)
        full = self._of_sources(self._local.buffer)
        self._pending = self._parts.comm.reduce_scatter(full, shard, self._name, wire, add)

    def _add_sources(self, rows: list[Tensor]) -> Tensor:
        """Add up all sources in rank order: in the first one's row if it is wide enough."""
        first, *others = rows
        if first.dtype != self._wide:
            first = self._sum_of_sources = self._arena.borrow("wire", len(first), self._wide).copy_(first)
        for row in others:
            first.add_(row)
        return first

    def finish(self) -> None:
        self._pending.wait()
        if self._host is not None:
            self._host.keep_received()
        self._drop_sum_of_sources()
        if self._stash is not None:
            self.shard.add_(self._stash)
            self._drop_stash(self._stash)
        self._summed = True

    def _drop_stash(self, stash: Tensor) -> None:
        self._arena.give_back("bucket", stash)
        self._stash = None

    def complete(self) -> None:
        if self._parts.to_host is not None:
            self._parts.to_host.finish()

    def follow(self, plan: UnitPlan) -> None:
        super().follow(plan)
        if not self._summed and self._late is None:  # otherwise the separate shard keeps its sum until `drain`
            self._move_to_local()

    def _move_to_local(self) -> None:
        """Move the shard to this rank's slot of the local buffer, where the plan has it there and it is not yet."""
        if not self.plan.shard and not self._in_local:
            if self._memory is not None:
                self._memory.drop()
            self._memory, self._in_local = None, True
            self._put(self._parts.slot(self.whole))

    def reset(self) -> None:
        super().reset()
        if self._stash is not None:
            self._drop_stash(self._stash)
        if self._late is not None:
            self._arena.give_back("bucket", self._late)
        self._late, self._is_of_all = None, False
        self._summed = False

    def drain(self) -> None:
        super().drain()
        self._move_to_local()  # not in `reset`: a deferred update may still read the shard where it is

    @property
    def differs_on_copies(self) -> bool:
        return self._parts.across.size > 1 and (not self._is_of_all or self._late is not None)

    def sum_copies(self, step: int) -> Pending:
        late, self._late = self._late, None
        again, self._is_of_all = self._is_of_all, True
        if late is not None:
            return _then(self._sum_copies(late, step, again), partial(self._add_late, late))
        if self._far is None:
            return self._sum_copies(self.shard, step, again)
        near = self._far.bring()
        return _then(self._sum_copies(near, step, again), partial(self._far.keep, near))

    @property
    def _far(self) -> HostShard | None:
        """The shard where this rank does not compute there: by the type of device, whatever number it is given."""
        return None if self.shard.device.type == self._parts.across.device.type else self._host

    def _add_late(self, late: Tensor) -> None:
        if self._far is None:
            self.shard.add_(late)
        else:
            self._far.keep(self._far.bring().add_(late))
        self._arena.give_back("bucket", late)

    def _sum_copies(self, shard: Tensor, step: int, again: bool) -> Pending:
        across, slow = self._parts.across, self._parts.slow
        if slow is None:
            return across.all_reduce(shard, self._name, torch_dtype(self.plan.sums))
        gaps = self._layout.gaps(self._parts.comm.rank)
        if gaps:  # of buckets nobody has written there, and a block has one scale
            torch._foreach_zero_([shard[start:stop] for start, stop in gaps])
        place = f"{step} {self._name} {self._parts.comm.rank} {across.rank} {self._parts.part}{' again' * again}"
        return across.all_reduce_coded(shard, self._name, slow.form, slow.noise(place, shard.device))


class HostShard:
    """Moves a shard that is kept on the host to the device and back (Note 2).

    _incoming  the bucket for a reduction's result
    _crossing  the same in the shard's own dtype, where that is narrower
    """

    def __init__(self, shard: Tensor, parts: UnitParts) -> None:
        assert parts.to_host is not None
        self.shard = shard
        self._arena = parts.arena
        self._to_host = parts.to_host
        self._incoming: Tensor | None = None
        self._crossing: Tensor | None = None

    def receive(self, dtype: torch.dtype, add: bool) -> Tensor:
        """Return a bucket for a reduction's result; where the reduction adds, with the host's sum of this step."""
        sums = self._incoming = self._arena.borrow("bucket", self.shard.numel(), dtype)
        if add:
            self._to_host.follow()
            if self.shard.dtype == dtype:
                sums.copy_(self.shard, non_blocking=True)
            else:
                self._crossing = self._borrow()
                sums.copy_(self._crossing.copy_(self.shard, non_blocking=True))
        return sums

    def keep_received(self) -> None:
        """Copy what has come to the host, unless that has been done."""
        if self._incoming is not None:
            leaving, self._incoming = self._rounded(self._incoming), None
            self.keep(leaving)

    def _rounded(self, sums: Tensor) -> Tensor:
        """Return sums in the dtype in which the host keeps them, and give up the wider ones."""
        if self.shard.dtype == sums.dtype:
            return sums
        crossing, self._crossing = self._crossing, None
        if crossing is None:
            crossing = self._borrow()
        crossing.copy_(sums)
        self._arena.give_back("bucket", sums)
        return crossing

    def bring(self) -> Tensor:
        """Return a copy of the shard on the device, in a bucket."""
        self._to_host.follow()
        return self._borrow().copy_(self.shard, non_blocking=True)

    def keep(self, near: Tensor) -> None:
        """Copy a bucket to the shard, and let go of it."""
        self._to_host.copy(self.shard, near, partial(self._arena.give_back, "bucket", near))

    def _borrow(self) -> Tensor:
        return self._arena.borrow("bucket", self.shard.numel(), self.shard.dtype)


def _then(summed: Pending, then: Callable[[], object]) -> Pending:
    """Do something with a sum when it has been waited for."""

    def finish() -> None:
        summed.wait()
        then()

    return Pending(finish)


def _cut(buffer: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    return [buffer[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]
