"""Tokens by which units are in use, in the order of a forward and a backward, and the gathers that follow. No torch.

A unit is gathered when its set of users becomes non-empty. The engine's hooks take these tokens, and `count_gathers`
plays them; `forward_gathers` and `backward_gathers` give plans the same counts without a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

TURN, ROOT_TURN = "turn", "root turn"  # tokens that the units used last in a forward, and the root, keep


class TokenEvent(NamedTuple):
    """A user of a unit starts (acquire) or stops needing its full parameters."""

    unit: str
    token: object
    acquire: bool


def count_gathers(events: Iterable[TokenEvent]) -> Counter[str]:
    """Count gathers per unit: how often its set of users goes from empty to non-empty."""
    users: dict[str, set[object]] = {}
    gathers: Counter[str] = Counter()
    for unit, token, acquire in events:
        holders = users.setdefault(unit, set())
        if acquire:
            gathers[unit] += not holders
            holders.add(token)
        else:
            holders.discard(token)
    return gathers


def token_order(forward: Sequence[str], root: str | None = None, no_backward: Iterable[str] = ()) -> list[TokenEvent]:
    """Return the tokens of one micro-batch in which units are used in the order `forward`.

    The root unit is used from its forward to the end of backward. The unit used last keeps
    its turn token, so its backward finds it gathered. Units in `no_backward` (embeddings: their
    backward needs indices only) are used in forward alone.
    """
    return forward_tokens(forward, root) + backward_tokens(forward, root, frozenset(no_backward))


def forward_tokens(forward: Sequence[str], root: str | None) -> list[TokenEvent]:
    """Return the tokens of a forward: what it used last, and the root unit, keep one."""
    events = [TokenEvent(root, ROOT_TURN, True)] if root else []
    turn: str | None = None
    for i, unit in enumerate(forward):
        if turn not in (None, unit):
            events.append(TokenEvent(str(turn), TURN, False))
        events += [TokenEvent(unit, ("forward", i), True), TokenEvent(unit, TURN, True)]
        events.append(TokenEvent(unit, ("forward", i), False))
        turn = unit
    return events


def backward_tokens(forward: Sequence[str], root: str | None, no_backward: frozenset[str]) -> list[TokenEvent]:
    """Return the tokens of a backward, in reverse; the root unit's ends last."""
    events = [TokenEvent(root, "backward", True)] if root else []
    for i, unit in reversed(list(enumerate(forward))):
        if unit not in no_backward:
            events += [TokenEvent(unit, ("backward", i), True), TokenEvent(unit, ("backward", i), False)]
    return events + ([TokenEvent(root, "backward", False)] if root else [])


def forward_gathers(forward: Sequence[str], root: str | None) -> Counter[str]:
    """Count the gathers of `forward_tokens` where nothing is gathered before: one for each run of a unit, one of root.

    What it used last, and the root, are there behind it: `left_by`.
    """
    gathers = Counter(unit for unit, _ in groupby(forward) if unit != root)
    if root:
        gathers[root] = 1
    return gathers


def left_by(forward: Sequence[str], root: str | None) -> set[str]:
    """Return the units that are gathered behind a forward."""
    return {*forward[-1:], *([root] if root else [])}


def backward_gathers(
    forward: Sequence[str], root: str | None, no_backward: Collection[str], there: Collection[str]
) -> Counter[str]:
    """Count the gathers of `backward_tokens`: one for each use of a unit that is not there till its end."""
    gathers = Counter(unit for unit in forward if unit not in no_backward and unit not in there and unit != root)
    if root and root not in there:
        gathers[root] = 1
    return gathers
