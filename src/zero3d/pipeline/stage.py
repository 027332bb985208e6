"""A model chunk as torch's schedules drive it: called by number, with every action recorded.

schedule -> Stage (forward, backward, weights, sends) -> ScheduledChunk (knows the micro-batch) -> Step

What torch's names call a chunk is a micro-batch; in ours a chunk is always a model chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zero3d.pipeline.acknowledgements import Work, work_of
from zero3d.pipeline.actions import Action
from zero3d.pipeline.messages import RECEIVED, ReceiveBuffers, Sends
from zero3d.pipeline.step import Step
from zero3d.pipeline.waits import Waits


class ScheduledChunk(nn.Module):
    """A chunk as schedules call it. `micro_batch`: the number of the one to run, which its Stage sets.

    came, left  integers that come and go beside what has a gradient, by micro-batch; torch's stages do not know them
    """

    def __init__(self, chunk: nn.Module, step: Step, number: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.step = step
        self.number = number
        self.micro_batch = 0
        self.came: dict[int, Tensor] = {}
        self.left: dict[int, Tensor] = {}

    def forward(self, *entering: Tensor) -> Any:
        came = [self.came[self.micro_batch]] if self.micro_batch in self.came else []
        output = self.step.forward(self.number, self.micro_batch, (*entering, *came))
        if not isinstance(output, tuple) or output[-1].is_floating_point():
            return output
        *output, self.left[self.micro_batch] = output
        return tuple(output)


class Stage(PipelineStage):
    """One of torch's stages that reports its actions to the step, and keeps messages no longer than needed.

    warmup   in 1f1b, forwards before the first backward; all other messages torch sends together with a receive.
             None: torch sends every message by itself
    facts    integers that are sent beside what has a gradient, forward alone (entry.py)
    before   the stage before, where this rank has it
    """

    submod: ScheduledChunk

    sends: Sends
    waits: Waits
    warmup: int | None = None
    facts: int = 0
    before: Stage | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._record("F", fwd_chunk_id)
        self.submod.micro_batch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.waits.over(self.submod.step.actions[-1])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._record("B" if full_backward else "I", bwd_chunk_id)
        with self.submod.step.backward(self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._end(bwd_chunk_id)
        else:
            self.waits.over(self.submod.step.actions[-1])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._record("W", bwd_chunk_id)
        step, number = self.submod.step, self.stage_index
        with step.backward(number, bwd_chunk_id), step.weights(number):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._end(bwd_chunk_id)

    def _record(self, kind: str, micro_batch: int) -> None:
        action = Action(kind, self.stage_index, micro_batch)
        self.submod.step.actions.append(action)
        if (work := work_of(action)) is not None:
            self.sends.begin(work)

    def _end(self, micro_batch: int) -> None:
        """End a micro-batch's backward, of weights too: what it received is needed no more."""
        self.submod.step.done(self.stage_index)
        self._buffers.give_back(micro_batch, self.args_recv_info, self.grad_recv_info)
        came = self.submod.came.pop(micro_batch, None)
        if came is not None and self.before is None:
            self.submod.step.arena.give_back(RECEIVED, came)
        self.submod.left.pop(micro_batch, None)
        self.waits.over(self.submod.step.actions[-1])

    # --- its first step -------------------------------------------------------------------------

    # Torch asks stage after stage whether all know the shapes of their messages. Ours are made with them: nothing is
    # sent, and NCCL makes no communicators of two ranks, which it does for a message that is sent by itself.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.tensor([1])

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.tensor([1])

    # --- what is received -----------------------------------------------------------------------

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self._buffers = ReceiveBuffers(self.submod.step.arena)
        outputs = super()._prepare_forward_infra(1, *args, **kwargs)
        self._buffers.empty(self.args_recv_info, num_microbatches)
        return outputs

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches  # torch's
        self._buffers.empty(self.grad_recv_info, num_microbatches)
        return prepared

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._buffers.lend(self.args_recv_info, fwd_chunk_id)
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        if self.facts and not self.is_first:
            came = self.submod.step.arena.borrow(RECEIVED, self.facts, torch.int64)
            self.submod.came[fwd_chunk_id] = came
            operations.append(dist.P2POp(dist.irecv, came, self._rank_of(self.stage_index - 1), self.group))
        return self._announced(Work(False, self.stage_index, fwd_chunk_id), operations)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        if self.before is not None and mb_index in self.before.submod.left:
            self.submod.came[mb_index] = self.before.submod.left[mb_index]

    def _rank_of(self, stage: int) -> int:
        """Return the global rank of a stage."""
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._buffers.lend(self.grad_recv_info, bwd_chunk_id)
        return self._announced(Work(True, self.stage_index, bwd_chunk_id), super().get_bwd_recv_ops(bwd_chunk_id))

    def _announced(self, work: Work, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Tell the watchdog of the operations that receive a work's inputs, and return them."""
        if operations:
            self.waits.receiving(work)
        return operations

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return torch 2.11's greetings of neighbours, but none to this rank itself, which gloo refuses: a V's turn."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def free(self) -> None:
        """Give back the memory of received tensors: graphs that wait for the garbage collector still hold it."""
        self._buffers.free()
        while self.submod.came:
            _, came = self.submod.came.popitem()
            if self.before is None:
                self.submod.step.arena.give_back(RECEIVED, came)
        self.submod.left.clear()

    # --- what is sent ---------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if (left := self.submod.left.get(fwd_chunk_id)) is not None:
            operations.append(dist.P2POp(dist.isend, left, self._rank_of(self.stage_index + 1), self.group))
        operations = self._counted("send_forward", operations)
        if self.warmup is not None and fwd_chunk_id >= self.warmup:
            self.waits.sending(Work(False, self.stage_index, fwd_chunk_id))
            return operations
        self.sends.send(Work(False, self.stage_index, fwd_chunk_id), operations)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        operations = self._counted("send_backward", super().get_bwd_send_ops(bwd_chunk_id))
        if self.warmup is not None:
            self.waits.sending(Work(True, self.stage_index, bwd_chunk_id))
            return operations
        self.sends.send(Work(True, self.stage_index, bwd_chunk_id), operations)
        return []

    def _counted(self, name: str, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return messages that are about to be sent, written into the ledger."""
        for operation in operations:
            self.submod.step.count_message(name, self.stage_index, operation.tensor)
        return operations
