"""Looks at the records of a host's ranks and finds out when nothing moves any more.

moved      a rank whose record has changed since the last look; in a slow phase (start-up, save, load, export, ...)
           also one that has moved bytes to or from a disk, as the system counts them (on Linux)
silent     seconds since then, for each rank, counted from look to look: a monitor that was itself held up, with its
           host or by Ctrl-Z, blames nobody, and while a debugger holds a rank nothing is counted
stall      some rank is silent for `health.timeout` while all of them train, or for `health.slow_timeout` at all;
           while any rank is in a slow phase the others may wait for it, and without end as long as it moves
limits     are what ranks have told; until then, and where they are 0, there is none
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from zero3d.watchdog.flight_recorder import FACT
from zero3d.watchdog.heartbeat import ENDED, TRAINING, Beat, read_facts, read_record
from zero3d.watchdog.stacks import gather_stacks
from zero3d.watchdog.waits import DEAD, GONE, RUNNING, STOPPED, WAITING, RankState, correct_by_stack

LOOK = 0.2  # seconds between two looks
MOST = 1.0  # seconds that count between two looks, however long this process slept
USUAL = (TRAINING, ENDED)  # phases that are not slow
Signs = tuple[int, int]  # of life: the record's sequence, and bytes moved to and from disks
NO_SIGNS = (-1, 0)
LONGEST = 1e12  # seconds


class Facts(NamedTuple):
    """What ranks have told once: limits in seconds, the run's folder if it is known, and how many ranks there are."""

    timeout: float = math.inf
    slow_timeout: float = math.inf
    output: Path | None = None
    world: int | None = None


class Silence:
    """Counts how long one rank has been silent: while all train, while none is slow and moves, and at all."""

    def __init__(self) -> None:
        self.signs = NO_SIGNS
        self.training = 0.0
        self.slow = 0.0
        self.total = 0.0

    def see(self, signs: Signs, seconds: float, all_train: bool, one_works: bool) -> None:
        """Take note of a look, `seconds` after the last one."""
        if signs != self.signs:
            self.signs = signs
            self.training = 0.0
            self.slow = 0.0
            self.total = 0.0
        else:
            self.total += seconds
            self.training = self.training + seconds if all_train else 0.0
            self.slow = 0.0 if one_works else self.slow + seconds


class Monitor:
    """Owns the counts of silence of the ranks whose records are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname()
        self._silences: dict[int, Silence] = {}
        self._last = time.monotonic()

    def look(self) -> bool:
        """Look, if it is time; return whether the ranks have come to a stall."""
        now = time.monotonic()
        elapsed = now - self._last
        if elapsed < LOOK:
            return False
        self._last = now
        beats = self.beats()
        signs = {rank: _signs(beat) for rank, beat in beats.items()}
        before = {rank: self._silences.setdefault(rank, Silence()).signs for rank in beats}
        silent = [beat for rank, beat in beats.items() if signs[rank] == before[rank]]
        counted = 0.0 if any(_is_traced(beat.pid) for beat in silent) else min(elapsed, MOST)
        all_train = all(beat.phase == TRAINING for beat in beats.values())
        one_works = any(signs[rank] != before[rank] and beat.phase not in USUAL for rank, beat in beats.items())
        for rank in beats:
            self._silences[rank].see(signs[rank], counted, all_train, one_works)
        return self._is_stalled(beats)

    def beats(self) -> dict[int, Beat]:
        """Return the record of each rank that has one."""
        beats = {}
        with suppress(OSError):  # a folder that is gone
            for file in self.folder.glob("rank-*"):
                rank = file.name.removeprefix("rank-")
                if rank.isdecimal() and (beat := read_record(file)) is not None:
                    beats[int(rank)] = beat
        return dict(sorted(beats.items()))

    def facts(self) -> Facts:
        """Return what ranks have told."""
        told: dict[str, object] = {}
        for rank in self.beats():
            told = read_facts(self.folder / f"rank-{rank}") | told
        timeout, slow = (_limit(told.get(name)) for name in ("timeout", "slow_timeout"))
        output, world = told.get("output"), told.get("world")
        return Facts(
            timeout, slow, Path(output) if isinstance(output, str) else None, world if isinstance(world, int) else None
        )

    def states(self, dead: Iterable[int] = ()) -> list[RankState]:
        """Return what each rank is doing, without stacks; `dead` ranks are known to be gone."""
        gone = set(dead)
        found = []
        for rank, beat in self.beats().items():
            state = _state(beat, rank in gone)
            axes = read_facts(self.folder / f"rank-{rank}").get("axes", {})
            silence = self._silences.get(rank, Silence()).total
            found.append(
                RankState(
                    rank,
                    self.host,
                    beat.pid,
                    state,
                    beat.phase,
                    beat.axis,
                    beat.op,
                    beat.unit,
                    beat.number,
                    beat.step,
                    silence,
                    beat.work,
                    axes,
                    peer=beat.peer,
                )
            )
        return found

    def recording(self, states: Iterable[RankState]) -> list[int]:
        """Return the ranks that are there and have NCCL's flight recorder."""
        there = [state.rank for state in states if state.state not in (DEAD, GONE)]
        return [rank for rank in there if read_facts(self.folder / f"rank-{rank}").get(FACT) is True]

    def with_stacks(self, states: list[RankState]) -> list[RankState]:
        """Fill in the Python stacks of all ranks that are there; those that were stopped go on."""
        pids = {state.rank: state.pid for state in states if state.state not in (DEAD, GONE)}
        stopped = [state.rank for state in states if state.state == STOPPED]
        stacks = gather_stacks(self.folder, pids, stopped)
        for state in states:
            state.stack = stacks.get(state.rank, [])
        correct_by_stack(states)
        return states

    def _is_stalled(self, beats: dict[int, Beat]) -> bool:
        silences = [self._silences[rank] for rank, beat in beats.items() if beat.phase != ENDED]
        longest = max((silence.slow for silence in silences), default=0.0)
        if longest < MOST:
            return False
        facts = self.facts()
        return longest > facts.slow_timeout or max(silence.training for silence in silences) > facts.timeout


def _limit(told: object) -> float:
    """Return a limit of time in seconds, infinite where none is told."""
    return float(told) if isinstance(told, (int, float)) and 0 < told < LONGEST else math.inf


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; what only waits for its parent to take notice is gone."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def _state(beat: Beat, dead: bool) -> str:
    if beat.phase == ENDED:
        return GONE
    if dead or not is_alive(beat.pid):
        return DEAD
    with suppress(psutil.Error):
        if psutil.Process(beat.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return STOPPED
    return WAITING if beat.depth else RUNNING


def _signs(beat: Beat) -> Signs:
    return beat.sequence, 0 if beat.phase in USUAL else _disk_bytes(beat.pid)


def _disk_bytes(pid: int) -> int:
    """Return the bytes that a process has moved to and from disks, 0 where the system does not tell."""
    with suppress(psutil.Error, AttributeError, OSError):  # macOS does not count them
        counts = psutil.Process(pid).io_counters()
        return int(counts.read_bytes + counts.write_bytes)
    return 0


def _is_traced(pid: int) -> bool:
    """Return whether a debugger holds a process."""
    with suppress(psutil.Error):
        return pid != os.getpid() and psutil.Process(pid).status() == psutil.STATUS_TRACING_STOP
    return False
