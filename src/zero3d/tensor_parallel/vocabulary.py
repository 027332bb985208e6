"""Embedding, head and loss with the vocabulary cut over tp: no rank has logits of the whole vocabulary.

    ids -> [ this rank's rows, else 0 ] -> reduce_from -> blocks -> copy_to -> [ this rank's logits, .. x V/N ] -> loss

The loss of a token needs two numbers of every rank: the logsumexp of its logits, and the label's logit
if it is there, else 0. They are gathered together, [2, tokens] per rank, and combined in rank order.

An id or a label of no rank's rows is an error, as in one process, and not a row of zeros.

Logits stay local in a forward that is given labels, for the model's own loss takes them so. Any other
forward (generation, losses outside the model) gathers them to [.., V] on all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.models.tiles import check_ids
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.regions import Conversion, Regions, convert

IGNORED = -100


class LocalEmbedding:
    """The forward of an nn.Embedding with this rank's rows of the vocabulary: token ids -> the whole embedding.

    lookup  the module's own forward, of ids within those rows

    Raises TokenError for ids beyond the vocabulary, on the CPU.
    """

    def __init__(self, module: nn.Embedding, regions: Regions, name: str) -> None:
        self.lookup: Callable[[Tensor], Tensor] = module.forward
        self._regions, self._name = regions, name
        self._all = module.num_embeddings
        self._rows = self._all // regions.channel.size
        self._start = regions.channel.rank * self._rows
        padding = -1 if module.padding_idx is None else module.padding_idx - self._start
        module.padding_idx = padding if 0 <= padding < self._rows else None

    def __call__(self, ids: Tensor) -> Tensor:
        check_ids(ids, self._all)
        rows = ids - self._start
        absent = (rows < 0) | (rows >= self._rows)
        partial = self.lookup(rows.masked_fill(absent, 0)).masked_fill(absent[..., None], 0)
        return self._regions.reduce_from(partial, self._name, whole=True)


class Head:
    """The model's head: whether it gathers its logits, and the loss that takes them as they are.

    local   whether logits of the forward under way stay this rank's, [.., V/N]
    """

    def __init__(self, regions: Regions, name: str) -> None:
        self._regions, self._name = regions, name
        self.local = False

    def finish(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Gather the head's output, unless it stays local: its forward hook."""
        return output if self.local else gather_logits(output, self._regions.channel, self._name)

    def install_loss(self, model: Any) -> None:
        """Let a model that `has_causal_loss` compute it from local logits; other losses get gathered ones."""
        model.loss_function = CausalLoss(self._regions.channel, self._name, model.loss_function)
        signature = inspect.signature(model.forward)

        def set_local(module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            self.local = arguments.get("labels") is not None

        model.register_forward_pre_hook(set_local, with_kwargs=True)


def has_causal_loss(model: Any) -> bool:
    """Return whether a model's own loss is Hugging Face's of the next token: some have that and compute another one."""
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss" and calls_loss(model)


def calls_loss(model: Any) -> bool:
    """Return whether a model's forward calls its `loss_function`."""
    forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind))
    return any("loss_function" in f.__code__.co_names for f in forwards if inspect.isfunction(f))


class CausalLoss:
    """Computes transformers' ForCausalLMLoss from local logits. `whole` is that function, for gathered logits."""

    def __init__(self, channel: Channel, name: str, whole: Callable[..., Tensor]) -> None:
        self._channel = channel
        self._name = name
        self._whole = whole

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the next-token loss.

        logits   [batch, length, V/N]
        labels   [batch, length], unshifted; or shift_labels, which are shifted already
        Moves 2 (N-1) numbers per token and rank.
        """
        if logits.shape[-1] == vocab_size:
            return self._whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **options
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = shifted(labels, ignore_index)
        return cross_entropy(logits, shift_labels, self._channel, ignore_index, num_items_in_batch, self._name)

    def of_tokens(self, logits: Tensor, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
        """Return the losses [tokens] of local logits, [.., V/N], of these targets [tokens]."""
        local = logits.reshape(-1, logits.shape[-1])
        if local.shape[1] == vocab_size:
            return F.cross_entropy(local.float(), targets, ignore_index=ignored, reduction="none")
        args = targets, self._channel, ignored, self._name
        losses: Tensor = _CrossEntropy.apply(local, *args)  # type: ignore[no-untyped-call]
        return losses


def shifted(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the label of the token after each one, [.., S]; the last has none."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    channel: Channel,
    ignore_index: int = IGNORED,
    num_items_in_batch: Tensor | int | None = None,
    name: str = "loss",
) -> Tensor:
    """Return the cross-entropy of local logits, alike on all ranks: the mean over labels, or sum / num_items_in_batch.

    logits   [.., V/N], computed with in fp32, or fp64 if they are
    labels   [..], of the whole vocabulary; those equal to ignore_index do not count
    """
    flat = labels.reshape(-1).to(logits.device)
    local = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _CrossEntropy.apply(local, flat, channel, ignore_index, name)  # type: ignore[no-untyped-call]
    count: Any = (flat != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count)


def gather_logits(local: Tensor, channel: Channel, name: str = "logits") -> Tensor:
    """Gather logits, [.., V/N] -> [.., V] on all ranks, for losses that all ranks compute alike."""
    return convert(local, Conversion("gather_from", -1, name, channel))


class _CrossEntropy(torch.autograd.Function):
    """Per-token losses [n] of local logits [n, V/N]; keeps the logits and one number per token.

    Raises TokenError for labels beyond the vocabulary, on the CPU.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, channel: Channel, ignore_index: int, name: str) -> Tensor:
        counted = labels != ignore_index
        check_ids(labels.where(counted, 0), logits.shape[-1] * channel.size, "label")
        wide = _wide(logits)
        columns, local = _local_labels(labels, logits.shape[-1], channel.rank)
        target = wide.gather(1, columns[:, None])[:, 0].masked_fill(~local, 0.0)
        numbers = torch.stack([wide.logsumexp(1), target])
        gathered = channel.all_gather(numbers, 0, name).view(channel.size, 2, -1)
        total = gathered[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, labels, total, counted)
        ctx.rank = channel.rank
        return (total - gathered[:, 1].sum(0)).where(counted, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, total, counted = ctx.saved_tensors
        columns, local = _local_labels(labels, logits.shape[-1], ctx.rank)
        grad = (_wide(logits) - total[:, None]).exp_()
        grad.scatter_add_(1, columns[:, None], -local.to(grad.dtype)[:, None])
        grad *= grads[0].where(counted, 0.0)[:, None]
        return grad.to(logits.dtype), None, None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _local_labels(labels: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return labels as columns of this rank's logits (0 where they are another rank's), and which are its own."""
    columns = labels - rank * rows
    local = (columns >= 0) & (columns < rows)
    return columns.where(local, 0), local
