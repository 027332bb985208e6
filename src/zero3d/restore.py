"""Reading checkpoints (checkpoint.py writes them and has the format).

open      the newest manifest; the model, optimizer and frozen parameters must be the saved ones
verify    checksums of all files, divided among the ranks
restore   every rank fills its pieces from the boxes that overlap them, whatever mesh and stage saved
          them; a tied parameter's copy from its owner's boxes
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zero3d.agree import agree
from zero3d.boxes import Box, intersect, slices
from zero3d.checkpoint import FORMAT, FROZEN, MASTER, Parts, Segment, digest, file_of
from zero3d.degrees import Degrees
from zero3d.errors import CheckpointError
from zero3d.plain import revive
from zero3d.precision import to_compute
from zero3d.promise import promise
from zero3d.rng import set_rng_state
from zero3d.zero.collectives import Comm
from zero3d.zero.optimizer import OwnedPiece
from zero3d.zero.unit import Unit


def load(directory: Path, parts: Parts) -> tuple[int, Any, str]:
    """Restore states from a checkpoint of any mesh and stage; returns its step, what the loop had saved, `promise`.

    Everything is checked before anything is written. Raises CheckpointError on all ranks.
    """
    source, manifest = agree(parts.everyone, lambda: _open(directory, parts))
    agree(parts.everyone, lambda: _verify_files(source, manifest, parts.everyone))
    agree(parts.everyone, lambda: _restore(source, manifest, parts))
    return int(manifest["step"]), manifest.get("loop"), promise(manifest["about"], parts.about)


def find(directory: Path) -> Path:
    """The checkpoint itself, or the newest one in a directory of them."""
    if (directory / "manifest.json").is_file():
        return directory
    found = {}
    if directory.is_dir():
        for entry in directory.iterdir():
            number = entry.name.removeprefix(".").removeprefix("step-").removesuffix(".old")
            complete = "step-" in entry.name and number.isdigit() and (entry / "manifest.json").is_file()
            if complete and (int(number) not in found or not entry.name.startswith(".")):
                found[int(number)] = entry
    if not found:
        raise CheckpointError(
            f"no checkpoint in {directory}: it has no step-N folder with a manifest.json. Check the path."
        )
    return found[max(found)]


def _open(directory: Path, parts: Parts) -> tuple[Path, dict[str, Any]]:
    source = find(directory)
    try:
        manifest = json.loads((source / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source / 'manifest.json'} cannot be read ({error}): use an older step-N.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{source / 'manifest.json'} is no manifest of format {FORMAT}: it was written by something else."
        )
    _compare(source, manifest, parts)
    return source, manifest


def _compare(source: Path, manifest: Mapping[str, Any], parts: Parts) -> None:
    """Refuse a checkpoint of another model, with the differences."""
    saved = {name: tuple(entry["shape"]) for name, entry in manifest["parameters"].items()}
    mine = parts.whole.shapes
    differences = [
        f"{name}: checkpoint {saved[name]}, model {mine[name]}"
        for name in saved
        if name in mine and saved[name] != mine[name]
    ]
    differences += [f"{name} is only in the checkpoint" for name in saved if name not in mine]
    differences += [f"{name} is only in the model" for name in mine if name not in saved]
    if differences:
        shown = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise CheckpointError(
            f"{source} is a checkpoint of another model ({len(saved)} parameters, this model {len(mine)}): {shown}. "
            "Build the model the checkpoint was saved from."
        )
    trainable = parts.whole.trainable
    changed = [name for name, entry in manifest["parameters"].items() if entry["trainable"] != (name in trainable)]
    if changed:
        raise CheckpointError(
            f"{source}: {len(changed)} parameters were frozen in one run and trained in the other, "
            f"first {changed[0]!r}: set requires_grad as it was when the checkpoint was saved."
        )
    wanted, found = type(parts.optimizer.torch).__name__, manifest["optimizer"]["class"]
    if wanted != found:
        raise CheckpointError(f"{source} holds states of {found}, this engine uses {wanted}: build it with {found}.")
    groups, saved_groups = len(parts.optimizer.torch.param_groups), len(manifest["optimizer"]["groups"])
    if groups != saved_groups:
        raise CheckpointError(
            f"{source} has {saved_groups} parameter groups, this engine {groups}: pass "
            "the param_groups it was saved with."
        )


def _verify_files(source: Path, manifest: Mapping[str, Any], comm: Comm) -> None:
    """Check the checksums, the files divided among the ranks."""
    for file, expected in sorted(manifest["files"].items())[comm.rank :: comm.size]:
        path = source / file
        if path.parent != source or not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, use an older step-N.")
        if digest(path) != expected:
            raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the manifest's. Use an older step-N.")


class _Reader:
    """Boxes of one checkpoint by (name, state); opens each file once."""

    def __init__(self, source: Path, manifest: Mapping[str, Any]) -> None:
        self._source = source
        self._files: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], list[tuple[Box, str, str]]] = {}
        for row in manifest["tensors"]:
            box = tuple((int(a), int(b)) for a, b in row["box"])
            self._rows.setdefault((row["name"], row["state"]), []).append((box, row["file"], row["key"]))

    def states(self, name: str) -> list[str]:
        return [state for n, state in self._rows if n == name]

    def starting(self, name: str, prefix: str, wanted: Container[str] | None = None) -> dict[str, Tensor]:
        """Tensors of one file whose keys start so, by the rest of the key; only `wanted` rests are read."""
        file = self._file(name)
        rests = [key.removeprefix(prefix) for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
        return {rest: file.get_tensor(prefix + rest) for rest in rests if wanted is None or rest in wanted}

    def fill(self, segment: Segment) -> None:
        """Read the overlaps of stored boxes with a segment into its values."""
        rows = self._rows.get((segment.name, segment.state), [])
        missing = segment.values.numel()
        for box, target in segment.pieces():
            for stored, file, key in rows:
                common = intersect(box, stored)
                if common is None:
                    continue
                inside, opened = slices(common, stored), self._file(file)
                values = opened.get_slice(key)[inside] if inside else opened.get_tensor(key)
                target[slices(common, box)].copy_(values)
                missing -= values.numel()
        if missing:
            raise CheckpointError(
                f"{self._source}: {missing} of {segment.values.numel()} elements of {segment.state} of "
                f"{segment.name!r} are in no file: the checkpoint is incomplete."
            )

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._source / name, framework="pt")
        return self._files[name]


def _restore(source: Path, manifest: Mapping[str, Any], parts: Parts) -> None:
    reader = _Reader(source, manifest)
    for unit in parts.units:
        if unit.grads is None:
            _restore_frozen(reader, unit, parts)
    for owned in parts.optimizer.pieces:
        _restore_piece(reader, manifest["optimizer"]["scalars"], parts, owned)
    for group, saved in zip(parts.optimizer.torch.param_groups, manifest["optimizer"]["groups"], strict=True):
        group.update(revive(saved, {key: value for key, value in group.items() if key != "params"}))
    for unit in parts.units:
        if unit.grads is not None:
            unit.weights.refresh().wait()
    if parts.scheduler is not None and manifest["scheduler"] is not None:
        parts.scheduler.load_state_dict(revive(manifest["scheduler"], parts.scheduler.state_dict()))
    parts.loss_scale.restore(manifest["loss_scale"])
    if parts.leaves is not None and manifest.get("exact") is not None:
        parts.leaves.restore(manifest["exact"])
    _restore_own(reader, manifest, parts)


def _restore_own(reader: _Reader, manifest: Mapping[str, Any], parts: Parts) -> None:
    """Every rank's own streams and statistics go on on the same mesh; elsewhere the first rank's statistics do."""
    rank, files = parts.everyone.rank, sorted(manifest["files"])
    same = _mesh_of(manifest) == parts.degrees
    if same:
        files = [file_of(rank)]
        kept = reader.starting(files[0], "rng:")
        set_rng_state(kept, manifest["python_rng"][rank])
    missing = parts.buffers
    for file in files:
        for name, value in reader.starting(file, "buffer:", set(missing)).items():
            for buffer in missing.pop(name):
                buffer.copy_(value)
        if not missing:
            break


def _mesh_of(manifest: Mapping[str, Any]) -> Degrees:
    """The mesh that saved it; manifests that do not say know no other axis than dp."""
    return Degrees(**manifest.get("mesh", {"pp": 1, "dp": len(manifest["files"]), "tp": 1}))


def _restore_piece(reader: _Reader, scalars: Mapping[str, float], parts: Parts, owned: OwnedPiece) -> None:
    name, optimizer, cut = parts.whole.owner(owned.name), parts.optimizer, parts.cut(owned.name)
    reader.fill(Segment(name, MASTER, owned.shape, owned.piece.start, owned.master, cut))
    state: dict[str, Any] = optimizer.torch.state[owned.master]
    saved = [key for key in reader.states(name) if key != MASTER]
    for key in set(state) - {*saved, *scalars}:
        del state[key]  # the checkpoint was written before the optimizer made this state
    for key in saved:
        state[key] = optimizer.state_view(owned, key, owned.master.dtype)
        reader.fill(Segment(name, key, owned.shape, owned.piece.start, state[key], cut))
    for key, value in scalars.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        else:
            state[key] = torch.tensor(value, dtype=torch.float32)


def _restore_frozen(reader: _Reader, unit: Unit, parts: Parts) -> None:
    weights = unit.weights
    if weights.sharded:
        pieces, values = unit.layout.pieces(parts.comm.rank), weights.shard
    else:
        pieces, values = weights.whole_pieces(), weights.full
    for piece in pieces:
        slot = unit.layout.slots[piece.slot]
        part = values[piece.offset : piece.offset + piece.stop - piece.start]
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32  # holds what any precision saved
        stored = torch.empty_like(part, dtype=wide if part.is_floating_point() else None)
        name, cut = parts.whole.owner(slot.name), parts.cut(slot.name)
        reader.fill(Segment(name, FROZEN, slot.shape, piece.start, stored, cut))
        to_compute(stored, part.dtype, out=part)
