"""One micro-batch forward through all chunks of a pipeline, one after another and without a schedule.

    rank 0   chunk 0 -> send              chunk 2 -> send
    rank 1         receive -> chunk 1 -> send  receive -> chunk 3 -> output

For evaluation and generation, which have no backward to make room for. Where all ranks choose tokens, they are sent the
logits of the last position. Ranks go on with the next micro-batch
as soon as they have sent, so that a pipeline of one chunk per rank fills up by itself.

Router logits (mixtures of experts with `output_router_logits`) travel behind the hidden state, after a
header of three numbers: layers so far (0: none yet), experts, dtype. Their shapes are noted in `ChunkOutputs`. What
else a chunk is given comes last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.axis import Axis, messages
from zero3d.distributed.ledger import Ledger
from zero3d.pipeline.chunks import Chunks
from zero3d.pipeline.shapes import ChunkOutputs, RouterLogits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ForwardOnly:
    """Runs this rank's chunks in turn with those of the other ranks. owners: the rank of each chunk."""

    def __init__(
        self, owners: Sequence[int], axis: Axis, ledger: Ledger, chunks: Chunks, outputs: ChunkOutputs
    ) -> None:
        self._owners = owners
        self._axis = axis
        self._ledger = ledger
        self._chunks, self._outputs = chunks, outputs
        self._logits: tuple[int, torch.dtype] | None = None  # their columns and what they are in

    def __call__(self, ids: Tensor, inputs: Mapping[str, Any]) -> Any:
        """Return the model's output on the rank of the last chunk, None on others; sends 1 hidden state per cut."""
        passed: tuple[Any, ...] = (ids,)
        for chunk, owner in enumerate(self._owners):
            output = self._chunks.run(chunk, passed, inputs) if owner == self._axis.rank else None
            if chunk == self._chunks.last:
                return output
            passed = self._pass_on(chunk, output if isinstance(output, tuple) else (output,), ids.shape)
        return None

    def spread(self, tensor: Tensor) -> None:
        """Give all ranks the values that the rank of the last chunk has, in place; it sends them to each other rank."""
        source, here = self._owners[-1], self._axis.rank
        if here != source:
            messages(self._axis, "receive", "logits", {}, {source: tensor})
            return
        for target in range(self._axis.size):
            if target != here:
                self._ledger.record("send", self._axis.name, "logits", tensor.numel(), tensor.dtype.itemsize)
                messages(self._axis, "send", "logits", {target: tensor.contiguous()}, {})

    def everywhere(self, logits: Tensor | None, batch: int) -> Tensor:
        """Return logits [batch, vocabulary] of the rank of the last chunk on all ranks; their form is told once."""
        device = self._outputs.device
        if self._logits is None:
            form = (0, 0) if logits is None else (logits.shape[-1], DTYPES.index(logits.dtype))
            header = torch.tensor(form, device=device)
            self.spread(header)
            columns, dtype = (int(value) for value in header)
            self._logits = columns, DTYPES[dtype]
        if logits is None:
            columns, of = self._logits
            logits = torch.empty(batch, columns, dtype=of, device=device)
        self.spread(logits)
        return logits

    def _pass_on(self, chunk: int, tensors: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, ...]:
        """Return the inputs of the next chunk, if it is on this rank; `tensors`: outputs of `chunk`, if it is here."""
        source, target, here = self._owners[chunk], self._owners[chunk + 1], self._axis.rank
        if here == source:
            routed = tensors[1] if len(tensors) > 1 + self._more(chunk, shape) else None
            shapes = None if routed is None else RouterLogits(len(routed), routed.shape[-1], routed.dtype)
            self._outputs.router_logits[chunk] = shapes
            if target != here:
                self._send(target, [*self._header(chunk), *tensors])
        elif here == target:
            return self._receive(chunk, source, shape)
        return tensors

    def _more(self, chunk: int, shape: Sequence[int]) -> int:
        """Return how many tensors a chunk hands on behind hidden state and router logits."""
        return len(self._outputs.beside(chunk, shape)) + bool(self._outputs.facts(shape))

    def _header(self, chunk: int) -> list[Tensor]:
        if not self._chunks.routes:
            return []
        layers, experts, dtype = self._outputs.router_logits[chunk] or (0, 0, DTYPES[0])
        return [torch.tensor([layers, experts, DTYPES.index(dtype)], device=self._outputs.device)]

    def _send(self, target: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._ledger.record("send", self._axis.name, "hidden", tensor.numel(), tensor.dtype.itemsize)
            messages(self._axis, "send", "hidden", {target: tensor.contiguous()}, {})

    def _receive(self, chunk: int, source: int, shape: Sequence[int]) -> tuple[Tensor, ...]:
        hidden = self._outputs.hidden(shape)
        received = [hidden]
        header = torch.zeros(3, dtype=torch.int64, device=hidden.device)
        for into in (header, hidden) if self._chunks.routes else (hidden,):
            messages(self._axis, "receive", "hidden", {}, {source: into})
        if self._chunks.routes:
            layers, experts, dtype = (int(value) for value in header)
            self._outputs.router_logits[chunk] = RouterLogits(layers, experts, DTYPES[dtype]) if layers else None
            if layers:
                rows = hidden.shape[:-1].numel()
                received.append(torch.empty(layers, rows, experts, dtype=DTYPES[dtype], device=hidden.device))
                messages(self._axis, "receive", "hidden", {}, {source: received[-1]})
        for like in self._outputs.beside(chunk, shape):
            received.append(torch.empty(like.shape, dtype=like.dtype, device=hidden.device))
            messages(self._axis, "receive", "hidden", {}, {source: received[-1]})
        if facts := self._outputs.facts(shape):
            received.append(torch.empty(facts, dtype=torch.int64, device=hidden.device))
            messages(self._axis, "receive", "hidden", {}, {source: received[-1]})
        return tuple(received)
