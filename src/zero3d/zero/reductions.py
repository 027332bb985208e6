"""When units are reduced: one order on all ranks, a bounded window.

A unit is complete when no more gradients of it will come (arrivals.py): a missing one counts as zero. A rank with such
a hole begins a reduction before the same gather as a rank without. If it began at the end of backward, its peers would
wait for the reduction before that gather, and it for them in the gather.

Complete units are reduced in one order, the same on all ranks without communication: in the first backward
that of a forward (blueprint.units.in_order_of_use) reversed, afterwards rank 0's recorded one. A complete unit
waits for those before it. At most IN_FLIGHT are in flight.

Shards with copies on other ranks are summed over these in that order, too, at most IN_FLIGHT at a time. Such a sum
begins when the shard's reduction in the step's last backward is over, or at the boundary if no backward was announced
as the last. The last ones are waited for at the end of that backward. Gradients that come behind it are reduced and
summed by themselves, and added (gradient_shards.py, Note 3).

At stage 0 a sum is gathered when it has been waited for: when the window is full, or at the end. Sums end in the order
in which they began, even if more gradients of a unit come while its sum is under way. They may come at another moment
on every rank, and all ranks gather in one order.

Where gathers and reductions share a process group (`shared`), their places among each other are the same on all ranks,
whenever gradients come. At stage 3 a unit is reduced when backward has left its modules (arrivals.py). At stage 0 a sum
is gathered in its turn even where a late gradient has made the gather useless.

On an accelerator the ranks' terms are added up on the side stream, too: one unit's while the next one's are on their
way, so that neither compute nor the messages wait for the sum.

The reduce-scatter itself is `Gradients.reduce` (gradients.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from typing import Protocol

import torch

from zero3d.distributed.axis import Pending
from zero3d.distributed.unit_order import IN_FLIGHT
from zero3d.errors import ConfigError
from zero3d.zero.arrivals import Arrivals
from zero3d.zero.clocks import Clocks
from zero3d.zero.step_parts import REDUCTIONS
from zero3d.zero.streams import SideStream
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State

WAITING = (State.FILLING, State.SUMMED)  # local gradients that have not been reduced


class Closes(Enum):
    """Says what completes a unit's local gradients as one summand of an exact sum (exact/)."""

    NOTHING = auto()
    BACKWARD = auto()
    CHUNK = auto()  # a micro-batch's backward through a model chunk of a pipeline


class Updates(Protocol):
    """The updates that are left of a step."""

    def finish(self) -> None:
        """Make them: the step's gradients are no longer needed then."""

    def prefetch(self) -> None:
        """Begin to bring what the next step needs first."""


class Reductions:
    """Owns the queue of units whose gradients are complete.

    arrivals  what has come in the backward under way
    due       the backward under way ends in a reduction
    final     it is the last one of its step, as far as is known
    watch     is shown every local gradient before it is taken (health.py)
    heard     of which parameters gradients have come, by unit and number, while somebody asks
    updates   of the last step: over before gradients of the next come, begun to be prepared before its backward ends
    gathered  units whose sums all ranks need, and which are terms of no further sum
    shared    gathers have the process group of reductions
    applied   how many steps have been applied
    """

    watch: Callable[[Unit, int, torch.Tensor], None] | None = None
    heard: set[tuple[Unit, int]] | None = None
    updates: Updates | None = None
    applied: Callable[[], int] | None = None

    def __init__(
        self,
        units: Sequence[Unit],
        side: SideStream,
        across: SideStream,
        closes: Closes = Closes.NOTHING,
        gathered: Collection[Unit] = (),
        shared: bool = False,
        clocks: Clocks | None = None,
    ) -> None:
        """Begin without gradients. side: where reductions run; across: where sums over copies do."""
        self._closes, self._shared = closes, shared
        self._clocks = clocks or Clocks(torch.device("cpu"), on=False)
        self._side, self._across = side, across
        self.extend(units, gathered)
        self.arrivals = Arrivals()
        self._next = 0
        self._in_flight: deque[Unit] = deque()
        self._over_copies: deque[tuple[Unit, Pending]] = deque()  # sums under way
        self._completed: list[Unit] = []
        self._done: set[Unit] = set()  # of this backward
        self.due = self.final = False
        self._backwards = 0  # since the last reduction: the same on all ranks

    def extend(self, units: Sequence[Unit], gathered: Collection[Unit]) -> None:
        """Reduce the trained ones of these units from now on, at first in the reverse of this order."""
        trainable = [unit for unit in units if unit.grads is not None]
        self._order = [u for u in reversed(trainable) if not u.deferred] + [u for u in trainable if u.deferred]
        self._gathered = gathered
        self.adopted = False  # rank 0's order is in use

    def begin(self, task: int = -1) -> None:
        """Begin a backward, by autograd's number of it."""
        self._finish_sums(0)  # of one that died: who failed must not wait for what its peers have not begun
        self._forget(task)

    def _forget(self, task: int = -1) -> None:
        self._backwards += 1
        self.due = self.final = False
        self._next = 0
        self.arrivals.begin(task)
        self._completed.clear()
        self._done.clear()

    def receive(self, unit: Unit, index: int, grad: torch.Tensor | None) -> None:
        """Receive one parameter's gradient, which autograd has finished; None where there is none.

        index  of the parameter; those of a unit's second source follow those of its first
        """
        if self.updates is not None:
            self.updates.finish()
        if self.watch is not None and grad is not None:
            self.watch(unit, index, grad)
        if self._closes is not Closes.NOTHING and unit in self._done and grad is not None:
            raise ConfigError(
                f"exact=True: {unit.slot_of(index).name} got a second gradient in one backward, after the first "
                "was summed (a block called twice in reentrant checkpoints): pass use_reentrant=False, or exact=False."
            )
        if grad is not None:
            if self.heard is not None:
                self.heard.add((unit, index))
            if unit in self._in_flight:
                self._finish(unit)
            unit.gradients.hold(index, grad)
        ends_only = self.arrivals.at_module_ends
        if self.arrivals.count(unit, index) and self.due and not ends_only and self._next_is_not(unit):
            self._drain()
        if self.due and ends_only and self.arrivals.have_come(unit):
            self._make_room()  # before backward gathers the next unit, as where its reduction began now
        self._complete(unit)

    def _next_is_not(self, unit: Unit) -> bool:
        return self._next < len(self._order) and self._order[self._next] is not unit

    def leave(self, unit: Unit, call: int) -> None:
        """Hear that the backward under way has left a call of a module of the unit, perhaps not the last one."""
        self.arrivals.leave(unit, call)
        self._complete(unit)
        self.look()

    def look(self) -> None:
        """Reduce what is next if nothing of it is still to come, though nobody has told so: backward is elsewhere."""
        if self.due and not self.arrivals.at_module_ends:
            self._drain()

    def _complete(self, unit: Unit) -> None:
        """Reduce a unit when it is its turn, if it has all its gradients."""
        if unit in self._completed or not self.arrivals.has_all(unit):
            return
        self._completed.append(unit)
        unit.gradients.land()
        if self.due:
            self._drain()
        elif self._closes is not Closes.NOTHING and not unit.deferred:
            self._close(unit)

    def _close(self, unit: Unit) -> None:
        self._done.add(unit)
        unit.gradients.close()

    def close(self, units: Sequence[Unit]) -> None:
        """End a backward through these units without a reduction: their gradients are a summand."""
        for unit in units:
            if unit not in self._done:
                self._close(unit)
            self.arrivals.forget(unit)
        self._done.difference_update(units)
        self._completed = [unit for unit in self._completed if unit not in units]

    def _drain(self) -> None:
        while self._next < len(self._order):
            unit = self._order[self._next]
            if unit.deferred:
                return
            if unit not in self._completed and unit.trained:  # of frozen ones nothing comes
                if not self.arrivals.ends_elsewhere(unit):
                    return
                self._completed.append(unit)
                unit.gradients.land()
            self._next += 1
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._done.add(unit)
        if self.updates is not None:
            self.updates.finish()  # no gradient came that would have asked for it
            self.updates.prefetch()
        self._make_room()
        unit.gradients.fill_up()
        with self._side.issue(unit.name, *(other.name for other in self._in_flight)):
            unit.gradients.reduce(single=self._backwards == 1)
            self._add_up(self._in_flight)
        self._in_flight.append(unit)

    def _add_up(self, units: Iterable[Unit]) -> None:
        """Add up, on the side stream, what has come of reductions under way."""
        for unit in units:
            if self._side.beside_compute and unit.comm.enqueues:
                unit.gradients.add_up()

    def _make_room(self) -> None:
        while len(self._in_flight) >= IN_FLIGHT:
            self._finish_oldest()

    def _finish(self, unit: Unit) -> None:
        """Finish the sums up to a unit's, which is under way; in a shared group they are gathered in their turns."""
        while unit in self._in_flight and not (self._shared and self._gathered):
            self._finish_oldest()
        for place in range(self._in_flight.index(unit) + 1 if unit in self._in_flight else 0):
            with self._clocks.of(REDUCTIONS):
                self._side.join(self._in_flight[place].name)
                self._in_flight[place].gradients.finish()

    def _finish_oldest(self) -> None:
        unit = self._in_flight.popleft()
        if not self._in_flight and self._side.beside_compute:
            with self._side.issue(unit.name):
                self._add_up([unit])
        with self._clocks.of(REDUCTIONS):
            self._side.join(unit.name)
            unit.gradients.finish()
        if unit in self._gathered:
            with self._side.issue(unit.name):
                unit.gradients.gather()
        if self.final:
            self._sum_copies(unit)

    def end_backward(self) -> None:
        """End a backward: reduce what is left, in order; missing gradients count as zero."""
        if self.due:
            while self._next < len(self._order):
                self._reduce(self._order[self._next])
                self._next += 1
            for unit in self._order:  # gradients that arrived after their unit had been reduced
                if unit.gradients.state in WAITING:
                    self._reduce(unit)
            self._backwards = 0
        elif self._closes is Closes.BACKWARD:
            self.close(self._order)
        for unit in self._order:
            unit.gradients.land()
        while self._in_flight:
            self._finish_oldest()
        self._finish_sums(0)
        with self._clocks.of(REDUCTIONS):
            for unit in self._gathered:  # an engine may be dropped between its backward and its step
                self._side.join(unit.name)
                unit.gradients.wait()

    def sweep(self) -> None:
        """Take gradients that came without a hook."""
        for unit in self._order:
            for index, p in enumerate(unit.weights.params):
                if p.grad is not None:
                    grad, p.grad = p.grad, None
                    self.receive(unit, index, grad)

    @property
    def pending(self) -> bool:
        """Whether there are local gradients that have not been reduced."""
        return any(unit.gradients.state in WAITING for unit in self._order)

    def catch_up(self) -> None:
        """Reduce, at the boundary, gradients that no root forward announced."""
        if self.updates is not None:
            self.updates.finish()  # no gradient has come since: others shall learn that this rank's last step is over
        if self.pending:
            self.due = self.final = True
            self.end_backward()
        for unit in self._order:
            self._sum_copies(unit)
        self._finish_sums(0)
        for unit in self._order:
            unit.gradients.complete()

    def _sum_copies(self, unit: Unit) -> None:
        """Start summing a unit's shard over the ranks that have copies of it, unless it is that sum."""
        if unit.gradients.differs_on_copies:
            self._finish_sums(IN_FLIGHT - 1)
            with self._across.issue(unit.name):
                summed = unit.gradients.sum_copies(0 if self.applied is None else self.applied())
            self._over_copies.append((unit, summed))

    def _finish_sums(self, left: int) -> None:
        """Wait for the oldest sums over copies until so many are left."""
        while len(self._over_copies) > left:
            unit, summed = self._over_copies.popleft()
            with self._clocks.of(REDUCTIONS):
                with self._across.issue(unit.name):
                    summed.wait()
                self._across.join(unit.name)
            if unit.gradients.state is State.EMPTY:  # of a step that died
                unit.gradients.take_back()

    def reset(self) -> None:
        """Forget the gradients of this step, whose memory goes where nothing is under way any more.

        After a backward that died, compute has not waited for the side streams yet. A sum over copies, which nobody
        waits for here, has its memory until the next backward begins.
        """
        if self._in_flight:
            for unit in self._order:
                self._side.join(unit.name)
        self._in_flight.clear()
        for unit, _ in self._over_copies:
            unit.gradients.lend()
        self._forget()
        self.arrivals.reset()
        self._backwards = 0
        for unit in self._order:
            unit.gradients.reset()

    def observed(self) -> list[int]:
        """Return the order in which units completed, as positions in the current order; then the rest."""
        seen = [unit for unit in self._completed if not unit.deferred]
        rest = [unit for unit in self._order if unit not in seen]
        return [self._order.index(unit) for unit in seen + rest]

    def adopt(self, positions: Sequence[int]) -> None:
        """Use the order `observed` on rank 0."""
        self._order = [self._order[i] for i in positions]
        self.adopted = True
