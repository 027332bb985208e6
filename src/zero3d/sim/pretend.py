"""What stands in for ranks and weights where a model runs without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Axis


class Silent(Axis):
    """An axis on which nothing is sent."""

    @property
    def backend(self) -> str:
        """As in a dry run."""
        return "fake"

    def call(self, op: str, unit: str, call: Callable[[], Any]) -> Any:
        """Nothing."""


def fake_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of this shape on the CPU; inside FakeTensorMode without memory."""
    made = torch.empty(t.shape, dtype=dtype or t.dtype, device="cpu")
    return torch.nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
