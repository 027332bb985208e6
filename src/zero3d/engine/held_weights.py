"""Decides whether a generation at stage 3 holds the whole weights or gathers them for every token, on all ranks alike.

    whole    units are gathered before the first token, and stay until training goes on: a rank may generate as many
             tokens as it wants, as below stage 3
    by use   a forward without grad gathers each unit and releases it, so that ranks must make as many forwards; those
             that come after a generation, such as of log-probabilities, do so too: there is no more room for these

What is gathered so has the bits of a forward in training, whatever travels (`gather_wire`): `unshard` would show exact
weights.
The few numbers that ranks tell each other are in no plan, and not in the ledger.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero3d.engine.auto_offload import room_of
from zero3d.engine.parts import Parts
from zero3d.errors import OutOfBudget
from zero3d.spec.sizes import decimal
from zero3d.zero.hooks import KEEP


class Held(NamedTuple):
    """Says what was decided for a generation, and by which numbers.

    needed  bytes that whole weights take beside what is there, on the rank that has the least room for them; 0 where
            they were whole already
    room    bytes that this rank may take
    rank    its number
    """

    whole: bool
    needed: int = 0
    room: int = 0
    rank: int = 0


def hold_weights(parts: Parts, whole: bool | None) -> Held:
    """Gather all units until training goes on, or have forwards without grad gather them by use.

    whole  None: if every rank has room for them
    """
    if whole is False:
        _let_go(parts)
    missing = [unit for unit in parts.units if unit.weights.sharded and not unit.users]
    if not missing:
        return _kept(parts, Held(True))
    held = _tightest(parts, sum(unit.weights.bytes_to_open for unit in missing))
    held = _kept(parts, held if whole is None else held._replace(whole=whole))
    if not held.whole:
        _let_go(parts)
    for unit in missing if held.whole else ():
        parts.gathers.acquire(unit, KEEP)
    return held


def check_room(parts: Parts) -> None:
    """Raise OutOfBudget on all ranks where one has no room for the whole weights that a generation would keep."""
    if any(KEEP in unit.users for unit in parts.units):
        return  # asked since training paused: from then on ranks may generate more often than others
    missing = [unit for unit in parts.units if unit.weights.sharded and not unit.users]
    held = _tightest(parts, sum(unit.weights.bytes_to_open for unit in missing))  # ranks may miss unlike units
    if not held.whole:
        raise OutOfBudget(
            f"generate() keeps the whole weights until training goes on: they take {decimal(held.needed)} beside the "
            f"shards, and rank {held.rank}, the tightest, has room for {decimal(held.room)}. Pass keep_full=False, "
            "which gathers each layer for each token while ranks stay in step."
        )


def _kept(parts: Parts, held: Held) -> Held:
    """Have forwards without grad keep what they gather, or release it."""
    for hooks in parts.hooks:
        hooks.keep_full = held.whole
    return held


def _let_go(parts: Parts) -> None:
    parts.gathers.drop(lambda token: token == KEEP)


def _tightest(parts: Parts, needed: int) -> Held:
    """Return the numbers of the rank that has the least room to spare, and whether it has enough."""
    world = parts.axes.world
    own = [needed, room_of(parts.mesh, parts.options.offload).device]
    rows = world.exchange(torch.tensor(own, dtype=torch.float64, device=world.device), recorded=False)
    told = [int(value) for value in world.read(rows.flatten(), [*own] * world.size)]
    ranks = [(told[2 * rank + 1] - told[2 * rank], rank) for rank in range(world.size)]
    spare, rank = min(ranks)
    return Held(spare >= 0, told[2 * rank], told[2 * rank + 1], rank)
