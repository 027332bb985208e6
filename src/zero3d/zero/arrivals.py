"""Arrivals of a unit's gradients in the backward under way, and whether more are to come.

A parameter may get no gradient, on one rank alone: an expert without tokens, a branch. Autograd knows which gradients
the backward under way will still accumulate, so a unit has all of them when nothing is still to come. That is asked

    when backward leaves a module of the unit         stage 3
    when it comes to another unit, or leaves one      of units of which something has come, or which are `unheard`

A reentrant checkpoint runs a backward of its own, and autograd does not know then which gradients follow it. Inside,
only the unit whose module was left is judged.

Gathers and reductions may share a process group (zero.communicators: 1). All ranks then reduce a unit at the same place
among gathers, whatever gradients came: when backward has left all calls of its modules. The ranks' gathers make that
place alike. A unit without such an end (`unheard`, `unclear`) is reduced at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from torch import Tensor
from torch._C import _current_graph_task_id as current_backward, _will_engine_execute_node as will_execute
from torch.autograd.graph import get_gradient_edge

from zero3d.zero.released_parameters import untold
from zero3d.zero.unit import Unit


class Reached(Enum):
    """Says what the backward under way does with a leaf's gradient."""

    NOT = auto()
    ACCUMULATED = auto()
    ASKED_FOR = auto()

    @classmethod
    def of(cls, leaf: Tensor) -> Reached:
        """Return what happens to a leaf's gradient."""
        try:
            executed = will_execute(get_gradient_edge(leaf).node)
        except RuntimeError:  # torch.autograd.grad returns it
            return cls.ASKED_FOR
        return cls.ACCUMULATED if executed else cls.NOT


class Arrivals:
    """Counts each unit's gradients in one backward.

    unheard  units of stage 3 whose modules' ends go unnoticed, since no input of these modules has a gradient
    unclear  units that backward may read again, or leave at another place on another rank: their modules have several
             inputs, all leaves, and one of them may get no gradient
    at_module_ends  a unit is complete when backward has left its modules, and not before
    """

    at_module_ends = False

    def __init__(self) -> None:
        self.unheard: set[Unit] = set()
        self.unclear: set[Unit] = set()
        self._calls: dict[Unit, set[int]] = {}  # of forwards, of whose ends backward will tell
        self._over: dict[Unit, set[int]] = {}  # of these: left by backwards before this one
        self._arrived: dict[Unit, set[int]] = {}
        self._expected: dict[Unit, int] = {}
        self._left: dict[Unit, set[int]] = {}  # calls of its modules
        self._task = -1

    def begin(self, task: int) -> None:
        """Begin a backward, by autograd's number of it."""
        self._task = task
        self._arrived.clear()
        self._expected.clear()
        for unit, calls in self._left.items():
            self._over.setdefault(unit, set()).update(calls)
        self._left.clear()

    def reset(self) -> None:
        """Forget calls whose backward will not come."""
        self._calls.clear()
        self._over.clear()
        self._left.clear()

    def forget(self, unit: Unit) -> None:
        """Begin anew with one unit."""
        self._arrived.pop(unit, None)
        self._over.setdefault(unit, set()).update(self._left.pop(unit, set()))

    def count(self, unit: Unit, index: int) -> bool:
        """Count a gradient, by the number of its parameter, or that there is none; return whether it is the first."""
        arrived = self._arrived.setdefault(unit, set())
        arrived.add(index)
        if unit not in self._expected:
            self._expected[unit] = unit.trained * unit.sources
        return len(arrived) == 1

    def call(self, unit: Unit, call: int) -> None:
        """Hear that a forward calls a module of the unit, and that backward will tell when it has left this call."""
        calls = self._calls.setdefault(unit, set())
        calls -= self._over.pop(unit, set())
        calls.add(call)

    def leave(self, unit: Unit, call: int) -> None:
        """Hear that backward has left a call of a module of the unit, perhaps not the last one."""
        self._left.setdefault(unit, set()).add(call)

    def _has_left(self, unit: Unit) -> bool:
        """Return whether backward has left all calls that no backward had left before; all, if it goes there again."""
        calls = self._calls.get(unit, set())
        return unit in self._left and (calls - self._over.get(unit, set()) or calls) <= self._left[unit]

    def have_come(self, unit: Unit) -> bool:
        """Return whether every gradient of a unit has come."""
        return 0 < self._expected.get(unit, 0) <= len(self._arrived.get(unit, ()))

    def has_all(self, unit: Unit) -> bool:
        """Return whether all gradients of a unit have come, or backward has left it and none is still to come."""
        if self.at_module_ends:
            return self._has_left(unit) and unit not in self.unheard and unit not in self.unclear
        return self.have_come(unit) or (unit in self._left and not self._is_to_come(unit))

    def ends_elsewhere(self, unit: Unit) -> bool:
        """Return whether a unit without a module's end is complete: autograd expects no more of its gradients."""
        begun = not self.at_module_ends and (unit in self._arrived or unit in self.unheard)
        return begun and self._task == current_backward() and not self._is_to_come(unit)

    def _is_to_come(self, unit: Unit) -> bool:
        if unit.sources > 1:  # its experts' own modules say of every source what there is
            return False
        return self.to_come(unit, set(range(len(unit.weights.params))) - self._arrived.get(unit, set()))

    def to_come(self, unit: Unit, indices: Collection[int]) -> bool:
        """Return whether the backward under way will accumulate one of these parameters' gradients."""
        params = [unit.weights.params[index] for index in indices]
        with untold():  # most are released
            return any(p.requires_grad and Reached.of(p) is Reached.ACCUMULATED for p in params)
