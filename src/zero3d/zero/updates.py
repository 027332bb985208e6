"""Pieces of masters in the portions in which a torch optimizer updates them.

    stored as they are   all at once
    in halves            bucket by bucket, each a portion or, of small units, several:

        join   scratch = weight, remainder      fp32, one bucket long, for all portions
        step   the optimizer's own, on the pieces of this portion, which are views of the scratch
        split  weight, remainder = scratch

A piece that reaches over several buckets is cut at their borders, which are multiples of 16 elements as all cuts are:
an optimizer has a tensor and states, its step count included, for every part, and an element's update has the bits
that it has in the whole piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.memory.arena import Arena
from zero3d.memory.scratch import update_bucket
from zero3d.precision import Halves
from zero3d.zero.layout import Piece
from zero3d.zero.masters import SplitMasters
from zero3d.zero.state_records import Bucket as RecordBucket, UnitRecords
from zero3d.zero.unit import Unit


@dataclass(frozen=True)
class MasterPiece:
    """A piece of a parameter that this rank updates: `master` and all its states are 1-D tensors.

    `master` is the key of its states in the torch optimizer; its values are read and written here, since those of
    masters in halves are in it only during their portion.
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
    def records(self) -> UnitRecords | None:
        """What its unit has in records, where its states are in one."""
        return self.unit.weights.records

    @property
    def bucket(self) -> RecordBucket:
        """The one bucket of its unit's records that it is in."""
        assert self.records is not None
        ((bucket, *_),) = self.records.within(self.piece.offset, self.piece.offset + self.master.numel())
        return bucket

    @property
    def gradient(self) -> Tensor:
        """Its reduced gradient."""
        whole = self.unit.gradients.owned_pieces()[self.place]
        size = self.master.numel()
        return whole if whole.numel() == size else whole[self.begin : self.begin + size]


class Bucket(NamedTuple):
    """A range of a unit's masters in halves, and where in the scratch it is joined."""

    masters: SplitMasters
    start: int
    stop: int
    at: int


@dataclass
class Portion:
    """Holds the pieces of one step of the torch optimizer.

    buckets  that those in halves are in
    places   where these are in the scratch
    """

    pieces: list[MasterPiece] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    places: list[tuple[MasterPiece, int]] = field(default_factory=list)

    @property
    def filled(self) -> int:
        """Elements of the scratch that it takes."""
        return self.buckets[-1].at + self.buckets[-1].stop - self.buckets[-1].start if self.buckets else 0

    def step(self, optimizer: Optimizer) -> None:
        """Step a torch optimizer over these pieces, which alone have gradients, but for frozen parameters'."""
        for owned in self.pieces:
            owned.master.grad = owned.gradient if owned.is_trained else None
        optimizer.step()
        for owned in self.pieces:
            owned.master.grad = None

    @contextmanager
    def joined(self, scratch: Tensor) -> Iterator[None]:
        """Have the pieces' tensors be masters inside, and keep what they have become."""
        for masters, start, stop, at in self.buckets:
            masters.join(start, scratch[at : at + stop - start])
        placeholders = [owned.master.data for owned, _ in self.places]
        try:
            for owned, at in self.places:
                owned.master.data = scratch[at : at + owned.master.numel()]
            yield
        finally:
            for (owned, _), placeholder in zip(self.places, placeholders, strict=True):
                owned.master.data = placeholder
        for masters, start, stop, at in self.buckets:
            masters.write(start, scratch[at : at + stop - start])


def portions_of(pieces: Sequence[MasterPiece]) -> list[Portion]:
    """Put pieces into portions: those whose masters are stored as they are into the first."""
    portions = [Portion([owned for owned in pieces if not isinstance(owned.unit.weights.masters, SplitMasters)])]
    known: dict[tuple[str, int], tuple[Portion, Bucket]] = {}
    for owned in pieces:
        masters, offset = owned.unit.weights.masters, owned.piece.offset
        if isinstance(masters, SplitMasters):
            (start, stop), *_ = masters.buckets(offset, offset + 1)
            if (owned.unit.name, start) not in known:
                full = portions[-1].filled + stop - start > update_bucket(owned.master.device.type)
                if full or not portions[-1].buckets:
                    portions.append(Portion())
                bucket = Bucket(masters, start, stop, portions[-1].filled)
                portions[-1].buckets.append(bucket)
                known[owned.unit.name, start] = portions[-1], bucket
            portion, bucket = known[owned.unit.name, start]
            portion.pieces.append(owned)
            portion.places.append((owned, bucket.at + offset - start))
    return portions if portions[0].pieces or len(portions) == 1 else portions[1:]


def update(optimizer: Optimizer, portions: Sequence[Portion], arena: Arena) -> None:
    """Step a torch optimizer over all pieces; masters in halves need scratch of the longest portion.

    In each of several portions it sees those pieces alone, and the options of before: some count their steps there.
    """
    longest = max(portion.filled for portion in portions)
    if not longest:
        portions[0].step(optimizer)
        return
    scratch = arena.borrow("wire", longest, torch.float32)
    before = frozen_options(optimizer)
    try:
        for portion in portions:
            with stepping(optimizer, before, portion.pieces), portion.joined(scratch):
                portion.step(optimizer)
    finally:
        arena.give_back("wire", scratch)


def frozen_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups as they are now; schedulers write into tensors among them."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


@contextmanager
def stepping(
    optimizer: Optimizer, options: Sequence[Mapping[str, Any]], pieces: Sequence[MasterPiece]
) -> Iterator[None]:
    """Have a torch optimizer see these pieces alone inside, with these options of its groups.

    What it changes of them, as some count their steps there, stays; what others have changed since does, too.
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
