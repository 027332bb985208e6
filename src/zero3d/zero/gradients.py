"""A unit's gradients: taken from autograd, reduced over the dp axis, kept as a shard of their sum.

Where dp ranks have copies of shards (Setting.across), a reduction sums over the ranks that states are cut over, and
what a step has in the end is summed once more over the copies: `sum_copies`.

    full    [sources, total]  local gradients of this rank, on their way to the reduction
    shard   [total/N]  reduced dtype; the sum over ranks of this rank's slice
    pieces             1-D views of parameters' parts in either, for the optimizer; made anew only where it moves

Note 0, shards on the host (stages 2 and 3). A reduction goes to a bucket on the device, with what the shard has come
back to it first where it adds: on the side stream, since the link has both ways at once, and a sum on the host would
read and write its memory twice as often as two copies do. The bucket then goes to the host beside compute, and is let
go of after the next one. The bits are those of a shard on the device. A shard that is narrower there, by choice, is
rounded on the device and crosses in its own dtype, both ways: what is added is rounded after every micro-batch.

Experts have gradients of several sources, the ranks of the ep axis, of which each has a row; the rows are summed in
rank order, and that sum is reduced over the ranks that have the same experts. Others have one row.

Note 1, where the sum may live. When local gradients already have the reduced dtype and the whole
buffer is kept, the shard is this rank's slot of the buffer. Gradients that arrive after a
reduction would overwrite it, so it is stashed until the next reduction has been added.

Note 2, gradients that are held. A backward's gradients of a unit are copied in together, one launch for all of them:
`take` holds them until the unit is complete. Large ones are not worth it, whose copies run longer than a launch takes:
no unit holds more than HELD bytes.

Note 3, one rank alone. Where a unit is reduced after every micro-batch and no other rank has gradients of it, there is
nothing to sum: they add up in the shard, as they come, and have no bucket.

Note 4, gradients that arrive after the shard was summed over copies (or while it is): what comes of them here is a term
of a sum over all ranks, as the first was, and not of that sum. They have a bucket and a shard of their own, which is
summed over copies by itself and then added. The first sum is waited for in its turn, not when they arrive: that may
be at another moment on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero3d.blueprint.layout import Piece, UnitLayout
from zero3d.blueprint.unit import UnitPlan
from zero3d.distributed.axis import DONE, Pending
from zero3d.distributed.collectives import Comm, same_memory
from zero3d.precision import torch_dtype
from zero3d.spec.zero import SAME
from zero3d.zero.policy import Setting, State, parameter_views
from zero3d.zero.streams import ToHost

HELD = 1 << 24  # bytes of a unit's gradients that wait for others: of which a copy takes about 10 us on an accelerator


class Gradients:
    """Owns a unit's gradients from autograd to the reduced shard."""

    def __init__(self, name: str, layout: UnitLayout, setting: Setting) -> None:
        self._name = name
        self._layout = layout
        self._setting = setting
        self._arena = setting.arena
        self._wide = setting.wide
        self._room, self._used = layout.total * setting.sources, layout.numel * setting.sources
        self.full: Tensor | None = None
        self._sum_of_sources: Tensor | None = None  # on its way to the reduction
        self._views: list[Tensor] = []
        self._shard: Tensor
        self._shard_pieces: list[Tensor] = []
        self._whole_pieces: list[Tensor] = []
        self.state = State.EMPTY
        self._filled: set[int] = set()
        self._held: dict[int, Tensor] = {}  # Note 2
        self._held_bytes = 0
        self._adding: set[int] = set()  # of those that are held, to what came before
        self._summed = False  # the shard already holds a sum of this step
        self._stash: Tensor | None = None  # Note 1
        self._is_of_all = False  # the shard is, or will be, summed over the ranks that have copies of it
        self._late: Tensor | None = None  # Note 4: what reductions come to
        self._away: Tensor | None = None  # Note 4: the buffer that `full` is when no gradient is late
        self._incoming: Tensor | None = None  # Note 0
        self._crossing: Tensor | None = None  # the same in the shard's own dtype, where that is narrower
        self._pending = DONE
        self._gathering: Pending | None = None  # stage 0, since the sum was there
        self._keep()

    def _keep(self) -> None:
        """Allocate the buffers that live between steps."""
        layout, setting, arena = self._layout, self._setting, self._setting.arena
        self._follow(setting.plan)
        assert setting.plan.gradients is not None
        kept, own = setting.plan.gradients.kept, setting.plan.gradients.shard
        if kept:
            self._use(arena.allocate("gradients", self._room, self._used, self._local))
        if not own:
            assert self.full is not None
            self.shard = setting.slot(self._first(self.full))
        elif self._name in setting.kept:
            self.shard = setting.kept[self._name]
        else:
            self.shard = arena.allocate("gradients", layout.shard, layout.used_per_shard, self._wide)

    def _follow(self, plan: UnitPlan) -> None:
        """Keep and send gradients from now on as this plan says."""
        assert plan.gradients is not None
        self.unit_plan, self.plan = plan, plan.gradients
        self._local, self.travels = torch_dtype(self.plan.local), torch_dtype(self.plan.travels)
        self._wire = torch_dtype(self.plan.sums)

    def _use(self, full: Tensor) -> None:
        self.full, self._whole_pieces = full, []
        self._views = [view for row in self._rows(full) for view in parameter_views(row, self._layout)]

    def _rows(self, full: Tensor) -> list[Tensor]:
        """Return what each source has in a buffer."""
        return list(full.view(self._setting.sources, -1))

    def _first(self, full: Tensor) -> Tensor:
        """Return the first row, where the sources' sum may be made."""
        return full[: self._layout.total]

    @property
    def shard(self) -> Tensor:
        """This rank's reduced gradients."""
        return self._shard

    @shard.setter
    def shard(self, shard: Tensor) -> None:
        self._shard, self._shard_pieces = shard, []

    @property
    def local(self) -> torch.dtype:
        """In which gradients are taken from autograd."""
        return self._local

    def shard_pieces(self) -> list[Tensor]:
        """Return this rank's pieces of the reduced gradients, in slot order."""
        if not self._shard_pieces:
            self._shard_pieces = _cut(self._shard, self._layout.pieces(self._setting.comm.rank))
        return self._shard_pieces

    def owned_pieces(self) -> list[Tensor]:
        """Return the pieces of `owned`, in slot order."""
        if self._gathering is None:
            return self.shard_pieces()
        self.wait()
        if not self._whole_pieces:
            self._whole_pieces = _cut(self.whole, self._layout.whole_pieces())
        return self._whole_pieces

    @property
    def sums(self) -> torch.dtype:
        """Return the dtype in which sums travel between copies of shards."""
        return self._wire

    @property
    def across(self) -> Comm:
        """Return the ranks that have copies of the shard."""
        return self._setting.across

    @property
    def slow(self) -> str:
        """Return how these sums are coded on their way: `zero.slow_wire`."""
        return SAME if self._setting.slow is None else self._setting.slow.form

    @property
    def accumulates(self) -> bool:
        """Whether local gradients are kept in the reduced dtype, by plan or since a second one came."""
        return self.plan.kept and self._local == self._wide

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers that live between steps."""
        return [self.shard] if self.full is None else [self.full, self.shard]

    @property
    def differs_on_copies(self) -> bool:
        """Return whether a sum over the ranks that have copies of the shard is still to come."""
        return self._setting.across.size > 1 and (not self._is_of_all or self._late is not None)

    @property
    def whole(self) -> Tensor:
        """All reduced gradients (stage 0): other ranks' are there after `gather`."""
        assert self.full is not None
        return self._first(self.full)

    @property
    def owned(self) -> Tensor:
        """Reduced gradients of what this rank updates: its shard, at stage 0 all that was gathered."""
        if self._gathering is None:
            return self.shard
        self.wait()
        return self.whole

    @property
    def comes_and_goes(self) -> bool:
        """Return whether a bucket is allocated for local gradients in each backward and freed by their reduction."""
        return not self.plan.kept

    @property
    def _is_sum(self) -> bool:
        """Return whether the local gradients of all micro-batches add up in the shard itself (Note 3)."""
        return self.plan.kept and self.unit_plan.policy.often

    @property
    def _in_place(self) -> bool:
        return self.full is not None and same_memory(self.shard, self._setting.slot(self._first(self.full)))

    def take(self, index: int, grad: Tensor) -> None:
        """Hold a parameter's gradient until it lands, alone or with others; those of a source follow another's."""
        self._open()
        assert self.full is not None
        if index in self._held:
            self.land()
        if index in self._filled:
            if self.full.dtype != self._wide:
                self.land()
                self._widen()
            self._adding.add(index)
        self._filled.add(index)
        self._held[index] = grad.to_dense() if grad.is_sparse else grad
        self._held_bytes += self._held[index].untyped_storage().nbytes()
        if self._held_bytes > HELD:
            self.land()

    def land(self) -> None:
        """Copy the gradients that are held in, those of parameters that had one before are added to it."""
        new = [index for index in self._held if index not in self._adding]
        if new:
            torch._foreach_copy_([self._views[index] for index in new], [self._held[index] for index in new])
        if self._adding:
            again = list(self._adding)
            torch._foreach_add_([self._views[index] for index in again], [self._held[index] for index in again])
        self._let_go()

    def _let_go(self) -> None:
        self._held.clear()
        self._adding.clear()
        self._held_bytes = 0

    @property
    def to_host(self) -> ToHost:
        """What copies the shard to the host, where it is kept there."""
        assert self._setting.to_host is not None
        return self._setting.to_host

    def _open(self) -> None:
        """Make room for local gradients."""
        self.finish()
        self._forget_gather()
        if self._is_of_all and self._late is None:  # Note 4
            self._late, self._summed = self._arena.borrow("bucket", self.shard.numel(), self._wide), False
            self._filled.clear()
        if self._late is not None and self._in_place:
            self._away = self.full
            self._use(self._arena.borrow("bucket", self._room, self._local))
        elif self.state is State.REDUCED and self._in_place and not self._is_sum:
            self._stash = self._arena.borrow("bucket", self.shard.numel(), self.shard.dtype).copy_(self.shard)
        if self.full is None:
            self._use(self._arena.borrow("bucket", self._room, self._local))
        self.state = State.FILLING

    def _widen(self) -> None:
        """Accumulate in the reduced dtype from the second contribution on."""
        old = self.full
        assert old is not None
        if not self.plan.kept:
            self._use(self._arena.borrow("bucket", self._room, self._wide).copy_(old))
            self._arena.give_back("bucket", old)
            return
        wide = self._arena.allocate("gradients", self._room, self._used, self._wide)
        self._use(wide.copy_(old))
        self._arena.free("gradients", old, self._used)
        self._follow(self.unit_plan._replace(gradients=self.plan.widened(self.unit_plan.policy.master)))
        if not self._summed and self._late is None:  # otherwise the separate shard keeps its sum until `reset`
            self._move_shard(wide)

    def _move_shard(self, full: Tensor) -> None:
        """Move the shard to this rank's slot of the wide local buffer."""
        self._arena.free("gradients", self.shard, self._layout.used_per_shard)
        self.shard = self._setting.slot(self._first(full))

    def fill_up(self) -> None:
        """Let parameters without a gradient count as zero, before `reduce`."""
        self._open()
        self.land()
        missing = [view for index, view in enumerate(self._views) if index not in self._filled]
        if missing:
            torch._foreach_zero_(missing)

    def reduce(self, single: bool) -> None:
        """Start summing local gradients over the dp axis into what this rank owns.

        full  [sources, Psi]  local dtype  consumed
        shard [Psi/N]  reduced dtype   accumulated
        single: they are one backward's, so that the narrow dtype they may travel in rounds no sum of
        several. Moves (N-1)/N Psi elements per rank (reduce-scatter, ZeRO section 7).
        """
        assert self.full is not None
        add = self._summed and not self._in_place
        wire = self.travels if single else self._wire
        shard = self.shard if self._late is None else self._late
        if self._name in self._setting.kept and self._late is None:
            shard = self._incoming = self._arena.borrow("bucket", self.shard.numel(), self._wide)
            if add:
                self.to_host.follow()
                self._bring_back(shard)
        self._pending = self._setting.comm.reduce_scatter(self._of_sources(self.full), shard, self._name, wire, add)
        self.state = State.REDUCING

    def add_up(self) -> None:
        """Wait for a reduction under way on the current stream, and add up there what has come."""
        self._pending.wait()

    def _of_sources(self, full: Tensor) -> Tensor:
        """Return the sum of all sources in rank order, in the reduced dtype: that of a row if it is wide enough."""
        first, *others = self._rows(full)
        if not others:
            return full
        if first.dtype != self._wide:
            first = self._sum_of_sources = self._arena.borrow("wire", len(first), self._wide).copy_(first)
        for row in others:
            first.add_(row)
        return first

    def finish(self) -> None:
        """Complete a reduction under way."""
        if self.state is not State.REDUCING:
            return
        self._pending.wait()
        if self._incoming is not None:
            leaving, self._incoming = self._rounded(self._incoming), None
            self.to_host.copy(self.shard, leaving, partial(self._arena.give_back, "bucket", leaving))
        self._drop_sum_of_sources()
        if self._stash is not None:
            self.shard.add_(self._stash)
            self._drop_stash()
        if not self._is_sum or self._late is not None:
            self._filled.clear()
        self._summed = True
        self._drop_bucket()
        self.state = State.REDUCED

    def _bring_back(self, sums: Tensor) -> None:
        """Copy what the host has of this step's sums into a bucket on the device."""
        if self.shard.dtype == sums.dtype:
            sums.copy_(self.shard, non_blocking=True)
            return
        self._crossing = self._arena.borrow("bucket", len(self.shard), self.shard.dtype)
        sums.copy_(self._crossing.copy_(self.shard, non_blocking=True))

    def _rounded(self, sums: Tensor) -> Tensor:
        """Return sums in the dtype in which the host keeps them, and give up the wider ones."""
        if self.shard.dtype == sums.dtype:
            return sums
        crossing, self._crossing = self._crossing, None
        if crossing is None:
            crossing = self._arena.borrow("bucket", len(self.shard), self.shard.dtype)
        crossing.copy_(sums)
        self._arena.give_back("bucket", sums)
        return crossing

    def gather(self) -> None:
        """Start giving every rank's sums to all where each updates all (stage 0): the second half of an all-reduce.

        A sum is gathered once: this does nothing where that was begun. A unit that has taken late gradients since its
        sum was over needs nothing of it, and takes its turn: peers that take theirs later gather that sum now.
        """
        if self.unit_plan.row.shards_optimizer:
            return
        if self.state is State.FILLING:
            unused = self._arena.borrow("bucket", self._layout.total, self.shard.dtype)
            self._setting.comm.all_gather(unused, self._setting.slot(unused), self._name).wait()
            self._arena.give_back("bucket", unused)
        elif self._gathering is None:
            self._gathering = self._setting.comm.all_gather(self.whole, self.shard, self._name)

    def wait(self) -> None:
        """Wait for what is gathered."""
        if self._gathering is not None:
            self._gathering.wait()

    def _forget_gather(self) -> None:
        """Let a gather end whose sum is over, or was not the last."""
        self.wait()
        self._gathering = None

    def close(self) -> None:
        """Do nothing for a backward that ends in no reduction: its gradients add up."""

    def complete(self) -> None:
        """Complete the step's sum: nothing more comes."""
        self.finish()
        if self._setting.to_host is not None:
            self._setting.to_host.finish()

    def sum_copies(self, step: int) -> Pending:
        """Start summing the shard of a step, by its number, over the ranks that have a copy of it; wait for the result.

        Gradients that came after that are summed so once more, and added. Moves 2 (R-1)/R Psi/N elements per rank, over
        R copies, or what a narrow form of terms takes.
        """
        late, self._late = self._late, None
        again, self._is_of_all = self._is_of_all, True
        if late is not None:
            return self._then(self._sum_copies(late, step, again), partial(self._add_late, late))
        if self._is_near:
            return self._sum_copies(self.shard, step, again)
        near = self._from_host()
        return self._then(self._sum_copies(near, step, again), partial(self._to_host, near))

    @property
    def _is_near(self) -> bool:
        """Return whether the shard is where this rank computes: by the type of device, whatever number it is given."""
        return self.shard.device.type == self._setting.across.device.type

    @staticmethod
    def _then(summed: Pending, then: Callable[[], object]) -> Pending:
        """Do something with a sum when it has been waited for."""

        def finish() -> None:
            summed.wait()
            then()

        return Pending(finish)

    def _add_late(self, late: Tensor) -> None:
        if self._is_near:
            self.shard.add_(late)
        else:
            self._to_host(self._from_host().add_(late))
        self._arena.give_back("bucket", late)

    def _from_host(self) -> Tensor:
        """Return a copy of a shard that the host keeps, in a bucket."""
        self.to_host.follow()
        near = self._arena.borrow("bucket", self.shard.numel(), self.shard.dtype)
        return near.copy_(self.shard, non_blocking=True)

    def _to_host(self, near: Tensor) -> None:
        """Copy a bucket to the shard that the host keeps, and let go of it."""
        self.to_host.copy(self.shard, near, partial(self._arena.give_back, "bucket", near))

    def _sum_copies(self, shard: Tensor, step: int, again: bool) -> Pending:
        across, slow = self._setting.across, self._setting.slow
        if slow is None:
            return across.all_reduce(shard, self._name, self._wire)
        gaps = self._layout.gaps(self._setting.comm.rank)
        if gaps:  # of buckets nobody has written there, and a block has one scale
            torch._foreach_zero_([shard[start:stop] for start, stop in gaps])
        place = f"{step} {self._name} {self._setting.comm.rank} {across.rank} {self._setting.part}{' again' * again}"
        return across.all_reduce_coded(shard, self._name, slow.form, slow.noise(place, shard.device))

    def reset(self) -> None:
        """Forget this step's gradients."""
        self._let_go()
        self.finish()
        self._forget_gather()
        self._drop_stash()
        self._drop_bucket()
        if self._late is not None:
            self._arena.give_back("bucket", self._late)
        self._late, self._is_of_all = None, False
        self._filled.clear()
        self._summed = False
        self.state = State.EMPTY
        if self.full is not None and self.accumulates and not self._in_place:
            self._move_shard(self.full)

    def _drop_sum_of_sources(self) -> None:
        if self._sum_of_sources is not None:
            self._arena.give_back("wire", self._sum_of_sources)
            self._sum_of_sources = None

    def _drop_stash(self) -> None:
        if self._stash is not None:
            self._arena.give_back("bucket", self._stash)
            self._stash = None

    def _drop_bucket(self) -> None:
        if (not self.plan.kept or self._away is not None) and self.full is not None:
            self._arena.give_back("bucket", self.full)
            self.full, self._views = None, []
        if self._away is not None:
            self._use(self._away)
            self._away = None


def _cut(buffer: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the views of pieces in a buffer."""
    return [buffer[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]
