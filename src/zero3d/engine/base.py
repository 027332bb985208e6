"""The folder that an engine's frozen weights came from, for its checkpoints (`checkpoint/frozen_base.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from zero3d.checkpoint.frozen_base import FolderSource, FrozenBase
from zero3d.distributed.agreement import agree
from zero3d.engine.foundation import Foundation
from zero3d.zero.initial_weights import Source
from zero3d.zero.unit import Unit


def open_base(base: Foundation, weights: Source | None) -> FrozenBase | None:
    """Return the folder of frozen weights; None where nothing is frozen or no folder is known. Raises ConfigError.

    weights  where the engine's came from; it has been read
    Rank 0 takes the digest, before anybody can change the files.
    """
    full_model, world = base.division.full_model, base.axes.world
    frozen = [name for name in full_model.shapes if name not in full_model.trainable]
    if not frozen or not isinstance(weights, FolderSource) or weights.folder is None:
        return None
    return agree(world.patient, lambda: FrozenBase.of(weights, frozen, world.rank == 0))


def note_writes(base: Foundation, frozen_base: FrozenBase | None, written: Sequence[Unit]) -> None:
    """Take note that units have other values than the folder of frozen weights."""
    if frozen_base is not None:
        owner = base.division.full_model.owner
        frozen_base.changed(owner(slot.name) for unit in written for slot in unit.layout.slots)
