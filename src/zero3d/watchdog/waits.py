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
from itertools import takewhile
from typing import Any, NamedTuple

from zero3d.watchdog.heartbeat import ALL
from zero3d.watchdog.stacks import main_frames

DEAD, STOPPED, WAITING, RUNNING, GONE = "dead", "stopped", "waiting", "running", "ended"
TORCH = "torch.distributed"  # in the place of an axis: a collective that is none of ours
_FUNCTION = re.compile(r'File ".*/torch/distributed/distributed_c10d.py", line \d+ in (\w+)')
_OF_TORCH, _OF_PIPELINE = "/torch/distributed/", "/torch/distributed/pipelining/"


@dataclass
class RankState:
    """One rank as its monitor sees it.

    seconds  since its record changed last
    axes     ranks of each of its axes, by name
    peer     the only one of the call's axis that the call waits for, by its place there; ALL: all of them
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
    peer: int = ALL

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
            return f"{TORCH}.{self.op}, a call from outside zero3d"
        number = f" {self.number:,}" if self.number else ""
        unit = "" if self.unit == "-" else f" of {self.unit if ' ' in self.unit else f'unit {self.unit!r}'}"
        return f"{self.op}{number}{unit} on axis {self.axis}"

    def as_json(self) -> dict[str, Any]:
        """Return its part of watchdog.json."""
        return {name: value for name, value in asdict(self).items() if name not in ("axes", "peer")} | {
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


def correct_by_stack(states: Iterable[RankState]) -> None:
    """Correct what a record cannot tell by the innermost frames of a running rank's main thread.

    in torch's schedule of a pipeline             waiting for the message that it has said comes next
    in a collective of torch.distributed's own    waiting in that
    """
    for state in states:
        frames = list(takewhile(lambda frame: _OF_TORCH in frame, main_frames(state.stack)))
        if state.state == RUNNING and frames:
            if any(_OF_PIPELINE in frame for frame in frames):
                state.state = WAITING
            elif found := _FUNCTION.match(frames[0]):
                state.state = WAITING
                state.axis = TORCH
                state.op = found[1]
                state.unit = "-"
                state.number = 0
                state.peer = ALL


def find_waits(states: Sequence[RankState]) -> list[Wait]:
    """Return who waits for whom: for the sender of a message, else for the ranks of that axis not in the same call.

    Ranks of other hosts are not seen; they are named where nobody here is missing.
    """
    by_rank = {state.rank: state for state in states}
    waits = []
    for state in states:
        if state.state == WAITING:
            ranks = state.axes.get(state.axis, [])
            if 0 <= state.peer < len(ranks):
                waits.append(Wait(state.rank, [ranks[state.peer]], state.axis, state.op, state.unit))
                continue
            peers = [rank for rank in ranks if rank != state.rank]
            seen = [by_rank[rank] for rank in peers if rank in by_rank]
            missing = [peer.rank for peer in seen if peer.state != WAITING or peer.call != state.call]
            unseen = [rank for rank in peers if rank not in by_rank]
            waits.append(Wait(state.rank, missing or unseen, state.axis, state.op, state.unit))
    return waits


def find_culprits(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that others wait for: the first kind of these that there is.

    dead, else stopped, else running, else waiting in a collective in which fewer ranks are than in another, or whose
    message is waited for; none where all are in one call, or wait for each other's messages.
    """
    for kind in (DEAD, STOPPED, RUNNING):
        if found := [state for state in states if state.state == kind]:
            return found
    calls: dict[tuple[str, str, str, int], list[RankState]] = {}
    for state in states:
        if state.state == WAITING and state.peer == ALL:
            calls.setdefault(state.call, []).append(state)
    if len(calls) < 2:
        wanted = {rank for wait in find_waits(states) for rank in wait.peers}
        messages = any(state.state == WAITING and state.peer != ALL for state in states)
        return [state for call in calls.values() for state in call if messages and state.rank in wanted]
    most = max(map(len, calls.values()))
    return [state for call in calls.values() for state in call if len(call) < most or most == 1]
