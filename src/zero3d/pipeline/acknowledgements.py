"""When a pipeline rank can know that a gradient it has sent has arrived, from what all ranks do in order. No torch.

    rank r    ... I of chunk p on k: sends its gradient ....... begins b: the message of a has come, so has the gradient
    rank r'   ........ I of chunk p - 1 on k: uses it; .. a: the first action from there on that sends to r

A hidden state that was sent has arrived once its own gradient comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zero3d.pipeline.actions import Action

BACKWARDS = "BI"  # kinds that send a gradient


class Work(NamedTuple):
    """A forward, or a backward that gives gradients of inputs, of a chunk on a micro-batch."""

    backward: bool
    chunk: int
    micro_batch: int


def work_of(action: Action) -> Work | None:
    """None for a backward of weights."""
    return None if action.kind == "W" else Work(action.kind in BACKWARDS, action.chunk, action.micro_batch)


def acknowledgements(order: Mapping[int, Sequence[Action]], rank: int, owners: Sequence[int]) -> dict[Work, Work]:
    """By backward of `rank` that sends a gradient: its work at whose beginning that has arrived.

    order   of the ranks that it sends to, at least; without an entry nothing is known before the end of the step
    owners  the rank of every chunk
    """
    found = {}
    for other, actions in order.items():
        if other == rank:
            continue
        first: Work | None = None  # of what `other` sends to `rank` from an action on
        for action in reversed(actions):
            work = work_of(action)
            if work is None:
                continue
            to = work.chunk - 1 if work.backward else work.chunk + 1
            if 0 <= to < len(owners) and owners[to] == rank:
                first = work._replace(chunk=to)
            after = work.chunk + 1
            if work.backward and first is not None and after < len(owners) and owners[after] == rank:
                found[work._replace(chunk=after)] = first
    return found
