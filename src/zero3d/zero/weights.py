"""A unit's parameters: gathered into one storage, released, updated from their master.

    full    [total]    compute dtype   every parameter is a view into it while gathered
    shard   [total/N]  compute dtype   this rank's slice: a view of full where full is kept, a record elsewhere, or
                                       nothing, where each gather casts the masters
    masters            fp32            of what this rank updates (masters.py)

Note 1, placeholders. While SHARDED a parameter's data is one NaN expanded to its shape: reading
a view of a freed storage is a segmentation fault, reading a NaN is not. Before that its class refuses a read
(released_parameters.py). Each parameter has its
own, so that a write which lands on it is noticed at the next gather.

Note 2, one storage per unit for ever. Autograd saves views of `full`; freeing and refilling that
same storage brings them alive again, which is why a release between forward and backward is free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.blueprint.layout import Piece, UnitLayout
from zero3d.distributed.axis import DONE, Pending
from zero3d.distributed.collectives import same_memory
from zero3d.errors import LayoutError, Zero3dError
from zero3d.precision import joined, to_compute
from zero3d.zero.buckets import InMasters, InRecord, OnDevice, ShardPlace
from zero3d.zero.masters import REMAINDER, Masters
from zero3d.zero.pending_parameters import arrived, expect
from zero3d.zero.released_parameters import RELEASED, Told, gather, release, untold
from zero3d.zero.streams import compute_stream, wait_on
from zero3d.zero.unit_parts import State, UnitParts, parameter_views
from zero3d.zero.wires import Wire


class Weights:
    """Owns a unit's parameters: their storage, this rank's shard and its masters.

    records   the unit's buckets in records, if it has any
    place     the place of the weights that this rank updates
    keeps_full  `full` stays allocated while the unit is released: below stage 3, for a step, or for one rank
    pending   new weights were left on their way (`leave`), or their update is due (`defer`)
    _received  whole parameters that were gathered to this rank alone
    """

    pending = False
    _exact = False
    _received: list[Tensor] | None = None
    _due: Callable[[], None] | None = None

    def __init__(
        self,
        name: str,
        params: list[nn.Parameter],
        layout: UnitLayout,
        dtype: torch.dtype,
        parts: UnitParts,
        fill: Callable[[Tensor], None],
    ) -> None:
        self.name = name
        self.params = params
        self.layout = layout
        self._parts = parts
        self.trainable = params[0].requires_grad
        self.sharded = parts.plan.row.shards_parameters
        self.updates_all = not parts.plan.row.shards_optimizer  # every rank, every parameter (stage 0)
        self.state = State.FULL
        self._pending_gather = DONE
        self.records = parts.records.get(name)
        self.keeps_full = parts.plan.whole
        if self.keeps_full:
            self.full = parts.arena.allocate("parameters", layout.total, layout.numel, dtype)
            self.place: ShardPlace = OnDevice(self.full if self.updates_all else parts.slot(self.full))
        else:
            self.full = parts.arena.borrow("gathered", layout.total, dtype)
            self.place = self._own_place(dtype)
        self._wire = Wire(name, layout, dtype, parts, self.place) if self.sharded else None
        self.views = parameter_views(self.full, layout)
        self.masters = self._own_masters(dtype)
        self._placeholders = [placeholder(p, dtype, self.full.device) for p in params]
        self._lent: int | None = None  # how many tensors had the memory of `full` before the caller was given it
        self.before_refusing: list[Callable[[], None]] = []  # checks that may say more of a read of released parameters
        self._told = [Told(slot.name, RELEASED, self.before_refusing) for slot in layout.slots]
        self._adopt(fill)
        self._point_at(self.views)
        self._versions = [p._version for p in self.params]
        if self.sharded:
            self.release()

    def train(self, parts: UnitParts) -> None:
        """Make masters of weights that were frozen, from these. parts: of the unit that is trained."""
        dtype, frozen, shard = self.full.dtype, self.masters, self.place
        self._parts, self.trainable = parts, True
        if parts.plan.from_masters:
            self.place = self._own_place(dtype)
        self.masters = self._own_masters(dtype)
        self.masters.from_weights(shard.view())
        self.masters.go_on_from(frozen)
        if self.place is not shard:
            parts.arena.let_go("parameters", self.layout.shard, self.layout.used_per_shard, dtype)
            assert self._wire is not None
            self._wire.place = self.place

    def _own_place(self, dtype: torch.dtype) -> ShardPlace:
        parts, layout = self._parts, self.layout
        if parts.plan.from_masters:
            masters = parts.arena.allocate("optimizer", layout.shard, layout.used_per_shard, parts.wide)
            return InMasters(masters, dtype, parts.arena)
        if self.records is not None and self.records.shard is not None:
            return InRecord(self.records.records, self.records.shard, parts.arena.device, self.records.passes)
        return OnDevice(parts.arena.allocate("parameters", layout.shard, layout.used_per_shard, dtype))

    def _own_masters(self, dtype: torch.dtype) -> Masters:
        if isinstance(self.place, InMasters):
            return Masters.alone(self.place.masters, self.place, dtype)
        wide = self._parts.wide if self.trainable else dtype
        if self.records is not None:
            return Masters(self.records, self.place, wide, dtype)
        weights, stored = self.shard_or_full, None
        if dtype != wide:
            form = REMAINDER if self._parts.plan.policy.splits else wide
            stored = self._parts.arena.allocate("optimizer", weights.numel(), self.used, form)
        return Masters.on_device(weights, wide, stored)

    @property
    def shard_or_full(self) -> Tensor:
        """Return what this rank updates of the unit, in compute dtype: its shard, or everything at stage 0.

        On a disk it is only read; where masters are cast in gathers it is a copy.
        """
        return self.place.view()

    @property
    def elements(self) -> int:
        """Return how many elements of the unit this rank updates, padding among them."""
        return self.layout.total if self.updates_all else self.layout.shard

    @property
    def shard(self) -> Tensor:
        """This rank's slice; it may only be read on a disk, or where masters are cast in gathers."""
        return self._parts.slot(self.full) if self.updates_all else self.place.view()

    @property
    def coded(self) -> bool:
        """Whether what is gathered travels in blocks of 8 bits."""
        return self._wire is not None and self._wire.codec is not None

    @property
    def bytes_to_open(self) -> int:
        """Bytes that a gather and `open` add: the storage, or a copy of weights that masters are made of."""
        if not self.keeps_full:
            return self.full.element_size() * self.layout.total
        return self.full.element_size() * self.elements if self.masters.copies_weights else 0

    @property
    def node(self) -> int:
        """How many neighbours keep a second shard together: 1 where nobody does."""
        return 1 if self._wire is None or self._wire.second is None else self._wire.second.comm.size

    @property
    def second_shard(self) -> Tensor | None:
        """This rank's part of the second shard, if there is one."""
        return None if self._wire is None or self._wire.second is None else self._wire.second.shard

    @property
    def comes_late(self) -> bool:
        """Whether new weights may still be on their way to parameters that are not gathered: sent, or not updated."""
        return not self.sharded and (not self.updates_all or self.records is not None)

    @property
    def used(self) -> Fraction | int:
        """Parameters that `shard_or_full` stands for, padding apart."""
        return self.layout.numel if self.updates_all else self.layout.used_per_shard

    def update_pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of `shard_or_full`, in slot order."""
        return self.layout.whole_pieces() if self.updates_all else self.layout.pieces(rank)

    def _adopt(self, fill: Callable[[Tensor], None]) -> None:
        """Take the first weights: this rank's slice [total/N] and, where all are kept, all ((N-1)/N Psi elements)."""
        comm, layout = self._parts.comm, self.layout
        start = comm.rank * layout.shard if self.updates_all else 0
        if self.trainable and self.full.dtype != self._parts.wide:
            stored = self.masters.read(start, start + layout.shard) if self.records is None else None
            first = self._zeros(self.masters.dtype) if stored is None else joined(stored)
            fill(first)
            self.masters.write(start, first)
            self._share_masters()
            self._cast()
        elif self.records is None:
            fill(self.shard)
        else:
            first = self._zeros(self.full.dtype)
            fill(first)
            self.masters.write(start, first)
        if not self.sharded:
            comm.all_gather(self.full, self.shard, "-").wait()

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return self.full.new_zeros(self.layout.shard, dtype=dtype)

    @property
    def from_records(self) -> bool:
        """Whether this rank's shard comes from a record off the device."""
        return isinstance(self.place, InRecord)

    # --- gather and release ---------------------------------------------------------------------

    def gather(self, exactly: bool = False) -> None:
        """Start filling `full` from all shards; moves (N-1)/N Psi elements per rank.

        exactly  with the weights themselves, where a codec makes others of them
        """
        assert self.state is State.SHARDED
        self.check()
        self._pending_gather = self._gather(exactly, fill=not self.keeps_full)
        self.state = State.GATHERING

    def _gather(self, exactly: bool, fill: bool) -> Pending:
        assert self._wire is not None
        self._exact = exactly
        return (self._wire.gather_weights if exactly else self._wire.gather)(self.full, fill)

    def gather_to_first(self) -> None:
        """Have parameters be the weights themselves on the first rank, in memory that is not `full`.

        The others give 1/N Psi each, and stay SHARDED.
        """
        assert self.state is State.SHARDED
        assert self._wire is not None
        self.check()
        whole = self._wire.gather_to_first()
        if whole is not None:
            self._received = parameter_views(whole, self.layout)
            gather(self.params)
            self._point_at(self._received)
            self.state = State.FULL

    def share_first(self) -> None:
        """Gather on all ranks what `gather_to_first` has left on the first: others need it now; (N-1)/N Psi each."""
        self.release()
        self.gather(exactly=True)

    def show(self, exactly: bool) -> None:
        """Show a gathered unit's own weights in its parameters, or those of forwards where coding changes them."""
        if self.coded and self._exact != exactly:
            self.ready()
            self._gather(exactly, fill=False).wait()

    def ready(self) -> None:
        """Complete an update, a gather or a refresh: parameters are views of `full`."""
        if self.pending:
            self._complete()
        self._pending_gather.wait()
        if self.state in (State.GATHERING, State.KEPT):
            gather(self.params)
            self._point_at(self.views)
            self.state = State.FULL

    def keep(self) -> None:
        """Keep `full`, but have parameters refuse reads: a use now could not be followed into its backward."""
        if self.state is State.KEPT:
            return
        self.check()
        self._point_at(self._placeholders)
        release(self.params, self._told)
        self.state = State.KEPT

    def release(self) -> None:
        """Go back to placeholders and free `full`, unless it is kept: stale then, but for the shard in it."""
        if self.state is State.SHARDED:  # its gather failed, or was to another rank
            return
        if self.state is not State.KEPT:
            self.ready()
            self.keep()
        self._free()
        self.state = State.SHARDED

    def _free(self) -> None:
        lost = self._pending_gather.failed  # of its peers one is gone, another may still write there
        if self._received is None and not self.keeps_full and not lost:
            self._parts.arena.drain("gathered", self.full, self._parts.plan.policy.poison, self._views_are_kept())
        self._received = None

    def _views_are_kept(self) -> bool:
        """Return whether the caller still has views of `full`, or a graph that has: a read of them must not crash."""
        if self._lent is not None and _holders(self.full) <= self._lent:
            self._lent = None
        return self._lent is not None

    def _point_at(self, targets: list[Tensor]) -> None:
        for p, target in zip(self.params, targets, strict=True):
            p.data = target

    def check(self) -> None:
        """Raise LayoutError if a parameter was written or re-pointed behind the engine's back."""
        whole = self.views if self._received is None else self._received
        if self.state is State.FULL:
            self._check(whole)
        else:
            with untold():
                self._check(self._placeholders)

    def _check(self, targets: list[Tensor]) -> None:
        for slot, p, target, version in zip(self.layout.slots, self.params, targets, self._versions, strict=True):
            if p.requires_grad and not self.trainable and torch.is_grad_enabled():
                raise LayoutError(
                    f"parameter {slot.name!r} was unfrozen outside engine.full_params(), and has no optimizer states: "
                    f"call engine.unfreeze({slot.name!r}), or requires_grad_(True) inside `with engine.full_params():`."
                )
            if p._version != version:
                what = "was written in place" if same_memory(p, target) else "was replaced"
            elif not same_memory(p, target):
                what = "has other data than its unit gave it"
            else:
                continue
            raise LayoutError(
                f"parameter {slot.name!r} {what} outside engine.full_params(): the change would be lost. "
                "Change weights inside `with engine.full_params():`, or before the Engine is built "
                "(requires_grad_, resize_token_embeddings, tie_weights, LoRA merges)."
            )

    # --- after an update ------------------------------------------------------------------------

    def changed(self) -> None:
        """Say that shards have other weights now, on all ranks together: a second shard is not of these."""
        if self._wire is not None and self._wire.second is not None:
            self._wire.second.drop()

    def refresh(self) -> Pending:
        """Cast the masters to weights, and `send` them."""
        self.ready()
        self._cast()
        return self.send()

    def _cast(self) -> None:
        if self.masters.cast is not None:
            masters, weights = self.masters.cast
            to_compute(masters, weights.dtype, out=weights)

    def send(self) -> Pending:
        """Start to send weights that were cast to all ranks at stages 1 and 2; (N-1)/N Psi elements each.

        `ready` waits for them.
        """
        self.changed()
        if self.sharded or self.updates_all:
            return DONE
        self._pending_gather = self._share_shards()
        return self._pending_gather

    def leave(self) -> None:
        """Leave the gather of `send` on its way where any use of a parameter will wait for it; else wait now."""
        if not self._pending_gather.over:
            self._waiting_stream = compute_stream(self._parts.arena.device)
            self.pending = expect(self.params, self.ready)
        if not self.pending:
            self.ready()

    def defer(self, update: Callable[[], None]) -> None:
        """Leave an update for when its weights are used: when the unit is gathered, below stage 3 when it is `ready`.

        Where a parameter cannot wait, being of a class of its own, it is made now.
        """
        self._due = update
        self.changed()
        if not self.sharded:
            self._waiting_stream = compute_stream(self._parts.arena.device)
            self.pending = expect(self.params, self.ready)
            if not self.pending:
                self.flush()
                self.ready()

    def flush(self) -> None:
        """Make an update that is due."""
        if self._due is not None:
            self._due()  # one that fails is due still
            self._due = None

    @_disable_dynamo
    def _complete(self) -> None:
        """Wait for what was left on its way. Raises Zero3dError where an earlier wait failed."""
        self.flush()
        if self._pending_gather.failed:
            raise Zero3dError(f"new weights of unit {self.name!r} did not arrive: look at the first error.")
        wait_on(self._waiting_stream, self._pending_gather)
        self.pending = False
        arrived(self.params)

    def __del__(self) -> None:
        """Complete what was left on its way: its memory goes, and peers still want what this rank sends."""
        if self.pending:
            with suppress(Zero3dError, RuntimeError):
                self.flush()
                wait_on(self._waiting_stream, self._pending_gather)

    def lend(self) -> None:
        """Look who has the memory of `full`, before the caller may take views of it."""
        if self._lent is None and self.state is State.SHARDED and not self.keeps_full:
            self._lent = _holders(self.full)

    def open(self) -> None:
        """Let gathered parameters be written until `absorb`."""
        if self.keeps_full:  # they are this rank's weights
            self.masters.hold(self._parts.arena)

    def absorb(self) -> bool:
        """Keep what was written into gathered parameters, and return whether anything was."""
        written = [p._version for p in self.params] != self._versions
        self._versions = [p._version for p in self.params]
        values = self.full if self.updates_all else self._parts.slot(self.full)
        return self.masters.absorb(values) or written

    def take_other_dtypes(self) -> None:
        """Cast data of another dtype that gathered parameters were given; masters that were shown so change no bit."""
        for p, view in zip(self.params, self.views, strict=True):
            if p.dtype != view.dtype and p.shape == view.shape:
                view.copy_(to_compute(p.data, view.dtype))  # experts' views have gaps
                p.data = view

    def replaced(self) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
        """Return each gathered parameter whose data the caller has put in place of its view: with view and a copy."""
        return [
            (p, view, p.detach().clone())
            for p, view in zip(self.params, self.views, strict=True)
            if not same_memory(p, view) or p.stride() != view.stride()
        ]

    def take_resized(self) -> dict[str, Tensor]:
        """Return copies of data of another shape that the caller has given gathered parameters, by name; undo that."""
        found = {}
        for slot, p, view in zip(self.layout.slots, self.params, self.views, strict=True):
            if p.shape != view.shape:
                found[slot.name] = p.detach().clone(memory_format=torch.contiguous_format)
                p.data = view
        return found

    def share(self) -> Pending:
        """Make every rank's gathered parameters agree after writes: each slice's owner wins, of several the first."""
        self.changed()
        self._share_copies()
        return self._share_shards()

    def _share_shards(self) -> Pending:
        """Start to give all ranks that the unit is cut over the whole of it."""
        self._share_masters()
        own = self.shard if self._wire is None else self._wire.bring(self.full)
        return self._parts.comm.all_gather(self.full, own, self.name)

    def _share_copies(self) -> None:
        """Give ranks that have copies of a shard the first one's masters; Psi/N of them."""
        across, layout = self._parts.across, self.layout
        if across.size == 1:
            return
        start = self._parts.comm.rank * layout.shard if self.updates_all else 0
        values = joined(self.masters.read(start, start + layout.shard)).to(across.device, copy=True)
        across.broadcast(values, self.name)
        self.masters.write(start, values)
        self._cast()

    def _share_masters(self) -> None:
        """Give all ranks the owners' masters where each updates all (stage 0); (N-1)/N Psi elements of those stored."""
        if not self.updates_all:
            return
        with self.masters.whole(self._parts.arena) as stored:
            if stored is not None:
                travel = stored.view(self.full.dtype) if stored.dtype == REMAINDER else stored  # no backend sends int16
                self._parts.comm.all_gather(travel, self._parts.slot(travel), self.name).wait()


def _holders(buffer: Tensor) -> int:
    """Return how many tensors have a buffer's memory."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


def is_placeholder(p: Tensor) -> bool:
    """Return whether one element stands for a parameter, which an engine has released or owns."""
    return p.numel() > 1 and not any(p.stride())


def placeholder(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one NaN in the shape of a released parameter (Note 1); for bytes, the bytes of a NaN."""
    value: float = float("nan") if dtype.is_floating_point else 0
    if dtype == torch.uint8:
        value = 255
    return torch.full((), value, dtype=dtype, device=device).expand(p.shape)
