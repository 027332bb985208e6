"""The loss of the next token without logits of the whole vocabulary: tile by tile, in forward and backward.

    hidden state --head--> DeferredLogits --the model's own steps--> DeferredLogits --loss function--> loss
                           nothing is computed                      noted                |
                                                                                         v
    for each tile, as many rows of the head's matrix as the hidden state is wide:   head(hidden state, targets)
        logits of the tile [tokens, rows] -> their logsumexp, and the target's logit if it is there
    loss of a token = logsumexp over tiles - its target's logit

Backward makes the tile's logits again. What is held at once are a few tiles, each as large as a hidden state, where
plain logits take [tokens, vocabulary] several times over. The sum over tiles has another order than torch's: losses
are equal up to rounding, and the same at every stage.

The head is called inside the loss, once, so that whoever gathers its matrix for a call of the module sees one call.
Models do more to logits than making them: casts, scales and soft caps are noted and done to each tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.tiles import RowTile, check_ids, rows_of, tiles_of
from zero3d.precision import as_autocast, at_least_fp32

IGNORED = -100  # transformers' label of a position that is no target
NOT_HERE = -1  # in the place of a target's row: another rank has it
Step = Callable[[Tensor], Tensor]  # elementwise, of logits


class Targets(NamedTuple):
    """What a head is called with beside the hidden state where numbers of its logits are wanted, not logits.

    rows   [tokens] of the head's matrix: each token's target, or NOT_HERE
    steps  what is done to logits
    """

    rows: Tensor
    steps: Sequence[Step]


class Ranks(NamedTuple):
    """The ranks that share out the vocabulary. gather: [2, tokens] of this one -> [ranks, 2, tokens]."""

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]


class DeferredLogits:
    """Stands for logits that nobody has computed: notes what a model does to them, and refuses to be read."""

    def __init__(self, head: nn.Linear, hidden: Tensor, steps: tuple[Step, ...] = ()) -> None:
        self.head = head
        self.hidden = hidden
        self.steps = steps
        self.device, self.shape = hidden.device, torch.Size((*hidden.shape[:-1], head.out_features))

    def _then(self, step: Step) -> DeferredLogits:
        return DeferredLogits(self.head, self.hidden, (*self.steps, step))

    def __mul__(self, factor: Any) -> DeferredLogits:
        return self._then(lambda logits: logits * factor) if _is_fixed(factor) else self._refuse("* a tensor")

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        return self._then(lambda logits: logits / divisor) if _is_fixed(divisor) else self._refuse("/ a tensor")

    def __add__(self, other: Any) -> NoReturn:
        self._refuse("+ or -")

    __radd__ = __sub__ = __rsub__ = __add__

    def tanh(self) -> DeferredLogits:
        """Note a soft cap's bend."""
        return self._then(torch.tanh)

    def float(self) -> DeferredLogits:
        """Note a cast to fp32."""
        return self._then(lambda logits: logits.float())

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """Note a cast."""
        return self._then(lambda logits: logits.to(*args, **kwargs))

    def contiguous(self) -> DeferredLogits:
        """Return itself: a tile is contiguous."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> DeferredLogits:
        if func is torch.tanh and isinstance(args[0], cls):
            return args[0].tanh()
        cls._refuse(f"torch.{getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # asked by copy, pickle and inspection
        self._refuse(f".{name}")

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse("[...]")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise ConfigError(
            f"tiled_loss=True makes no logits in a forward with labels, and {what} of them is asked for: call the "
            "model without labels for logits, or pass tiled_loss=False (train.tiled_loss=false)."
        )


def _is_fixed(factor: Any) -> bool:
    """Return whether a factor is one number that is not trained."""
    return isinstance(factor, (int, float)) or (
        isinstance(factor, Tensor) and factor.dim() == 0 and not factor.requires_grad
    )


class TiledHead:
    """A language model's head as the model's own forward sees it, in the place of the module.

    deferring  whether logits of the forward under way are deferred: it was given labels
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head, self._logits = head, head.forward
        self.deferring = False
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    def __call__(self, hidden: Tensor) -> Any:
        return DeferredLogits(self._head, hidden) if self.deferring else self._head(hidden)

    def __getattr__(self, name: str) -> Any:
        if name == "_head":  # asked for by copy before there is one
            raise AttributeError(name)
        return getattr(self._head, name)

    def _forward(self, hidden: Tensor, targets: Targets | None = None) -> Tensor:
        """Return logits; with targets [2, tokens], the logsumexp of each token's logits and its target's."""
        if targets is None:
            return self._logits(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if tiles := tiles_of(self._head):
            return self._over_tiles(tiles, flat, targets)
        return head_numbers(flat, self._head.weight, self._head.bias, targets)

    def _over_tiles(self, tiles: Sequence[RowTile], flat: Tensor, targets: Targets) -> Tensor:
        """Return the numbers of all tiles' logits together, each made while its tile is gathered."""
        rows, bias = tiles[0].weight.shape[0], self._head.bias
        biases = [None] * len(tiles) if bias is None else torch.split(bias, rows)
        parts = []
        for i, (tile, of_tile) in enumerate(zip(tiles, biases, strict=True)):
            own = targets.rows - i * rows
            here = (own >= 0) & (own < tile.weight.shape[0]) & (targets.rows != NOT_HERE)
            within = targets._replace(rows=own.where(here, NOT_HERE))
            parts.append(tile(flat.view_as(flat), partial(head_numbers, bias=of_tile, targets=within)))
        numbers = torch.stack(parts)
        return torch.stack([numbers[:, 0].logsumexp(0), numbers[:, 1].sum(0)])


class TiledLoss:
    """Computes transformers' ForCausalLMLoss of deferred logits. `whole` is that function, for logits that are there.

    ranks  those that share out the vocabulary, where the head's matrix is a slice of it
    """

    def __init__(self, whole: Callable[..., Tensor], ranks: Ranks | None = None) -> None:
        self._whole, self._ranks = whole, ranks

    def __call__(
        self,
        logits: Tensor | DeferredLogits,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the next-token loss: the mean over labels, or sum / num_items_in_batch.

        labels   [batch, length], unshifted; or shift_labels, which are shifted already
        Over tp moves 2 (N-1) numbers per token and rank. Raises TokenError for labels of no token, on the CPU.
        """
        if isinstance(logits, Tensor):
            return self._whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **options
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        flat = shift_labels.reshape(-1).to(logits.device)
        losses = self.of_tokens(logits, flat, vocab_size, ignore_index)
        count: Any = (flat != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / (count.to(losses.device) if isinstance(count, Tensor) else count)

    def of_tokens(self, logits: DeferredLogits, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
        """Return the losses [tokens] of deferred logits, of these targets [tokens]; 0 for those that are ignored."""
        counted = targets != ignored
        check_ids(targets.where(counted, 0), vocab_size, "label")  # tiles would pass over them
        total, target = self._numbers(logits, targets, vocab_size)
        return (total - target).where(counted, 0.0)

    def _numbers(self, logits: DeferredLogits, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return [tokens] logsumexp over the vocabulary, and the target's logit."""
        rows = rows_of(logits.head)
        ranks = self._ranks if rows != vocab_size else None
        if rows * (1 if ranks is None else ranks.size) != vocab_size:
            raise ConfigError(
                f"the head has {rows} rows{'' if ranks is None else f' on each of {ranks.size} tp ranks'}, and its "
                f"model's vocab_size is {vocab_size}: resize one of them, or pass tiled_loss=False."
            )
        own = labels - (0 if ranks is None else ranks.rank * rows)
        own = own.where((own >= 0) & (own < rows), NOT_HERE)
        numbers = logits.head(logits.hidden, Targets(own, logits.steps))
        if ranks is None:
            return numbers[0], numbers[1]
        total, target = _OverRanks.apply(numbers, ranks.gather)  # type: ignore[no-untyped-call]
        return total, target


def defer_logits(model: Any, ranks: Ranks | None = None) -> None:
    """Let a causal language model of Hugging Face's compute its loss tile by tile, in place.

    Its head is a plain nn.Linear (`find_head`), and its loss function that of the next token. A forward without labels
    stays as it is.
    """
    name, head = find_head(model)
    parent, _, leaf = name.rpartition(".")
    tiled = TiledHead(head)
    vars(model.get_submodule(parent))[leaf] = tiled  # what the model's forward finds before its module of that name
    model.loss_function = TiledLoss(model.loss_function, ranks)
    signature = inspect.signature(model.forward)

    def defer(module: nn.Module, args: Any, kwargs: Any) -> None:
        tiled.deferring = signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None

    model.register_forward_pre_hook(defer, with_kwargs=True)


def find_head(model: Any) -> tuple[str, nn.Linear]:
    """Return the name and module of a model's head. Raises ConfigError where it is no plain matrix."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        found = "no head" if head is None else f"a {type(head).__name__} for a head"
        raise ConfigError(
            f"tiled_loss=True multiplies a head's matrix tile by tile, and this {type(model).__name__} has {found}: "
            "leave adapters off the head, or pass tiled_loss=False."
        )
    name = next(name for name, module in model.named_modules() if module is head)
    return name, head


def head_numbers(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> Tensor:
    """Return [2, tokens]: the logsumexp of each token's logits by these rows of a head, and its target's logit."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # the backward, which makes logits again, is in none
        hidden, weight, bias = as_autocast(hidden, weight, bias)
        with torch.autocast(kind, enabled=False):
            return head_numbers(hidden, weight, bias, targets)
    numbers: Tensor = _HeadNumbers.apply(hidden, weight, bias, targets, weight.shape[1])  # type: ignore[no-untyped-call]
    return numbers


class _HeadNumbers(torch.autograd.Function):
    """[2, tokens] logsumexp of a token's logits and its target's (0 where it has none); keeps no logits.

    hidden [tokens, width], weight [rows, width], bias [rows] or None
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, rows: int) -> Tensor:
        parts, target = [], None
        for start in range(0, weight.shape[0], rows):
            logits = at_least_fp32(_apply(targets.steps, _tile(hidden, weight, bias, start, rows)))
            parts.append(logits.logsumexp(1))
            columns, inside = _columns(targets.rows, start, logits.shape[1])
            found = logits.gather(1, columns[:, None])[:, 0].where(inside, 0.0)
            target = found if target is None else target + found
            del logits
        total = parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0)
        ctx.save_for_backward(hidden, weight, bias, targets.rows, total)
        ctx.rows, ctx.steps = rows, targets.steps
        return torch.stack([total, target])  # type: ignore[list-item]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, targets, total = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype) if of_hidden else None
        grad_weight = torch.empty_like(weight) if of_weight else None
        grad_bias = torch.empty_like(bias) if of_bias else None
        for start in range(0, weight.shape[0], ctx.rows):
            tile = slice(start, start + ctx.rows)
            grad = _grad_of_tile(_tile(hidden, weight, bias, start, ctx.rows), start, ctx.steps, targets, total, grads)
            if grad_hidden is not None:
                grad_hidden += grad @ weight[tile]
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[tile])
            if grad_bias is not None:
                torch.sum(grad, 0, out=grad_bias[tile])
            del grad
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def _tile(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, rows: int) -> Tensor:
    """Return [tokens, rows] logits of a tile."""
    return F.linear(hidden, weight[start : start + rows], None if bias is None else bias[start : start + rows])


def _apply(steps: Sequence[Step], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _columns(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return targets as columns of a tile (0 where they are elsewhere), and which are in it."""
    columns = targets - start
    inside = (columns >= 0) & (columns < rows) & (targets != NOT_HERE)
    return columns.where(inside, 0), inside


def _grad_of_tile(
    logits: Tensor, start: int, steps: Sequence[Step], targets: Tensor, total: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of a tile's logits, in their dtype: softmax x gradient of the logsumexp + the target's."""
    leaf = logits.detach().requires_grad_() if steps else logits
    with torch.enable_grad():
        last = _apply(steps, leaf)
    of_total, of_target = grads[0]
    grad = last.detach().to(total.dtype, copy=bool(steps))  # without steps logits in fp32 are used up
    grad.sub_(total[:, None]).exp_().mul_(of_total[:, None])
    columns, inside = _columns(targets, start, logits.shape[1])
    grad.scatter_add_(1, columns[:, None], of_target.where(inside, 0.0)[:, None])
    grad = grad.to(last.dtype)
    return torch.autograd.grad(last, leaf, grad)[0] if steps else grad


class _OverRanks(torch.autograd.Function):
    """The numbers of all ranks' slices of the vocabulary as those of the whole one, alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        everywhere = gather(numbers)
        total = everywhere[:, 0].logsumexp(0)
        ctx.save_for_backward((numbers[0] - total).exp())
        return total, everywhere[:, 1].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        of_total, of_target = grads
        (share,) = ctx.saved_tensors
        return torch.stack([of_total * share, of_target]), None
