"""Writing a checkpoint: sharded, atomic, reshardable (`restore.py` reads it, `manifest.py` has the format).

    directory/
      step-N/                     exists or does not: written as .step-N.tmp, fsynced, renamed
        rank-00000.safetensors    this rank's boxes: masters, m, v, frozen weights; its RNG and buffers
        rank-00000.json           what is in that, with its checksum: this rank's part of the manifest
        manifest.json             the rest of it, with the parts' checksums (`manifest.py`)
        manifest.sha256           checksum of that, written last

States are n-dimensional boxes of the full model's tensors, so any mesh and stage loads them, each
rank reading only its bytes; a tied parameter's copy on a later pipeline stage is left out, and what all
tp ranks have alike is written by the first. The key in a file is `state:name@start:stop,...`, as its row in
the manifest says. Tensors are safetensors, everything else JSON: no pickle is ever read.

States go to the disk as they are, or through one bounded buffer (`writing.py`). Between ranks 32 bytes of each travel,
its part's checksum; rank 0 reads the parts one by one, for what they say together.

`save` does all of it while its caller waits. Its steps are also those of a save behind training (`background.py`):

    prepare          the temporary folder          rank 0
    capture, facts   what is to be written, tensors as views, and what is known beside them
    write_all        tensors and parts, the manifest over them, all of it on the disk, the rename; a store's copy
"""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.checkpoint.copies import Copies, told as told_of_store
from zero3d.checkpoint.fields import USE_ANOTHER, parse_fields
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST, step_of
from zero3d.checkpoint.json_values import to_json
from zero3d.checkpoint.manifest import (
    BUFFER,
    FORMAT,
    NEWEST,
    STREAM,
    WITH_BASE,
    checksum_line,
    file_of,
    key_of,
    part_of,
)
from zero3d.checkpoint.manifest_parser import Contents, check_tiling, parse_manifest, parse_part, read_part
from zero3d.checkpoint.resume_contract import OPTIONS
from zero3d.checkpoint.state import EngineState, state_pieces
from zero3d.checkpoint.writing import Unsynced, json_text, removed_on_failure, told, write_tensors, write_text
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.degrees import AXES, FOLDS
from zero3d.errors import CheckpointError
from zero3d.offload.commit_file import sync
from zero3d.precision import Halves, dtype_name
from zero3d.rng import rng_state

STEP_OF = "step of "  # how the count of one parameter is named
ENTRIES = ("step-", "best")  # how names in a directory of checkpoints begin, behind a dot perhaps


class Captured(NamedTuple):
    """What one rank writes of a step.

    states  tensors by their keys in the file: views of what the next update changes
    own     buffers and random states of this rank; the buffers are views, too
    part    what is known of both, without the checksum of their file
    """

    rank: int
    states: Mapping[str, Tensor | Halves]
    own: Mapping[str, Tensor]
    part: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Count the bytes of all tensors, as they are in the file."""
        tensors = (*self.states.values(), *self.own.values())
        return sum(values.shape.numel() * values.dtype.itemsize for values in tensors)


class Facts(NamedTuple):
    """What is known of a step beside tensors, alike on all ranks, and the degrees of the mesh.

    base  the folder of frozen weights, as rank 0 knows it
    """

    run: Mapping[str, Any]
    mesh: Mapping[str, int]
    base: Mapping[str, str] | None = None

    @classmethod
    def of(cls, engine: EngineState) -> Facts:
        """Collect them; some are the engine's own, and change with its next step."""
        base = None if engine.base is None else engine.base.described()
        usual = {fold.name: fold.usual for fold in FOLDS}
        mesh = {axis: size for axis, size in engine.degrees._asdict().items() if axis in AXES or size != usual[axis]}
        return cls(run_state(engine), mesh, base)


class Saved(NamedTuple):
    """A checkpoint that is there.

    nbytes   of tensors that this rank has written into it
    seconds  in which it has written its own files, and its disk taken them
    """

    folder: Path
    nbytes: int
    seconds: float


class Target(NamedTuple):
    """Names the folder a checkpoint ends up in, the one it is written in, and the URL of its copy, if there is one."""

    final: Path
    temporary: Path
    to: str | None = None

    @classmethod
    def of(cls, directory: Path, step: int, to: str | None = None) -> Target:
        """Name them."""
        return cls(directory / f"step-{step}", directory / f".step-{step}.tmp", to)


def save(directory: Path, engine: EngineState, to: str | None = None) -> Saved:
    """Write directory/step-N, and a copy below the URL `to`. A crash at any instant leaves the older ones whole."""
    target, world = Target.of(directory, engine.step, to), engine.world.patient
    prepare(target, world)
    return write_all(target, world, lambda: capture(engine), lambda: Facts.of(engine))


def prepare(target: Target, world: Comm) -> None:
    """Make the temporary folder. Raises CheckpointError for a directory that holds something else."""
    agree(world, lambda: _prepare(target.final.parent, target.temporary) if world.rank == 0 else None)


def write_all(target: Target, world: Comm, capture: Callable[[], Captured], facts: Callable[[], Facts]) -> Saved:
    """Write what all ranks have, and commit. `world` has all of them; `facts` is asked on rank 0."""
    temporary, final = target.temporary, target.final
    with removed_on_failure(temporary, world):
        with Unsynced() as files:
            sha256, nbytes, seconds = agree(world, lambda: _write_rank(temporary, capture(), files))
            digests = _exchange_digests(world, sha256)
            agree(world, lambda: _complete(temporary, facts, digests if world.rank == 0 else (), files))
        agree(world, lambda: _publish(temporary, final) if world.rank == 0 else None)
    if target.to is not None:
        copy_to_store(final, target.to, world)
    seconds += sum(files.seconds[temporary / name(world.rank)] for name in (file_of, part_of))
    return Saved(final, nbytes, seconds)


def copy_to_store(folder: Path, url: str, world: Comm) -> None:
    """Copy a checkpoint below a URL: every rank its own files, then rank 0 the manifest. Raises CopyError."""
    place = f"{url.rstrip('/')}/{folder.name}"

    def attempt(action: Callable[[Copies], None], mine: bool = True) -> None:
        with told_of_store(place, "written", folder):
            if mine:
                action(Copies(url))

    first = world.rank == 0
    step, files = step_of(folder), (file_of(world.rank), part_of(world.rank))
    assert step is not None
    agree(world, lambda: attempt(lambda copies: copies.make_way(step), first))
    agree(world, lambda: attempt(lambda copies: copies.upload(folder, files)))
    agree(world, lambda: attempt(lambda copies: copies.commit(folder), first))


def _prepare(directory: Path, temporary: Path) -> None:
    """Make the temporary folder. Raises CheckpointError for a directory that holds something else."""
    with told(directory):
        directory.mkdir(parents=True, exist_ok=True)
    foreign = [entry.name for entry in directory.iterdir() if not entry.name.lstrip(".").startswith(ENTRIES)]
    if foreign and not any(entry.name.lstrip(".").startswith(ENTRIES) for entry in directory.iterdir()):
        raise CheckpointError(
            f"{directory} is not empty and holds no checkpoints (it has {len(foreign)} other files, such as "
            f"{foreign[0]!r}): pass a new or empty directory, or one with step-N folders."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    with told(temporary):
        temporary.mkdir()


def capture(engine: EngineState) -> Captured:
    """Collect what this rank writes of the engine's step; no bytes of states are copied."""
    rank = engine.world.rank
    states: dict[str, Tensor | Halves] = {}
    rows = []
    for piece in state_pieces(engine):
        for box, values in piece.boxes():
            key = key_of(piece.name, piece.state, box)
            states[key] = values
            rows.append(
                {"name": piece.name, "state": piece.state, "box": box, "dtype": dtype_name(values.dtype), "key": key}
            )
    own, python_rng = own_state(engine)
    part = {
        "parameters": {
            (name := engine.full_model.owner(slot.name)): {
                "shape": list(engine.full_model.shapes[name]),
                "trainable": unit.grads is not None,
                "dtype": dtype_name(unit.dtype),
                **({"base": True} if engine.leaves_out(slot.name) else {}),
            }
            for unit in engine.owned_units
            for slot in unit.layout.slots
        },
        "tensors": rows,
        "own": {key: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)} for key, value in own.items()},
        "scalars": optimizer_scalars(engine),
        "python_rng": python_rng,
    }
    return Captured(rank, states, own, part)


def _write_rank(temporary: Path, captured: Captured, files: Unsynced) -> tuple[str, int, float]:
    """Write a rank's tensors, then its part of the manifest; return that one's SHA-256, the tensors' bytes, seconds."""
    begun = time.perf_counter()
    rank, file = captured.rank, file_of(captured.rank)
    checksums = write_tensors(temporary / file, {**captured.states, **captured.own}, files)
    path = temporary / part_of(rank)
    text = json_text(path, {"file": file, "xxh3_128": checksums.file, **captured.part, "xxh3_64": checksums.tensors})
    with _loadable(temporary):
        parse_part(parse_fields(text.encode(), path.name), rank, NEWEST)
    return write_text(path, text, files), captured.nbytes, time.perf_counter() - begun


def own_state(engine: EngineState) -> tuple[dict[str, Tensor], Any]:
    """Return what a rank saves for itself: buffers and random states as tensors, those of Python and numpy as JSON.

    Every rank saves its buffers, and the numbers that forwards have written beside them: ranks may differ in both.
    """
    own = {f"{BUFFER}{name}": same[0] for name, same in engine.buffers.items()}
    own |= {f"{BUFFER}{name}": number.tensor for name, number in engine.numbers.items() if number.is_written}
    rng, python_rng = rng_state(engine.world.device)
    return own | {f"{STREAM}{name}": value for name, value in rng.items()}, python_rng


def _exchange_digests(world: Comm, sha256: str) -> list[str]:
    """Return every rank's SHA-256, by rank; moves 32 bytes per rank, as four whole numbers."""
    numbers = torch.tensor(struct.unpack("<4q", bytes.fromhex(sha256)), dtype=torch.int64)
    return [struct.pack("<4q", *row).hex() for row in world.exchange(numbers).tolist()]


def _complete(temporary: Path, facts: Callable[[], Facts], digests: Sequence[str], files: Unsynced) -> None:
    """Have the disk take this rank's files; write the manifest where there are digests of parts.

    All ranks ask the disk at once: who came later would wait for the journal twice, and seem to be the slow one.
    """
    files.sync()
    if digests:
        _write_manifest(temporary, facts(), digests, files)
        files.sync()
    with told(temporary):
        sync(temporary)


def _write_manifest(temporary: Path, facts: Facts, digests: Sequence[str], files: Unsynced) -> None:
    """Write the manifest of the ranks' parts, and check that they fit together."""
    contents = Contents()
    with _loadable(temporary):
        for rank, sha256 in enumerate(digests):
            contents.add(read_part(temporary, rank, sha256, NEWEST))
    text = json_text(temporary / MANIFEST, _manifest(contents, facts, digests))
    with _loadable(temporary):
        check_tiling(contents, parse_manifest(temporary, parse_fields(text.encode(), MANIFEST)))
    write_text(temporary / MANIFEST, text, files)
    write_text(temporary / CHECKSUM, checksum_line(text.encode()), files)


def _manifest(contents: Contents, facts: Facts, digests: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of what all ranks have written (`manifest.py` says what is in it)."""
    base = facts.base if any(parameter.in_base for parameter in contents.parameters.values()) else None
    return {
        **facts.run,
        "format": FORMAT if base is None else WITH_BASE,
        **({} if base is None else {"base": base}),
        "mesh": facts.mesh,
        "parameters": {
            name: {
                "shape": parameter.shape,
                "trainable": parameter.trainable,
                "dtype": parameter.dtype,
                **({"base": True} if parameter.in_base else {}),
            }
            for name, parameter in contents.parameters.items()
        },
        "parts": {part_of(rank): sha256 for rank, sha256 in enumerate(digests)},
        "optimizer": {**facts.run["optimizer"], "scalars": contents.scalars},
    }


def run_state(engine: EngineState) -> dict[str, Any]:
    """Return what is known of a step beside tensors, alike on all ranks."""
    optimizer = engine.optimizer.torch
    return {
        "step": engine.step,
        "about": {name: fact for name, fact in engine.about.items() if name != OPTIONS},  # which the optimizer's are
        "exact": engine.summands.state(engine.degrees.tp, engine.degrees.pp) if engine.summands is not None else None,
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        },
        "scheduler": to_json(engine.scheduler.state_dict()) if engine.scheduler is not None else None,
        "loss_scale": engine.loss_scale.state(),
        "loop": engine.loop,
    }


def _publish(temporary: Path, final: Path) -> None:
    """Rename the complete folder; one that was saved at this step before stays until the new one stands."""
    aside = final.with_name(f".{final.name}.old")
    with told(final):
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        temporary.rename(final)
        sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _loadable(folder: Path) -> Iterator[None]:
    """Refuse to commit what `restore` would refuse: better now than when it is needed."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot save {folder}, since it could not be loaded: {str(error).removesuffix(USE_ANOTHER)}"
        ) from error


def optimizer_scalars(engine: EngineState) -> dict[str, float]:
    """Return per-parameter scalars of the optimizer ("step"), one value for all: pieces are updated together.

    Parameters that were frozen for some steps have a count of their own, "step of NAME".
    """
    optimizer = engine.optimizer
    for owned in optimizer.pieces:
        state = optimizer.torch.state.get(owned.master, {})
        scalars = {
            k: float(v)
            for k, v in state.items()
            if isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.dim() == 0)
        }
        if "step" in scalars and optimizer.missed:
            scalars["step"] += optimizer.missed[owned.name]
            names = [(engine.full_model.owner(name), missed) for name, missed in optimizer.missed.items()]
            scalars |= {f"{STEP_OF}{name}": scalars["step"] - missed for name, missed in sorted(names) if missed}
        return scalars
    return {}
