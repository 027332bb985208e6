"""Stand-ins for ranks and weights where a model runs without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Axis, Pending


class SilentAxis(Axis):
    """An axis on which nothing is sent."""

    @property
    def backend(self) -> str:
        """Name of the backend of a dry run."""
        return "fake"

    def guarded(self, op: str, unit: str, call: Callable[[], Any], peer: int | None = None) -> Any:
        """Leave the call out; there is nothing to wait for."""
        return Pending()


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make an empty tensor of this shape on the CPU; inside FakeTensorMode it takes no memory."""
    empty = torch.empty(t.shape, dtype=dtype or t.dtype, device="cpu")
    return torch.nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else empty
