"""Micro-batches through the pipeline stages of one replica, by the schedules of torch.distributed.pipelining.

    chunk 0 (embedding, blocks)  -> hidden states ->  chunk 1 (blocks)  ->  chunk 2 (blocks, norm, head, loss)
    rank pp=0                                         rank pp=1             rank pp=2  one chunk per rank
    rank 0: chunks 0, P                               rank 1: chunks 1, P+1            looped (interleaved, zero-bubble)
    rank 0: chunks 0, 2P-1                            rank 1: chunks 1, 2P-2           a V (zbv)

The schedules cut tensors along the batch. Ours are given the numbers of the micro-batches instead, and
each chunk looks its micro-batch up: whatever a batch holds reaches every chunk, and nothing is copied.

Note 1, split backward. A zero-bubble schedule takes gradients of inputs and of weights apart, by
`autograd.grad`; the latter writes `.grad` without any hook. `Stage` hands what it finds there on. No hook
tells either that recomputed blocks and saved weights are read again, so the chunk's units are gathered first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from zero3d.distributed.agreement import exchange_texts
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.pipeline.acknowledgements import acknowledgements
from zero3d.pipeline.actions import Action, actions_of
from zero3d.pipeline.failures import Failures
from zero3d.pipeline.forward_only import ForwardOnly
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.sends import Sends
from zero3d.pipeline.stage import ScheduledChunk, Stage
from zero3d.pipeline.traffic import pipeline_traffic
from zero3d.zero.accumulation import Accumulation, Driven
from zero3d.zero.traffic import Moved


class Callbacks(NamedTuple):
    """What a schedule calls of the engine around its forwards and backwards (Note 1).

    accumulation  counts micro-batches
    sweep         hands on gradients that no hook saw
    begin         a forward comes next, of a micro-batch through a chunk, by their numbers
    done          all gradients of a chunk and a micro-batch are there
    gathered      a chunk's units, whole inside the block
    arena         lends what is received into
    """

    accumulation: Accumulation
    sweep: Callable[[], None]
    begin: Callable[[int, int], None]
    done: Callable[[nn.Module], None]
    gathered: Callable[[nn.Module], AbstractContextManager[None]]
    arena: Arena


class Pipeline:
    """This rank's chunks, and a schedule for the latest number and shape of micro-batches.

    chunks  chunk number -> module, forward(hidden states or nothing, **micro-batch)
    sum_and_weight  (output, micro-batch) -> (sum of losses, weight), of the last chunk's output
    takes   entries of a micro-batch that the model takes, None for all; the others are for the loss

    Micro-batches are on the engine's device. `failures.guard()` is around every call.
    """

    def __init__(
        self, chunks: Mapping[int, Any], schedule: Schedule, axis: Axis, ledger: Ledger, callbacks: Callbacks,
        sum_and_weight: Callable[[Any, Any], tuple[Tensor, float | Tensor]], takes: frozenset[str] | None,
    ) -> None:  # fmt: skip
        self._chunks, self._schedule, self._axis, self._ledger = chunks, schedule, axis, ledger
        self._callbacks, self._sum_and_weight, self._takes = callbacks, sum_and_weight, takes
        self.arena = callbacks.arena
        self._total = schedule.chunks_per_rank * axis.size
        self.failures = Failures(axis, self._total)
        self._key: tuple[int, tuple[int, ...]] | None = None  # micro-batches and their shape in the last step
        self._made: Any = None
        self._stages: list[Stage] = []
        self._sends = Sends({})
        self._like = next(p for chunk in chunks.values() for p in chunk.parameters() if p.is_floating_point())
        self._wide = torch.float64 if self._like.dtype == torch.float64 else torch.float32
        self._width = next(iter(chunks.values())).width
        config = getattr(next(iter(chunks.values())), "config", None)
        self._owners = [schedule.rank_of(chunk, axis.size) for chunk in range(self._total)]
        self._forward_only = ForwardOnly(
            self._owners, axis, ledger, self.call, self._hidden, bool(getattr(config, "output_router_logits", False))
        )
        self.batches: Sequence[Any] = ()
        self._seen: list[tuple[Tensor, float | Tensor]] = []
        self._scale = 1.0
        self.recorded: list[Action] = []

    def run(self, batches: Sequence[Any], scale: float) -> list[tuple[Tensor, float | Tensor]]:
        """Forward and backward of all micro-batches; (sum, weight) of each, on the rank of the last chunk only."""
        schedule = self._schedule_for(batches)
        self.batches, self._seen, self._scale, self.recorded = batches, [], scale, []
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self._chunks else ()
        step = partial(schedule.step, *first, target=numbers, losses=[], return_outputs=False)
        try:
            self._axis.call("a step", "pipeline", step)
            self._axis.call("a step", "pipeline", self._sends.finish)
        finally:
            self._sends.forget()
            self.batches = ()
        self._callbacks.accumulation.finish(len(batches), [weight for _, weight in self._seen])
        return self._seen

    def evaluate(self, batches: Iterable[Any]) -> list[tuple[Tensor, float | Tensor]]:
        """Forward only: (sum, weight) of each micro-batch, on the rank of the last chunk only."""
        found = []
        for batch in batches:
            output = self.output(batch)
            if self._total - 1 in self._chunks:
                with self.failures.in_chunk(self._total - 1):
                    found.append(self._sum_and_weight(output, batch))
        return found

    def learn(self) -> None:
        """How many router logits leave each chunk, which schedules must know beforehand: a forward of two tokens."""
        if self._forward_only.routes:
            self.output({"input_ids": torch.zeros(1, 2, dtype=torch.long, device=self._like.device)})

    def output(self, batch: Any) -> Any:
        """Forward only: the model's output for one micro-batch on the rank of the last chunk, None on others."""
        return self._forward_only(*self.split_batch(batch))

    def call(self, number: int, entering: tuple[Any, ...], batch: Mapping[str, Any]) -> Any:
        """A chunk's forward."""
        with self.failures.in_chunk(number):
            return self._chunks[number](*entering, **batch)

    def traffic(self, micro_batches: int) -> dict[tuple[str, str], Moved]:
        """What this rank sends in a step of so many micro-batches, of the last step's shape, by formula."""
        if self._key is None:
            raise ConfigError("traffic() is that of the last step's shape, and there was no step: train_batch first.")
        leaving = [self._leaving(chunk, self._key[1]) for chunk in range(self._total - 1)]
        cuts = [[(tensor.numel(), tensor.itemsize) for tensor in tensors] for tensors in leaving]
        return pipeline_traffic(list(self._chunks), micro_batches, cuts)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are; None where neither a config nor an embedding says."""
        chunk = next(iter(self._chunks.values()))
        config: Any = getattr(chunk, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        tables = [(m.num_embeddings * m.embedding_dim, m.num_embeddings) for m in chunk.modules()
                  if hasattr(m, "num_embeddings")]  # fmt: skip
        found: int | None = getattr(config, "vocab_size", max(tables, default=(0, None))[1])
        return found

    def sent(self, op: str, chunk: str, tensor: Tensor) -> None:
        """A chunk sends a tensor to another rank."""
        self._ledger.record(op, self._axis.name, chunk, tensor.numel(), tensor.element_size())

    def order(self) -> dict[int, list[Action]]:
        """What every rank of the axis did in the last step, in order, as it was recorded. All ranks call it."""
        comm = Comm(self._axis, Arena(self._like.device), Ledger())
        told = exchange_texts(comm, json.dumps(self.recorded))
        return {rank: [Action(*each) for each in json.loads(text)] for rank, text in enumerate(told)}

    def torch_plan(self, micro_batches: int) -> Mapping[int, Sequence[Action]]:
        """What torch has every rank do in a step of so many micro-batches like those of the last one."""
        assert self._key is not None, "there was a step"
        stages, sends = self._stages, self._sends
        made = self._make(micro_batches, self._key[1])
        self._stages, self._sends = stages, sends
        return _order(made)

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Around every backward of a schedule (Note 1)."""
        with self.failures.in_chunk(number), self._callbacks.accumulation.driving(Driven(0.0, last=False)):
            yield
            self._callbacks.sweep()

    def begin(self, number: int, micro_batch: int) -> None:
        """Before the forward of a chunk in training."""
        self._callbacks.begin(micro_batch, number)

    def done(self, number: int) -> None:
        """A micro-batch's backward through a chunk is over, of weights too."""
        self._callbacks.done(self._chunks[number])

    def weights(self, number: int) -> AbstractContextManager[None]:
        """Around the weight phase of a split backward (Note 1)."""
        return self._callbacks.gathered(self._chunks[number])

    def split_batch(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Token ids, and what else the model takes. Raises ConfigError."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            raise ConfigError(
                f"a pipeline takes micro-batches that are mappings with 'input_ids', and got a {type(batch).__name__}: "
                "pass {'input_ids': ids, ...} with the names of the model's forward, or pp=1."
            )
        rest = {key: value for key, value in batch.items() if self._takes is None or key in self._takes}
        routes = rest.get("output_router_logits")
        if routes is not None and bool(routes) != self._forward_only.routes:
            raise ConfigError(
                f"a micro-batch says output_router_logits={routes}, and the pipeline was built for "
                f"{self._forward_only.routes}: set model.config.output_router_logits = {bool(routes)} before "
                "zero3d.Engine, and leave it out of the batches."
            )
        return rest.pop("input_ids"), rest

    def _schedule_for(self, batches: Sequence[Any]) -> Any:
        shapes = {tuple(self.split_batch(batch)[0].shape) for batch in batches}
        if len(shapes) != 1:
            raise ConfigError(
                f"micro-batches of a pipeline step must have one shape, and have {sorted(shapes)}: pad them alike, or "
                "leave the last, smaller one out (drop_last)."
                if shapes
                else "a pipeline step needs micro-batches, and got none: pass a list of at least one."
            )
        key = (len(batches), shapes.pop())
        if key != self._key:
            self._schedule.check(len(batches), self._axis.size)
            for stage in self._stages:
                stage.free()
            self._key = key
            self._made = self._make(*key)
        return self._made

    def _make(self, count: int, shape: tuple[int, ...]) -> Any:
        self._stages = [self._stage(number, chunk, shape) for number, chunk in self._chunks.items()]
        kind = get_schedule_class(self._schedule.torch)
        what = self._stages[0] if issubclass(kind, PipelineScheduleSingle) else self._stages
        made = kind(what, n_microbatches=count, loss_fn=lambda loss, _: loss, scale_grads=False)
        self._sends = Sends(acknowledgements(_order(made), self._axis.rank, self._owners))
        for stage in self._stages:
            stage.sends = self._sends
            stage.alone = self._axis.size - 1 - self._axis.rank if self._schedule.name == "1f1b" else None
        return made

    def _hidden(self, shape: Sequence[int]) -> Tensor:
        return torch.empty((*shape, self._width), dtype=self._like.dtype, device=self._like.device)

    def _leaving(self, chunk: int, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What a chunk hands on, on the meta device."""
        hidden = self._hidden(shape).to("meta").requires_grad_()
        learned = self._forward_only.learned.get(chunk)
        if learned is None:
            return (hidden,)
        layers, experts, dtype = learned
        tokens = hidden.shape[:-1].numel()
        return hidden, torch.empty((layers, tokens, experts), dtype=dtype, device="meta", requires_grad=True)

    def _stage(self, number: int, chunk: Any, shape: tuple[int, ...]) -> Stage:
        last = number == self._total - 1
        index = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=self._wide, device="meta", requires_grad=True)
        takes = (index,) if number == 0 else self._leaving(number - 1, shape)
        gives = (loss,) if last else self._leaving(number, shape)
        return Stage(ScheduledChunk(chunk, self, number, last), number, self._total, self._like.device, takes,
                      gives, group=self._axis.gathers)  # fmt: skip

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The scaled sum of a micro-batch's losses, kept for the caller; in the dtype that `_stage` announced."""
        total, weight = self._sum_and_weight(output, batch)
        self._seen.append((total.detach(), weight))
        loss = total.to(self._wide)
        return loss * self._scale if self._scale != 1.0 else loss


def _order(made: Any) -> dict[int, list[Action]]:
    """What every rank does, of a schedule that plans it; empty of one of torch's simple ones."""
    return {rank: actions_of(row) for rank, row in getattr(made, "pipeline_order", {}).items()}
