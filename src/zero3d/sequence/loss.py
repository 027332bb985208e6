"""The loss of a micro-batch whose tokens are on several ranks: the mean over all labels of the sp group.

    rank 0   losses of its rows  [B, rows] ---+
    rank 1   losses of its rows  [B, rows] ---+--> [B, S] on every rank --> the mean, as one rank would take it

Every rank has the group's mean, so that `backward(loss)` means what it means without sp. The gradient of that value
reaches this rank's rows alone, and is taken sp times, because a step divides by the weights of all ranks, which name
each label sp times.

A loss that balances experts is of the router logits of all tokens of a micro-batch, which are gathered in the same way.
So are the numbers of each label that a head of TRL's returns in the place of logits, of which its trainers make losses.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.sequence.shares import even_parts
from zero3d.tensor_parallel.vocabulary import IGNORED, shifted

SHIFTED = "ForCausalLMLoss"  # transformers' loss of the next token: a row's label is the one after it
LOSSES = (SHIFTED, "ForMaskedLMLoss")
FUSED = "fused_lm_head"  # with which a forward that TRL has changed returns numbers of labels, and no logits


class GroupLoss:
    """Takes the place of transformers' loss functions of tokens, which are given logits of rows and labels of all.

    whole   that function, for logits of whole sequences; where tp has cut the vocabulary, or the loss is computed in
            tiles, one with a method `of_tokens` of its own
    calls   by batch, length of sequences and bytes of a loss: how often it was called
    """

    def __init__(self, whole: Callable[..., Tensor], comm: Comm, shifted: bool) -> None:
        self._whole = whole
        self._comm = comm
        self._shifted = shifted
        self._losses: Callable[..., Tensor] = getattr(whole, "of_tokens", _token_losses)
        self.calls: Counter[tuple[int, int, int]] = Counter()
        self.__name__ = getattr(whole, "__name__", type(whole).__name__)

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
        """Return the mean over the group's labels, or their sum / num_items_in_batch; the same on all its ranks.

        logits  [B, rows, V] of this rank's; labels, or shift_labels, which are shifted already: [B, S] of all
        Moves (sp - 1) losses of a rank's rows to each rank.
        """
        targets = labels if shift_labels is None else shift_labels
        assert targets is not None, "transformers calls it with labels"
        if logits.shape[1] == targets.shape[1]:
            kept = {} if shift_labels is None else {"shift_labels": shift_labels}
            return self._whole(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kept, **options)
        if shift_labels is None and self._shifted:
            targets = shifted(targets, ignore_index)
        parts = even_parts(targets.shape[1], self._comm.size)
        rows = parts[self._comm.rank]
        mine = targets[:, rows.start : rows.stop].to(logits.device)
        losses = self._losses(logits, mine.reshape(-1), vocab_size, ignore_index).view(mine.shape)
        self.calls[(*targets.shape, losses.element_size())] += 1
        counted = targets.to(logits.device) != ignore_index
        mean: Tensor = _GroupMean.apply(  # type: ignore[no-untyped-call]
            losses, counted, parts, self._comm, num_items_in_batch
        )
        return mean


class GroupRouting:
    """Gives the loss that balances experts the router logits of all ranks' tokens.

    calls   by numbers of a token, length of sequences and bytes of a number: how often they were gathered
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.calls: Counter[tuple[int, int, int]] = Counter()

    def gather(self, routed: Sequence[Tensor], batch: int, length: int) -> tuple[Tensor, ...]:
        """Return router logits [B S, E] of every layer for those [B rows, E] of this rank.

        Moves (sp - 1) router logits of a rank's rows to each rank. Raises ConfigError where layers have other shapes.
        """
        parts = even_parts(length, self._comm.size)
        rows = len(parts[self._comm.rank])
        odd = next((t for t in routed if t.shape != (batch * rows, routed[0].shape[-1])), None)
        if odd is not None:
            raise ConfigError(
                f"output_router_logits gave router logits of shape {list(odd.shape)}, where mesh.sp expects those of "
                f"{batch} x {rows} tokens from every layer: set output_router_logits to false, or type mesh.sp=1."
            )
        own = torch.stack(tuple(routed)).view(len(routed), batch, rows, -1).transpose(2, 3)
        self.calls[own[..., 0].numel(), length, own.element_size()] += 1
        whole: Tensor = _GroupRows.apply(own.flatten(0, 2), parts, self._comm)  # type: ignore[no-untyped-call]
        return tuple(whole.view(*own.shape[:3], length).transpose(2, 3).flatten(1, 2).unbind())


class GroupScores:
    """Takes the place of a forward of TRL's, which returns numbers of labels [B, S - 1], such as log-probabilities.

    The model computes those of this rank's labels; then every rank is given those of all, and a loss that a trainer
    makes of them is one rank's.

    calls   by numbers of a token, length of sequences and bytes of a number: how often they were gathered
    """

    def __init__(self, forward: Callable[..., Any], comm: Comm) -> None:
        self._forward = forward
        self._comm = comm
        self.calls: Counter[tuple[int, int, int]] = Counter()
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the output for labels [B, S], or `shift_labels`, which are shifted already; any other as it is.

        Moves (sp - 1) numbers of each kind of a rank's rows to each rank.
        """
        labels, given = options.pop("labels", None), options.get("shift_labels")
        if not options.get(FUSED) or (labels is None and given is None):
            return self._forward(*args, **options | ({} if labels is None else {"labels": labels}))
        targets = shifted(labels) if given is None else given
        parts = even_parts(targets.shape[1], self._comm.size)
        rows = parts[self._comm.rank]
        output = self._forward(*args, **options | {"shift_labels": targets[:, rows.start : rows.stop]})
        names = [name for name, t in output.items() if isinstance(t, Tensor) and t.shape == (len(targets), len(rows))]
        balance = output.loss - _mean_of(output, options)  # what a loss has beside that of tokens
        dtype = functools.reduce(torch.promote_types, [output[name].dtype for name in names])
        own = torch.stack([output[name].to(dtype) for name in names])
        self.calls[own[..., 0].numel(), targets.shape[1], own.element_size()] += 1
        whole: Tensor = _GroupRows.apply(own.flatten(0, 1), parts, self._comm)  # type: ignore[no-untyped-call]
        length = targets.shape[1] - (given is None)  # the last token has no label
        for name, t in zip(names, whole.view(len(names), *targets.shape)[..., :length], strict=True):
            output[name] = t.to(output[name].dtype)
        output["loss"] = _mean_of(output, options) + balance
        return output


def gives_scores(forward: Callable[..., Any]) -> bool:
    """Return whether a forward is TRL's, which returns numbers of labels when it is asked to."""
    return FUSED in inspect.signature(forward, follow_wrapped=False).parameters


def _mean_of(output: Any, options: Mapping[str, Any]) -> Tensor:
    """Return the mean of negative log-probabilities over labels, or their sum / num_items_in_batch."""
    items = options.get("num_items_in_batch")
    mean: Tensor = -output.log_probs.sum() / (output.label_mask.sum().clamp(min=1) if items is None else items)
    return mean


def _token_losses(logits: Tensor, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, vocab_size), targets, ignore_index=ignored, reduction="none")


class _GroupMean(torch.autograd.Function):
    """The mean of all ranks' losses in the order of one rank's; its gradient is sp / count for each of this rank's."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, counted: Tensor, parts: Sequence[range], comm: Comm, items: Any) -> Tensor:
        ctx.save_for_backward(counted[:, parts[comm.rank].start : parts[comm.rank].stop])
        ctx.scale = comm.size, counted.sum() if items is None else items
        whole = _of_all_ranks(losses.detach(), parts, comm)
        # Cross-entropy's own sum, of losses that are there already: the same order, and so the same bits.
        targets, how = torch.where(counted, 0, IGNORED).flatten(), "mean" if items is None else "sum"
        total = F.nll_loss(-whole.reshape(-1, 1), targets, ignore_index=IGNORED, reduction=how)
        return total if items is None else total / items

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (counted,) = ctx.saved_tensors
        ranks, count = ctx.scale
        grad = grads[0] * ranks / count
        return torch.where(counted, grad, 0.0), None, None, None, None


class _GroupRows(torch.autograd.Function):
    """Gathers the rows [n, rows] of all ranks, [n, S]; gradients of this rank's are taken sp times, as a loss's are."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, parts: Sequence[range], comm: Comm) -> Tensor:
        ctx.own, ctx.ranks = parts[comm.rank], comm.size
        return _of_all_ranks(own, parts, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][:, ctx.own.start : ctx.own.stop] * ctx.ranks, None, None


def _of_all_ranks(own: Tensor, parts: Sequence[range], comm: Comm) -> Tensor:
    """Return what all ranks have of [n, S], of which this rank has [n, rows]: parts are padded to the longest."""
    count, most = len(own), max(map(len, parts))
    padded = own.new_zeros(count, most)
    padded[:, : own.shape[1]] = own
    everywhere = comm.exchange(padded.flatten()).view(comm.size, count, most)
    return torch.cat([t[:, : len(part)] for t, part in zip(everywhere, parts, strict=True)], 1)
