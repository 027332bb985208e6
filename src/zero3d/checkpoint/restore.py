"""Reading a checkpoint (`save.py` writes it, `manifest.py` has the format). All of it is checked before any is taken.

check   the newest manifest, and that it fits this engine (compatibility.py)   every rank
        checksums and headers of all files                                     each file by one rank
        the files that a rank will read are opened, random states are tried    every rank; then all agree
load    every rank fills its pieces from the boxes that overlap them, whatever mesh and stage saved
        them; a tied parameter's copy from its owner's boxes
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero3d.checkpoint.compatibility import buffer_problem, check_compatible, check_streams
from zero3d.checkpoint.fields import USE_ANOTHER, quote
from zero3d.checkpoint.folders import find
from zero3d.checkpoint.integrity import rank_tensors, verify_file
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import BUFFER, FORMAT, FROZEN, MASTER, STREAM, BoxRow, Manifest, file_of
from zero3d.checkpoint.manifest_parser import open_manifest
from zero3d.checkpoint.resume_contract import resume_guarantee
from zero3d.checkpoint.state import EngineState, StatePiece
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError
from zero3d.precision import to_compute
from zero3d.rng import set_rng_state
from zero3d.shards.boxes import Box, intersect, slices
from zero3d.zero.layout import Piece
from zero3d.zero.optimizer import MasterPiece
from zero3d.zero.unit import Unit


class Reader:
    """Reads boxes of one checkpoint by (name, state); opens each file once and keeps it open."""

    def __init__(self, manifest: Manifest) -> None:
        self._source = manifest.folder
        self._files: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], list[BoxRow]] = {}
        self._states: dict[str, list[str]] = {}
        for row in manifest.rows:
            rows = self._rows.setdefault((row.name, row.state), [])
            if not rows:
                self._states.setdefault(row.name, []).append(row.state)
            rows.append(row)

    def states(self, name: str) -> list[str]:
        """Return the names of the states that are stored of a parameter."""
        return self._states.get(name, [])

    def tensor(self, file: str, key: str) -> Tensor:
        """Read a whole tensor. Raises CheckpointError."""
        tensor: Tensor = self._open(file).get_tensor(key)
        return tensor

    def prepare(self, piece: StatePiece) -> None:
        """Open the files that `fill` will read."""
        for row, *_ in self._overlaps(piece):
            self._open(row.file)

    def fill(self, piece: StatePiece) -> None:
        """Read the overlaps of stored boxes with a piece into its values. The boxes are all of its tensor."""
        for row, common, box, target in self._overlaps(piece):
            inside, opened = slices(common, row.box), self._open(row.file)
            values = opened.get_slice(row.key)[inside] if inside else opened.get_tensor(row.key)
            target[slices(common, box)].copy_(values)

    def _overlaps(self, piece: StatePiece) -> Iterator[tuple[BoxRow, Box, Box, Tensor]]:
        rows = self._rows.get((piece.name, piece.state), [])
        for box, target in piece.boxes():
            for row in rows:
                common = intersect(box, row.box)
                if common is not None:
                    yield row, common, box, target

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self._source / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self._source / name} cannot be read ({quote(str(error))}). {USE_ANOTHER}"
                ) from error
        return self._files[name]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Holds a checkpoint that was found whole, and to be one of this engine.

    buffers  of this rank, by name: in which file each is
    streams  this rank's random states, where the mesh is the one that saved them
    """

    manifest: Manifest
    reader: Reader
    buffers: Mapping[str, str]
    streams: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None


def check(directory: Path, engine: EngineState) -> VerifiedCheckpoint:
    """Find a checkpoint, or the newest in a directory of them, and check all of it; changes nothing.

    Raises CheckpointError on all ranks.
    """
    manifest = agree(engine.world, lambda: _open(directory, engine))
    return agree(engine.world, lambda: _verify(manifest, engine))


def load(checkpoint: VerifiedCheckpoint, engine: EngineState) -> tuple[int, Any, str]:
    """Restore states from a checkpoint of any mesh and stage.

    Returns its step, what the training loop had saved, and whether the run goes on bitwise (`resume_guarantee`).
    """
    manifest = checkpoint.manifest
    agree(engine.world, lambda: _restore(checkpoint, engine))
    return manifest.step, manifest.value("loop"), resume_guarantee(manifest.about, engine.about)


# --- checking -----------------------------------------------------------------------------------


def _open(directory: Path, engine: EngineState) -> Manifest:
    manifest = open_manifest(find(directory))
    check_compatible(manifest, engine)
    if manifest.format < FORMAT and engine.world.rank == 0:
        warnings.warn(
            f"{manifest.folder} has format {manifest.format}, whose manifest has no checksum: damage to it may go "
            f"unnoticed. The next checkpoint has format {FORMAT}.",
            stacklevel=6,
        )
    return manifest


def _verify(manifest: Manifest, engine: EngineState) -> VerifiedCheckpoint:
    """Check this rank's share of the files, and open what this rank will read."""
    world = engine.world
    for file in list(manifest.files)[world.rank :: world.size]:
        verify_file(manifest, file)
    reader = Reader(manifest)
    for piece in _pieces_to_read(reader, engine):
        reader.prepare(piece)
    same = manifest.mesh == engine.degrees
    files = [file_of(world.rank)] if same else list(manifest.files)
    return VerifiedCheckpoint(
        manifest, reader, _find_buffers(manifest, files, engine), _streams(manifest, reader, engine, same)
    )


def _pieces_to_read(reader: Reader, engine: EngineState) -> Iterator[StatePiece]:
    """Yield all that this rank will read; masters stand in for moments that are not there yet."""
    for unit in engine.units:
        for name, piece, values in _frozen(unit, engine):
            yield StatePiece(engine.full_model.owner(name), FROZEN, *_place(unit, piece), values, engine.cut(name))
    for owned in engine.optimizer.pieces:
        for state in reader.states(engine.full_model.owner(owned.name)):
            yield _state_piece(engine, owned, state, owned.master)


def _find_buffers(manifest: Manifest, files: Sequence[str], engine: EngineState) -> dict[str, str]:
    """Return the file of each buffer: the rank's own on the mesh that saved it, elsewhere the first that has it."""
    file_of_buffer: dict[str, str] = {}
    live = engine.buffers
    for file in files:
        if file_of_buffer.keys() == live.keys():
            break
        for key, saved in rank_tensors(manifest, file).items():
            name = key.removeprefix(BUFFER)
            if not key.startswith(BUFFER) or name not in live or name in file_of_buffer:
                continue
            if problem := buffer_problem(name, saved, live[name][0]):
                raise CheckpointError(f"{manifest.folder / file}: {problem}")
            file_of_buffer[name] = file
    missing = sorted(engine.persistent_buffers - file_of_buffer.keys())
    if missing and manifest.format == FORMAT:
        raise CheckpointError(
            f"{manifest.fields.file}: own has no buffer {quote(missing[0])}, and the model has it: build the model the "
            "checkpoint was saved from."
        )
    return file_of_buffer


def _streams(
    manifest: Manifest, reader: Reader, engine: EngineState, same: bool
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]] | None:
    """Return this rank's random states, which were tried; None on another mesh than the one that saved them."""
    if not same:
        return None
    rank = engine.world.rank
    file = file_of(rank)
    keys = [key for key in rank_tensors(manifest, file) if key.startswith(STREAM)]
    tensors = {key.removeprefix(STREAM): reader.tensor(file, key) for key in keys}
    python_rng = manifest.fields.entry("python_rng").rows()[rank]
    check_streams(str(manifest.folder / file), tensors, python_rng)
    return tensors, python_rng.value


# --- restoring ------------------------------------------------------------------------------------


def _restore(checkpoint: VerifiedCheckpoint, engine: EngineState) -> None:
    """Fill weights, optimizer, scheduler, loss scale, summands, buffers and random states."""
    manifest, reader = checkpoint.manifest, checkpoint.reader
    optimizer = manifest.value("optimizer")
    for unit in engine.units:
        _restore_frozen(reader, unit, engine)
    for owned in engine.optimizer.pieces:
        _restore_piece(reader, optimizer["scalars"], engine, owned)
    engine.optimizer.adopted = False
    for group, saved in zip(engine.optimizer.torch.param_groups, optimizer["groups"], strict=True):
        group.update(from_json(saved, {key: value for key, value in group.items() if key != "params"}))
    for unit in engine.units:
        if unit.grads is not None:
            unit.weights.refresh().wait()
    if engine.scheduler is not None and manifest.value("scheduler") is not None:
        engine.scheduler.load_state_dict(from_json(manifest.value("scheduler"), engine.scheduler.state_dict()))
    engine.loss_scale.restore(manifest.value("loss_scale"))
    if engine.summands is not None and manifest.value("exact") is not None:
        engine.summands.restore(manifest.value("exact"))
    live = engine.buffers
    for name, file in checkpoint.buffers.items():
        for buffer in live[name]:
            buffer.copy_(reader.tensor(file, f"{BUFFER}{name}"))
    if checkpoint.streams is not None:
        set_rng_state(*checkpoint.streams)


def _state_piece(engine: EngineState, owned: MasterPiece, state: str, values: Tensor) -> StatePiece:
    cut = engine.cut(owned.name)
    return StatePiece(engine.full_model.owner(owned.name), state, owned.shape, owned.piece.start, values, cut)


def _restore_piece(reader: Reader, scalars: Mapping[str, float], engine: EngineState, owned: MasterPiece) -> None:
    optimizer = engine.optimizer
    reader.fill(_state_piece(engine, owned, MASTER, owned.master))
    state: dict[str, Any] = optimizer.torch.state[owned.master]
    saved = [key for key in reader.states(engine.full_model.owner(owned.name)) if key != MASTER]
    for key in set(state) - {*saved, *scalars}:
        del state[key]  # the checkpoint was written before the optimizer made this state
    for key in saved:
        state[key] = optimizer.state_view(owned, key, owned.master.dtype)
        reader.fill(_state_piece(engine, owned, key, state[key]))
    for key, value in scalars.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        else:
            state[key] = torch.tensor(value, dtype=torch.float32)


def _frozen(unit: Unit, engine: EngineState) -> Iterator[tuple[str, Piece, Tensor]]:
    """Yield what this rank holds of a frozen unit: the parameter's name, the piece of it, its values."""
    weights = unit.weights
    if unit.grads is not None:
        return
    if weights.sharded:
        pieces, values = unit.layout.pieces(engine.dp.rank), weights.shard
    else:
        pieces, values = unit.layout.whole_pieces(), weights.full
    for piece in pieces:
        yield unit.layout.slots[piece.slot].name, piece, values[piece.offset : piece.offset + piece.stop - piece.start]


def _place(unit: Unit, piece: Piece) -> tuple[tuple[int, ...], int]:
    return unit.layout.slots[piece.slot].shape, piece.start


def _restore_frozen(reader: Reader, unit: Unit, engine: EngineState) -> None:
    for name, piece, values in _frozen(unit, engine):
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32  # holds what any precision saved
        stored = torch.empty_like(values, dtype=wide if values.is_floating_point() else None)
        reader.fill(StatePiece(engine.full_model.owner(name), FROZEN, *_place(unit, piece), stored, engine.cut(name)))
        to_compute(stored, values.dtype, out=values)
