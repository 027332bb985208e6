"""Writes and reads notes of steps: what a restart from slots needs beside their records (offload/disk_slab.py).

    DIRECTORY/
      rank-00003.note-0.json          of even steps: loop, options, scheduler, loss scale, random states, checksum of
      rank-00003.note-0.safetensors   its buffers and random states
      rank-00003.note-1.*             of odd steps

A note is written when all that belongs to its step has happened, a checkpoint of it included; the step's records may
be committed before or after. Commits alone say which step can be gone back to (offload/disk_slab.py): every rank must
have a note of that very step, all of one session, or none is gone back to. A rank that has committed k may have to go
back to k-1, whose note lies beside that of k.

A note is written beside the one that it replaces, which stays where it cannot be. One whose tensors are of another
step, or that is damaged, is none: its checksums say so. Records have theirs in the commit, and are compared with them
before anything is gone on from: a damaged one is an error, since the step that it belongs to is lost, and the last
checkpoint may be many steps older.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from zero3d.blueprint.layout import Slot
from zero3d.checkpoint.compatibility import buffer_problem, check_run, check_streams, fill_named, number_problem
from zero3d.checkpoint.fields import Field
from zero3d.checkpoint.files import has_checksum
from zero3d.checkpoint.integrity import header
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import BUFFER, FORMAT, STREAM, Manifest
from zero3d.checkpoint.restore import refresh
from zero3d.checkpoint.resume_contract import OPTIONS
from zero3d.checkpoint.save import own_state, run_state
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.update_settings import options_of
from zero3d.checkpoint.writing import json_text, write_tensors, write_text
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError
from zero3d.offload.commit_file import sha256_of
from zero3d.reading import Unreadable, read_object
from zero3d.rng import set_rng_state


@dataclass(frozen=True)
class Note:
    """Holds what is known of a step beside its records.

    session  the number of the run of processes that has written it, the same on all ranks
    """

    path: Path
    entries: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Applied steps."""
        return int(self.entries["step"])

    @property
    def session(self) -> int:
        """The number of the session that wrote it."""
        return int(self.entries["session"])

    @property
    def loop(self) -> Any:
        """What the training loop wants back."""
        return self.entries["loop"]

    @property
    def tensors(self) -> Path:
        """The file of buffers and random states."""
        return self.path.with_suffix(".safetensors")


class Committed(Protocol):
    """Records that an earlier process has committed."""

    def verify(self) -> bool:
        """Compare them with their checksums; False where there are none. Raises CheckpointError."""

    def go_back(self) -> None:
        """Have the records be those."""


def write_note(stem: Path, engine: EngineState, session: int) -> None:
    """Write this rank's note of the engine's step. Raises CheckpointError, OSError; the note before stays then."""
    path = _path(stem, engine.step)
    tensors = path.with_suffix(".safetensors")
    fresh = {each: each.with_name(f".{each.name}.tmp") for each in (tensors, path)}
    own, python_rng = own_state(engine)
    try:
        entries = {
            **run_state(engine),
            "session": session,
            "layout": _layout(engine),
            "python_rng": python_rng,
            "inode": _inode(stem),
            "tensors": write_tensors(fresh[tensors], own).file,
        }
        plain = json.loads(json_text(path, entries))
        write_text(fresh[path], json_text(path, plain | {"sha256": sha256_of(plain)}))
        for each, written in fresh.items():
            written.replace(each)
    except BaseException:
        for written in fresh.values():
            with suppress(OSError):
                written.unlink(missing_ok=True)
        raise


def read_notes(stem: Path, steps: Sequence[int]) -> dict[int, Note]:
    """Return the notes of these steps that are there and whole."""
    notes = {}
    for step in steps:
        path = _path(stem, step)
        with suppress(Unreadable, CheckpointError, OSError):
            entries = read_object(path)
            checksum = entries.pop("sha256", None)
            note = Note(path, entries)
            same = checksum == sha256_of(entries) and note.step == step and entries["inode"] == _inode(stem)
            if same and has_checksum(note.tensors, entries["tensors"]):
                notes[step] = note
    return notes


def remove_notes(stem: Path, but: Note | None) -> None:
    """Remove the notes of steps that this session makes anew, all but one. Raises OSError."""
    for step in (0, 1):
        if but is None or but.path != _path(stem, step):
            _path(stem, step).unlink(missing_ok=True)


def load_slots(note: Note, engine: EngineState, records: Committed) -> Mapping[str, Any]:
    """Go on from the step of a note and its records; return what the bits of its run depended on (`resume_contract`).

    Raises CheckpointError on all ranks: before anything is changed where the run is another one, or a record damaged.
    """
    world = engine.world.patient
    agree(world, lambda: _check(note, engine))
    _warn_of_unverified(note, world, agree(world, records.verify))
    agree(world, lambda: _restore(note, engine, records))
    agree(world, lambda: refresh(engine))
    return {**note.entries["about"], OPTIONS: options_of(note.entries["optimizer"]["groups"])}


def _warn_of_unverified(note: Note, world: Comm, verified: bool) -> None:
    """Warn on rank 0 where some rank's records have no checksums to compare."""
    of_ranks = world.exchange(torch.tensor([int(verified)])).flatten().tolist()
    if world.rank == 0 and not all(of_ranks):
        warnings.warn(
            f"step {note.step} in {note.path.parent} was written by an older zero3d, without checksums of its records: "
            "damage to them would go unnoticed. Checkpoints have checksums, and so has the next step.",
            stacklevel=5,
        )


def _manifest(note: Note, engine: EngineState) -> Manifest:
    """Return the note as what compatibility.py compares with an engine."""
    fields = Field(str(note.path), "", dict(note.entries))
    return Manifest(note.path.parent, fields, FORMAT, note.step, engine.degrees, {}, {})


def _check(note: Note, engine: EngineState) -> None:
    if note.entries["layout"] != _layout(engine):
        raise CheckpointError(f"{note.path} has states of other parameters than this model's: {_remedy(note)}")
    manifest = _manifest(note, engine)
    check_run(manifest, engine)
    live, saved = engine.buffers, header(note.tensors)
    names = {key.removeprefix(BUFFER) for key in saved if key.startswith(BUFFER)}
    if names - engine.numbers.keys() != live.keys():
        raise CheckpointError(f"{note.tensors} has other buffers than the model: {_remedy(note)}")
    for name in names:
        spec = saved[f"{BUFFER}{name}"]
        if problem := buffer_problem(name, spec, live[name][0]) if name in live else number_problem(name, spec):
            raise CheckpointError(f"{note.tensors}: {problem}")
    with safe_open(note.tensors, framework="pt") as file:
        streams = {key.removeprefix(STREAM): file.get_tensor(key) for key in saved if key.startswith(STREAM)}
    check_streams(str(note.tensors), streams, manifest.fields.entry("python_rng"), engine.world.device)


def _remedy(note: Note) -> str:
    return f"remove {note.path.parent} to go on from a checkpoint."


def _restore(note: Note, engine: EngineState, records: Committed) -> None:
    """Go back to the records, make weights of them, and restore all that is beside them."""
    entries, optimizer = note.entries, engine.optimizer
    records.go_back()
    for unit in optimizer.units:
        unit.weights.masters.revive()
        unit.weights.changed()
    for owned in optimizer.pieces:
        optimizer.torch.state[owned.master]["step"].fill_(note.step)
    for group, saved in zip(optimizer.torch.param_groups, entries["optimizer"]["groups"], strict=True):
        group.update(from_json(saved, {key: value for key, value in group.items() if key != "params"}))
    if engine.scheduler is not None and entries["scheduler"] is not None:
        engine.scheduler.load_state_dict(from_json(entries["scheduler"], engine.scheduler.state_dict()))
    engine.loss_scale.restore(entries["loss_scale"])
    if engine.summands is not None and entries["exact"] is not None:
        engine.summands.restore(entries["exact"])
    live = engine.buffers
    with safe_open(note.tensors, framework="pt") as file:
        own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for number in engine.numbers.values():
        number.reset()
    for key, values in own.items():
        if key.startswith(BUFFER):
            fill_named(key.removeprefix(BUFFER), values, live, engine.numbers)
    streams = {key.removeprefix(STREAM): values for key, values in own.items() if key.startswith(STREAM)}
    set_rng_state(streams, entries["python_rng"], engine.world.device)


def _layout(engine: EngineState) -> str:
    """Return a hash of which parameters this rank has, and where."""
    units = [[unit.name, str(unit.dtype), [_placed(slot) for slot in unit.layout.slots]] for unit in engine.units]
    return hashlib.sha256(json.dumps(units).encode()).hexdigest()


def _placed(slot: Slot) -> Sequence[Any]:
    """Return a slot without what it has as all slots once had it."""
    return slot if slot.runs > 1 else slot[:5]


def _inode(stem: Path) -> int:
    """Return the number of the file of states: what was copied while a run wrote into it is of no step."""
    return stem.with_suffix(".states").stat().st_ino


def _path(stem: Path, step: int) -> Path:
    return stem.with_suffix(f".note-{step % 2}.json")
