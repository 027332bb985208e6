"""A unit's gradients of this rank, as autograd gives them: in one buffer, until they are reduced.

    buffer  [sources, total]  kept, or borrowed for a backward and given back by its reduction
    views                     of parameters in it, in their shapes: those of the first source, then of the next one

Experts have gradients of several sources, the ranks of the ep axis, of which each has a row. Others have one row.

Held gradients. A backward's gradients of a unit are copied in together, one launch for all of them: `hold` keeps them
until the unit is complete. Large ones are not worth it, whose copies run longer than a launch takes: no unit holds more
than HELD bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.unit import GradientPlan
from zero3d.precision import torch_dtype
from zero3d.zero.gradient_memory import GradientMemory
from zero3d.zero.unit_parts import UnitParts, parameter_views

HELD = 1 << 24  # bytes of a unit's gradients that wait for others: of which a copy takes about 10 us on an accelerator


class LocalGradients:
    """Owns a unit's gradients from autograd to the end of their reduction.

    buffer    None while nothing has come, unless it is kept: its memory comes with the first gradient of a step
    filled    numbers of the parameters that have a gradient, in the buffer or held
    """

    def __init__(self, layout: UnitLayout, parts: UnitParts) -> None:
        assert parts.plan.gradients is not None
        self._layout = layout
        self._arena, self._wide = parts.arena, parts.wide
        self._memory = parts.gradient_memory
        self._plan = parts.plan.gradients
        self.elements, self.used = layout.total * parts.sources, layout.numel * parts.sources
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self.filled: set[int] = set()
        self._held: dict[int, Tensor] = {}
        self._held_bytes = 0
        self._adding: set[int] = set()  # of the held ones: to be added to an earlier gradient
        self._aside: Tensor | None = None
        self._kept: GradientMemory | None = None
        if self._plan.kept:
            self._keep(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self._plan.local)

    def _keep(self, dtype: torch.dtype) -> None:
        self._kept = self._memory(self.elements, self.used, dtype)
        self._use(self._kept.buffer)

    def _use(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.views = [view for row in self.rows(buffer) for view in parameter_views(row, self._layout)]

    def _borrow(self, dtype: torch.dtype) -> Tensor:
        return self._arena.borrow("bucket", self.elements, dtype)

    def rows(self, buffer: Tensor) -> list[Tensor]:
        """Return what each source has in a buffer."""
        return list(buffer.view(-1, self._layout.total))

    @property
    def is_narrow(self) -> bool:
        """Return whether the buffer has fewer bits than sums: a parameter's second gradient is not added there."""
        assert self.buffer is not None
        return self.buffer.dtype != self._wide

    @property
    def is_aside(self) -> bool:
        """Return whether gradients are taken into another buffer than the one that is kept."""
        return self._aside is not None

    @property
    def is_open(self) -> bool:
        """Return whether gradients can be taken."""
        return self.buffer is not None and (self._kept is None or self._kept.there)

    def open(self) -> None:
        """Borrow a buffer, or have memory for the one that is kept."""
        if self._kept is None:
            self._use(self._borrow(self._dtype))
        else:
            self._kept.fill()

    @property
    def memory(self) -> list[GradientMemory]:
        """Return the memory of the buffer, if it is kept between backwards."""
        return [] if self._kept is None else [self._kept]

    def step_aside(self) -> None:
        """Take gradients into a borrowed buffer until `close`, and leave the kept one as it is."""
        self._aside = self.buffer
        self._use(self._borrow(self._dtype))

    def hold(self, index: int, grad: Tensor) -> None:
        """Hold a parameter's gradient until it lands, alone or with others; those of a source follow another's."""
        if index in self._held:
            self.land()
        if index in self.filled:
            self._adding.add(index)
        self.filled.add(index)
        self._held[index] = grad.to_dense() if grad.is_sparse else grad
        self._held_bytes += self._held[index].untyped_storage().nbytes()
        if self._held_bytes > HELD:
            self.land()

    def land(self) -> None:
        """Copy the held gradients into the buffer, or add them where it has the parameter's already."""
        new = [index for index in self._held if index not in self._adding]
        if new:
            torch._foreach_copy_([self.views[index] for index in new], [self._held[index] for index in new])
        if self._adding:
            again = list(self._adding)
            torch._foreach_add_([self.views[index] for index in again], [self._held[index] for index in again])
        self.let_go()

    def let_go(self) -> None:
        """Forget the gradients that are held."""
        self._held.clear()
        self._adding.clear()
        self._held_bytes = 0

    def fill_up(self) -> None:
        """Land what is held, and let parameters without a gradient count as zero."""
        self.land()
        missing = [view for index, view in enumerate(self.views) if index not in self.filled]
        if missing:
            torch._foreach_zero_(missing)

    def widen(self, plan: GradientPlan) -> None:
        """Accumulate in the dtype of sums from here on: of a kept buffer, in all steps to come."""
        self.land()
        old, narrow, self._plan = self.buffer, self._kept, plan
        assert old is not None
        if narrow is None:
            self._use(self._borrow(self._wide).copy_(old))
            self._arena.give_back("bucket", old)
            return
        self._keep(self._wide)
        self.open()
        assert self.buffer is not None
        self.buffer.copy_(old)
        narrow.drop()

    def close(self) -> None:
        """Give a borrowed buffer back when its gradients are reduced, and go on with the kept one, if there is one."""
        if (not self._plan.kept or self._aside is not None) and self.buffer is not None:
            self._arena.give_back("bucket", self.buffer)
            self.buffer, self.views = None, []
        if self._aside is not None:
            self._use(self._aside)
            self._aside = None
