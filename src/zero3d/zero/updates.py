"""Updates of masters by a torch optimizer on the device, over all pieces of units or bucket by bucket.

    masters that the optimizer has views of    all at once, or in portions where multi-tensor calls take memory for all
    others, bucket by bucket                   split ones; states in records; small buckets several at a time

        widen   master = weight, remainder; bf16 moments to fp32        scratch, one bucket long
        step    the optimizer's own, on this bucket's pieces, which are views of these
        narrow  weight, remainder = master; moments rounded

A piece that reaches over several buckets is cut at their borders, multiples of 16 elements as all cuts are. An
optimizer has a tensor and states, its step count included, for every part. An element's update has the same bits as in
the whole piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.blueprint.layout import Piece
from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import cast_scratch, update_bucket
from zero3d.precision import Halves, cast_all, join_master, rounds_away, split_master
from zero3d.spec.optimizer import TEMPORARIES, temporary_elements
from zero3d.zero.buckets import MASTER, WEIGHTS, Bucket, UnitBuckets
from zero3d.zero.masters import REMAINDER, absent
from zero3d.zero.released_parameters import untold
from zero3d.zero.unit import Unit

T = TypeVar("T")
Options = Sequence[Mapping[str, Any]]  # of an optimizer's groups, as they were at `step()`


@dataclass(frozen=True)
class MasterPiece:
    """A piece of a parameter that this rank updates: `master` and all its states are 1-D tensors.

    `master` is the key of its states in the torch optimizer; its values are read and written here, since those of
    masters in halves are in it only during their update.
    """

    unit: Unit
    name: str
    shape: tuple[int, ...]
    order: int  # position in model.parameters()
    group: int
    piece: Piece
    place: int  # of the piece that it is part of, among the unit's
    begin: int  # inside that
    master: Tensor

    def read(self) -> Tensor | Halves:
        """Return a view of its values, as they are stored."""
        return self.unit.weights.masters.read(self.piece.offset, self.piece.offset + self.master.numel())

    def write(self, values: Tensor) -> None:
        """Overwrite its values, and use those given up."""
        self.unit.weights.masters.write(self.piece.offset, values)

    @property
    def is_trained(self) -> bool:
        """Whether its parameter is not frozen now."""
        return self.unit.weights.params[self.piece.slot].requires_grad

    @property
    def records(self) -> UnitBuckets | None:
        """The buckets of its unit, where its states are in their records."""
        return self.unit.weights.records

    @property
    def bucket(self) -> Bucket:
        """The one bucket of its unit that it is in."""
        buckets = self.unit.weights.masters.buckets
        ((bucket, *_),) = buckets.within(self.piece.offset, self.piece.offset + self.master.numel())
        return bucket

    @property
    def gradient(self) -> Tensor:
        """Its reduced gradient."""
        whole = self.unit.gradients.reduced.owned_pieces()[self.place]
        size = self.master.numel()
        return whole if whole.numel() == size else whole[self.begin : self.begin + size]


@dataclass(frozen=True)
class BucketPieces:
    """One bucket of a unit, and the pieces in it."""

    unit: Unit
    bucket: Bucket
    pieces: list[MasterPiece]

    @property
    def buckets(self) -> UnitBuckets:
        """Return all buckets of the unit."""
        return self.unit.weights.masters.buckets

    @property
    def range(self) -> slice:
        """Return the range of the bucket in what this rank updates of the unit."""
        return slice(self.bucket.start, self.bucket.stop)

    def within(self, owned: MasterPiece) -> slice:
        """Return where a piece is in the bucket."""
        start = owned.piece.offset - self.bucket.start
        return slice(start, start + owned.master.numel())


class OpenBucket(NamedTuple):
    """A bucket whose record is where it is updated: its fields by name, its weights and its gradient.

    frozen  slots of parameters that are frozen now, and left alone
    factors factors that are still to be multiplied into the gradient, one after the other
    """

    of: BucketPieces
    fields: dict[str, Tensor]
    weights: Tensor
    grad: Tensor
    frozen: frozenset[int] = frozenset()
    factors: Sequence[float] = ()

    @property
    def states(self) -> list[str]:
        """Return the names of the fields that are optimizer states."""
        return [name for name in self.fields if name not in (MASTER, WEIGHTS)]


class DeferredUpdates(Protocol):
    """Updates that are made after `step()`, each before its unit's weights are used (offload/updates.py)."""

    @property
    def buckets(self) -> Mapping[Unit, Sequence[BucketPieces]]:
        """What is updated, by unit in forward order."""

    def begin(self, options: Options, factors: Sequence[float] = ()) -> None:
        """Take over a step: its gradients stay until they are used, and are final but for this factor."""

    def prefetch(self) -> None:
        """Begin to bring the first records of the next step."""

    def confirm(self) -> None:
        """Say that all ranks have ended their last step."""

    def replace(self, step: int) -> None:
        """Say that a checkpoint of a step takes the place of all records."""

    def through(self, unit: Unit) -> None:
        """Update all units up to this one, if its update is due."""

    def finish(self) -> None:
        """Update all units that are due."""


def buckets_of(units: Sequence[Unit], pieces: Sequence[MasterPiece]) -> dict[Unit, list[BucketPieces]]:
    """Return the buckets of units with the pieces in each."""
    found = {unit: [BucketPieces(unit, each, []) for each in unit.weights.masters.buckets.buckets] for unit in units}
    of_bucket = {(unit, each.bucket.start): each.pieces for unit, own in found.items() for each in own}
    for owned in pieces:
        if owned.unit in found:
            of_bucket[owned.unit, owned.bucket.start].append(owned)
    return found


class ResidentUpdates:
    """Updates units whose states are on the device."""

    def __init__(self, units: Sequence[Unit], pieces: Sequence[MasterPiece], arena: Arena) -> None:
        resident = [unit for unit in units if unit.weights.records is None]
        split = {unit for unit in resident if unit.weights.masters.split}
        self._arena = arena
        self._direct = [owned for owned in pieces if owned.records is None and owned.unit not in split]
        found = buckets_of([unit for unit in resident if unit in split], pieces)
        filled = [each for own in found.values() for each in own if each.pieces]
        sizes = [each.bucket.stop - each.bucket.start for each in filled]
        self._groups = groups_of(filled, sizes, update_bucket(arena.device.type))

    @torch.no_grad()
    def make(self, optimizer: Optimizer) -> None:
        """Step a torch optimizer over all pieces.

        In each of several steps it sees those pieces alone, and the options of before: some count their steps there.
        """
        if not self._groups:
            self._step(optimizer)
            return
        before = frozen_options(optimizer)
        if self._direct:
            with stepping(optimizer, before, self._direct):
                self._step(optimizer)
        for group in self._groups:
            buckets = [
                OpenBucket(
                    each,
                    each.buckets.fields(each.bucket),
                    each.unit.weights.shard_or_full[each.range],
                    each.unit.gradients.owned[each.range],
                    frozenset(owned.piece.slot for owned in each.pieces if not owned.is_trained),
                )
                for each in group
            ]
            update_buckets(optimizer, before, buckets, self._arena)

    def _step(self, optimizer: Optimizer) -> None:
        with untold():
            for owned in self._direct:
                owned.master.grad = owned.gradient if owned.is_trained else None
        with in_portions(optimizer, update_bucket(self._arena.device.type)):
            optimizer.step()
        for owned in self._direct:
            owned.master.grad = None


def name_in_torch(kind: type[Optimizer]) -> str:
    """Return the name of an optimizer's class if it is torch's own; else nothing."""
    return kind.__name__ if getattr(torch.optim, kind.__name__, None) is kind else ""


def updates_together(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether torch's own optimizer updates a group on a device by multi-tensor calls that take memory for all.

    That is its default on accelerators. Fused kernels take none.
    """
    foreach = group.get("foreach")
    known = name_in_torch(type(optimizer)) in TEMPORARIES and not group.get("fused")
    return known and (device.type != "cpu" if foreach is None else bool(foreach))


def temporaries_of(optimizer: Optimizer, group: Mapping[str, Any], sizes: Sequence[int], device: torch.device) -> int:
    """Return how many values a step of a group makes and drops at once, at most; 0 where nothing is known of it.

    sizes  elements of the tensors that the group has then
    """
    kind = name_in_torch(type(optimizer))
    if kind not in TEMPORARIES or group.get("fused"):
        return 0
    return temporary_elements(kind, updates_together(optimizer, group, device), sizes, update_bucket(device.type))


@contextmanager
def in_portions(optimizer: Optimizer, room: int) -> Iterator[None]:
    """Have torch's optimizer see tensors that it `updates_together` in portions inside, each as a group of its own.

    A portion has at most `room` elements, or is one longer tensor. An optimizer of torch writes into no group when it
    steps, and its hooks are called once. Elements have the bits that they have without portions.
    """
    groups = optimizer.param_groups
    portions = [portion for group in groups for portion in _portions(optimizer, group, room)]
    if len(portions) == len(groups):
        yield
        return
    optimizer.param_groups = portions
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _portions(optimizer: Optimizer, group: dict[str, Any], room: int) -> list[dict[str, Any]]:
    """Return a group's portions, each with its options; the group itself where it is one."""
    pieces: list[Tensor] = group["params"]
    if not pieces or not updates_together(optimizer, group, pieces[0].device):
        return [group]
    parts = groups_of(pieces, [piece.numel() for piece in pieces], room)
    return [group] if len(parts) == 1 else [group | {"params": part} for part in parts]


def groups_of(items: Sequence[T], sizes: Sequence[int], room: int) -> list[list[T]]:
    """Put neighbours together whose sizes add up to no more than `room`; a larger one is alone."""
    groups: list[list[T]] = []
    filled = 0
    for each, size in zip(items, sizes, strict=True):
        if not groups or filled + size > room:
            groups.append([])
            filled = 0
        groups[-1].append(each)
        filled += size
    return groups


def update_buckets(
    optimizer: Optimizer,
    options: Options,
    opened: Sequence[OpenBucket],
    arena: Arena,
    narrow: Callable[[BucketPieces, str, Tensor, Tensor], None] | None = None,
) -> None:
    """Step a torch optimizer on the device over the pieces of buckets that are open there.

    narrow  writes a state that was widened back: (bucket, name, fp32 values, field)
    """
    lent: list[Tensor] = []
    try:
        wide = [_widen(each, arena, lent) for each in opened]
        with stepping(optimizer, options, [owned for each in opened for owned in each.of.pieces]):
            before = [[owned.master.data for owned in each.of.pieces] for each in opened]
            try:
                for each, values in zip(opened, wide, strict=True):
                    _point(optimizer, each, values)
                optimizer.step()
            finally:
                for each, values, placeholders in zip(opened, wide, before, strict=True):
                    _let_go(optimizer, each, values, placeholders)
        for each, values in zip(opened, wide, strict=True):
            for name in each.states:
                if values[name] is not each.fields[name]:
                    assert narrow is not None
                    narrow(each.of, name, values[name], each.fields[name])
            _put_back(each, values[MASTER], arena)
    finally:
        for scratch in lent:
            arena.give_back("wire", scratch)


def _widen(opened: OpenBucket, arena: Arena, lent: list[Tensor]) -> dict[str, Tensor]:
    """Return a bucket's masters and states in the dtypes in which they are updated, by name; scratch goes to `lent`."""
    found = {MASTER: opened.weights}
    for name, field in opened.fields.items():
        if name == WEIGHTS:
            continue
        found[name] = field
        if field.dtype in (REMAINDER, torch.bfloat16):
            lent.append(arena.borrow("wire", field.numel(), torch.float32))
            halves = field.dtype == REMAINDER
            found[name] = join_master(opened.weights, field, lent[-1]) if halves else lent[-1].copy_(field)
    return found


def _point(optimizer: Optimizer, opened: OpenBucket, values: Mapping[str, Tensor]) -> None:
    """Have the pieces' tensors, their states and gradients be parts of a bucket's."""
    for owned in opened.of.pieces:
        within = opened.of.within(owned)
        owned.master.data = values[MASTER][within]
        owned.master.grad = None if owned.piece.slot in opened.frozen else opened.grad[within]
        known = optimizer.state.get(owned.master, {}) if opened.states else {}
        for name in opened.states:
            if name in known:
                known[name].data = values[name][within]


def _let_go(
    optimizer: Optimizer, opened: OpenBucket, values: Mapping[str, Tensor], placeholders: Sequence[Tensor]
) -> None:
    """Have placeholders be the pieces' tensors again. States that the optimizer has made go into their fields."""
    for owned, placeholder in zip(opened.of.pieces, placeholders, strict=True):
        within = opened.of.within(owned)
        owned.master.grad, owned.master.data = None, placeholder
        known = optimizer.state.get(owned.master, {}) if opened.states else {}
        for name in opened.states:
            if name in known:
                if not same_memory(known[name], values[name][within]):
                    values[name][within].copy_(known[name])
                known[name] = absent(values[name][within])


def _put_back(opened: OpenBucket, master: Tensor, arena: Arena) -> None:
    """Write updated masters where they are stored, and weights."""
    stored = opened.fields.get(MASTER)
    if stored is None:
        return
    if stored.dtype == REMAINDER:
        split_master(master, opened.weights, stored, scratch=master)
    else:
        cast_masters([(stored, opened.weights)], arena)


def cast_masters(pairs: Sequence[tuple[Tensor, Tensor]], arena: Arena) -> None:
    """Cast masters to weights, all at once."""
    to_round = [pair for pair in pairs if rounds_away(pair[0].dtype, pair[1].dtype)]
    others = [pair for pair in pairs if not rounds_away(pair[0].dtype, pair[1].dtype)]
    if others:
        torch._foreach_copy_([weights for _, weights in others], [master for master, _ in others])
    if to_round:
        scratch = arena.borrow(
            "wire", cast_scratch(sum(m.numel() for m, _ in to_round), arena.device.type), torch.float32
        )
        cast_all(to_round, scratch)
        arena.give_back("wire", scratch)


def frozen_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups as they are now; schedulers write into tensors among them."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


@contextmanager
def stepping(optimizer: Optimizer, options: Options, pieces: Sequence[MasterPiece]) -> Iterator[None]:
    """Have a torch optimizer see these pieces alone inside, with these options of its groups.

    The optimizer's own changes to the options stay, since some count their steps there; later changes by others stay,
    too.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for number, (group, frozen) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        group.clear()
        group.update(frozen, params=[owned.master for owned in pieces if owned.group == number])
    try:
        yield
    finally:
        for group, own, frozen in zip(optimizer.param_groups, before, options, strict=True):
            changed = {k: v for k, v in group.items() if k != "params" and frozen.get(k) is not v}
            group.clear()
            group.update(own | changed)
