"""How an engine saves: its parts for saves behind training, and what their copy takes of the host."""

from __future__ import annotations

from functools import partial

import torch

from zero3d.checkpoint.background import Saves
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.foundation import Foundation, host_share
from zero3d.memory.arena import Arena
from zero3d.spec.offload import HOST

COPY = "checkpoint"  # the category of the host's copy


def open_saves(base: Foundation) -> Saves:
    """Return what saves for an engine; nothing is taken or opened yet."""
    mesh = base.resolved.mesh
    return Saves(mesh.device, partial(host_share, base), partial(_of_threads, mesh))


def _of_threads(mesh: Mesh) -> Comm:
    """Open what threads of all ranks agree over; its ranks open it together, in the order of engines."""
    comm = Comm(mesh.store_axis("saves"), Arena(torch.device("cpu")), Ledger())
    agree(comm, lambda: None)
    return comm


def copy_entry(saves: Saves) -> list[MemoryEntry]:
    """Return the entry of the host's copy, where there is one."""
    if not saves.held:
        return []
    return [MemoryEntry(COPY, HOST, saves.planned, saves.held, saves.held)]
