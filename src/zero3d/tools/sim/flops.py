"""Multiplications and additions of matrix products and attention, by phase and by model chunk.

torch's own formulas (torch.utils.flop_counter); it has none for attention on the CPU, which a dry run stands on,
and which is the same product: 2 b h s t (d + e) forward, 2.5 times that backward; and none for rows in groups that
each have a matrix (experts): 2 r k n for r rows in all groups together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zero3d.tools.sim.position import PositionTracker

Formula = Callable[..., int]


class FlopCounter:
    """Counts while it hears operations: (phase, a pipeline's action or "", chunk) -> multiplications and additions."""

    def __init__(self, position: PositionTracker) -> None:
        self._position = position
        self.counted: Counter[tuple[str, str, int]] = Counter()

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation that has run."""
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            phase, _, chunk, _ = self._position.now()
            kind = "" if self._position.action is None else self._position.action.kind
            self.counted[phase, kind, chunk] += int(formula(*args, **kwargs, out_val=out))

    def reset(self) -> None:
        """Forget all counts."""
        self.counted.clear()


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, *_for_all_heads(query, key, value))  # type: ignore[no-untyped-call]
    return flops


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = grad.shape, query.shape, *_for_all_heads(query, key, value)
    flops: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return flops


def _for_all_heads(query: Any, *others: Any) -> list[tuple[int, ...]]:
    """Return shapes with as many heads as queries: each works with keys and values, of which there may be fewer.

    Formulas of older torch do not know that.
    """
    return [(batch, query.shape[1], length, width) for batch, _, length, width in (t.shape for t in others)]


def _grouped(rows: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Count a product of rows [r, k] with matrices [groups, k, n], or that of [n, r] and [r, k] to their gradients."""
    return int(2 * rows.shape[-2] * rows.shape[-1] * out_val.shape[-1])


_ATEN = torch.ops.aten
FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped,
}
