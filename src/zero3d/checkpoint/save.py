"""Sharded, atomic, reshardable checkpoints: writing them (restore.py reads them).

    directory/
      step-N/                     exists or does not: written as .step-N.tmp, fsynced, renamed
        rank-00000.safetensors    this rank's boxes: masters, m, v, frozen weights; its RNG and buffers
        manifest.json             what is in which file, with the files' checksums (checkpoint/manifest.py)
        manifest.sha256           checksum of that, written last

States are n-dimensional boxes of the full model's tensors, so any mesh and stage loads them, each
rank reading only its bytes; a tied parameter's copy on a later pipeline stage is left out, and what all
tp ranks have alike is written by the first. The key in a file is `state:name@start:stop,...`, as its row in
the manifest says. Tensors are safetensors, everything else JSON: no pickle is ever read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from zero3d.checkpoint.fields import USE_ANOTHER, parse
from zero3d.checkpoint.folders import MANIFEST, SEAL, complete_steps
from zero3d.checkpoint.manifest import BUFFER, FORMAT, FROZEN, MASTER, STREAM, checked, file_of, key_of, seal_of
from zero3d.checkpoint.plain import plain
from zero3d.checkpoint.regular import digest
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.degrees import Degrees
from zero3d.errors import CheckpointError, Zero3dError
from zero3d.precision import LossScale
from zero3d.rng import rng_state
from zero3d.shards.boxes import Box, Shape
from zero3d.shards.cuts import Cut, cover
from zero3d.zero.exact.summands import Summands
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.unit import Unit

OURS = ("step-", "best")  # what the names of entries begin with, behind a dot perhaps


class Whole(NamedTuple):
    """The full model's parameters, of which a rank may have a few only.

    shapes     of all, by name in model order, as they are before the tp axis cuts them
    trainable  names
    copies     a tied parameter's copy on a later pipeline stage -> its owner: not saved, restored from it
    """

    shapes: Mapping[str, Shape]
    trainable: frozenset[str]
    copies: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, copies: Mapping[str, str]) -> Whole:
        """Of a model before it is split or cut."""
        named = dict(model.named_parameters())
        trainable = frozenset(name for name, p in named.items() if p.requires_grad)
        return cls({name: tuple(p.shape) for name, p in named.items()}, trainable, copies)

    def owner(self, name: str) -> str:
        """The name under which a parameter of this rank is saved."""
        return self.copies.get(name, name)


@dataclass(frozen=True)
class Parts:
    """What a checkpoint is made of; `about` is written for `promise`, `loop` by the training loop for itself.

    modules   this rank's parts of the model
    comm      the dp axis, over which units are cut
    tp        the tp axis
    everyone  all ranks of the mesh
    cuts      how the tp axis cuts parameters, by name in the full model; it has all others on every rank
    summands  of exact mode
    """

    modules: Sequence[nn.Module]
    whole: Whole
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    comm: Comm
    tp: Comm
    everyone: Comm
    degrees: Degrees
    loss_scale: LossScale
    scheduler: Any
    step: int
    about: Mapping[str, Any]
    loop: Mapping[str, Any] | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    summands: Summands | None = None

    def cut(self, name: str) -> Cut | None:
        """How a parameter of this rank is cut over tp; None where every tp rank has all of it."""
        return self.cuts.get(self.whole.owner(name))

    def saves(self, name: str) -> bool:
        """Whether this rank's part of a parameter goes into files: copies do not."""
        return name not in self.whole.copies and (self.tp.rank == 0 or self.cut(name) is not None)

    @property
    def buffers(self) -> dict[str, list[Tensor]]:
        """This rank's buffers by their names in the full model; one of each part that has it."""
        found: dict[str, list[Tensor]] = {}
        for module in self.modules:
            for name, buffer in module.named_buffers():
                found.setdefault(name, []).append(buffer)
        return found

    @property
    def persistent(self) -> set[str]:
        """Names of this rank's buffers that belong to a model's weights."""
        names = set()
        for module in self.modules:
            for prefix, owner in module.named_modules():
                own = owner._buffers.keys() - owner._non_persistent_buffers_set
                names |= {f"{prefix}.{name}" if prefix else name for name in own}
        return names & self.buffers.keys()

    @property
    def owned_units(self) -> list[Unit]:
        """This rank's units without copies of tied parameters, which have a unit each."""
        return [unit for unit in self.units if unit.layout.slots[0].name not in self.whole.copies]


@dataclass(frozen=True)
class Segment:
    """A flat range of one state of one parameter, held by this rank as a 1-D tensor.

    shape, start  of this rank's parameter, and where in it the range begins
    cut           how that lies in the full model's parameter; None where it is that
    """

    name: str
    state: str
    shape: Shape
    start: int
    values: Tensor
    cut: Cut | None = None

    def pieces(self) -> Iterator[tuple[Box, Tensor]]:
        """Its boxes of the full model's tensor, each with a view of its values in the box's shape."""
        return cover(self.shape, self.start, self.values, self.cut)


def segments(parts: Parts) -> Iterator[Segment]:
    """Everything that this rank owns of the full model; at stage 0 only its share of the copies."""
    for unit in parts.units:
        if unit.grads is None:
            for piece in unit.layout.pieces(parts.comm.rank):
                slot = unit.layout.slots[piece.slot]
                values = unit.weights.shard[piece.offset : piece.offset + piece.stop - piece.start]
                if parts.saves(slot.name):
                    yield Segment(slot.name, FROZEN, slot.shape, piece.start, values, parts.cut(slot.name))
    for owned in parts.optimizer.pieces:
        share = {p.slot: p for p in owned.unit.layout.pieces(parts.comm.rank)}.get(owned.piece.slot)
        if share is None or not parts.saves(owned.name):
            continue
        part = slice(share.start - owned.piece.start, share.stop - owned.piece.start)
        states = parts.optimizer.torch.state.get(owned.master, {})
        flat = {MASTER: owned.master} | {k: v for k, v in states.items() if _is_flat(v, owned.master)}
        for state, values in flat.items():
            yield Segment(owned.name, state, owned.shape, share.start, values[part], parts.cut(owned.name))


def _is_flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == master.shape


# --- save ---------------------------------------------------------------------------------------


def save(directory: Path, parts: Parts) -> Path:
    """Write directory/step-N and return it. A crash at any instant leaves the older checkpoints whole."""
    final = directory / f"step-{parts.step}"
    temporary = directory / f".step-{parts.step}.tmp"
    everyone = parts.everyone
    agree(everyone, lambda: _prepare(directory, temporary) if everyone.rank == 0 else None)
    part_file = temporary / f"rank-{everyone.rank:05d}.json"
    with taken_back(temporary, everyone):
        agree(everyone, lambda: write_json(part_file, _write_rank(temporary, parts)))
        agree(everyone, lambda: _commit(temporary, final, parts) if everyone.rank == 0 else None)
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
    foreign = [entry.name for entry in directory.iterdir() if not entry.name.lstrip(".").startswith(OURS)]
    if foreign and not any(entry.name.lstrip(".").startswith(OURS) for entry in directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not empty and holds no checkpoints (it has {len(foreign)} other files, such as "
            f"{foreign[0]!r}): pass a new or empty directory, or one with step-N folders."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _write_rank(temporary: Path, parts: Parts) -> dict[str, Any]:
    file = file_of(parts.everyone.rank)
    tensors: dict[str, Tensor] = {}
    rows = []
    for segment in segments(parts):
        for box, values in segment.pieces():
            key = key_of(segment.name, segment.state, box)
            tensors[key] = values.detach().cpu().contiguous()
            rows.append({
                "name": segment.name, "state": segment.state, "box": box, "dtype": _dtype(values), "file": file,
                "key": key,
            })  # fmt: skip
    buffers = parts.buffers.items()  # every rank's own: running statistics may differ
    own = {f"{BUFFER}{name}": each[0].detach().cpu().contiguous().clone() for name, each in buffers}
    rng, python_rng = rng_state()
    own |= {f"{STREAM}{name}": value for name, value in rng.items()}
    write_tensors(temporary / file, tensors | own)
    return {
        "file": file,
        "sha256": digest(temporary / file),
        "own": {key: {"shape": list(value.shape), "dtype": _dtype(value)} for key, value in own.items()},
        "parameters": {
            slot.name: {
                "shape": list(parts.whole.shapes[slot.name]),
                "trainable": unit.grads is not None,
                "dtype": str(unit.dtype).removeprefix("torch."),
            }
            for unit in parts.owned_units
            for slot in unit.layout.slots
        },
        "tensors": rows,
        "scalars": _scalars(parts),
        "python_rng": python_rng,
    }


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _commit(temporary: Path, final: Path, parts: Parts) -> None:
    ranks = []
    for rank in range(parts.everyone.size):
        part = temporary / f"rank-{rank:05d}.json"
        ranks.append(json.loads(part.read_text()))
        part.unlink()
    optimizer = parts.optimizer.torch
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": parts.step,
        "about": dict(parts.about),
        "mesh": parts.degrees._asdict(),
        "exact": parts.summands.state(parts.degrees.tp, parts.degrees.pp) if parts.summands is not None else None,
        "parameters": {name: entry for rank in ranks for name, entry in rank["parameters"].items()},
        "tensors": [row for rank in ranks for row in rank["tensors"]],
        "files": {rank["file"]: rank["sha256"] for rank in ranks},
        "own": {rank["file"]: rank["own"] for rank in ranks},
        "python_rng": [rank["python_rng"] for rank in ranks],
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "scalars": next((rank["scalars"] for rank in ranks if rank["scalars"]), {}),
        },
        "scheduler": plain(parts.scheduler.state_dict()) if parts.scheduler is not None else None,
        "loss_scale": parts.loss_scale.state(),
        "loop": parts.loop,
    }
    text = write_json(temporary / MANIFEST, manifest)
    _check_loadable(temporary, text)
    write_text(temporary / SEAL, seal_of(text.encode()))
    sync(temporary)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():  # saved at this step before: keep it until the new one stands
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _check_loadable(folder: Path, text: str) -> None:
    """Refuse to commit what `restore` would refuse: better now than when it is needed."""
    try:
        checked(folder, parse(text.encode(), MANIFEST))
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot save {folder}, since it could not be loaded: {str(error).removesuffix(USE_ANOTHER)}"
        ) from error


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
        older = complete_steps(path.parent.parent)
        way = "go on from an older checkpoint, which is whole" if older else "try again"
        raise CheckpointError(f"cannot write {path} ({error}): make room and {way}.") from OSError(str(error))


def write_json(path: Path, value: Any) -> str:
    """Write and fsync plain values; the text. Raises CheckpointError for anything else."""
    try:
        text = json.dumps(plain(value))
    except TypeError as error:
        raise CheckpointError(
            f"cannot write {path.name}: {error}. Scheduler and group options must be plain values."
        ) from error
    write_text(path, text)
    return text


def write_text(path: Path, text: str) -> None:
    """Write and fsync."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
