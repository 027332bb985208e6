"""When units are gathered and reduced: recorded orders, two bounded windows, side streams.

    Gathers      tokens per unit; a unit is gathered when its users go from none to one and
                 released when the last one leaves. The order of one micro-batch is recorded
                 and, in the next, up to WINDOW gathers run ahead of it; in a pipeline that of a
                 whole step, whose micro-batches follow each other in a fixed but uneven order.
    Reductions   complete units are reduced in one order, the same on all ranks without
                 communication: reverse layout order in the first backward, afterwards rank 0's
                 recorded one. A complete unit waits for those before it. At most WINDOW in flight.
    Lane         one side stream: what is issued on it waits for what compute has enqueued so far.

A prefetched unit's memory is allocated on the compute stream, its gather issued before the
current unit's kernels are enqueued, and its memory freed only after compute's last use is
enqueued; compute has then waited for the lane, so no `record_stream` is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zero3d.errors import ConfigError
from zero3d.zero.traffic import TokenEvent
from zero3d.zero.unit import State, Unit

WINDOW = 2
WAITING = (State.FILLING, State.SUMMED)  # local gradients that have not been reduced
TURN, ROOT_TURN = "turn", "root turn"
STEP = "step"  # release="every_step": from the first use to the end of the step


class Lane:
    """A side stream on an accelerator; on the CPU only its log, if one is given."""

    def __init__(self, name: str, device: torch.device, log: list[tuple[str, str]] | None = None) -> None:
        self._name = name
        self._log = log
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    @contextmanager
    def issue(self, unit: str) -> Iterator[None]:
        """Enqueue on the side stream, after everything compute has enqueued so far."""
        self.note("issue", unit)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def join(self, unit: str) -> None:
        """Compute waits for what this lane has enqueued."""
        self.note("join", unit)
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def note(self, what: str, unit: str) -> None:
        """Write the log that tests read."""
        if self._log is not None:
            self._log.append((f"{self._name}.{what}", unit))


class Gathers:
    """Who needs which unit, and what to gather ahead. Persistent units (stages 0-2) cost nothing here."""

    def __init__(self, lane: Lane, every_step: bool = False, plans_step: bool = False) -> None:
        self._lane = lane
        self._every_step = every_step
        self._plans_step = plans_step  # a recording is of a whole step, not of one micro-batch
        self._previous: list[Unit] = []
        self._current: list[Unit] = []
        self._on_track = True
        self._recording = False  # from a training forward to the end of its backward, or of its step
        self._ahead: list[Unit] = []
        self._turn: list[Unit] = []
        self._known: dict[str, Unit] = {}
        self.events: list[TokenEvent] | None = None

    def acquire(self, unit: Unit, token: object) -> None:
        """`token` needs the unit's full parameters from now on."""
        if not unit.weights.sharded:
            return
        self._note(unit, token, True)
        first = not unit.users
        unit.users.add(token)
        if not first:
            unit.weights.ready()
        else:
            self._known[unit.name] = unit
            self._gather(unit)
            if self._every_step:
                self._note(unit, STEP, True)
                unit.users.add(STEP)

    def release(self, unit: Unit, token: object) -> None:
        """`token` is done; the last one out frees the full parameters. Repeating it is harmless."""
        if not unit.weights.sharded:
            return
        self._note(unit, token, False)
        if token in unit.users:
            unit.users.discard(token)
            if not unit.users:
                self._lane.note("free", unit.name)
                unit.weights.release()
            elif unit.users <= {TURN, ROOT_TURN, STEP}:
                unit.weights.hold()

    def pass_turn(self, units: Sequence[Unit]) -> None:
        """The units used last in a forward stay gathered until others are used."""
        holders, self._turn = self._turn, list(units)
        for unit in holders:
            if unit not in units:
                self.release(unit, TURN)
        for unit in units:
            self.acquire(unit, TURN)

    def begin(self) -> None:
        """A micro-batch starts: what was recorded in the last one (or step) is the plan for this one."""
        self.pass_turn([])
        if self._recording:
            return
        if self._current:
            self._previous, self._current = self._current, []
        self._on_track = self._recording = True

    def drop(self, which: Callable[[object], bool]) -> None:
        """Release these tokens everywhere, and gathers that nobody came for."""
        ended = which(STEP if self._plans_step else TURN)
        if which(TURN):
            self._turn = []
        if ended:
            self._recording = False
        for unit in list(self._known.values()):
            for token in [token for token in unit.users if which(token)]:
                self.release(unit, token)
        if ended or not self._plans_step:
            self._cancel_ahead()

    def _note(self, unit: Unit, token: object, acquire: bool) -> None:
        if self.events is not None:
            self.events.append(TokenEvent(unit.name, token, acquire))

    def _gather(self, unit: Unit) -> None:
        position = len(self._current)
        if self._recording:
            self._current.append(unit)
        if self._recording and self._on_track and self._previous[position : position + 1] != [unit]:
            self._on_track = False
            self._cancel_ahead(keep=unit)
        self._issue(unit)
        if unit in self._ahead:
            self._ahead.remove(unit)
        if self._recording and self._on_track:
            self._look_ahead(position + 1)
        self._lane.join(unit.name)
        unit.weights.ready()

    def _issue(self, unit: Unit) -> None:
        if unit.weights.state is State.SHARDED:
            with self._lane.issue(unit.name):
                unit.weights.gather()

    def _look_ahead(self, position: int) -> None:
        for unit in self._previous[position : position + WINDOW]:
            if len(self._ahead) >= WINDOW:
                return
            if unit.weights.state is State.SHARDED:
                self._issue(unit)
                self._ahead.append(unit)
            elif unit not in self._ahead:
                return  # in use now: it will be released and gathered again

    def _cancel_ahead(self, keep: Unit | None = None) -> None:
        for unit in self._ahead:
            if unit is not keep and not unit.users:
                self._lane.join(unit.name)
                unit.weights.release()
        self._ahead = [unit for unit in self._ahead if unit is keep]


class Reductions:
    """The queue of units whose gradients are complete.

    closes  exact mode: what a "backward" gives, or a "part" of a pipeline in it, is closed for itself (exact.py)
    watch   shown every local gradient before it is taken (health.py)
    """

    watch: Callable[[Unit, int, torch.Tensor], None] | None = None

    def __init__(self, units: Sequence[Unit], lane: Lane, closes: str = "") -> None:
        self._closes = closes
        trainable = [unit for unit in units if unit.grads is not None]
        self._order = [u for u in reversed(trainable) if not u.deferred] + [u for u in trainable if u.deferred]
        self._lane = lane
        self._arrived: dict[Unit, set[int]] = {}
        self._next = 0
        self._in_flight: deque[Unit] = deque()
        self._completed: list[Unit] = []
        self._done: set[Unit] = set()  # of this backward
        self.adopted = False  # rank 0's order is in use
        self.due = False  # this backward ends in a reduction
        self._backwards = 0  # since the last reduction: the same on all ranks

    def begin(self) -> None:
        """A backward starts."""
        self._backwards += 1
        self.due = False
        self._next = 0
        self._arrived.clear()
        self._completed.clear()
        self._done.clear()

    def take(self, unit: Unit, index: int, grad: torch.Tensor) -> None:
        """Autograd has finished one parameter's gradient."""
        if self.watch is not None:
            self.watch(unit, index, grad)
        if self._closes and unit in self._done:
            raise ConfigError(
                f"exact=True: {unit.layout.slots[index].name} got a second gradient in one backward, after the first "
                "was summed (a block called twice in reentrant checkpoints): pass use_reentrant=False, or exact=False."
            )
        unit.gradients.take(index, grad)
        arrived = self._arrived.setdefault(unit, set())
        arrived.add(index)
        if len(arrived) == len(unit.weights.params) and unit not in self._completed:
            self._completed.append(unit)
            if self.due:
                self._drain()
            elif self._closes and not unit.deferred:
                self._close(unit)

    def _close(self, unit: Unit) -> None:
        self._done.add(unit)
        unit.gradients.close()

    def close(self, units: Sequence[Unit]) -> None:
        """A backward through these units is over, which ends in no reduction."""
        for unit in units:
            if unit not in self._done:
                self._close(unit)
            self._arrived.pop(unit, None)
        self._done.difference_update(units)
        self._completed = [unit for unit in self._completed if unit not in units]

    def _drain(self) -> None:
        while self._next < len(self._order):
            unit = self._order[self._next]
            if unit.deferred or unit not in self._completed:
                return
            self._next += 1
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._done.add(unit)
        while len(self._in_flight) >= WINDOW:
            self._finish_oldest()
        with self._lane.issue(unit.name):
            unit.gradients.reduce(single=self._backwards == 1)
        self._in_flight.append(unit)

    def _finish_oldest(self) -> None:
        unit = self._in_flight.popleft()
        self._lane.join(unit.name)
        unit.gradients.finish()

    def flush(self) -> None:
        """End of a backward: reduce what is left, in order; missing gradients count as zero."""
        if self.due:
            while self._next < len(self._order):
                self._reduce(self._order[self._next])
                self._next += 1
            for unit in self._order:  # gradients that arrived after their unit had been reduced
                if unit.gradients.state in WAITING:
                    self._reduce(unit)
            self._backwards = 0
        elif self._closes == "backward":
            self.close(self._order)
        while self._in_flight:
            self._finish_oldest()

    def sweep(self) -> None:
        """Take gradients that came without a hook."""
        for unit in self._order:
            for index, p in enumerate(unit.weights.params):
                if p.grad is not None:
                    grad, p.grad = p.grad, None
                    self.take(unit, index, grad)

    @property
    def pending(self) -> bool:
        """There are local gradients that have not been reduced."""
        return any(unit.gradients.state in WAITING for unit in self._order)

    def catch_up(self) -> None:
        """At the boundary: reduce gradients that no root forward announced."""
        if self.pending:
            self.due = True
            self.flush()
        for unit in self._order:
            unit.gradients.complete()

    def reset(self) -> None:
        """Forget the gradients of this step."""
        self._in_flight.clear()
        self.begin()
        self._backwards = 0
        for unit in self._order:
            unit.gradients.reset()

    def observed(self) -> list[int]:
        """The order in which units completed, as positions in the current order; then the rest."""
        seen = [unit for unit in self._completed if not unit.deferred]
        rest = [unit for unit in self._order if unit not in seen]
        return [self._order.index(unit) for unit in seen + rest]

    def adopt(self, positions: Sequence[int]) -> None:
        """Use the order `observed` on rank 0."""
        self._order = [self._order[i] for i in positions]
        self.adopted = True
