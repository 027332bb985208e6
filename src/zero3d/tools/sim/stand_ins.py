"""Stand-ins for ranks and weights where a model runs without any."""

from __future__ import annotations

import torch
from torch import Tensor

from zero3d.distributed.axis import Axis


class SilentAxis(Axis):
    """An axis on which nothing is sent."""

    silent = True

    @property
    def backend(self) -> str:
        """Name of the backend of a dry run."""
        return "fake"


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make an empty tensor of this shape on the CPU; inside FakeTensorMode it takes no memory."""
    empty = torch.empty(t.shape, dtype=dtype or t.dtype, device="cpu")
    return torch.nn.Parameter(empty, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else empty
