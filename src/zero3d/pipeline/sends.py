"""What a pipeline rank has sent, for as long as it may be on its way.

torch's schedules hold what they send to the end of a step: two hidden states for every micro-batch. Here a hidden
state is let go when its gradient has come back, a gradient when something has come that its receiver sent after it
had used it (pipeline/acknowledgements.py). Both have arrived by then, so that nobody waits.

A message that torch sends together with a receive stays torch's: 1f1b's, but for those before its first backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from zero3d.pipeline.acknowledgements import Work


class Sends:
    """Messages under way. over: by backward that sends a gradient, the work at whose beginning that has arrived."""

    def __init__(self, over: Mapping[Work, Work]) -> None:
        self._over = over
        self._held: dict[Work | None, list[tuple[list[dist.Work], list[dist.P2POp]]]] = {}  # None: to the end

    def send(self, work: Work, operations: list[dist.P2POp]) -> None:
        """Start what `work` sends."""
        if operations:
            until = self._over.get(work) if work.backward else work._replace(backward=True)
            started = schedules._batch_p2p(operations)  # torch's own way: both ends must take the same communicator
            self._held.setdefault(until, []).append((started, operations))

    def begin(self, work: Work) -> None:
        """This rank has what `work` needs; let go of what has arrived by that."""
        self._wait(work)

    def finish(self) -> None:
        """Let go of everything when it has arrived."""
        for until in list(self._held):
            self._wait(until)

    def forget(self) -> None:
        """A step has failed."""
        self._held.clear()

    def _wait(self, until: Work | None) -> None:
        for started, _ in self._held.pop(until, ()):
            for each in started:
                each.wait()
