"""What a monitor knows of each rank, and from that who waits for whom.

dead       the process is gone, without having said that it leaves
stopped    SIGSTOP, or a debugger holds it
waiting    inside a call that may wait for peers
running    outside of any: in Python, in a kernel, on a disk
ended      it said so
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

DEAD, STOPPED, WAITING, RUNNING, GONE = "dead", "stopped", "waiting", "running", "ended"
MIXED = "a step"  # the call around a whole step of a pipeline: whether it waits, its stack tells
TORCH = "torch.distributed"  # in the place of an axis: a collective that is none of ours
_OF_WAITS = ("/torch/distributed/", "/zero3d/distributed/")  # files in whose functions a rank waits
_FUNCTION = re.compile(r'File ".*/torch/distributed/distributed_c10d.py", line \d+ in (\w+)')


@dataclass
class RankState:
    """One rank as its monitor sees it.

    seconds  since its record changed last
    axes     ranks of each of its axes, by name
    stack    of all its threads, the main one's first, as Python's faulthandler writes them
    """

    rank: int
    host: str
    pid: int
    state: str
    phase: str
    axis: str
    op: str
    unit: str
    number: int
    step: int
    seconds: float
    work: str = ""
    axes: dict[str, list[int]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)

    @property
    def call(self) -> tuple[str, str, str, int]:
        """The call that it is in, or was in last."""
        return self.axis, self.op, self.unit, self.number

    @property
    def call_words(self) -> str:
        """The call in words."""
        if not self.op:
            return "no call yet"
        if self.axis == TORCH:
            return f"{TORCH}.{self.op}, a call that is none of zero3d's"
        number = f" {self.number:,}" if self.number else ""
        unit = "" if self.unit == "-" else f" of unit {self.unit!r}"
        return f"{self.op}{number}{unit} on axis {self.axis}"

    def as_json(self) -> dict[str, Any]:
        """Return its part of watchdog.json."""
        return {name: value for name, value in asdict(self).items() if name != "axes"} | {
            "seconds": round(self.seconds, 2)
        }


class Wait(NamedTuple):
    """Says that `rank` waits for `peers` in a call; `peers` is empty where all are in the same one."""

    rank: int
    peers: list[int]
    axis: str
    op: str
    unit: str

    def as_json(self) -> dict[str, Any]:
        """Return its part of watchdog.json."""
        return {"rank": self.rank, "for": self.peers, "axis": self.axis, "op": self.op, "unit": self.unit}


def settle_by_stack(states: Iterable[RankState]) -> None:
    """Correct what a record cannot tell by the innermost frame of a rank's main thread.

    in a pipeline's step, in a function that waits for nobody   running
    running, in a collective of torch.distributed's own         waiting in that
    """
    for state in states:
        innermost = next((line.strip() for line in state.stack if line.lstrip().startswith("File ")), "")
        if state.state == WAITING and state.op == MIXED and innermost and not any(f in innermost for f in _OF_WAITS):
            state.state = RUNNING
        elif state.state == RUNNING and (found := _FUNCTION.match(innermost)):
            state.state, state.axis, state.op, state.unit, state.number = WAITING, TORCH, found[1], "-", 0


def find_waits(states: Sequence[RankState]) -> list[Wait]:
    """Return who waits for whom: for the ranks of that axis that are not in the same call.

    Ranks of other hosts are not seen; they are named where nobody here is missing.
    """
    by_rank = {state.rank: state for state in states}
    waits = []
    for state in states:
        if state.state == WAITING:
            peers = [rank for rank in state.axes.get(state.axis, ()) if rank != state.rank]
            seen = [by_rank[rank] for rank in peers if rank in by_rank]
            missing = [peer.rank for peer in seen if peer.state != WAITING or peer.call != state.call]
            unseen = [rank for rank in peers if rank not in by_rank]
            waits.append(Wait(state.rank, missing or unseen, state.axis, state.op, state.unit))
    return waits


def find_culprits(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that others wait for: the first kind of these that there is.

    dead, else stopped, else running, else waiting in a call in which fewer ranks are than in another; none where all
    are in one call.
    """
    for kind in (DEAD, STOPPED, RUNNING):
        if found := [state for state in states if state.state == kind]:
            return found
    calls: dict[tuple[str, str, str, int], list[RankState]] = {}
    for state in states:
        if state.state == WAITING:
            calls.setdefault(state.call, []).append(state)
    if len(calls) < 2:
        return []
    most = max(map(len, calls.values()))
    return [state for call in calls.values() for state in call if len(call) < most or most == 1]
