"""A chunk of a pipeline as torch's schedules drive it: called by number, with every action recorded.

schedule -> Stage (forward, backward, weights, sends) -> ScheduledChunk (looks its micro-batch up) -> Pipeline.call
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zero3d.pipeline.acknowledgements import Work, work_of
from zero3d.pipeline.actions import Action
from zero3d.pipeline.receives import Rooms
from zero3d.pipeline.sends import Sends

if TYPE_CHECKING:
    from zero3d.pipeline.runner import Pipeline


class ScheduledChunk(nn.Module):
    """A chunk as schedules call it. `micro_batch`: the number of the one to run, as its Stage says."""

    def __init__(self, chunk: nn.Module, pipeline: Pipeline, number: int, last: bool) -> None:
        super().__init__()
        self.chunk, self.pipeline = chunk, pipeline
        self.number, self._last = number, last
        self.micro_batch = 0

    def forward(self, *entering: Tensor) -> Any:
        batch = self.pipeline.batches[self.micro_batch]
        ids, rest = self.pipeline.split_batch(batch)
        self.pipeline.begin(self.number, self.micro_batch)
        output = self.pipeline.call(self.number, entering if self.number else (ids,), rest)
        if not self._last:
            return output
        with self.pipeline.failures.in_chunk(self.number):
            return self.pipeline.loss_of(output, batch)


class Stage(PipelineStage):
    """Tells the engine about backwards (Note 1 of pipeline.py)."""

    submod: ScheduledChunk

    sends: Sends
    alone: int | None = None  # micro-batches whose forwards torch sends by themselves, and no backwards; None: all

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
        if full_backward:
            self.submod.pipeline.done(self.stage_index)
            self._rooms.close(bwd_chunk_id, self.args_recv_info, self.grad_recv_info)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._note("W", bwd_chunk_id)
        pipeline, number = self.submod.pipeline, self.stage_index
        with pipeline.backward(number), pipeline.weights(number):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        pipeline.done(number)
        self._rooms.close(bwd_chunk_id, self.args_recv_info, self.grad_recv_info)

    # --- what is received -----------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self._rooms = Rooms(self.submod.pipeline.arena)
        found = super()._prepare_forward_infra(1, *args, **kwargs)
        self._rooms.open(self.args_recv_info, num_microbatches)
        return found

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        self._rooms.open(self.grad_recv_info, num_microbatches)
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._rooms.furnish(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._rooms.furnish(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets neighbours before the first step, itself too where a V turns, which gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sends = self._sent("send_forward", super().get_fwd_send_ops(fwd_chunk_id))
        if self.alone is not None and fwd_chunk_id >= self.alone:
            return sends
        self.sends.send(Work(False, self.stage_index, fwd_chunk_id), sends)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        sends = self._sent("send_backward", super().get_bwd_send_ops(bwd_chunk_id))
        if self.alone is not None:
            return sends
        self.sends.send(Work(True, self.stage_index, bwd_chunk_id), sends)
        return []

    def free(self) -> None:
        """Give back the memory of what was received: graphs that wait for the garbage collector still hold it."""
        self._rooms.free()

    def _sent(self, op: str, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self.submod.pipeline.sent(op, f"part {self.stage_index}", send.tensor)
        return sends

    def _note(self, kind: str, micro_batch: int) -> None:
        action = Action(kind, self.stage_index, micro_batch)
        self.submod.pipeline.recorded.append(action)
        if (work := work_of(action)) is not None:
            self.sends.begin(work)
