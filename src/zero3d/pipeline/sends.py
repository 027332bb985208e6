"""What a pipeline rank has sent, for as long as it may be on its way.

torch's schedules hold what they send to the end of a step: two hidden states for every micro-batch. Here a hidden
state is let go when its gradient has come back, a gradient when something has come that its receiver sent after it
had used it (pipeline/acknowledgements.py). Both have arrived by then, so that nobody waits.

A message that torch sends together with a receive stays torch's: 1f1b's, but for those before its first backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from zero3d.pipeline.acknowledgements import Work


class Message(NamedTuple):
    """What was started together: handles to wait for, and the operations, whose tensors must live until then."""

    handles: list[dist.Work]
    operations: list[dist.P2POp]


class Sends:
    """Messages under way, by the work at whose beginning they are known to have arrived.

    acknowledgements   by backward that sends a gradient, the work at whose beginning that gradient has arrived
    """

    def __init__(self, acknowledgements: Mapping[Work, Work]) -> None:
        self._acknowledgements = acknowledgements
        self._under_way: dict[Work | None, list[Message]] = {}  # None: known at the end of the step only

    def send(self, work: Work, operations: list[dist.P2POp]) -> None:
        """Start what `work` sends."""
        if operations:
            until = self._acknowledgements.get(work) if work.backward else work._replace(backward=True)
            handles = schedules._batch_p2p(operations)  # torch's own way: both ends must take the same communicator
            self._under_way.setdefault(until, []).append(Message(handles, operations))

    def begin(self, work: Work) -> None:
        """Let go of what has arrived once this rank has what `work` needs."""
        self._wait(work)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for until in list(self._under_way):
            self._wait(until)

    def forget(self) -> None:
        """Let go of everything without waiting, after a step that failed."""
        self._under_way.clear()

    def _wait(self, until: Work | None) -> None:
        for message in self._under_way.pop(until, ()):
            for handle in message.handles:
                handle.wait()
