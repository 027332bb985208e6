"""Values of whole numbers where everything else has shapes alone: sizes and grids of images, tokens, places.

A vision tower asks how many patches an image has, and a language model where its tokens are. In FakeTensorMode nothing
has values, so such a forward ends there. Inside `KnownValues`, which comes on top of that mode, an operator of which
all tensors are real is computed, and what makes whole numbers of none, such as arange, makes real ones; where a fake
tensor meets a real one the result is fake.

    grid [[1, 64, 64]]  ->  prod, tolist, arange      real
    pixels, weights     ->  products, norms           fake
    hidden[mask]                                      fake, of as many rows as a real mask has
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = 1 << 26  # numbers of a tensor that is computed: the mask of a sequence of 8,192 tokens
_ATEN = torch.ops.aten
BY_MASK = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what it can inside FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `func`, of values where all of its tensors have some."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(isinstance(t, FakeTensor) for t in given):
            return func(*_by_places(func, args), **kwargs)
        if not given:
            made = func(*args, **kwargs)
            tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            if not tensors or any(t.is_floating_point() or t.numel() > LARGEST for t in tensors):
                return made
        elif _numbers(given) > LARGEST:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _numbers(tensors: list[Tensor]) -> int:
    """Return how many numbers an operator makes of these at most, one by one."""
    try:
        return prod(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return max(t.numel() for t in tensors)


def _by_places(func: Any, args: Any) -> Any:
    """Return arguments in which real masks that choose rows are the places of these rows."""
    if func not in BY_MASK:
        return args
    places: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return (args[0], places, *args[2:])
