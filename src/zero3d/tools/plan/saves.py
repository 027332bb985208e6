"""Bytes of the host's memory that a rank takes to save behind training: a copy of all that it saves. No torch.

trainable   fp32 master and moments of an element, however the engine stores them, and its average (ema)
frozen      the weight
"""

from __future__ import annotations

from collections.abc import Sequence

from zero3d.account.optimizers import state_width, states_of
from zero3d.memory.blocks import padded
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.rank_model import chunks_of_rank, rank_model
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan, Part


def copy_bytes(model: ModelSpec, plan: ParallelPlan, pp_stage: int = 0, dp_rank: int = 0) -> int:
    """Return the bytes on rank `dp_rank` of stage `pp_stage`, of tp ranks the first; 0 where nothing is copied.

    Copies of tied parameters on another pipeline stage are not saved.
    """
    if not plan.asynchronous_saves:
        return 0
    chunks = chunks_of_rank(model, plan, pp_stage)
    wide = policy_of(plan).master.itemsize
    moment = state_width(wide, plan.offload.moments)
    total = 0
    for number, units in rank_model(model, plan, pp_stage).units.items():
        copies = _copies(chunks[number])
        for unit in units:
            matrices = dict(unit.forms)
            pieces = unit.layout.pieces_of_copy(unit.layout.rank_of(dp_rank), dp_rank // plan.shard)
            own = [piece for piece in pieces if unit.names[piece.slot] not in copies]
            for piece in own:
                trained = (1 + plan.averages) * wide + moment * states_of(plan.optimizer, piece.slot in matrices)
                total += (piece.stop - piece.start) * (trained if unit.trainable else unit.itemsize)
    return padded(total)


def _copies(parts: Sequence[Part]) -> set[str]:
    """Return the names of a chunk's weights that are copies of those on another stage."""
    here = {unit.name for part in parts for unit in part.units if unit.copy_of is None}
    away = [unit for part in parts for unit in part.units if unit.copy_of is not None and unit.copy_of not in here]
    return {weight.name for unit in away for weight in unit.weights}
