"""A unit's gradients: taken from autograd, reduced over the dp axis, kept as a shard of their sum.

    autograd -> LocalGradients [sources, total] -> reduction -> GradientShard [total/N] -> the step
                local dtype, of this rank                       reduced dtype, of all ranks

One rank alone. Where a unit is reduced after every micro-batch and no other rank has gradients of it, there is nothing
to sum: they add up in the shard, as they come, and have no bucket (`UnitPlan.adds_up`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.unit import GradientPlan, UnitPlan
from zero3d.distributed.axis import Pending
from zero3d.zero.gradient_memory import GradientMemory
from zero3d.zero.gradient_shards import GradientShard, RankOrderShard
from zero3d.zero.local_gradients import LocalGradients
from zero3d.zero.streams import ToHost
from zero3d.zero.unit_parts import State, UnitParts

MakeShard = Callable[[str, UnitLayout, UnitParts, LocalGradients], GradientShard]


class Gradients:
    """Owns a unit's gradients from autograd to the reduced shard: local gradients first, then their reduced sum.

    local   gradients from autograd on this rank that no reduction has taken yet
    reduced the results of reductions, which the step reads
    """

    def __init__(self, name: str, layout: UnitLayout, parts: UnitParts, make: MakeShard = RankOrderShard) -> None:
        self.local = LocalGradients(layout, parts)
        self.reduced = make(name, layout, parts, self.local)
        self.state = State.EMPTY
        self._lent = False
        self._drain()

    @property
    def unit_plan(self) -> UnitPlan:
        """The unit's plan now: a second backward of a step, or more micro-batches, may have changed it."""
        return self.reduced.unit_plan

    @property
    def plan(self) -> GradientPlan:
        """How its gradients are kept and travel now."""
        return self.reduced.plan

    # --- a backward -----------------------------------------------------------------------------

    def hold(self, index: int, grad: Tensor) -> None:
        """Hold a parameter's gradient until it lands, alone or with others; those of a source follow another's."""
        self._open()
        if index in self.local.filled and self.local.is_narrow:
            self._widen()
        self.local.hold(index, grad)

    def _open(self) -> None:
        """Make room for local gradients: asked for each of them, so that nothing is called for nothing."""
        if self.state is State.REDUCING:
            self.finish()
        self.reduced.make_way(self.state is State.REDUCED)
        if not self.local.is_open:
            self.local.open()
        self.state = State.FILLING

    def _widen(self) -> None:
        """Accumulate in the reduced dtype from the second contribution on."""
        plan = self.unit_plan.widened
        assert plan.gradients is not None
        self.local.widen(plan.gradients)
        if plan != self.unit_plan:
            self.reduced.follow(plan)

    def land(self) -> None:
        """Copy the gradients that are held into the buffer of all."""
        self.local.land()

    def fill_up(self) -> None:
        """Let parameters without a gradient count as zero, before `reduce`."""
        self._open()
        self.local.fill_up()

    def close(self) -> None:
        """Do nothing for a backward that ends in no reduction: its gradients add up."""

    # --- its reduction --------------------------------------------------------------------------

    def reduce(self, single: bool) -> None:
        """Start summing local gradients over the dp axis into what this rank owns.

        full  [sources, Psi]  local dtype  consumed
        shard [Psi/N]  reduced dtype   accumulated
        single: they are one backward's, so that the narrow dtype they may travel in rounds no sum of
        several. Moves (N-1)/N Psi elements per rank (reduce-scatter, ZeRO section 7).
        """
        self.reduced.reduce(single)
        self.state = State.REDUCING

    def add_up(self) -> None:
        """Wait for a reduction under way on the current stream, and add up there what has come."""
        self.reduced.add_up()

    def finish(self) -> None:
        """Complete a reduction under way."""
        if self.state is not State.REDUCING:
            return
        self.reduced.finish()
        if not self.unit_plan.adds_up or self.reduced.is_late:
            self.local.filled.clear()
        self.local.close()
        self.state = State.REDUCED

    def gather(self) -> None:
        """Start giving every rank's sums to all where each updates all (stage 0): the second half of an all-reduce.

        A unit with late gradients since the end of its sum has no use for this gather, but takes its turn: peers may
        gather that sum now, and get their late gradients afterwards.
        """
        self.reduced.gather(turn_only=self.state is State.FILLING)

    def wait(self) -> None:
        """Wait for what is gathered."""
        self.reduced.wait()

    @property
    def differs_on_copies(self) -> bool:
        """Return whether a sum over the ranks that have copies of the shard is still to come."""
        return self.reduced.differs_on_copies

    def sum_copies(self, step: int) -> Pending:
        """Start summing the shard of a step, by its number, over the ranks that have a copy of it; wait for the result.

        Gradients that came after that are summed so once more, and added. Moves 2 (R-1)/R Psi/N elements per rank, over
        R copies, or what a narrow form of terms takes.
        """
        self._provide()
        return self.reduced.sum_copies(step)

    def complete(self) -> None:
        """Complete the step's sum: nothing more comes."""
        self.finish()
        self._provide()
        self.reduced.complete()

    def _provide(self) -> None:
        """Have zeros as the sum of a unit that is trained since the step's last backward."""
        if not self.is_there:
            self.reduced.provide()
            self.reduced.shard.zero_()

    @property
    def is_there(self) -> bool:
        """Return whether reduced gradients have memory, and can be read."""
        return self.reduced.is_there

    def reset(self) -> None:
        """Forget this step's gradients, and give back their memory unless a deferred update reads it."""
        self.local.let_go()
        self.finish()
        self.local.close()
        self.local.filled.clear()
        self.reduced.reset()
        self.state = State.EMPTY
        if not self._lent:
            self._drain()

    def lend(self) -> Tensor:
        """Return `owned`, which stays allocated until `take_back`: for an update made after the step."""
        self._lent = True
        return self.owned

    def take_back(self) -> None:
        """Give back the memory of what was lent: its update is over, and nothing has come since."""
        self._lent = False
        self._drain()

    def _drain(self) -> None:
        self.reduced.drain()
        for each in self.local.memory:
            each.drain()

    # --- the step -------------------------------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """This rank's reduced gradients."""
        return self.reduced.shard

    @property
    def owned(self) -> Tensor:
        """Reduced gradients of the elements that this rank updates: its shard, or at stage 0 the whole unit's."""
        return self.reduced.owned

    @property
    def to_host(self) -> ToHost | None:
        """The copier of the shard to the host, where it is kept there."""
        return self.reduced.to_host

    @property
    def memory(self) -> list[GradientMemory]:
        """Memory of gradients that comes and goes with a step."""
        return [*self.local.memory, *self.reduced.memory]

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of gradients, also without memory."""
        local = [] if self.local.buffer is None else [self.local.buffer]
        return [*local, *([each.buffer for each in self.reduced.memory] or [self.shard])]
