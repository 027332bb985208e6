"""Restarts from the slots of disk slabs: which step all ranks have, and the notes of steps (checkpoint/slots.py)."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass

import torch

from zero3d.checkpoint.slots import Note, read_notes, write_note
from zero3d.checkpoint.state import EngineState
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError
from zero3d.memory.disk_slab import DiskSlab, common_step

NEVER = -1  # no step
SESSION_BITS = 48


@dataclass
class Slots:
    """Owns what a rank knows of its slots.

    session  the number of this run of processes, the same on all ranks
    note     of the step that all ranks can go back to, of an earlier session; None once training has begun
    """

    disk: DiskSlab
    session: int
    note: Note | None

    @classmethod
    def agreed(cls, disk: DiskSlab, world: Comm, usable: bool) -> Slots:
        """Agree with all ranks on a session and on the newest step that each of them has, with a note of one session.

        usable  whether a restart is possible at all

        On a rank that is one step further, that step is void from now on.
        """
        notes = read_notes(disk.stem, disk.steps) if usable else {}
        offers = [(step, notes[step].session) for step in disk.steps if step in notes]
        offers += [(NEVER, NEVER)] * (2 - len(offers))
        row = [secrets.randbits(SESSION_BITS), *(number for offer in offers for number in offer)]
        rows = world.exchange(torch.tensor(row, dtype=torch.int64)).tolist()
        common = common_step([[(a, b), (c, d)] for _, a, b, c, d in rows])
        note = None
        if common is not None and common[0] != NEVER:
            step = common[0]
            note = notes[step]
            agree(world, lambda: disk.resume(step))
        else:
            agree(world, lambda: disk.discard() if disk.steps else None)
        return cls(disk, rows[0][0], note)

    def write(self, engine: EngineState) -> None:
        """Write the note of the engine's step. Without one there is no restart from its slots: a line says why."""
        self.note = None
        try:
            write_note(self.disk.stem, engine, self.session)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"a restart cannot go on from step {engine.step} on the disk: {error}", stacklevel=3)
