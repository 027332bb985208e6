"""Writing a checkpoint: sharded, atomic, reshardable (`restore.py` reads it, `manifest.py` has the format).

    directory/
      step-N/                     exists or does not: written as .step-N.tmp, fsynced, renamed
        rank-00000.safetensors    this rank's boxes: masters, m, v, frozen weights; its RNG and buffers
        manifest.json             what is in which file, with the files' checksums (`manifest.py`)
        manifest.sha256           checksum of that, written last

States are n-dimensional boxes of the full model's tensors, so any mesh and stage loads them, each
rank reading only its bytes; a tied parameter's copy on a later pipeline stage is left out, and what all
tp ranks have alike is written by the first. The key in a file is `state:name@start:stop,...`, as its row in
the manifest says. Tensors are safetensors, everything else JSON: no pickle is ever read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from zero3d.checkpoint.fields import USE_ANOTHER, parse_fields
from zero3d.checkpoint.files import digest
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.checkpoint.json_values import to_json
from zero3d.checkpoint.manifest import BUFFER, FORMAT, STREAM, checksum_line, file_of, key_of
from zero3d.checkpoint.manifest_parser import parse_manifest
from zero3d.checkpoint.state import EngineState, state_pieces
from zero3d.checkpoint.writing import removed_on_failure, sync, write_json, write_tensors, write_text
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError
from zero3d.rng import rng_state

ENTRIES = ("step-", "best")  # how names in a directory of checkpoints begin, behind a dot perhaps


def save(directory: Path, engine: EngineState) -> Path:
    """Write directory/step-N and return it. A crash at any instant leaves the older checkpoints whole."""
    final = directory / f"step-{engine.step}"
    temporary = directory / f".step-{engine.step}.tmp"
    world = engine.world.patient
    agree(world, lambda: _prepare(directory, temporary) if world.rank == 0 else None)
    with removed_on_failure(temporary, world):
        agree(world, lambda: write_json(temporary / _rows_file(world.rank), _write_rank(temporary, engine)))
        agree(world, lambda: _commit(temporary, final, engine) if world.rank == 0 else None)
    return final


def _prepare(directory: Path, temporary: Path) -> None:
    """Make the temporary folder. Raises CheckpointError for a directory that holds something else."""
    directory.mkdir(parents=True, exist_ok=True)
    foreign = [entry.name for entry in directory.iterdir() if not entry.name.lstrip(".").startswith(ENTRIES)]
    if foreign and not any(entry.name.lstrip(".").startswith(ENTRIES) for entry in directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not empty and holds no checkpoints (it has {len(foreign)} other files, such as "
            f"{foreign[0]!r}): pass a new or empty directory, or one with step-N folders."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _rows_file(rank: int) -> str:
    """Return the name of the file in which a rank leaves its share of the manifest for rank 0."""
    return f"rank-{rank:05d}.json"


def _write_rank(temporary: Path, engine: EngineState) -> dict[str, Any]:
    """Write this rank's tensors; return its share of the manifest."""
    file = file_of(engine.world.rank)
    tensors: dict[str, Tensor] = {}
    rows = []
    for piece in state_pieces(engine):
        for box, values in piece.boxes():
            key = key_of(piece.name, piece.state, box)
            tensors[key] = values.detach().cpu().contiguous()
            rows.append({
                "name": piece.name, "state": piece.state, "box": box, "dtype": _dtype(values), "file": file,
                "key": key,
            })  # fmt: skip
    # Every rank saves its buffers: running statistics may differ.
    unsharded = {
        f"{BUFFER}{name}": same[0].detach().cpu().contiguous().clone() for name, same in engine.buffers.items()
    }
    rng, python_rng = rng_state(engine.world.device)
    unsharded |= {f"{STREAM}{name}": value for name, value in rng.items()}
    write_tensors(temporary / file, tensors | unsharded)
    return {
        "file": file,
        "sha256": digest(temporary / file),
        "own": {key: {"shape": list(value.shape), "dtype": _dtype(value)} for key, value in unsharded.items()},
        "parameters": {
            slot.name: {
                "shape": list(engine.full_model.shapes[slot.name]),
                "trainable": unit.grads is not None,
                "dtype": str(unit.dtype).removeprefix("torch."),
            }
            for unit in engine.owned_units
            for slot in unit.layout.slots
        },
        "tensors": rows,
        "scalars": _scalars(engine),
        "python_rng": python_rng,
    }


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _commit(temporary: Path, final: Path, engine: EngineState) -> None:
    """Join the ranks' shares of the manifest, check it, and give the folder its final name."""
    ranks = []
    for rank in range(engine.world.size):
        rows = temporary / _rows_file(rank)
        ranks.append(json.loads(rows.read_text()))
        rows.unlink()
    text = write_json(temporary / MANIFEST, _manifest(ranks, engine))
    _check_loadable(temporary, text)
    write_text(temporary / CHECKSUM, checksum_line(text.encode()))
    sync(temporary)
    _publish(temporary, final)


def _manifest(ranks: Sequence[Mapping[str, Any]], engine: EngineState) -> dict[str, Any]:
    """Return the manifest of what all ranks have written (`manifest.py` says what is in it)."""
    optimizer = engine.optimizer.torch
    return {
        "format": FORMAT,
        "step": engine.step,
        "about": dict(engine.about),
        "mesh": engine.degrees._asdict(),
        "exact": engine.summands.state(engine.degrees.tp, engine.degrees.pp) if engine.summands is not None else None,
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
        "scheduler": to_json(engine.scheduler.state_dict()) if engine.scheduler is not None else None,
        "loss_scale": engine.loss_scale.state(),
        "loop": engine.loop,
    }


def _publish(temporary: Path, final: Path) -> None:
    """Rename the complete folder; one that was saved at this step before stays until the new one stands."""
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _check_loadable(folder: Path, text: str) -> None:
    """Refuse to commit what `restore` would refuse: better now than when it is needed."""
    try:
        parse_manifest(folder, parse_fields(text.encode(), MANIFEST))
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot save {folder}, since it could not be loaded: {str(error).removesuffix(USE_ANOTHER)}"
        ) from error


def _scalars(engine: EngineState) -> dict[str, float]:
    """Return per-parameter scalars of the optimizer ("step"), one value for all: pieces are updated together."""
    for owned in engine.optimizer.pieces:
        state = engine.optimizer.torch.state.get(owned.master, {})
        return {
            k: float(v)
            for k, v in state.items()
            if isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.dim() == 0)
        }
    return {}
