"""Tells the watchdog the next message, and its peer, for which a pipeline rank waits, before torch's schedule waits.

    gpipe, 1f1b    torch asks for the operations of a message, and waits: said when it asks
    the others     torch receives ahead and waits before an action that needs it: said when the action before has ended

1f1b sends a message and receives another one, of the same peer, at once, and waits for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero3d.distributed.axis import Axis
from zero3d.pipeline.acknowledgements import Work, work_of
from zero3d.pipeline.actions import Action

_NAMES = {False: "activations", True: "gradients"}


class Waits:
    """Says what one rank of a pipeline waits for.

    owners  the rank of every chunk
    order   of this rank's actions, where torch receives ahead
    """

    def __init__(self, axis: Axis, owners: Sequence[int], order: Sequence[Action]) -> None:
        self._axis, self._owners = axis, owners
        self._following = dict(zip([None, *order], order, strict=False))
        self._sending: Work | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._sending = None
        self.over(None)

    def sending(self, work: Work) -> None:
        """Take note that torch sends the result of `work` and waits for that, now or later."""
        self._sending = work

    def receiving(self, work: Work) -> None:
        """Say that torch waits for the inputs of `work`, where it asks for no message ahead."""
        if self._following:
            return
        peer, needed, sent = self._peer(work, -1), _message(work, "for"), self._sending
        if sent is not None and self._peer(sent, 1) == peer:
            self._sending = None
            self._say("send and receive", f"{_message(sent, 'from')} and {needed}", peer)
        else:
            self._say("receive", needed, peer)

    def over(self, action: Action | None) -> None:
        """Tell the wait after this action: for the inputs of the next one, or for a message still to be sent."""
        following, sent = self._following.get(action), self._sending
        work = None if following is None else work_of(following)
        if work is not None and self._peer(work, -1) != self._axis.rank:
            self._say("receive", _message(work, "for"), self._peer(work, -1))
        elif sent is not None:
            self._say("send", _message(sent, "from"), self._peer(sent, 1))

    def _peer(self, work: Work, way: int) -> int | None:
        """Return the rank of the chunk after `work` (way 1) or before it (-1); None where there is none."""
        chunk = work.chunk + (-way if work.backward else way)
        return self._owners[chunk] if 0 <= chunk < len(self._owners) else None

    def _say(self, op: str, what: str, peer: int | None) -> None:
        if self._axis.heartbeat is not None and peer is not None:
            self._axis.heartbeat.next_message(self._axis.name, op, what, peer)


def _message(work: Work, way: str) -> str:
    return f"the {_NAMES[work.backward]} of micro-batch {work.micro_batch} {way} model chunk {work.chunk}"
