"""One micro-batch forward through all parts of a pipeline, one after another and without a schedule.

    rank 0   part 0 -> send            part 2 -> send
    rank 1        receive -> part 1 -> send  receive -> part 3 -> output

For evaluation and generation, which have no backward to make room for. Ranks go on with the next micro-batch
as soon as they have sent, so that a pipeline of one part per rank fills up by itself.

Router logits (mixtures of experts with `output_router_logits`) travel behind the hidden state, after a
header of three numbers: layers so far (0: none yet), experts, dtype. Schedules, which must know shapes
beforehand, learn them here: `learned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Axis, messages
from zero3d.distributed.ledger import Ledger

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class InTurn:
    """owners: the rank of each part.

    call     (part, tensors that enter, batch) -> what the part returns
    hidden   shape of token ids -> an empty hidden state
    routes   router logits travel, too
    learned  part -> (layers, experts, dtype) of the router logits that leave it, None where there are none yet
    """

    def __init__(
        self, owners: Sequence[int], axis: Axis, ledger: Ledger, call: Callable[..., Any],
        hidden: Callable[[Sequence[int]], Tensor], routes: bool,
    ) -> None:  # fmt: skip
        self._owners, self._axis, self._ledger = owners, axis, ledger
        self._call, self._hidden, self.routes = call, hidden, routes
        self.learned: dict[int, tuple[int, int, torch.dtype] | None] = {}

    def __call__(self, ids: Tensor, batch: Mapping[str, Any]) -> Any:
        """The model's output on the rank of the last part, None on others; sends 1 hidden state per cut."""
        passed: tuple[Tensor, ...] = (ids,)
        last = len(self._owners) - 1
        for part, owner in enumerate(self._owners):
            output = self._call(part, passed, batch) if owner == self._axis.rank else None
            if part == last:
                return output
            passed = self._pass_on(part, output if isinstance(output, tuple) else (output,), ids.shape)
        return None

    def _pass_on(self, part: int, tensors: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, ...]:
        source, target, here = self._owners[part], self._owners[part + 1], self._axis.rank
        if here == source:
            routed = tensors[1] if len(tensors) > 1 else None
            self.learned[part] = None if routed is None else (len(routed), routed.shape[-1], routed.dtype)
            if target != here:
                self._send(target, [*self._header(part), *tensors])
        elif here == target:
            return self._receive(part, source, shape)
        return tensors

    def _header(self, part: int) -> list[Tensor]:
        if not self.routes:
            return []
        layers, experts, dtype = self.learned[part] or (0, 0, DTYPES[0])
        return [torch.tensor([layers, experts, DTYPES.index(dtype)], device=self._hidden((1,)).device)]

    def _send(self, target: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._ledger.record("send", self._axis.name, "hidden", tensor.numel(), tensor.dtype.itemsize)
            messages(self._axis, "send", "hidden", {target: tensor.contiguous()}, {})

    def _receive(self, part: int, source: int, shape: Sequence[int]) -> tuple[Tensor, ...]:
        hidden = self._hidden(shape)
        if not self.routes:
            messages(self._axis, "receive", "hidden", {}, {source: hidden})
            return (hidden,)
        header = torch.zeros(3, dtype=torch.int64, device=hidden.device)
        for into in (header, hidden):
            messages(self._axis, "receive", "hidden", {}, {source: into})
        layers, experts, dtype = (int(value) for value in header)
        self.learned[part] = (layers, experts, DTYPES[dtype]) if layers else None
        if not layers:
            return (hidden,)
        routed = torch.empty(layers, hidden.shape[:-1].numel(), experts, dtype=DTYPES[dtype], device=hidden.device)
        messages(self._axis, "receive", "hidden", {}, {source: routed})
        return hidden, routed
