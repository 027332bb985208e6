"""Checkpoints of an engine: its states to files and back, slots of a disk, exports; `engine.checkpoints`.

    save, saved, reserve           checkpoints, also behind training     checkpoint/background.py, checkpoint/save.py
    load                           from a checkpoint, on any mesh        checkpoint/restore.py
    slots, load_slots, note        a restart from a disk's slots         slots.py, checkpoint/slots.py
    fingerprint, export            of masters and states; of weights     checkpoint/fingerprint.py, checkpoint/export.py

What all of it takes of an engine is `engine_state` (state.py). `Engine` has these methods under the same names, and
tells there what each promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero3d.checkpoint import restore
from zero3d.checkpoint.background import SaveFigures, Saves
from zero3d.checkpoint.copies import copy_export, refuse_checkpoints
from zero3d.checkpoint.export import export
from zero3d.checkpoint.fingerprint import fingerprint
from zero3d.checkpoint.manifest import Manifest
from zero3d.checkpoint.model_card import NO_CARD, Card
from zero3d.checkpoint.resume_contract import Change, changes, resume_guarantee
from zero3d.checkpoint.slots import Note, load_slots
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.update_settings import Given, check_given
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.foundation import Foundation, host_share
from zero3d.engine.parts import Parts
from zero3d.engine.slots import Slots
from zero3d.engine.state import engine_state
from zero3d.engine.unshard import Unsharded
from zero3d.errors import CheckpointError, ConfigError
from zero3d.memory.arena import Arena
from zero3d.models.written_numbers import numbers_of
from zero3d.offload.tiered_records import TieredRecords
from zero3d.spec.bits import GIVEN, SAVED, SETTINGS
from zero3d.spec.tiers import HOST
from zero3d.stores.urls import check_url, is_url

COPY = "checkpoint"  # the category of the host's copy


class Checkpoints:
    """Owns how an engine's states leave it and come back; what a step needs of that is `await_copy`.

    resumed  whether the run goes on bitwise since the last load, and if not, why; empty before one
    loaded   what the run that saved it noted its bits to depend on; None before a load
    """

    def __init__(self, parts: Parts, unsharded: Unsharded, saves: Saves) -> None:
        self._parts = parts
        self._unsharded, self._saves = unsharded, saves
        self._mesh = parts.mesh
        self._numbers = numbers_of(parts.partition.chunks.values())
        self.resumed = ""
        self.loaded: Mapping[str, Any] | None = None

    def _state(self, loop: Mapping[str, Any] | None = None) -> EngineState:
        return engine_state(self._parts, loop, self._numbers)

    def _refuse(self, call: str) -> None:
        for feature in self._parts.features:
            feature.refuse(call)

    # --- to files -------------------------------------------------------------------------------

    def save(
        self, directory: str | Path, loop: Mapping[str, Any] | None = None, wait: bool = True, to: str | None = None
    ) -> Path:
        """Write `directory/step-N`, as `Engine.save` says."""
        self._refuse("save()")
        _check_places("save", directory, to)
        self._parts.registry.check()
        if micro_batches := self._parts.accumulation.count:
            raise CheckpointError(
                f"save() after {micro_batches} micro-batches of a step that is not applied yet: a checkpoint "
                "holds no gradients, so they would be lost. Save after the step() that applies it, or forget them with "
                "engine.zero_grad()."
            )
        with self._mesh.heartbeat.phase("save"), self._unsharded.resharded():
            self._parts.optimizer.flush()
            save = self._saves.now if wait else self._saves.begin
            return save(Path(directory), lambda: self._state(loop), to)

    def saved(self) -> Path | None:
        """Wait for a save with `wait=False` and return its folder, as `Engine.saved` says."""
        with self._mesh.heartbeat.phase("save"):
            return self._saves.finish()

    @property
    def copies(self) -> bool:
        """Return whether a save behind training may still read states: nobody has waited for its copy yet."""
        return self._saves.copies

    def await_copy(self) -> None:
        """Wait until what is to be saved behind training may be changed."""
        with self._mesh.heartbeat.phase("save"):
            self._saves.await_copy()

    @property
    def save_is_over(self) -> bool:
        """Return whether `saved` has something to tell and need not wait for this rank."""
        return self._saves.over

    @property
    def save_figures(self) -> SaveFigures:
        """Return what the last save has cost so far."""
        return self._saves.figures

    def reserve_saves(self) -> None:
        """Take the memory of saves with `wait=False`. Raises OutOfBudget."""
        self._parts.optimizer.flush()
        self._saves.reserve(self._state())

    @property
    def memory(self) -> list[MemoryEntry]:
        """Return the entry of the host's copy for saves behind training, where there is one."""
        if not self._saves.held:
            return []
        held = self._saves.held
        return [MemoryEntry(COPY, HOST, self._saves.planned, held, held, held, held)]

    def fingerprint(self) -> str:
        """Return one hash of all masters and optimizer states; all ranks call it."""
        self._parts.registry.check()
        with self._unsharded.resharded():
            self._parts.optimizer.flush()
            return fingerprint(self._state())

    def export(
        self,
        directory: str | Path,
        kind: str | None = None,
        to: str | None = None,
        overwrite: bool = False,
        card: Card = NO_CARD,
    ) -> Path:
        """Write the weights as a Hugging Face folder, as `Engine.export` says.

        card  what the caller knows for the model card, beside the engine's
        """
        _check_places("export", directory, to)
        self._parts.registry.check()
        self._parts.optimizer.flush()
        world = self._parts.axes.world
        with self._mesh.heartbeat.phase("export"), self._unsharded.resharded():
            if to is not None:
                agree(world.patient, partial(refuse_checkpoints, to) if world.rank == 0 else lambda: None)
            folder = export(Path(directory), self._state(), self._parts.whole_parameters, kind, overwrite, card)
            if to is not None:
                agree(world.patient, partial(copy_export, folder, to) if world.rank == 0 else lambda: None)
        return folder

    # --- from files -----------------------------------------------------------------------------

    def load(self, directory: str | Path, settings: str = SAVED) -> Any:
        """Continue from a checkpoint, as `Engine.load` says; if it is refused, open parameters are open again."""
        if settings not in SETTINGS:
            raise ConfigError(f"load(settings={settings!r}): pass {' or '.join(map(repr, SETTINGS))}.")
        before = self._unsharded.now
        try:
            with self._mesh.heartbeat.phase("load"), self._unsharded.resharded():
                return self._load(directory, settings)
        except (CheckpointError, ConfigError):  # of all ranks
            if not self._parts.whole_parameters.any_open:  # else full_params() is what was refused
                self._unsharded.again(*before)
            raise

    def _load(self, directory: str | Path, settings: str) -> Any:
        self._unsharded.refuse_open("load()")
        self._refuse("load()")
        self._parts.registry.check()
        with self._mesh.heartbeat.phase("save"):
            self._saves.wait()
        state = self._state()
        self._parts.optimizer.flush()  # the check reads what updates write, and masters may be what is sent
        checked = restore.check(directory, state, options=settings != GIVEN)
        own = self._given(checked.manifest) if settings == GIVEN else None
        self._parts.stepper.reset()
        step, loop, saved = restore.load(checked, state)
        if own is not None:
            own.put_back()
        self._go_on_from(step, saved, state.about if own is None else None)
        return loop

    def _given(self, manifest: Manifest) -> Given:
        """Return the settings that the engine was built with. Raises ConfigError where they are not there any more."""
        stepper, optimizer = self._parts.stepper, self._parts.optimizer
        if stepper.count or self.loaded is not None:
            raise ConfigError(
                "load(settings='given'): this engine has trained or loaded, and its schedule is not where it began: "
                "build a new Engine with the settings that should count."
            )
        check_given(optimizer.torch.param_groups, manifest.value("optimizer")["groups"])
        return Given(optimizer.torch, stepper.scheduler, manifest.step)

    def _go_on_from(self, step: int, saved: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> None:
        self._parts.stepper.count = step
        for feature in self._parts.features:
            feature.loaded()
        self.loaded = saved
        self.resumed = resume_guarantee(saved, self._state().about, before)

    def compare(self, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[Change]:
        """Compare the loaded run with this one; return the changes that affect bits, and note them in `resumed`.

        saved, live  what a training loop notes beside the engine, when it saved and now
        """
        assert self.loaded is not None, "nothing was loaded"
        was, now = {**saved, **self.loaded}, {**live, **self._state().about}  # the engine knows what values came to
        self.resumed = resume_guarantee(was, now)
        return changes(was, now)

    # --- slots of a disk ------------------------------------------------------------------------

    @property
    def slots(self) -> Note | None:
        """Return what an earlier process has left in slots, as `Engine.slots` says."""
        slots = self._slots
        return None if slots is None else slots.note

    def load_slots(self) -> Any:
        """Continue from `slots`; return what was given to `note`."""
        self._parts.registry.check()
        self._saves.wait()
        note, store = agree(self._parts.axes.world.patient, self._left)
        self._parts.stepper.reset()
        self._go_on_from(note.step, load_slots(note, self._state(), store))
        return note.loop

    def note(self, loop: Mapping[str, Any] | None = None) -> None:
        """Write the note of a step that is over, for restarts from slots (`Engine.note`)."""
        if self._slots is not None:
            self._slots.write(self._state(loop))

    def _left(self) -> tuple[Note, TieredRecords]:
        """Return the note of what is in slots, and the records. Raises CheckpointError where there is nothing."""
        tiers, note = self._parts.tiers, self.slots
        if tiers is None or note is None or self._parts.stepper.count:
            raise CheckpointError("there is no step in slots of a disk to go on from: load a checkpoint.")
        return note, tiers.store

    @property
    def _slots(self) -> Slots | None:
        return self._parts.slots


def _check_places(call: str, directory: str | Path, to: str | None) -> None:
    """Refuse a URL in the place of a folder, and what is no URL of a store in the place of one. Raises ConfigError."""
    if is_url(directory):
        copied = f"engine.{call}(FOLDER, to={str(directory)!r})"
        raise ConfigError(f"{call}({str(directory)!r}) writes a folder of this host first: type {copied}.")
    if to is not None and not is_url(to):
        raise ConfigError(f"{call}(to={to!r}) has no URL of an object store: give one such as s3://bucket/run.")
    if to is not None:
        check_url(to)


def open_saves(base: Foundation) -> Saves:
    """Return what saves for an engine; nothing is taken or opened yet."""
    mesh = base.mesh
    return Saves(mesh.device, partial(host_share, base), partial(_of_threads, mesh))


def _of_threads(mesh: Mesh) -> Comm:
    """Open what threads of all ranks agree over; its ranks open it together, in the order of engines."""
    comm = Comm(mesh.store_axis("saves"), Arena(torch.device("cpu")), Ledger())
    agree(comm, lambda: None)
    return comm
