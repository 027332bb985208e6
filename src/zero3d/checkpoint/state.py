"""The state of an engine that a checkpoint takes: its full model by name, its units and optimizer, states as pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero3d.blueprint.layout import Piece
from zero3d.checkpoint.frozen_base import FrozenBase
from zero3d.checkpoint.manifest import FROZEN, MASTER
from zero3d.distributed.collectives import Comm
from zero3d.distributed.degrees import Degrees
from zero3d.models.kept import Kept
from zero3d.models.names import persistent_buffers
from zero3d.models.written_numbers import WrittenNumber
from zero3d.precision import Halves, LossScale
from zero3d.shards.boxes import Box, Shape
from zero3d.shards.cuts import Cut, Tile, cover
from zero3d.zero.exact.summands import Summands
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.unit import Unit


class FullModel(NamedTuple):
    """Describes the full model's parameters, of which a rank may have a few only.

    shapes     of all, by name in model order, as they are before the tp axis cuts them
    trainable  names
    copies     a tied parameter's copy on a later pipeline stage -> its owner: not saved, restored from it
    tiles      of this rank's parameters those that are rows of one of these
    """

    shapes: Mapping[str, Shape]
    trainable: frozenset[str]
    copies: Mapping[str, str]
    tiles: Mapping[str, Tile]

    @classmethod
    def of(cls, model: nn.Module, copies: Mapping[str, str]) -> FullModel:
        """Describe a model before it is split or cut."""
        named = dict(model.named_parameters())
        trainable = frozenset(name for name, p in named.items() if p.requires_grad)
        return cls({name: tuple(p.shape) for name, p in named.items()}, trainable, copies, {})

    def owner(self, name: str) -> str:
        """Return the name under which a parameter of this rank is saved."""
        return self.tiles[name].owner if name in self.tiles else self.copies.get(name, name)


@dataclass(frozen=True)
class EngineState:
    """Holds the state of an engine that a checkpoint takes, and what is needed to find and restore it.

    modules   this rank's model chunks
    dp        the dp axis, over which units are cut
    tp        the tp axis, over which parameters are cut
    folds     those that fold dp, by name; some cut parameters, too
    world     all ranks of the mesh
    about     what the bits of the run depend on, for `resume_contract`
    loop      what the training loop has saved for itself
    cuts      how tp and the axes that fold dp cut parameters, by name in the full model; all others are whole
    summands  of exact mode
    base      the folder whose values frozen weights have
    kept      tensors of the model's folder that exports carry on
    numbers   which forwards may write beside buffers, by name
    """

    modules: Sequence[nn.Module]
    full_model: FullModel
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    dp: Comm
    tp: Comm
    folds: Mapping[str, Comm]
    world: Comm
    degrees: Degrees
    loss_scale: LossScale
    scheduler: Any
    step: int
    about: Mapping[str, Any]
    loop: Mapping[str, Any] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    summands: Summands | None = None
    base: FrozenBase | None = None
    kept: Kept | None = None
    numbers: Mapping[str, WrittenNumber] = field(default_factory=dict)

    def cut(self, name: str) -> Cut | None:
        """Return how a parameter of this rank is cut over tp, or what folds dp; None where it is not."""
        return self.cuts.get(self.full_model.owner(name))

    def piece(self, name: str, state: str, shape: Shape, start: int, values: Tensor | Halves) -> StatePiece:
        """Return a flat range of a state of one of this rank's parameters, as one of the parameter that is saved."""
        tile = self.full_model.tiles.get(name, Tile(name, shape, 0))
        return StatePiece(self.full_model.owner(name), state, tile.shape, tile.start + start, values, self.cut(name))

    def saves(self, name: str) -> bool:
        """Say whether this rank writes its share of a parameter: copies are not written, nor what is left out."""
        if name in self.full_model.copies or self.leaves_out(name):
            return False
        cut = self.cut(name)
        return self.tp.rank == 0 or (cut is not None and cut.axis == "tp")

    def leaves_out(self, name: str) -> bool:
        """Return whether checkpoints leave out a parameter: it is frozen, and has the values of the base's folder."""
        owner = self.full_model.owner(name)
        return self.base is not None and self.base.has(owner) and owner not in self.full_model.trainable

    @property
    def buffers(self) -> dict[str, list[Tensor]]:
        """This rank's buffers by their names in the full model; one of each chunk that has it."""
        buffers: dict[str, list[Tensor]] = {}
        for module in self.modules:
            for name, buffer in module.named_buffers():
                buffers.setdefault(name, []).append(buffer)
        return buffers

    @property
    def persistent_buffers(self) -> set[str]:
        """Names of this rank's buffers that belong to a model's weights."""
        names = {name for module in self.modules for name in persistent_buffers(module)}
        return names & self.buffers.keys()

    @property
    def owned_units(self) -> list[Unit]:
        """This rank's units without copies of tied parameters, which have a unit each."""
        return [unit for unit in self.units if unit.layout.slots[0].name not in self.full_model.copies]


@dataclass(frozen=True)
class StatePiece:
    """Holds a flat range of one state of one parameter, which this rank has as a 1-D tensor or its halves.

    shape, start  of this rank's parameter, and where in it the range begins
    cut           how that lies in the full model's parameter; None where it is that
    """

    name: str
    state: str
    shape: Shape
    start: int
    values: Tensor | Halves
    cut: Cut | None = None

    def boxes(self) -> Iterator[tuple[Box, Tensor | Halves]]:
        """Yield its boxes of the full model's tensor, each with a view of its values in the box's shape."""
        if isinstance(self.values, Tensor):
            yield from cover(self.shape, self.start, self.values, self.cut)
            return
        weights, remainder = self.values.weights, self.values.remainder
        halves = (cover(self.shape, self.start, values, self.cut) for values in (weights, remainder))
        for (box, of_weights), (_, of_remainder) in zip(*halves, strict=True):
            yield box, Halves(of_weights, of_remainder)


def state_pieces(engine: EngineState) -> Iterator[StatePiece]:
    """Yield all states that this rank saves of the full model; of copies its share, as at stage 0."""
    for unit in engine.units:
        if unit.grads is None:
            for piece in unit.saved_pieces():
                slot = unit.layout.slots[piece.slot]
                values = unit.weights.shard[piece.offset : piece.offset + piece.stop - piece.start]
                if engine.saves(slot.name):
                    yield engine.piece(slot.name, FROZEN, slot.shape, piece.start, values)
    shares: defaultdict[tuple[str, int], list[Piece]] = defaultdict(list)
    for unit in engine.units:
        for piece in unit.saved_pieces():
            shares[unit.name, piece.slot].append(piece)
    for owned in engine.optimizer.pieces:
        if not engine.saves(owned.name):
            continue
        for share in shares[owned.unit.name, owned.piece.slot]:
            start, stop = max(share.start, owned.piece.start), min(share.stop, owned.piece.stop)
            if start >= stop:
                continue
            within = slice(start - owned.piece.start, stop - owned.piece.start)
            flat = {k: v for k, v in engine.optimizer.states_of(owned).items() if _is_flat(v, owned.master)}
            for state, values in ({MASTER: owned.read()} | flat).items():
                yield engine.piece(owned.name, state, owned.shape, start, values[within])


def _is_flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == master.shape
