"""Sharded, atomic, reshardable checkpoints.

    directory/
      step-N/                     exists or does not: written as .step-N.tmp, fsynced, renamed
        manifest.json             written last: step, tensors (name, state, box, file, key), checksums, scalars
        rank-00000.safetensors    this rank's boxes: masters, m, v, frozen weights; its RNG and buffers

States are n-dimensional boxes of the logical tensors, so any dp degree and stage loads them,
each rank reading only its bytes. The key in a file is `name@start:stop,...`; only the manifest
says what it means. Tensors are safetensors, everything else JSON: no pickle is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zero3d.agree import agree
from zero3d.boxes import Box, Shape, box_shape, boxes, intersect
from zero3d.errors import CheckpointError, Zero3dError
from zero3d.plain import plain, revive
from zero3d.precision import LossScale, to_compute
from zero3d.rng import rng_state, set_rng_state
from zero3d.zero.collectives import Comm
from zero3d.zero.optimizer import OwnedPiece, ShardedOptimizer
from zero3d.zero.unit import Unit

FORMAT = 1
MASTER, FROZEN = "master", "weight"


@dataclass(frozen=True)
class Parts:
    """What a checkpoint is made of; `about` is written for people, `loop` by the training loop for itself."""

    module: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    comm: Comm
    loss_scale: LossScale
    scheduler: Any
    step: int
    about: Mapping[str, Any]
    loop: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Segment:
    """A flat range of one state of one parameter, held by this rank as a 1-D tensor."""

    name: str
    state: str
    shape: Shape
    start: int
    values: Tensor

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """Its boxes, each with its values in the box's shape."""
        offset = 0
        for box in boxes(self.shape, self.start, self.start + self.values.numel()):
            shape = box_shape(box)
            size = int(numpy.prod(shape))
            yield box, self.values[offset : offset + size].view(shape)
            offset += size


def segments(parts: Parts) -> Iterator[Segment]:
    """Everything sharded that this rank owns; at stage 0 only its share of the copies."""
    for unit in parts.units:
        mine = {piece.slot: piece for piece in unit.layout.pieces(parts.comm.rank)}
        if unit.grads is None:
            for piece in mine.values():
                slot = unit.layout.slots[piece.slot]
                values = unit.weights.shard[piece.offset : piece.offset + piece.stop - piece.start]
                yield Segment(slot.name, FROZEN, slot.shape, piece.start, values)
    for owned in parts.optimizer.pieces:
        share = {p.slot: p for p in owned.unit.layout.pieces(parts.comm.rank)}.get(owned.piece.slot)
        if share is None:
            continue
        part = slice(share.start - owned.piece.start, share.stop - owned.piece.start)
        states = parts.optimizer.torch.state.get(owned.master, {})
        flat = {MASTER: owned.master} | {k: v for k, v in states.items() if _is_flat(v, owned.master)}
        for state, values in flat.items():
            yield Segment(owned.name, state, owned.shape, share.start, values[part])


def _is_flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == master.shape


# --- save ---------------------------------------------------------------------------------------


def save(directory: Path, parts: Parts) -> Path:
    """Write directory/step-N and return it. A crash at any instant leaves the older checkpoints whole."""
    final = directory / f"step-{parts.step}"
    temporary = directory / f".step-{parts.step}.tmp"
    agree(parts.comm, lambda: _prepare(directory, temporary) if parts.comm.rank == 0 else None)
    part_file = temporary / f"rank-{parts.comm.rank:05d}.json"
    with taken_back(temporary, parts.comm):
        agree(parts.comm, lambda: write_json(part_file, _write_rank(temporary, parts)))
        agree(parts.comm, lambda: _commit(temporary, final, parts) if parts.comm.rank == 0 else None)
    return final


@contextmanager
def taken_back(temporary: Path, comm: Comm) -> Iterator[None]:
    """Remove a folder that could not be completed: it would fill the disk that may be full."""
    try:
        yield
    except Zero3dError:
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _prepare(directory: Path, temporary: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    entries = [entry.name for entry in directory.iterdir()]
    foreign = [name for name in entries if not name.lstrip(".").startswith("step-")]
    if foreign and len(foreign) == len(entries):
        raise CheckpointError(
            f"{directory} is not empty and holds no checkpoints (it has {len(foreign)} other files, such as "
            f"{foreign[0]!r}): pass a new or empty directory, or one with step-N folders."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _write_rank(temporary: Path, parts: Parts) -> dict[str, Any]:
    rank = parts.comm.rank
    file = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    rows = []
    for segment in segments(parts):
        for box, values in segment.pieces():
            key = f"{segment.state}:{segment.name}@" + ",".join(f"{a}:{b}" for a, b in box)
            tensors[key] = values.detach().cpu().contiguous()
            rows.append({"name": segment.name, "state": segment.state, "box": box, "file": file, "key": key})
    buffers = parts.module.named_buffers()  # every rank's own: running statistics may differ
    tensors |= {f"buffer:{name}": value.detach().cpu().contiguous().clone() for name, value in buffers}
    rng, python_rng = rng_state()
    tensors |= {f"rng:{name}": value for name, value in rng.items()}
    write_tensors(temporary / file, tensors)
    return {"file": file, "sha256": _digest(temporary / file), "tensors": rows, "python_rng": python_rng}


def _commit(temporary: Path, final: Path, parts: Parts) -> None:
    ranks = []
    for rank in range(parts.comm.size):
        part = temporary / f"rank-{rank:05d}.json"
        ranks.append(json.loads(part.read_text()))
        part.unlink()
    optimizer = parts.optimizer.torch
    manifest = {
        "format": FORMAT,
        "step": parts.step,
        "about": dict(parts.about),
        "parameters": {
            slot.name: {"shape": list(slot.shape), "trainable": unit.grads is not None, "dtype": str(unit.dtype)[6:]}
            for unit in parts.units
            for slot in unit.layout.slots
        },
        "tensors": [row for rank in ranks for row in rank["tensors"]],
        "files": {rank["file"]: rank["sha256"] for rank in ranks},
        "python_rng": [rank["python_rng"] for rank in ranks],
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "scalars": _scalars(parts),
        },
        "scheduler": plain(parts.scheduler.state_dict()) if parts.scheduler is not None else None,
        "loss_scale": parts.loss_scale.state(),
        "loop": parts.loop,
    }
    write_json(temporary / "manifest.json", manifest)
    sync(temporary)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():  # saved at this step before: keep it until the new one stands
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _scalars(parts: Parts) -> dict[str, float]:
    """Per-parameter scalars of the optimizer ("step"), one value for all: pieces are always updated together."""
    for owned in parts.optimizer.pieces:
        state = parts.optimizer.torch.state.get(owned.master, {})
        return {
            k: float(v)
            for k, v in state.items()
            if isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.dim() == 0)
        }
    return {}


def write_tensors(path: Path, tensors: dict[str, Tensor], **about: str) -> None:
    """Write and fsync a safetensors file. Raises CheckpointError where the disk does not take it."""
    try:
        save_file(tensors, path, metadata=about or None)
        sync(path)
    except (OSError, SafetensorError) as error:
        older = any(path.parent.parent.glob("step-*/manifest.json"))
        way = "go on from an older checkpoint, which is whole" if older else "try again"
        raise CheckpointError(f"cannot write {path} ({error}): make room and {way}.") from OSError(str(error))


def write_json(path: Path, value: Any) -> None:
    """Write and fsync plain values. Raises CheckpointError for anything else."""
    try:
        text = json.dumps(plain(value))
    except TypeError as error:
        raise CheckpointError(
            f"cannot write {path.name}: {error}. Scheduler and group options must be plain values."
        ) from error
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- load ---------------------------------------------------------------------------------------


def load(directory: Path, parts: Parts) -> tuple[int, Any]:
    """Restore states from a checkpoint of any dp degree and stage; returns its step and what the loop had saved.

    Everything is checked before anything is written. Raises CheckpointError on all ranks.
    """
    source, manifest = agree(parts.comm, lambda: _open(directory, parts))
    agree(parts.comm, lambda: _verify_files(source, manifest, parts.comm))
    agree(parts.comm, lambda: _restore(source, manifest, parts))
    return int(manifest["step"]), manifest.get("loop")


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
    mine = {slot.name: slot.shape for unit in parts.units for slot in unit.layout.slots}
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
    trainable = {slot.name for unit in parts.units if unit.grads is not None for slot in unit.layout.slots}
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
        if _digest(path) != expected:
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

    def file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._source / name, framework="pt")
        return self._files[name]

    def fill(self, segment: Segment) -> None:
        """Read the overlaps of stored boxes with a segment into its values."""
        rows = self._rows.get((segment.name, segment.state), [])
        missing = segment.values.numel()
        for box, target in segment.pieces():
            for stored, file, key in rows:
                common = intersect(box, stored)
                if common is None:
                    continue
                inside = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, stored, strict=True))
                place = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, box, strict=True))
                values = self.file(file).get_slice(key)[inside] if inside else self.file(file).get_tensor(key)
                target[place].copy_(values)
                missing -= values.numel()
        if missing:
            raise CheckpointError(
                f"{self._source}: {missing} of {segment.values.numel()} elements of {segment.state} of "
                f"{segment.name!r} are in no file: the checkpoint is incomplete."
            )


def _restore(source: Path, manifest: Mapping[str, Any], parts: Parts) -> None:
    reader = _Reader(source, manifest)
    for unit in parts.units:
        if unit.grads is None:
            _restore_frozen(reader, unit, parts.comm.rank)
    for owned in parts.optimizer.pieces:
        _restore_piece(reader, manifest["optimizer"]["scalars"], parts.optimizer, owned)
    for group, saved in zip(parts.optimizer.torch.param_groups, manifest["optimizer"]["groups"], strict=True):
        group.update(revive(saved, {key: value for key, value in group.items() if key != "params"}))
    for unit in parts.units:
        if unit.grads is not None:
            unit.weights.refresh().wait()
    if parts.scheduler is not None and manifest["scheduler"] is not None:
        parts.scheduler.load_state_dict(revive(manifest["scheduler"], parts.scheduler.state_dict()))
    parts.loss_scale.restore(manifest["loss_scale"])
    same_shape = len(manifest["files"]) == parts.comm.size  # then each rank's own streams and statistics go on
    file = reader.file(f"rank-{parts.comm.rank if same_shape else 0:05d}.safetensors")
    kept = {key: file.get_tensor(key) for key in file.keys() if key.startswith(("rng:", "buffer:"))}  # noqa: SIM118
    for name, buffer in parts.module.named_buffers():
        if f"buffer:{name}" in kept:
            buffer.copy_(kept[f"buffer:{name}"])
    if same_shape:
        rng = {key[4:]: value for key, value in kept.items() if key.startswith("rng:")}
        set_rng_state(rng, manifest["python_rng"][parts.comm.rank])


def _restore_piece(
    reader: _Reader, scalars: Mapping[str, float], optimizer: ShardedOptimizer, owned: OwnedPiece
) -> None:
    reader.fill(Segment(owned.name, MASTER, owned.shape, owned.piece.start, owned.master))
    state: dict[str, Any] = optimizer.torch.state[owned.master]
    saved = [key for key in reader.states(owned.name) if key != MASTER]
    for key in set(state) - {*saved, *scalars}:
        del state[key]  # the checkpoint was written before the optimizer made this state
    for key in saved:
        state[key] = optimizer.state_view(owned, key, owned.master.dtype)
        reader.fill(Segment(owned.name, key, owned.shape, owned.piece.start, state[key]))
    for key, value in scalars.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(value)
        else:
            state[key] = torch.tensor(value, dtype=torch.float32)


def _restore_frozen(reader: _Reader, unit: Unit, rank: int) -> None:
    weights = unit.weights
    if weights.sharded:
        pieces, values = unit.layout.pieces(rank), weights.shard
    else:
        pieces, values = weights.whole_pieces(), weights.full
    for piece in pieces:
        slot = unit.layout.slots[piece.slot]
        part = values[piece.offset : piece.offset + piece.stop - piece.start]
        wide = torch.float64 if part.dtype == torch.float64 else torch.float32  # holds what any precision saved
        stored = torch.empty_like(part, dtype=wide if part.is_floating_point() else None)
        reader.fill(Segment(slot.name, FROZEN, slot.shape, piece.start, stored))
        to_compute(stored, part.dtype, out=part)
