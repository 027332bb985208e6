"""Multiplications and additions of matrix products and attention, by phase and by part of the model.

torch's own formulas (torch.utils.flop_counter); it has none for attention on the CPU, which a dry run stands on,
and which is the same product: 2 b h s t (d + e) forward, 2.5 times that backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zero3d.sim.where import Where

Formula = Callable[..., int]


class Flops:
    """Counts while it hears operations: (phase, a pipeline's action or "", part) -> multiplications and additions."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self.counted: Counter[tuple[str, str, int]] = Counter()

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run."""
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            phase, _, part, _ = self._where.now()
            kind = "" if self._where.action is None else self._where.action.kind
            self.counted[phase, kind, part] += int(formula(*args, **kwargs, out_val=out))

    def reset(self) -> None:
        """Forget all."""
        self.counted.clear()


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = grad.shape, query.shape, key.shape, value.shape
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops


_ATEN = torch.ops.aten
FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
