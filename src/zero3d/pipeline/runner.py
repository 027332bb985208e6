"""Training steps, evaluation and generation through the pipeline stages of a model-parallel group.

    chunk 0 (embedding, blocks)  -> hidden states ->  chunk 1 (blocks)  ->  chunk 2 (blocks, norm, head, loss)
    rank pp=0                                         rank pp=1             rank pp=2  one chunk per rank
    rank 0: chunks 0, P                               rank 1: chunks 1, P+1            looped (interleaved, zero-bubble)
    rank 0: chunks 0, 2P-1                            rank 1: chunks 1, 2P-2           a V (zbv)

Training runs one of torch.distributed.pipelining's schedules. Those cut tensors along the batch. Ours are given the
numbers of the micro-batches instead, and each chunk looks its micro-batch up (step.py): whatever a batch holds
reaches every chunk, and nothing is copied.

A schedule is made for one number and shape of micro-batches. Those of the latest `KEPT` shapes are kept. They hold no
memory of the device: what they receive into is lent for a step (messages.py).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class

from zero3d.account.traffic import Moved
from zero3d.distributed.agreement import exchange_texts
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.pipeline.acknowledgements import acknowledgements
from zero3d.pipeline.actions import Action, actions_of
from zero3d.pipeline.chunks import Chunks, SumAndWeight, Taken
from zero3d.pipeline.failures import Failures
from zero3d.pipeline.forward_only import ForwardOnly
from zero3d.pipeline.messages import Sends
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.shapes import ChunkOutputs
from zero3d.pipeline.stage import ScheduledChunk, Stage
from zero3d.pipeline.step import Callbacks, Observer, Step
from zero3d.pipeline.traffic import pipeline_traffic
from zero3d.pipeline.waits import Waits
from zero3d.zero.step_parts import BUBBLE

# Lengths padded to multiples of 128 up to 2,048 are 16. A schedule of 8 stages takes 0.5 MB of the host for 32
# micro-batches in a V, 1.8 MB for 128 (measured in November 2026).
KEPT = 16


class StepShape(NamedTuple):
    """What a schedule is made for: how many micro-batches, and the shape of their token ids."""

    micro_batches: int
    ids: tuple[int, ...]


class MadeSchedule(NamedTuple):
    """One of torch's schedules: the shape of its step, this rank's stages in it, their sends and their waits."""

    shape: StepShape
    schedule: Any
    stages: list[Stage]
    sends: Sends
    waits: Waits


class Pipeline:
    """This rank's chunks of the model, and schedules for the latest numbers and shapes of micro-batches.

    chunks  number -> module, forward(token ids or hidden states, **micro-batch)
    loss    (output, micro-batch) -> (sum of losses, weight), of the last chunk's output
    taken   returns what the model takes of a micro-batch; the rest is for the loss

    Micro-batches are on the engine's device. The caller puts `failures.guard()` around every call.
    """

    def __init__(
        self,
        chunks: Mapping[int, Any],
        schedule: Schedule,
        axis: Axis,
        ledger: Ledger,
        callbacks: Callbacks,
        loss: Callable[[Any, Any], SumAndWeight],
        taken: Taken,
    ) -> None:
        total = schedule.chunks_per_rank * axis.size
        self.failures = Failures(axis, total)
        self._schedule, self._axis = schedule, axis
        self._owners = [schedule.rank_of(chunk, axis.size) for chunk in range(total)]
        self._chunks = Chunks(chunks, total - 1, self.failures, loss, taken)
        self._outputs = ChunkOutputs(chunks.values(), callbacks.own_shape)
        self._forward_only = ForwardOnly(self._owners, axis, ledger, self._chunks, self._outputs)
        self._step, self._step_apart = (
            Step(self._chunks, self.failures, each, ledger, axis.name, self._outputs.loss_dtype)
            for each in (callbacks, callbacks.apart())
        )
        self._kept: OrderedDict[tuple[StepShape, bool], MadeSchedule] = OrderedDict()  # the latest used one comes last
        self._made: MadeSchedule | None = None  # of the last step

    # --- running --------------------------------------------------------------------------------

    def run(self, batches: Sequence[Any], scale: float, observer: Observer | None = None) -> list[SumAndWeight]:
        """Run forward and backward of all micro-batches; (sum, weight) of each, on the rank of the last chunk only."""
        shape = StepShape(len(batches), self._chunks.ids_shape(batches))
        self._schedule.check(shape.micro_batches, self._axis.size)
        self._made = self._made_for(shape, self._step)
        self._drive(self._made, self._step.over(batches, scale, observer))
        self._step.finish(len(batches))
        return self._step.losses

    def run_apart(self, batch: Any, scale: float, observer: Observer) -> None:
        """Run forward and backward of one micro-batch that belongs to no step; its gradients are for the observer."""
        shape = StepShape(1, self._chunks.ids_shape([batch]))
        self._drive(self._made_for(shape, self._step_apart), self._step_apart.over([batch], scale, observer))

    def _drive(self, made: MadeSchedule, step: AbstractContextManager[None]) -> None:
        """Have torch run a schedule inside a step."""
        numbers = torch.arange(made.shape.micro_batches)
        first = (numbers,) if 0 in self._chunks.modules else ()
        run = partial(made.schedule.step, *first, target=numbers, losses=[], return_outputs=False)
        with step, self._step.clocks.of(BUBBLE):
            made.waits.begin()
            try:
                self._axis.guarded("a step", "pipeline", run)
                self._axis.call("send", "the last messages of a step", made.sends.finish)
            finally:
                made.sends.forget()

    def evaluate(self, batches: Iterable[Any]) -> list[SumAndWeight]:
        """Run forward only; (sum, weight) of each micro-batch, on the rank of the last chunk only."""
        losses = []
        for batch in batches:
            output = self.output(batch)
            if self._chunks.last in self._chunks.modules:
                losses.append(self._chunks.loss(output, batch))
        return losses

    def output(self, batch: Any) -> Any:
        """Return the model's output for one micro-batch on the rank of the last chunk, None on others."""
        return self._forward_only(*self._chunks.split_batch(batch))

    def logits(self, logits: Tensor | None, batch: int) -> Tensor:
        """Return on all ranks the logits [batch, vocabulary] that the rank of the last chunk has."""
        return self._forward_only.everywhere(logits, batch)

    def spread(self, tensor: Tensor) -> None:
        """Give all ranks the values that the rank of the last chunk has, in place."""
        self._forward_only.spread(tensor)

    @property
    def has_output(self) -> bool:
        """Whether this rank has the last chunk."""
        return self._chunks.last in self._chunks.modules

    def learn_shapes(self) -> None:
        """Learn how many router logits leave each chunk, which schedules must know, by a forward of two tokens."""
        if self._chunks.routes:
            self.output({"input_ids": torch.zeros(1, 2, dtype=torch.long, device=self._outputs.device)})

    # --- what was done --------------------------------------------------------------------------

    @property
    def recorded(self) -> list[Action]:
        """What this rank did in the last step, in order."""
        return self._step.actions

    def recorded_order(self) -> dict[int, list[Action]]:
        """Return what every rank of the axis did in the last step, in order. All ranks call it."""
        comm = Comm(self._axis, Arena(self._outputs.device), Ledger())
        texts = exchange_texts(comm, json.dumps(self.recorded))
        return {rank: [Action(*action) for action in json.loads(text)] for rank, text in enumerate(texts)}

    def planned_order(self, micro_batches: int) -> Mapping[int, Sequence[Action]]:
        """Return what torch has every rank do in a step of so many micro-batches, of the last step's shape."""
        assert self._made is not None, "there was a step"
        return _order(self._make(self._made.shape._replace(micro_batches=micro_batches), self._step).schedule)

    def traffic(self, micro_batches: int) -> dict[tuple[str, str], Moved]:
        """Return what this rank sends in a step of so many micro-batches, of the last step's shape, by formula."""
        if self._made is None:
            raise ConfigError("traffic() is that of the last step's shape, and there was no step: train_batch first.")
        cuts = [self._outputs.sizes(chunk, self._made.shape.ids) for chunk in range(self._chunks.last)]
        facts = self._outputs.facts(self._made.shape.ids)
        return pipeline_traffic(list(self._chunks.modules), micro_batches, cuts, facts)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are; None where nothing says."""
        return self._chunks.vocabulary

    # --- torch's schedule -----------------------------------------------------------------------

    def _made_for(self, shape: StepShape, step: Step) -> MadeSchedule:
        """Return the schedule kept for a shape and a kind of step, or a new one in the place of the one unused longest.

        Ranks of a pipeline run the same shapes in the same order, so that they make and drop the same schedules.
        """
        key = shape, step is self._step
        made = self._kept.pop(key, None)
        if made is None:
            while len(self._kept) >= KEPT:
                _, dropped = self._kept.popitem(last=False)
                for stage in dropped.stages:
                    stage.free()
            made = self._make(shape, step)
        self._kept[key] = made
        return made

    def _make(self, shape: StepShape, step: Step) -> MadeSchedule:
        stages = [self._stage(number, shape.ids, step) for number in self._chunks.modules]
        by_name = self._schedule.chunks_per_rank > 1 or step is self._step  # of one micro-batch 1f1b is gpipe
        kind = get_schedule_class(self._schedule.torch if by_name else "GPipe")
        driven = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        made = kind(driven, n_microbatches=shape.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
        order, rank = _order(made), self._axis.rank
        sends = Sends(acknowledgements(order, rank, self._owners))
        waits = Waits(self._axis, self._owners, order.get(rank, []) if self._schedule.chunks_per_rank > 1 else [])
        facts = self._outputs.facts(shape.ids)
        for stage in stages:
            stage.sends, stage.waits = sends, waits
            stage.facts = facts
            stage.before = next((each for each in stages if each.stage_index == stage.stage_index - 1), None)
            stage.warmup = self._axis.size - 1 - self._axis.rank if issubclass(kind, Schedule1F1B) else None
        return MadeSchedule(shape, made, stages, sends, waits)

    def _stage(self, number: int, ids: tuple[int, ...], step: Step) -> Stage:
        index = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=self._outputs.loss_dtype, device="meta", requires_grad=True)
        takes = self._outputs.leaving(number - 1, ids) if number else (index,)
        gives = (loss,) if number == self._chunks.last else self._outputs.leaving(number, ids)
        chunk = ScheduledChunk(self._chunks.modules[number], step, number)
        return Stage(chunk, number, self._chunks.last + 1, self._outputs.device, takes, gives, group=self._axis.gathers)


def _order(made: Any) -> dict[int, list[Action]]:
    """Return every rank's actions in a planned schedule; empty for one of torch's simple ones."""
    return {rank: actions_of(row) for rank, row in getattr(made, "pipeline_order", {}).items()}
