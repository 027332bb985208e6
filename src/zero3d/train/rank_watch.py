"""Watches a run's ranks for one that is slower than its peers: what they tell each other, and what is said of it.

Each rank's own seconds go with the numbers that ranks exchange in a step anyway, in the steps of `due`; rank 0 looks
at them (stragglers.py). The clocks of an accelerator are read a step late, so that the last step is left to the next
message everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from socket import gethostname

import torch

from zero3d.distributed.collectives import Comm
from zero3d.engine.engine import Engine
from zero3d.train.progress import LINES
from zero3d.train.stragglers import FACTS, KINDS, OwnTimes, Slow, Stragglers, Window, steps_told
from zero3d.zero.step_parts import SAVES

LETTERS = 48  # of a host's name
EVERY = 10  # steps between messages, at most, where nobody has said how many


class RankWatch:
    """Owns what ranks tell of their own seconds. All ranks make one together.

    hosts   the name of each rank's host
    slow    the slowest rank as the last message has it; None where none is slow, and on all ranks but the first
    worst   the last that was found, and the step at which
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._own = engine, OwnTimes(engine.clocks.steps)
        self.hosts = _hosts(engine.world)
        stages = [engine.mesh.degrees.place(rank).pp for rank in range(engine.world.size)]
        self._stragglers = Stragglers(stages) if engine.world.rank == 0 else None
        self.slow: Slow | None = None
        self.worst: tuple[int, Slow] | None = None
        self._said: set[tuple[int, str]] = set()
        self._waited = 0.0
        self.begin(1, None)

    def begin(self, last: int, every: int | None) -> None:
        """Begin a session that ends with step `last`; every: steps between messages, EVERY at most where None."""
        self._last, self._every = last, every or min(EVERY, max(1, last // LINES))
        self._told = steps_told(self._every, self._engine.world.size)

    def due(self, step: int) -> bool:
        """Return whether ranks tell in a step."""
        return step == self._last or step % self._every == 0

    @property
    def width(self) -> int:
        """Numbers that each rank tells."""
        return self._told + len(KINDS) + FACTS

    def tell(self, ended: int) -> list[float]:
        """Return this rank's numbers, where so many steps of the session have ended."""
        return self._own.window(self._engine.clocks.own, ended - 1, self._told).numbers()

    def hear(self, step: int, numbers: Sequence[float]) -> dict[str, float]:
        """Take all ranks' numbers; return the fields of rank 0's record."""
        if self._stragglers is None:
            return {}
        rows = (numbers[at : at + self.width] for at in range(0, len(numbers), self.width))
        self.slow = self._stragglers.hear([Window.of_numbers(row) for row in rows])
        if self.slow is None:
            return {}
        self.worst = step, self.slow
        return self.slow.fields()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count inside how long this thread is on a core, on a CPU, where it computes itself."""
        begun = time.thread_time()
        try:
            yield
        finally:
            if self._engine.mesh.device.type == "cpu":
                self._own.on_core(time.thread_time() - begun)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count inside how long training waits for a save."""
        begun = time.perf_counter()
        try:
            with self._engine.clocks.of(SAVES):
                yield
        finally:
            self._waited += time.perf_counter() - begun

    def saved(self, seconds: float) -> None:
        """Count a save, for whose files of this rank training has waited so long."""
        self._own.saved(seconds)

    @property
    def waits(self) -> float:
        """The seconds of the last step that was read in which this rank waited for others."""
        own = self._engine.clocks.own
        return own[-1].waits if own else 0.0

    def take_waited(self) -> float:
        """Return the seconds since it was asked last in which training waited for saves."""
        waited, self._waited = self._waited, 0.0
        return waited

    def news(self) -> Slow | None:
        """Return the slowest rank, once in a session for each rank and part."""
        if self.slow is None or (self.slow.rank, self.slow.part) in self._said:
            return None
        self._said.add((self.slow.rank, self.slow.part))
        return self.slow

    @property
    def line(self) -> str | None:
        """What a run says at its end of the last slow rank; None where none was."""
        if self.worst is None:
            return None
        step, slow = self.worst
        return slow.line(self.hosts) + ("" if slow == self.slow else f", up to step {step:,}")


def _hosts(world: Comm) -> list[str]:
    """Return the name of each rank's host. All ranks call it."""
    name = gethostname().encode()[:LETTERS]
    row = torch.tensor([*name, *bytes(LETTERS - len(name))], dtype=torch.float64, device=world.device)
    rows = world.exchange(row, recorded=False).tolist()
    return [bytes(map(int, each)).rstrip(b"\0").decode(errors="replace") for each in rows]
