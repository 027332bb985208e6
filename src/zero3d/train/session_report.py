"""report.json in a run's folder: what only its process knows, for `zero3d report`.

written    by rank 0 when a session begins, with every checkpoint, and at the end, whole or not at all
has        memory and traffic as the run prints them at its end, the engine's report, and how the session ended
without    a disk that takes it a run goes on: nothing is told
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zero3d.config.sections import END
from zero3d.engine.traffic_formulas import SessionCounts
from zero3d.spec.tiers import DEVICE
from zero3d.train.event_commands import facts_of
from zero3d.train.loop import Loop
from zero3d.train.measure import Activations, memory_rows
from zero3d.train.stop import Stopped
from zero3d.train.tables import MemoryRow, TrafficRow
from zero3d.train.traffic import traffic_rows
from zero3d.watchdog.own_files import write_whole

VERSION = 1
FINISHED, EARLY, STOPPED, FAILED = "finished", "ended early", "stopped", "failed"
LONGEST = 2000  # characters of an error
TIME = "%Y-%m-%dT%H:%M:%S%z"


class SessionReport:
    """Keeps what a session has measured on this rank. Nothing is sent, and nothing waits for the device.

    steps   the run's last one
    sample  the text at the run's end; empty before, and where there is none
    """

    def __init__(self, loop: Loop, activations: Activations, micro_batches: int, steps: int) -> None:
        self._loop, self._activations = loop, activations
        self._micro_batches, self._steps = micro_batches, steps
        self._began = time.strftime(TIME)
        self._ended: dict[str, str] | None = None
        self.sample = ""
        self.measure()

    def measure(self) -> None:
        """Measure memory and traffic of the session so far."""
        loop = self._loop
        applied = sum(record["applied"] for record in loop.history)
        counts = SessionCounts(applied, len(loop.history) - applied, self._micro_batches, loop.tokens)
        self.engine = loop.engine.report()
        self.memory: list[MemoryRow] = memory_rows(self.engine, self._activations.bytes, loop.engine)
        self.traffic: list[TrafficRow] = traffic_rows(loop.traffic, counts) if loop.history else []
        self._step, self._session = loop.state.step, len(loop.history)
        self._seconds = sum(record["seconds"] for record in loop.history)

    @property
    def peak_held(self) -> int:
        """The bytes of states and buffers on the device at the instant at which they are most together."""
        return sum(row.at_peak for row in self.engine.memory if row.place == DEVICE)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the file now, with every checkpoint that is saved inside, and behind it how the session ended."""
        self._loop.after_save = self._save
        self.write()
        self._loop.events.begin(FAILED)
        try:
            yield
        except BaseException as error:
            kind = STOPPED if isinstance(error, (Stopped, KeyboardInterrupt)) else FAILED
            self._end(kind, f"{type(error).__name__}: {error}" if kind == FAILED else str(error))
            raise
        over = self._loop.why_over
        self._end(FINISHED if over is None else EARLY, over or "")

    def _save(self) -> None:
        if self._loop.engine.world.rank == 0:
            with suppress(Exception):  # as in `write`
                self.measure()
            self.write()

    def _end(self, how: str, why: str) -> None:
        self._ended = {"how": how, "why": why[:LONGEST], "time": time.strftime(TIME)}
        self.write()
        history = self._loop.history
        facts = facts_of(self._loop.state.step, history[-1] if history else {})
        self._loop.events.fire(END, facts | {"how": how, "why": why[:LONGEST]})

    def write(self) -> None:
        """Write the file on rank 0."""
        if self._loop.engine.world.rank == 0:
            with suppress(Exception):  # a full disk, no memory: no reason to end a run, or to hide why it ends
                write_whole(self._loop.folder.report, json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        engine = self._loop.engine
        return {
            "version": VERSION,
            "began": self._began,
            "step": self._step,
            "steps": self._steps,
            "session_steps": self._session,
            "session_seconds": self._seconds,
            "ended": self._ended,
            "ranks": engine.world.size,
            "stage": engine.stage,
            "precision": engine.precision.name,
            "saves": self._loop.saves,
            "hosts": self._loop.ranks.hosts,
            "slowest": self._loop.ranks.line,
            "sample": self.sample,
            "peak_held": self.peak_held,
            "memory": [row.as_json() for row in self.memory],
            "traffic": [row.as_json() for row in self.traffic],
            "engine": self.engine.as_json(),
        }
