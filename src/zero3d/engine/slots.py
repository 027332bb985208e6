"""Restarts from the slots of disk slabs: which step all ranks have, and the notes of steps (checkpoint/slots.py)."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass

import torch

from zero3d.checkpoint.slots import Note, read_notes, remove_notes, write_note
from zero3d.checkpoint.state import EngineState
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError
from zero3d.offload.disk_slab import DiskSlab, common_step
from zero3d.offload.tiers import NEVER, UNKNOWN

SESSION_BITS = 48


@dataclass
class Slots:
    """Owns what a rank knows of its slots.

    session  the number of this run of processes, the same on all ranks
    left     the note of the step that all ranks can go back to, of an earlier session
    """

    disk: DiskSlab
    session: int
    left: Note | None

    @property
    def note(self) -> Note | None:
        """What can be gone back to; None once training has begun, or others than a step have written records."""
        return self.left if self.left is not None and self.disk.resumed == self.left.step else None

    @classmethod
    def agreed(cls, disk: DiskSlab, world: Comm, usable: bool, replaced: int = NEVER) -> Slots:
        """Agree with all ranks on a session and on the newest step that each of them has, with a note of one session.

        usable    whether a restart is possible at all
        replaced  the step of another run that was here (UNKNOWN: one that cannot be read)

        On a rank that is one step further, that step is void from now on. Rank 0 warns of steps of others on any rank.
        """
        notes = read_notes(disk.stem, disk.steps) if usable else {}
        own = (*disk.steps, NEVER, NEVER)[:2]
        sessions = [notes[step].session if step in notes else NEVER for step in own]
        row = [secrets.randbits(SESSION_BITS), replaced, *own, *sessions]
        rows = world.exchange(torch.tensor(row, dtype=torch.int64)).tolist()
        if world.rank == 0:
            _warn_of_replaced(disk, max(each[1] for each in rows))
        # Commits alone choose the step: the one before it may be half overwritten wherever a note of it lacks.
        steps = [[step for step in each[2:4] if step != NEVER] for each in rows]
        common = common_step(steps)
        noted = {
            each[4 + of_rank.index(common)] for each, of_rank in zip(rows, steps, strict=True) if common in of_rank
        }
        step = None if len(noted) > 1 or NEVER in noted else common

        def go_back() -> Note | None:
            if step is None:
                disk.discard()
            else:
                disk.resume(step)
            note = None if step is None else notes[step]
            remove_notes(disk.stem, note)
            return note

        return cls(disk, rows[0][0], agree(world, go_back))

    def write(self, engine: EngineState) -> None:
        """Write the note of the engine's step. Without one there is no restart from its slots: a line says why."""
        self.left = None
        try:
            write_note(self.disk.stem, engine, self.session)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"a restart cannot go on from step {engine.step} on the disk: {error}", stacklevel=4)


def _warn_of_replaced(disk: DiskSlab, step: int) -> None:
    """Say which step is lost where files are of another model, mesh or placement, or damaged."""
    if step != NEVER:
        of_others = f"step {step} of another model, mesh or placement, or a damaged one"
        what = "a step whose commit cannot be read" if step == UNKNOWN else of_others
        warnings.warn(
            f"{disk.directory} had {what}: its files are replaced, so a run can go on only from a checkpoint.",
            stacklevel=5,
        )
