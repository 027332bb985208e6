"""Transient buffers of units, as the engine has them in one backward. No torch.

    gathered   stage 3, released after every use: the root, the unit in use, and WINDOW gathered ahead of it; in blocks
               of 8 bits these are messages, on the wire
    bucket     stages 2 and 3, in exact mode all of them: local gradients of the unit in its backward, of WINDOW being
               reduced, of those that are reduced last (root and tied units); in the dtype in which they travel. Shards
               that go to the host come here first
    wire       WINDOW reductions: the gradients as they travel, if that is another dtype, and what arrives: in 16 bits
               the terms of all ranks; else a shard, if it is added to what is there or of another dtype

The order is that of the second micro-batch on: head, last block, .. first block. `zero/gathers.py` has the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zero3d.account.optimizers import state_width
from zero3d.account.states import WIDTHS
from zero3d.account.transients import Reduction, arriving_bytes
from zero3d.distributed.block_bytes import CODE_BITS, message_bytes
from zero3d.plan.rank_model import RankUnit, rank_model
from zero3d.plan.spec import ModelSpec, ParallelPlan
from zero3d.plan.states import is_coded, policies, sends_terms, states_key, wire_width
from zero3d.zero.layout import ROOT
from zero3d.zero.stages import WINDOW


class Windows(NamedTuple):
    """Bytes alive at an instant."""

    gathered: float
    bucket: float
    wire: float


class Backward(NamedTuple):
    """Buffers of one model chunk's backward. turns: in that of each of its parts, in the order of backwards."""

    turns: tuple[Windows, ...]
    end: Windows


def backwards(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, Backward]:
    """Return the buffers of each of a rank's model chunks, by number."""
    return _backwards(model, states_key(plan), pp_stage)


@lru_cache(maxsize=4096)
def _backwards(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, Backward]:
    copies = {unit.copy_of for part in model.parts for unit in part.units} - {None}
    tied = frozenset(str(name).partition("/")[0] for name in copies) if plan.pp == 1 else frozenset()
    by_chunk = {}
    for number, part_units in rank_model(model, plan, pp_stage).part_units.items():
        order = part_units[::-1]
        turns = tuple(windows(order, at, tied, plan) for at in range(len(order)))
        by_chunk[number] = Backward(turns, end_backward(order, tied, plan))
    return by_chunk


def windows(order: Sequence[Sequence[RankUnit]], at: int, tied: frozenset[str], plan: ParallelPlan) -> Windows:
    """Return the buffers while part number `at` is in its backward.

    Part 0's bucket opens after its fullest instant, the logits'.

    order  units by part, in the order of backwards; the root's are in any of them
    tied   owners whose units the first and the last part use
    """
    release, reduce = policies(plan)
    late = _late(order, tied)
    turns = [[unit for unit in units if unit not in late] for units in order]
    roots = [unit for unit in late if unit.owner == ROOT]
    gathered = bucket = messages = 0.0
    if plan.zero.stage == 3 and release != "every_step":
        using = late if at == 0 else roots
        ahead = [unit for units in turns[at + 1 : at + 1 + WINDOW] for unit in units if unit.comes_and_goes(plan)]
        shown = [unit for unit in (*using, *turns[at]) if unit.comes_and_goes(plan)]
        messages = sum(message_bytes(unit.layout.total, CODE_BITS) for unit in ahead if is_coded(unit, plan))
        gathered = sum(_full_bytes(unit) for unit in (*shown, *(unit for unit in ahead if not is_coded(unit, plan))))
    reduced = [unit for units in turns[:at] for unit in units if unit.trainable]
    moving = reduced[-WINDOW:]
    if (reduce == "every_micro_batch" or plan.zero.exact) and at > 0:
        filling = late if at == len(order) - 1 else roots
        summed = plan.zero.exact and reduce == "every_step" and plan.accumulate > 1  # what moves is a sum by then
        filled = (*(() if summed else moving), *turns[at], *filling)
        bucket = sum(_bucket_bytes(unit, plan) for unit in filled if unit.trainable)
        bucket += _incoming(reduced, plan)
    return Windows(gathered, bucket, messages + sum(_wire_bytes(unit, plan, reduce) for unit in moving))


def end_backward(order: Sequence[Sequence[RankUnit]], tied: frozenset[str], plan: ParallelPlan) -> Windows:
    """Return the buffers at the end of a backward, when what is left is reduced."""
    _, reduce = policies(plan)
    late = [unit for unit in _late(order, tied) if unit.trainable]
    early = [unit for units in order for unit in units if unit.trainable and unit not in late]
    reduced = early + late
    moving = reduced[-WINDOW:]
    buckets = reduce == "every_micro_batch" or plan.zero.exact
    bucket = sum(_bucket_bytes(unit, plan) for unit in dict.fromkeys((*moving, *late))) if buckets else 0.0
    bucket += _incoming(reduced, plan)
    return Windows(0.0, bucket, sum(_wire_bytes(unit, plan, reduce) for unit in moving))


def _late(order: Sequence[Sequence[RankUnit]], tied: frozenset[str]) -> list[RankUnit]:
    """Return the units that are reduced last, each once: a root unit belongs to several parts."""
    late = (unit for units in order for unit in units if unit.owner == ROOT or unit.owner in tied)
    return list(dict.fromkeys(late))


def _full_bytes(unit: RankUnit) -> int:
    return unit.layout.total * unit.itemsize


def _bucket_bytes(unit: RankUnit, plan: ParallelPlan) -> int:
    """Return the bytes of local gradients that come and go with a backward: cast as they come where sums travel."""
    alone = unit.layout.n == 1 and unit.sources < 2
    if alone and not plan.zero.exact and not plan.offload.gradients_leave:
        return 0  # they add up where they stay
    cast = not alone and not plan.zero.exact and unit.sources < 2
    each = unit.layout.total * (wire_width(plan, unit.itemsize) if cast else unit.itemsize)
    return max(1, unit.sources) * each


def _incoming(reduced: Sequence[RankUnit], plan: ParallelPlan) -> int:
    """Return the bytes of shards that reductions come to, where they are kept on the host: under way, or leaving."""
    if not plan.offload.gradients_leave:
        return 0
    wide = WIDTHS[plan.precision].reduced
    held = state_width(wide, plan.offload.gradient_dtype)
    return arriving_bytes([unit.layout.shard for unit in reduced], held, wide)


def _wire_bytes(unit: RankUnit, plan: ParallelPlan, reduce: str) -> float:
    """Return the bytes of one reduction under way. What several sources have is summed first, in the reduced dtype."""
    n, wide, several = unit.layout.n, WIDTHS[plan.precision].reduced, unit.sources > 1
    every_step = reduce == "every_step"
    kept_wide = every_step and (plan.accumulate > 1 or plan.zero.stage == 0)
    summed = float(unit.layout.total * wide) if several and (plan.zero.exact or not kept_wide) else 0.0
    if n == 1:
        return summed
    shard = unit.layout.shard
    if plan.zero.exact:  # what arrives, and shards of sums in the tree
        travels = wide if several or (every_step and plan.accumulate > 1) else unit.itemsize
        arrives = Reduction(n - 1, travels, casts=False, terms=True, lands=False).nbytes(shard)
        return summed + arrives + shard * wide * n.bit_length() / WINDOW
    travels = wire_width(plan, unit.itemsize, several)
    local = wide if kept_wide or several else unit.itemsize if every_step else travels
    lands = travels == wide and (every_step or plan.accumulate == 1)
    return summed + Reduction(n, travels, travels != local, sends_terms(plan, travels), lands).nbytes(shard)
