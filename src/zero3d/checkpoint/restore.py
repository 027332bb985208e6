"""Reading a checkpoint (`save.py` writes it, `manifest.py` has the format). All of it is checked before any is taken.

check   the newest manifest, and that it fits this engine (compatibility.py)   every rank
        the parts of all ranks that saved it, one by one; a rank keeps of
        them which boxes it will read                                          every rank
        checksums and headers of all files of tensors                          each file by one rank
        the files that a rank will read are opened, random states are tried    every rank; then all agree
load    every rank fills its pieces from the boxes that overlap them, whatever mesh and stage saved
        them; a tied parameter's copy from its owner's boxes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero3d.blueprint.layout import Piece
from zero3d.checkpoint.compatibility import (
    buffer_problem,
    check_compatible,
    check_states,
    check_streams,
    fill_named,
    number_problem,
)
from zero3d.checkpoint.copies import located
from zero3d.checkpoint.fields import USE_ANOTHER, quote
from zero3d.checkpoint.files import present
from zero3d.checkpoint.folders import find
from zero3d.checkpoint.integrity import verify_file
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import AVERAGE, BUFFER, FROZEN, MASTER, STREAM, BoxRow, Manifest, Part, TensorSpec
from zero3d.checkpoint.manifest_parser import open_manifest, part_of_rank, read_contents
from zero3d.checkpoint.option_values import check_update
from zero3d.checkpoint.resume_contract import EMA, IMPORTED, OPTIONS
from zero3d.checkpoint.save import STEP_OF
from zero3d.checkpoint.state import EngineState, StatePiece
from zero3d.checkpoint.update_settings import options_of
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError
from zero3d.precision import joined, to_compute
from zero3d.rng import set_rng_state
from zero3d.shards.boxes import Box, intersect, slices
from zero3d.zero.unit import Unit
from zero3d.zero.updates import MasterPiece


class Reader:
    """Reads boxes of one checkpoint by (name, state); opens each file once and keeps it open until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._source = folder
        self._files: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], list[tuple[str, BoxRow]]] = {}

    def add(self, file: str, row: BoxRow) -> None:
        """Take a box that is stored in a file."""
        self._rows.setdefault((row.name, row.state), []).append((file, row))

    def close(self) -> None:
        """Let go of the files, whose pages count as this process's memory; they open anew when needed."""
        self._files.clear()

    def tensor(self, file: str, key: str) -> Tensor:
        """Read a whole tensor. Raises CheckpointError."""
        tensor: Tensor = self._open(file).get_tensor(key)
        return tensor

    def prepare(self, piece: StatePiece) -> None:
        """Open the files that `fill` will read."""
        for file, *_ in self._overlaps(piece):
            self._open(file)

    def fill(self, piece: StatePiece) -> None:
        """Read the overlaps of stored boxes with a piece into its values. The boxes are all of its tensor."""
        for file, row, common, box, target in self._overlaps(piece):
            inside, opened = slices(common, row.box), self._open(file)
            values = opened.get_slice(row.key)[inside] if inside else opened.get_tensor(row.key)
            target[slices(common, box)].copy_(values)

    def _overlaps(self, piece: StatePiece) -> Iterator[tuple[str, BoxRow, Box, Box, Tensor]]:
        rows = self._rows.get((piece.name, piece.state), [])
        for box, target in piece.boxes():
            assert isinstance(target, Tensor)  # what is stored in halves is read as a whole
            for file, row in rows:
                common = intersect(box, row.box)
                if common is not None:
                    yield file, row, common, box, target

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(present(self._source / name), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self._source / name} cannot be read ({quote(str(error))}). {USE_ANOTHER}"
                ) from error
        return self._files[name]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Holds a checkpoint that was found whole, and to be one of this engine.

    states   of every parameter, by its name
    buffers  of this rank, by name: in which file each is
    streams  this rank's random states, where the mesh is the one that saved them
    """

    manifest: Manifest
    reader: Reader
    states: Mapping[str, Sequence[str]]
    buffers: Mapping[str, str]
    streams: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None


def check(directory: str | Path, engine: EngineState, options: bool = True) -> VerifiedCheckpoint:
    """Find a checkpoint, or the newest in a directory of them or below a URL, and check all of it; changes nothing.

    options  of the optimizer's groups, too, which are to take the place of the engine's
    Raises CheckpointError on all ranks.
    """
    world = engine.world.patient
    manifest, found = agree(world, lambda: _open(directory, engine, options))
    return agree(world, lambda: _verify(manifest, found, engine))


def load(checkpoint: VerifiedCheckpoint, engine: EngineState) -> tuple[int, Any, Mapping[str, Any]]:
    """Restore states from a checkpoint of any mesh and stage.

    Returns its step, what the training loop had saved, and what the bits of its run depended on (`resume_contract`).
    """
    manifest = checkpoint.manifest
    world = engine.world.patient
    agree(world, lambda: _restore(checkpoint, engine))  # as long as each rank's disk takes: nothing is gathered yet
    agree(world, lambda: refresh(engine))
    about = {**manifest.about, OPTIONS: options_of(manifest.value("optimizer")["groups"])}
    return manifest.step, manifest.value("loop"), about


# --- checking -----------------------------------------------------------------------------------


class _Found:
    """Keeps of the parts of all ranks that saved a checkpoint what this rank will read, and no more.

    buffers  name -> the file and description of the first that has it; on the mesh that saved it, the rank's own
    part     of this rank, on the mesh that saved it; its file is then the only one that this rank verifies
    states   of every parameter, by its name
    """

    def __init__(self, manifest: Manifest, engine: EngineState) -> None:
        self.manifest, self.engine = manifest, engine
        self.reader = Reader(manifest.folder)
        self.same = manifest.mesh == engine.degrees
        self.buffers: dict[str, tuple[str, TensorSpec]] = {}
        self.part: Part | None = None
        self._needed: dict[str, list[Box]] = {}
        for name, piece in _pieces(engine):
            self._needed.setdefault(name, []).extend(box for box, _ in piece.boxes())
        self._live = engine.buffers.keys() | engine.numbers.keys()
        self.states = read_contents(manifest, self._look).states

    def _look(self, rank: int, part: Part) -> None:
        for row in part.rows:
            if any(intersect(row.box, box) is not None for box in self._needed.get(row.name, ())):
                self.reader.add(part.file, row)
        if self.same and rank == self.engine.world.rank:
            self.part = part
        if (self.same and part is not self.part) or self._live <= self.buffers.keys():
            return
        for key, saved in part.own.items():
            name = key.removeprefix(BUFFER)
            if key.startswith(BUFFER) and name in self._live:
                self.buffers.setdefault(name, (part.file, saved))


def _open(directory: str | Path, engine: EngineState, options: bool) -> tuple[Manifest, _Found]:
    manifest = open_manifest(find(located(directory)))
    check_compatible(manifest, engine)
    found = _Found(manifest, engine)
    check_states(manifest, found.states, engine)
    if options:
        check_update(manifest, found.states, engine)
    return manifest, found


def _verify(manifest: Manifest, found: _Found, engine: EngineState) -> VerifiedCheckpoint:
    """Check this rank's share of the files, and open what this rank will read."""
    world = engine.world
    for rank in range(world.rank, manifest.mesh.world, world.size):
        verify_file(manifest, found.part or part_of_rank(manifest, rank))
    for name, piece in _pieces(engine):
        for state in found.states.get(name, ()):
            found.reader.prepare(replace(piece, state=state))
    return VerifiedCheckpoint(manifest, found.reader, found.states, _check_buffers(found), _streams(found))


def _pieces(engine: EngineState) -> Iterator[tuple[str, StatePiece]]:
    """Yield the name of everything that this rank will read, and one state of it, in the place of all of its states."""
    for unit in engine.units:
        for name, piece, values in _frozen(unit, engine):
            yield engine.full_model.owner(name), engine.piece(name, FROZEN, *_place(unit, piece), values)
    for owned in engine.optimizer.pieces:
        yield engine.full_model.owner(owned.name), _state_piece(engine, owned, MASTER, owned.master)


def _check_buffers(found: _Found) -> dict[str, str]:
    """Return the file of each buffer of this rank. Raises CheckpointError where one is missing or another's."""
    manifest, live = found.manifest, found.engine.buffers
    for name, (file, saved) in found.buffers.items():
        problem = buffer_problem(name, saved, live[name][0]) if name in live else number_problem(name, saved)
        if problem:
            raise CheckpointError(f"{manifest.folder / file}: {problem}")
    missing = sorted(found.engine.persistent_buffers - found.buffers.keys())
    if missing:
        raise CheckpointError(
            f"{manifest.fields.file}: own has no buffer {quote(missing[0])}, and the model has it: build the model the "
            "checkpoint was saved from."
        )
    return {name: file for name, (file, _) in found.buffers.items()}


def _streams(found: _Found) -> tuple[Mapping[str, Tensor], Mapping[str, Any]] | None:
    """Return this rank's random states, which were tried; None on another mesh than the one that saved them."""
    part = found.part
    if part is None:
        return None
    keys = [key for key in part.own if key.startswith(STREAM)]
    tensors = {key.removeprefix(STREAM): found.reader.tensor(part.file, key) for key in keys}
    check_streams(str(found.manifest.folder / part.file), tensors, part.python_rng, found.engine.world.device)
    return tensors, part.python_rng.value


# --- restoring ------------------------------------------------------------------------------------


def _restore(checkpoint: VerifiedCheckpoint, engine: EngineState) -> None:
    """Fill frozen weights, optimizer, scheduler, loss scale, summands, buffers and random states."""
    manifest, reader = checkpoint.manifest, checkpoint.reader
    optimizer = manifest.value("optimizer")
    if engine.optimizer.updates is not None:
        engine.optimizer.updates.replace(manifest.step)
    for unit in engine.units:
        _restore_frozen(checkpoint, unit, engine)
    counts = {
        key.removeprefix(STEP_OF): value for key, value in optimizer["scalars"].items() if key.startswith(STEP_OF)
    }
    scalars = {key: value for key, value in optimizer["scalars"].items() if not key.startswith(STEP_OF)}
    names = {engine.full_model.owner(owned.name): owned.name for owned in engine.optimizer.pieces}
    missed = {names.get(name, name): int(scalars["step"] - count) for name, count in counts.items()}
    engine.optimizer.count_from(int(scalars.get("step", manifest.step)), missed)
    for batch in engine.optimizer.in_batches():
        for owned in batch:
            saved = checkpoint.states.get(engine.full_model.owner(owned.name), ())
            states = [state for state in saved if state != AVERAGE or EMA in engine.about]
            own = (
                scalars if missed.get(owned.name) is None else scalars | {"step": scalars["step"] - missed[owned.name]}
            )
            _restore_piece(reader, states, own, engine, owned)
    for group, added, saved in zip(
        engine.optimizer.torch.param_groups, engine.optimizer.added, optimizer["groups"], strict=False
    ):
        for name in added - saved.keys():  # an earlier checkpoint had them
            group.pop(name, None)
        added.intersection_update(saved)
        added.update(saved.keys() - group.keys())
        group.update(from_json(saved, {key: value for key, value in group.items() if key != "params"}))
    if engine.scheduler is not None and manifest.value("scheduler") is not None:
        engine.scheduler.load_state_dict(from_json(manifest.value("scheduler"), engine.scheduler.state_dict()))
    engine.loss_scale.restore(manifest.value("loss_scale"))
    if engine.summands is not None and manifest.value("exact") is not None:
        engine.summands.restore(manifest.value("exact"))
    live = engine.buffers
    for number in engine.numbers.values():
        number.reset()
    for name, file in checkpoint.buffers.items():
        fill_named(name, reader.tensor(file, f"{BUFFER}{name}"), live, engine.numbers)
    if checkpoint.streams is not None:
        set_rng_state(*checkpoint.streams, engine.world.device)


def refresh(engine: EngineState) -> None:
    """Make weights of the masters that were read; those of frozen units were read themselves."""
    for unit in engine.units:
        if unit.grads is not None:
            unit.weights.refresh().wait()
        else:
            unit.weights.changed()


def _state_piece(engine: EngineState, owned: MasterPiece, state: str, values: Tensor) -> StatePiece:
    return engine.piece(owned.name, state, owned.shape, owned.piece.start, values)


def _restore_piece(
    reader: Reader, states: Sequence[str], scalars: Mapping[str, float], engine: EngineState, owned: MasterPiece
) -> None:
    optimizer = engine.optimizer
    masters = joined(owned.read())
    reader.fill(_state_piece(engine, owned, MASTER, masters))
    owned.write(masters)
    state: dict[str, Any] = optimizer.torch.state[owned.master]
    saved = [key for key in states if key != MASTER]
    for key in set(state) - {*saved, *scalars}:
        del state[key]  # the checkpoint was written before the optimizer made this state
    for key in saved:
        view = optimizer.state_view(owned, key, owned.master.dtype)
        reader.fill(_state_piece(engine, owned, key, view))
        optimizer.overwrite(owned, key, view)
    for key, value in scalars.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        else:
            state[key] = torch.tensor(value, dtype=torch.float32)


def _frozen(unit: Unit, engine: EngineState, writes: bool = False) -> Iterator[tuple[str, Piece, Tensor]]:
    """Yield what this rank holds of a frozen unit: the parameter's name, the piece of it, its values."""
    weights = unit.weights
    if unit.grads is not None:
        return
    with weights.place.opened(changed=writes) as shard:
        if weights.sharded:
            pieces, values = unit.layout.pieces(unit.comm.rank), shard
        else:
            pieces, values = unit.layout.whole_pieces(), weights.full
        for piece in pieces:
            yield (
                unit.layout.slots[piece.slot].name,
                piece,
                values[piece.offset : piece.offset + piece.stop - piece.start],
            )


def _place(unit: Unit, piece: Piece) -> tuple[tuple[int, ...], int]:
    return unit.layout.slots[piece.slot].shape, piece.start


def _restore_frozen(checkpoint: VerifiedCheckpoint, unit: Unit, engine: EngineState) -> None:
    """Fill a frozen unit, where it has not what it should have yet: from boxes, or from the base."""
    if unit.grads is not None:
        return
    owners = [engine.full_model.owner(slot.name) for slot in unit.layout.slots]
    of_base = {owner for owner in owners if checkpoint.manifest.parameters[owner].in_base}
    there = IMPORTED in checkpoint.manifest.about or (engine.base is not None and all(map(engine.base.has, of_base)))
    if there and of_base.issuperset(owners):
        return
    for name, piece, values in _frozen(unit, engine, writes=True):
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32  # holds what any precision saved
        stored = torch.empty_like(values, dtype=wide if values.is_floating_point() else None)
        saved = engine.piece(name, FROZEN, *_place(unit, piece), stored)
        if saved.name in of_base and IMPORTED in checkpoint.manifest.about:
            continue
        if saved.name in of_base:
            _fill_from_base(engine, saved)
        else:
            checkpoint.reader.fill(saved)
        to_compute(stored, values.dtype, out=values)
    if engine.base is not None:
        engine.base.changed(set(owners) - of_base)
        engine.base.returned(of_base)


def _fill_from_base(engine: EngineState, piece: StatePiece) -> None:
    """Read a piece from the folder of the base."""
    assert engine.base is not None
    for box, target in piece.boxes():
        assert isinstance(target, Tensor)
        target.copy_(engine.base.source(piece.name, box))
    engine.base.source.close()
