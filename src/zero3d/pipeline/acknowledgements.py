"""When a pipeline rank knows that a gradient it sent has arrived, from the order of all ranks' actions. No torch.

    sender     I of chunk p on k: sends its gradient ............... begins b, for which m has come: so the gradient has
    receiver   ........... I of chunk p - 1 on k: uses it ... sends m, the first message to the sender from there on

So m acknowledges the gradient, and b is where the sender may let go of it. A hidden state that was sent has
arrived once its own gradient comes back.
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
    """Return an action's work; None for a backward of weights, which needs and sends no message."""
    return None if action.kind == "W" else Work(action.kind in BACKWARDS, action.chunk, action.micro_batch)


def acknowledgements(order: Mapping[int, Sequence[Action]], rank: int, owners: Sequence[int]) -> dict[Work, Work]:
    """Return, by backward of `rank` that sends a gradient, the work of `rank` known to begin after its arrival.

    order   actions of the ranks that it sends to, at least; of others nothing is known before the end of the step
    owners  the rank of every chunk
    """
    acknowledged = {}
    for peer, actions in order.items():
        if peer == rank:
            continue
        needs_message: Work | None = None  # work of `rank` for which `peer` sends next, from an action on
        for kind, chunk, micro_batch in reversed(actions):
            if kind == "W":
                continue
            backward = kind in BACKWARDS
            receiver = chunk - 1 if backward else chunk + 1
            sender = chunk + 1
            if 0 <= receiver < len(owners) and owners[receiver] == rank:
                needs_message = Work(backward, receiver, micro_batch)
            if backward and needs_message is not None and sender < len(owners) and owners[sender] == rank:
                acknowledged[Work(True, sender, micro_batch)] = needs_message
    return acknowledged
