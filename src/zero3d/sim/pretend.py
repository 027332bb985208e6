"""What stands in for ranks, weights and values where a model runs without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from zero3d.tensor_parallel.regions import OwnRandom
from zero3d.transport import Axis


class Silent(Axis):
    """An axis on which nothing is sent."""

    @property
    def backend(self) -> str:
        """As in a dry run."""
        return "fake"

    def call(self, op: str, unit: str, call: Callable[[], Any]) -> Any:
        """Nothing."""


@contextmanager
def without_values() -> Iterator[None]:
    """Inside, what would read values does not.

    find_packed_sequence_indices  transformers reads positions to learn whether a row has several documents, and
                                  without values always makes a mask for them
    OwnRandom.begin               reads the bytes of a generator's state
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(OwnRandom, "begin", lambda *_, **__: None))
        if find_spec("transformers") is not None:
            masks = import_module("transformers.masking_utils")
            stack.enter_context(patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None))
        yield


def fake_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of this shape on the CPU; inside FakeTensorMode without memory."""
    made = torch.empty(t.shape, dtype=dtype or t.dtype, device="cpu")
    return torch.nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else made
