"""When units are gathered: tokens per unit, a recorded order, a bounded window ahead of it.

A unit is gathered when its users go from none to one and released when the last one leaves. The
order of one micro-batch is recorded and, in the next, up to AHEAD gathers run ahead of it; in a
pipeline that of a whole step, whose micro-batches follow each other in a fixed but uneven order.
Forwards without grad have a record of their own. Before there is one, the layout's order stands for it, in a forward;
the first backward gathers nothing ahead.

A forward gathers nothing ahead for the backward behind it: logits and what the loss makes of them would be there
besides, which is the fullest instant of many models. The backward does so itself, as it comes to its first unit.

What is gathered ahead follows from the record and from the gathers so far: it is the same on all ranks as
long as they use the same units in the same order, which stage 3 requires anyway. A unit that the plan did
not expect is looked for behind the place where the micro-batch was, and the plan goes on from there.

The all-gather itself is `Weights.gather` (weights.py), and hooks.py says who uses a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from zero3d.distributed.unit_order import AHEAD
from zero3d.errors import ConfigError
from zero3d.zero.clocks import Clocks
from zero3d.zero.step_parts import GATHERS, OFFLOAD
from zero3d.zero.streams import SideStream
from zero3d.zero.tokens import ROOT_TURN, TURN, TokenEvent
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State

CPU = torch.device("cpu")
OPENED = "full_params"  # inside full_params(): parameters are whole, and may be written
EXPORT = "export"  # one unit, to be read by others than the model
STREAM = "stream"  # one unit, to be streamed: an export between two of its buckets leaves it gathered
STEP = "step"  # release="every_step": from the first use to the end of the step
EXACT = (OPENED, EXPORT, STREAM)  # tokens of who needs the weights themselves, however they travel for the model


def refuse_export(unit: Unit) -> None:
    """Refuse to gather a unit inside of torch.export, which has put tensors without values in the model's place."""
    if torch.compiler.is_exporting():
        raise ConfigError(
            f"torch.export reached the released weights of unit {unit.name!r}, which it cannot gather: export inside "
            "of `with engine.full_params():`, or after engine.close()."
        )


def goes_to_first(unit: Unit) -> bool:
    """Return whether a unit is gathered to the first of its ranks alone where only that one needs it.

    On gloo: NCCL's all-gather is no slower, and between hosts faster: every rank's network card has a part of it.
    """
    return unit.weights.sharded and unit.comm.size > 1 and not unit.comm.enqueues


class Planned(NamedTuple):
    """Says which units come next: `near`, to be gathered ahead, and `far`, whose shards may have a long way."""

    near: Sequence[Unit]
    far: Sequence[Unit]


NOTHING = Planned((), ())


class Recorded:
    """Gathers one after another.

    turns  the places of those with which a backward began
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.turns: set[int] = set()
        self._in_backward = False

    def add(self, unit: Unit, in_backward: bool) -> None:
        """Record a gather."""
        if in_backward and not self._in_backward:
            self.turns.add(len(self.units))
        self._in_backward = in_backward
        self.units.append(unit)

    def next(self, place: int) -> Planned:
        """Return those from a place on, the near ones as far as the next backward after it begins."""
        near = next((at for at in range(place + 1, place + AHEAD) if at in self.turns), place + AHEAD)
        return Planned(self.units[place:near], self.units[place + AHEAD : place + AHEAD + 1])


class Order:
    """Owns the order of gathers from one micro-batch, or forward without grad, to the next."""

    def __init__(self) -> None:
        self._plan = Recorded()
        self._record = Recorded()
        self._place = 0

    def expect(self, units: Sequence[Unit]) -> None:
        """Plan these units, behind those that are planned, before anything was recorded."""
        self._plan.units += units

    def begin(self) -> None:
        """Begin anew: what was recorded is the plan."""
        if self._record.units:
            self._plan, self._record = self._record, Recorded()
        self._place = 0

    def follow(self, unit: Unit, in_backward: bool) -> Planned:
        """Record a gather, and return those that are planned next; none behind one that was not planned."""
        self._record.add(unit, in_backward)
        if unit not in self._plan.units[self._place :]:
            return NOTHING
        self._place = self._plan.units.index(unit, self._place) + 1
        planned = self._plan.next(self._place)
        return planned._replace(near=()) if self._place in self._plan.turns else planned

    def turn(self) -> Planned:
        """Return the first gathers of a backward that begins, where one was planned to begin here."""
        return self._plan.next(self._place) if self._place in self._plan.turns else NOTHING


class Gathers:
    """Owns who needs which unit, and what to gather ahead. Persistent units (stages 0-2) cost nothing here.

    training    the order of micro-batches, or of steps
    every_step  what is gathered stays so until the step is over
    """

    def __init__(
        self, side: SideStream, every_step: bool = False, plans_step: bool = False, clocks: Clocks | None = None
    ) -> None:
        self._side, self._clocks = side, clocks or Clocks(CPU, on=False)
        self.every_step = every_step
        self._plans_step = plans_step  # a recording is of a whole step, not of one micro-batch
        self.training = Order()
        self._order: Order | None = None  # followed now; that of training from a forward to the end of its backward
        self._interrupted: Order | None = None
        self._ahead: list[Unit] = []
        self._turn: list[Unit] = []
        self._known: dict[str, Unit] = {}
        self._on_first: set[Unit] = set()  # which the first of its ranks has whole, and the others have not
        self.events: list[TokenEvent] | None = None

    def acquire(self, unit: Unit, token: object) -> None:
        """Gather a unit for `token`, which needs its full parameters from now on."""
        if not unit.weights.sharded:
            self.ready(unit)
            return
        self._note(unit, token, True)
        first = not unit.users
        unit.users.add(token)
        if not first:
            if unit in self._on_first:
                self._on_first.remove(unit)
                with self._side.issue(unit.name):
                    unit.weights.share_first()
                self._side.join(unit.name)
            unit.weights.ready()
        else:
            self._known[unit.name] = unit
            try:
                self._gather(unit, token in EXACT)
            except BaseException:
                unit.users.discard(token)  # the next user gathers it
                raise
            if self.every_step:
                self._note(unit, STEP, True)
                unit.users.add(STEP)
        if token in EXACT:
            unit.weights.show(exactly=True)

    def ready(self, unit: Unit) -> None:
        """Wait for new weights of a persistent unit, if they are on their way."""
        if unit.weights.pending:
            with self._clocks.of(GATHERS):
                unit.weights.ready()
        else:
            unit.weights.ready()

    def acquire_on_first(self, unit: Unit, token: object) -> None:
        """Gather a unit to be exported or streamed: on gloo to its first rank alone, unless all have it anyway."""
        if unit.users or not goes_to_first(unit) or unit.weights.state is not State.SHARDED:
            self.acquire(unit, token)
            return
        self._note(unit, token, True)
        unit.weights.flush()
        with self._side.issue(unit.name):
            unit.weights.gather_to_first()
        self._side.join(unit.name)
        unit.weights.ready()
        unit.users.add(token)
        self._known[unit.name] = unit
        self._on_first.add(unit)

    def release(self, unit: Unit, token: object) -> None:
        """Take `token` back; the last one frees the full parameters. Repeating it is harmless."""
        if not unit.weights.sharded:
            return
        self._note(unit, token, False)
        if token in unit.users:
            unit.users.discard(token)
            if not unit.users:
                self._on_first.discard(unit)
                self._side.note("free", unit.name)
                unit.weights.release()
                return
            if token in EXACT and unit.users.isdisjoint(EXACT):
                unit.weights.show(exactly=False)
            if unit.users <= {TURN, ROOT_TURN, STEP}:
                unit.weights.keep()

    def pass_turn(self, units: Sequence[Unit]) -> None:
        """Keep the units used last in a forward gathered until others are used."""
        holders, self._turn = self._turn, list(units)
        for unit in holders:
            if unit not in units:
                self.release(unit, TURN)
        for unit in units:
            self.acquire(unit, TURN)

    def begin(self) -> None:
        """Begin a micro-batch: what was recorded in the last one (or step) is the plan for this one."""
        self.pass_turn([])
        if self._order is None:
            self._order = self.training
            self._order.begin()

    def begin_backward(self) -> None:
        """Begin a backward, where it comes to its first unit; repeating it is harmless."""
        if self._order is not None:
            self._look_ahead(self._order.turn())

    def begin_forward(self, order: Order) -> None:
        """Begin a forward without grad, which follows an order of its own."""
        self._interrupted, self._order = self._order, order
        order.begin()

    def end_forward(self) -> None:
        """End a forward without grad, and cancel gathers whose use did not come."""
        self._order, self._interrupted = self._interrupted, None
        self._cancel_ahead()

    def drop(self, which: Callable[[object], bool]) -> None:
        """Take these tokens back everywhere, and cancel gathers whose use did not come."""
        ended = which(STEP if self._plans_step else TURN)
        if which(TURN):
            self._turn = []
        if ended:
            self._order = None
        for unit in list(self._known.values()):
            for token in [token for token in unit.users if which(token)]:
                self.release(unit, token)
        if ended or not self._plans_step:
            self._cancel_ahead()

    def _note(self, unit: Unit, token: object, acquire: bool) -> None:
        if self.events is not None:
            self.events.append(TokenEvent(unit.name, token, acquire))

    def _gather(self, unit: Unit, exactly: bool) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        planned = NOTHING if self._order is None else self._order.follow(unit, in_backward)
        self._issue(unit, exactly)
        if unit in self._ahead:
            self._ahead.remove(unit)
        self._look_ahead(planned)
        with self._clocks.of(GATHERS):
            self._side.join(unit.name)
            unit.weights.ready()

    def _issue(self, unit: Unit, exactly: bool = False) -> None:
        if unit.weights.state is State.SHARDED:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise ConfigError(
                    f"torch.func or vmap reached the released weights of unit {unit.name!r}, which cannot be gathered "
                    "inside of its transforms: put `with engine.full_params():` around the forward and its backward, "
                    "or pass stage=2."
                )
            refuse_export(unit)
            unit.weights.flush()
            far = self._clocks.of(OFFLOAD) if unit.weights.from_records else nullcontext()
            with far, self._side.issue(unit.name):
                unit.weights.gather(exactly)

    def _look_ahead(self, planned: Planned) -> None:
        for unit in planned.far:
            if unit.weights.state is State.SHARDED:
                unit.weights.place.ahead()
        for unit in planned.near:
            if len(self._ahead) >= AHEAD:
                return
            if unit.weights.state is State.SHARDED and unit not in self._on_first:
                self._issue(unit)
                self._ahead.append(unit)
            elif unit not in self._ahead:
                return  # in use now: it will be released and gathered again

    def _cancel_ahead(self) -> None:
        for unit in self._ahead:
            if not unit.users:
                self._side.join(unit.name)
                unit.weights.release()
        self._ahead = []
