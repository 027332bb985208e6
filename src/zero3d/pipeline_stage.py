"""A part of a pipeline as torch's schedules drive it: called by number, with every action recorded.

schedule -> Stage (forward, backward, weights, sends) -> Part (looks its micro-batch up) -> Pipeline.call
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zero3d.plan.bubble import Action

if TYPE_CHECKING:
    from zero3d.pipeline import Pipeline


class Part(nn.Module):
    """A part as schedules call it. `micro_batch`: the number of the one to run, as its Stage says."""

    def __init__(self, part: nn.Module, pipeline: Pipeline, number: int, last: bool) -> None:
        super().__init__()
        self.part, self.pipeline = part, pipeline
        self.number, self._last = number, last
        self.micro_batch = 0

    def forward(self, *entering: Tensor) -> Any:
        batch = self.pipeline.batches[self.micro_batch]
        ids, rest = self.pipeline.split_batch(batch)
        output = self.pipeline.call(self.number, entering if self.number else (ids,), rest)
        if not self._last:
            return output
        with self.pipeline.faults.running(self.number):
            return self.pipeline.loss_of(output, batch)


class Stage(PipelineStage):
    """Tells the engine about backwards (Note 1 of pipeline.py)."""

    submod: Part

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._note("F", fwd_chunk_id)
        self.submod.micro_batch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._note("B" if full_backward else "I", bwd_chunk_id)
        with self.submod.pipeline.backward(self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._note("W", bwd_chunk_id)
        pipeline, number = self.submod.pipeline, self.stage_index
        with pipeline.backward(number), pipeline.weights(number):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets neighbours before the first step, itself too where a V turns, which gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent("send_forward", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent("send_backward", super().get_bwd_send_ops(bwd_chunk_id))

    def received(self) -> list[Tensor]:
        """Buffers of what arrives, one or more for every micro-batch."""
        infos = [info for each in (*self.args_recv_info.values(), *self.grad_recv_info.values()) for info in each]
        return [buffer for info in infos if (buffer := getattr(info, "buffer", None)) is not None]

    def free(self) -> None:
        """Give back the memory of what was received: graphs that wait for the garbage collector still hold it."""
        for buffer in self.received():
            buffer.untyped_storage().resize_(0)

    def _sent(self, op: str, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self.submod.pipeline.sent(op, f"part {self.stage_index}", send.tensor)
        return sends

    def _note(self, kind: str, micro_batch: int) -> None:
        self.submod.pipeline.recorded.append(Action(kind, self.stage_index, micro_batch))
