"""A unit: the parameters gathered, released and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zero3d.zero.gradients import Gradients
from zero3d.zero.layout import UnitLayout
from zero3d.zero.policy import Setting
from zero3d.zero.weights import Weights


class Unit:
    """Parameters handled together: one dtype, all trainable or all frozen.

    fill      writes this rank's slice [total/N] of the first weights
    deferred  its gradients may come in several parts (root unit, tied parameters): reduced last
    users     tokens of whoever needs the full parameters now
    """

    def __init__(
        self, name: str, params: Mapping[str, nn.Parameter], layout: UnitLayout, dtype: torch.dtype, setting: Setting,
        fill: Callable[[Tensor], None], deferred: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.layout, self.dtype, self.deferred = name, layout, dtype, deferred
        self.users: set[object] = set()
        self.weights = Weights(name, [params[slot.name] for slot in layout.slots], layout, dtype, setting, fill)
        owner = setting.gradients or Gradients
        self.grads = owner(name, layout, dtype, setting) if self.weights.trainable else None

    @property
    def gradients(self) -> Gradients:
        """The gradients of a trainable unit."""
        assert self.grads is not None, f"{self.name} is frozen"
        return self.grads
