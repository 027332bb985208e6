"""Whole batches, as DeepSpeed's pipeline engine takes them: the micro-batches of a step from an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zero3d.errors import ConfigError
from zero3d.nested import map_tensors
from zero3d.ways.deepspeed.questions import Questions


class Batches(Questions):
    """Takes micro-batches from a loader or an iterator and runs them through the loop's own methods.

    A micro-batch is a mapping, passed by name, or a tuple, passed by position. The model returns its mean loss, or an
    output that has it as `loss`.
    """

    _iterator: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    if TYPE_CHECKING:

        def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor: ...
        def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None: ...

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train a step on gradient_accumulation_steps() micro-batches; the mean of all ranks' losses.

        Without an iterator they come from `set_dataiterator`, or from initialize(training_data=...). Raises
        StopIteration where one ends, and ConfigError where a step has been begun outside.
        """
        if not torch.is_grad_enabled():
            raise ConfigError("train_batch() needs gradients: call eval_batch() instead, or leave torch.no_grad().")
        self._refuse_window("train_batch()")
        if data_iter is not None:
            self._iterator = data_iter
        self.module.train()
        batches, before, losses = self._next(self.gradient_accumulation_steps()), self._boundary, []
        try:
            for number, batch in enumerate(batches, 1):
                self._boundary = number == len(batches)
                loss = self._loss(batch)
                self.backward(loss)
                self.step()
                losses.append(loss.detach())
        finally:
            self._boundary = before
        return self._mean(losses)

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean of all ranks' losses over so many micro-batches, in eval mode, which stays.

        Raises ConfigError for what is not that mean.
        """
        if return_logits or not compute_loss or reduce_output != "avg":
            raise ConfigError(
                "eval_batch(return_logits=True), (compute_loss=False) and another reduce_output than 'avg' are not "
                "here: call engine(...) under torch.no_grad() for outputs."
            )
        self.module.eval()
        before, self._iterator = self._iterator, data_iter
        try:
            batches = self._next(num_micro_batches or self.gradient_accumulation_steps())
        finally:
            self._iterator = before
        mean = self._mean([self._loss(batch).detach() for batch in batches])
        self.engine.release()
        return mean

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from an iterator from now on."""
        self.training_dataloader, self._iterator = None, iterator

    def set_dataloader(self, loader: DataLoader[Any]) -> None:
        """Take micro-batches from a loader from now on."""
        self.training_dataloader, self._iterator = loader, iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Have a function change every micro-batch that comes from an iterator."""
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Return True: a JSON has no pipeline here."""
        return True

    is_last_stage = is_first_stage

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches: another order in each epoch (`loader.sampler.set_epoch`).

        Ranks that share sequences are handed the same ones.
        """
        mesh = self.engine.mesh
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, mesh.degrees.rows, mesh.row)
        return DataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), sampler=sampler, collate_fn=collate_fn
        )

    def _next(self, count: int) -> list[Any]:
        if self._iterator is None:
            if self.training_dataloader is None:
                raise ConfigError(
                    "train_batch() has no data: pass an iterator, or initialize(training_data=...). "
                    "zero3d.ways.deepspeed.utils.RepeatingLoader begins a loader anew where it ends."
                )
            self._iterator = iter(self.training_dataloader)
        batches = [next(self._iterator) for _ in range(count)]
        changed = batches if self._batch_fn is None else map(self._batch_fn, batches)
        return [map_tensors(batch, lambda t: t.to(self.device)) for batch in changed]

    def _loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            output = self.engine(**batch)
        else:
            output = self.engine(*batch) if isinstance(batch, (list, tuple)) else self.engine(batch)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                "train_batch() and eval_batch() need a model that returns its mean loss, or an output with .loss (a "
                "Hugging Face model has one where the batch has labels); or call engine, backward and step."
            )
        return loss

    def _mean(self, losses: list[Tensor]) -> Tensor:
        own = torch.stack([loss.double().reshape(()) for loss in losses]).mean()
        return self.engine.dp.exchange(own.view(1)).mean().float()
