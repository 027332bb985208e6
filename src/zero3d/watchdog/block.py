"""What a monitor says when nothing moves any more, or a rank is gone: one readable block, and the same as data.

watchdog.txt, watchdog.json            in the run's folder
watchdog-HOST.txt, watchdog-HOST.json  where ranks are on several hosts: each monitor says what it sees of its own
stderr                                 the same text, also where no folder is known yet
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from sysconfig import get_path
from typing import Any

from zero3d.watchdog.flight_recorder import ask
from zero3d.watchdog.heartbeat import TRAINING
from zero3d.watchdog.monitor import Facts, Monitor
from zero3d.watchdog.own_files import write_whole
from zero3d.watchdog.stacks import main_frames
from zero3d.watchdog.waits import (
    DEAD,
    GONE,
    RUNNING,
    STOPPED,
    TORCH,
    WAITING,
    RankState,
    Wait,
    find_culprits,
    find_waits,
)

STALL, DEATH, HELD, ORPHANS = "stall", "died", "stopped", "launcher"  # kinds of blocks
FRAMES = 24  # of a stack, in the text
WIDTH = 100
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_PACKAGES = re.compile(r".*/site-packages/|.*/(?=zero3d/)")
_CALLS = "torch/nn/modules/module.py"  # between every two modules, and of no interest
HEADLINES = {STALL: "nothing moves", DEATH: "a rank died", HELD: "a rank is stopped", ORPHANS: "the launcher is gone"}


@dataclass(frozen=True)
class Block:
    """Holds what was seen at one moment; `kind` is one of the four above.

    ends  how processes of ranks ended, where that is known: "killed by SIGKILL"
    records  files with NCCL's flight recorder, by rank
    """

    kind: str
    time: datetime
    host: str
    states: Sequence[RankState]
    facts: Facts
    waits: Sequence[Wait]
    culprits: Sequence[RankState]
    ends: Mapping[int, str] = field(default_factory=dict)
    records: Mapping[int, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step that all ranks have begun."""
        return min((state.step for state in self.states), default=0)

    @property
    def cause(self) -> str:
        """What happened, as one sentence without a full stop."""
        if self.kind == ORPHANS:
            return "the process that started the ranks is gone"
        calls = dict.fromkeys(state.call_words for state in self.states if state.state == WAITING)
        if not self.culprits:
            where = f"all ranks are in {next(iter(calls), 'no call')}"
            if len(calls) > 1:
                where = f"ranks wait for each other, {', '.join(map(self._in_call, calls))}"
            return f"{where}: the network between them, or a device, does not answer"
        ranks = _ranks([state.rank for state in self.culprits])
        first = self.culprits[0]
        return {
            DEAD: ": ".join(filter(None, (f"{ranks} died", self.ends.get(first.rank)))),
            STOPPED: f"{ranks} {_is(self.culprits)} stopped (SIGSTOP, Ctrl-Z or a debugger)",
            RUNNING: f"{ranks} {_is(self.culprits)} stuck or slow in {_work(first)}, in no collective{_place(first)}",
            WAITING: f"ranks are in different collectives: {', '.join(map(self._in_call, calls))}",
        }[first.state]

    @property
    def advice(self) -> list[str]:
        """What to try, for what happened."""
        state = self.culprits[0].state if self.culprits else ""
        alone = [rank for rank in self.culprits if rank.axis == TORCH]
        lines = {
            DEAD: "the lines below say how it died; `dmesg` names processes that the kernel killed for lack of memory",
            STOPPED: "`kill -CONT PID` continues a stopped process; with a debugger train with health.timeout=0",
            RUNNING: "look at its stack: a loop without end, a slow disk, or data that one rank alone waits for; where "
            "it is only slow, raise health.timeout; of what is announced as slow, health.slow_timeout",
            WAITING: f"all ranks must make that call{_place(alone[0])}; others may have made it before, and left it"
            if alone
            else "make branches equal on all ranks: every rank must use the same units in the same order; in a loop of "
            "your own `zero3d.Mesh(debug=True)` compares them before every gather",
            "": "look at the network between the ranks, and at other hosts' blocks; on NVIDIA GPUs try "
            "NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO",
        }
        found = [lines[state]] if self.kind != ORPHANS else ["look at why the launcher ended: its host's logs, `dmesg`"]
        if any(state.phase != TRAINING and state.state != GONE for state in self.states) and self.kind == STALL:
            found.append("what is slow on purpose may take health.slow_timeout")
        output = self.facts.output
        saved = output is None or any((output / "checkpoints").glob("step-*"))
        go_on = "goes on from the newest checkpoint" if saved else "starts anew: checkpoint.every has saved none yet"
        return [
            *found,
            "`zero3d doctor` examines this machine, and with --run this run's folder",
            f"`zero3d train ... --resume auto` {go_on}",
        ]

    def text(self) -> str:
        """Return the block as people read it."""
        moment = self.time.strftime("%Y-%m-%d %H:%M:%S UTC")
        head = f"zero3d watchdog: {HEADLINES[self.kind]} "
        lines = [f"{head}{'=' * max(3, WIDTH - len(head))}", f"{_sentence(self.cause)}.", *self._why()]
        lines += [f"host {self.host}, {moment}; last step that all its ranks have begun: {self.step}", ""]
        for state in self.states:
            lines += [f"rank {state.rank}: {self._line(state)}"]
        lines += ["", "Python stacks, innermost call first:"]
        for state in self.states:
            lines += self._stack(state)
        if self.records:
            lines += ["", "NCCL's flight recorder (torchfrtrace compares those of all ranks):"]
            lines += [f"  rank {rank}: {file}" for rank, file in self.records.items()]
        lines += ["", "What to try:", *(f"  - {line}" for line in self.advice), "=" * WIDTH]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the block as data."""
        limit = self.facts.timeout
        return {
            "version": 1,
            "kind": self.kind,
            "time": self.time.isoformat(timespec="seconds"),
            "host": self.host,
            "cause": self.cause,
            "step": self.step,
            "timeout": None if math.isinf(limit) else limit,
            "ranks": [state.as_json() for state in self.states],
            "waits": [wait.as_json() for wait in self.waits],
            "advice": self.advice,
            "flight_recorder": {str(rank): file for rank, file in self.records.items()},
        }

    def write(self) -> None:
        """Write it to stderr and into the run's folder, where that is known and takes it."""
        with suppress(OSError):
            print(self.text(), file=sys.stderr, flush=True)
        if self.facts.output is not None:
            alone = self.facts.world is None or self.facts.world <= len(self.states)
            stem = "watchdog" if alone else f"watchdog-{self.host}"
            for name, text in ((f"{stem}.txt", self.text()), (f"{stem}.json", json.dumps(self.as_json(), indent=1))):
                with suppress(OSError):
                    write_whole(self.facts.output / name, f"{text}\n")

    def _in_call(self, words: str) -> str:
        waiting = [state for state in self.states if state.state == WAITING]
        return f"{_ranks([state.rank for state in waiting if state.call_words == words])} in {words}"

    def _why(self) -> list[str]:
        """Say by which limit this is a stall."""
        if self.kind not in (STALL, HELD):
            return []
        silent = max((state.seconds for state in self.states), default=0.0)
        limits = [("health.timeout", self.facts.timeout), ("health.slow_timeout", self.facts.slow_timeout)]
        said = " and ".join(f"{name} is {limit:g} s" for name, limit in limits if not math.isinf(limit))
        return [f"A rank has shown no sign of life for {silent:.1f} s ({said})."]

    def _line(self, state: RankState) -> str:
        if state.state in (DEAD, GONE):
            where = f"in {_phase(state)}; its last call: {state.call_words}"
        elif state.state == WAITING:
            wait = next((wait for wait in self.waits if wait.rank == state.rank), None)
            peers = f", for {_ranks(wait.peers)}" if wait is not None and wait.peers else ""
            where = f"{state.seconds:.1f} s in {state.call_words}{peers}, in {_phase(state)}"
        else:
            where = f"{state.seconds:.1f} s in {_work(state)}, in {_phase(state)}; its last call: {state.call_words}"
        return f"{state.state} {where} (pid {state.pid})"

    def _stack(self, state: RankState) -> list[str]:
        frames = short_frames(main_frames(state.stack))
        if not frames:
            return [f"  rank {state.rank} ({state.state}): none came"]
        more = [f"... {len(frames) - FRAMES} more"] if len(frames) > FRAMES else []
        return [f"  rank {state.rank} ({state.state}):", *(f"    {line}" for line in [*frames[:FRAMES], *more])]


def observe(kind: str, monitor: Monitor, dead: Mapping[int, str] | None = None) -> Block:
    """Look closely, with stacks, and return the block; `kind` STALL becomes HELD where a rank is stopped.

    dead  ranks that are known to be gone, and how each ended; nothing where that is not known
    """
    states = monitor.with_stacks(monitor.states(dead or ()))
    culprits = find_culprits(states)
    if kind == STALL and culprits and culprits[0].state in (STOPPED, DEAD):
        kind = HELD if culprits[0].state == STOPPED else DEATH
    now, facts = datetime.now(UTC), monitor.facts()
    records = ask(monitor.folder, monitor.recording(states), facts.output)
    return Block(kind, now, monitor.host, states, facts, find_waits(states), culprits, dead or {}, records)


def short_frames(frames: Sequence[str]) -> list[str]:
    """Return a stack's frames in short, without the calls between every two modules."""
    return [_frame(line) for line in frames if _CALLS not in line]


def _place(state: RankState) -> str:
    """Say where the rank's own code is, the innermost function that is in no package, or the innermost at all."""
    frames = main_frames(state.stack)
    library = get_path("stdlib")
    own = [line for line in frames if not (_PACKAGES.search(line) or library in line or "<frozen" in line)]
    return f", at {_frame((own or frames)[0])}" if frames else ""


def _frame(line: str) -> str:
    """Return a frame in short: the file without the folder of its package, line and function."""
    found = _FRAME.match(line)
    if found is None:
        return line
    path, number, function = found.groups()
    return f"{_PACKAGES.sub('', path)}:{number} {function}"


def _work(state: RankState) -> str:
    return state.work or "Python"


def _phase(state: RankState) -> str:
    return f"step {state.step}" if state.phase == TRAINING else f"phase {state.phase}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _is(states: Sequence[RankState]) -> str:
    return "is" if len(states) == 1 else "are"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
