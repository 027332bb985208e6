"""A layer's experts, shared out over the ep axis: tokens travel to their experts, results back.

    hidden [T, H], experts [T, K]
      sorted by (expert, position)           T K rows
      --all-to-all-->                        every rank has its experts' rows, of one source rank behind the other's
      the module's own forward               once per source, whose gradients of weights are a term of their own
      --all-to-all-->                        results, in the order in which rows were sent
      times weights, summed over K           [T, H]

Nothing is dropped. A source's rows are those that it would have computed itself with all experts, in the same order:
every product and every sum has the bits that it has without ep.

A block may have several such layers, and call only some: Ernie 4.5 VL has experts for tokens of images. All ranks must
come to each, so one that a rank has no tokens for is called without (`call_all`), behind the others.

`fast` computes all sources' rows in one product: the module is called once, and a weight has one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import ExpertLayer
from zero3d.expert_parallel.rows import Splits, pass_rows
from zero3d.expert_parallel.traffic import Passed, even_rows
from zero3d.spec.mesh import EXACT

GROUPED, BATCHED = "grouped_mm", "batched_mm"  # transformers' names
Take = Callable[[int, Tensor | None], None]  # is given the number of a source, and a gradient; None: there is none


class Dispatch:
    """Computes a layer whose experts are on the ranks of the ep axis; it takes the place of the module's forward.

    layer   the module, and which of its parameters are experts
    inner   the forward that it takes the place of
    passed  what has been sent to other ranks
    hidden  the width of a row
    called  whether it has been called since somebody has set this to False
    takes   what takes the gradients of a trained parameter, by its local name: set before the first forward with
           gradients where sources are apart
    """

    def __init__(self, layer: ExpertLayer, ep: Comm, how: str) -> None:
        self.layer = layer
        self._ep = ep
        self._module = layer.module
        self.inner = layer.module.forward
        self._local = layer.experts // ep.size
        self._apart = how == EXACT
        self.takes: dict[str, Take] = {}
        self.passed, self.hidden = Passed(), 0
        self.called = False
        self._has_graph = False  # what was called last outside of a backward

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's stacks of experts [experts / ep, ...], by their local names."""
        stacks = ((key, self._module._parameters[key]) for key in self.layer.parameters)
        return {key: p for key, p in stacks if p is not None}

    @_disable_dynamo
    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if hidden.dim() != 2 or experts.dim() != 2 or experts.shape != weights.shape:
            raise ConfigError(
                f"{self.layer.name} is called with hidden states {tuple(hidden.shape)}, experts "
                f"{tuple(experts.shape)} and weights {tuple(weights.shape)}; mesh.ep expects [tokens, width], "
                "[tokens, chosen] and [tokens, chosen]. Leave mesh.ep out."
            )
        self.called, chosen = True, experts.shape[1]
        sorted_experts, order = torch.sort(experts.reshape(-1), stable=not self._sorts)
        counts = self._counts(sorted_experts)
        ep, local, here = self._ep, self._local, self._ep.rank * self._local
        splits = Splits(
            [sum(counts[ep.rank][rank * local : (rank + 1) * local]) for rank in range(ep.size)],
            [sum(row[here : here + local]) for row in counts],
        )
        if self._sorts and self._apart:
            order = _unsorted(sorted_experts, order, list(splits.sends))
        trained = any(p.requires_grad for p in self.parameters().values())
        self._count(splits, hidden.shape[1], hidden.requires_grad, trained)
        rows = pass_rows(hidden[order // chosen], splits, ep, self.layer.name, hidden.requires_grad)
        results = self._compute(rows, [row[here : here + local] for row in counts], weights.dtype)
        back = pass_rows(results, splits.back, ep, self.layer.name, trained or hidden.requires_grad)
        weighted = back * weights.reshape(-1)[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return weighted[place].view(*experts.shape, back.shape[-1]).sum(dim=1).to(hidden.dtype)

    def without_tokens(self, hidden: Tensor) -> Tensor:
        """Take part in a call for which this rank has no tokens; a zero through which backward comes to it.

        hidden  [..., H], from which its gradient goes on
        """
        empty = hidden.reshape(-1, hidden.shape[-1])[:0]
        none = empty.new_zeros(0, 1)
        return self(empty, none.long(), none).sum()

    def _count(self, splits: Splits, hidden: int, moving: bool, trained: bool) -> None:
        """Count the rows of a call, and those of its backward: recomputation runs a forward whose graph has none."""
        if self._ep.size == 1:
            return
        inside = torch._C._current_graph_task_id() != -1
        graph = torch.is_grad_enabled() and not (inside and self._has_graph)
        if not inside:
            self._has_graph = graph
        sent, given = (sum(rows) - rows[self._ep.rank] for rows in (splits.sends, splits.receives))
        back = [given] * moving + [sent] * (moving or trained) if graph else []
        self.hidden = hidden
        self.passed = self.passed.plus(Passed(1, sent + given, len(back), sum(back)))

    @property
    def _sorts(self) -> bool:
        """Whether the module sorts what it is given: transformers' grouped product does, not in a stable way."""
        return self._implementation == GROUPED

    @property
    def _implementation(self) -> str | None:
        """How transformers computes the experts; None of a module of one's own."""
        how: str | None = getattr(getattr(self._module, "config", None), "_experts_implementation", None)
        return how

    def _counts(self, sorted_experts: Tensor) -> list[list[int]]:
        """Return how many rows every rank has for every expert, [ep, experts]: 8 bytes for each to every rank."""
        experts = self.layer.experts
        ends = torch.searchsorted(sorted_experts, torch.arange(experts, device=sorted_experts.device), right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        read = self._ep.read(
            self._ep.exchange(counts).view(-1), even_rows(len(sorted_experts), experts) * self._ep.size
        )
        return [read[rank * experts : (rank + 1) * experts] for rank in range(self._ep.size)]

    def _compute(self, rows: Tensor, counts: list[list[int]], dtype: torch.dtype) -> Tensor:
        """Return the results of all sources' rows, in their order; `counts` [sources, own experts] says whose."""
        device = rows.device
        every = torch.arange(self._local, device=device).repeat(len(counts))
        sizes = torch.tensor([count for source in counts for count in source], device=device)
        of_row = torch.repeat_interleave(every, sizes, output_size=len(rows))
        if not self._apart:
            return self._of_source(0, rows, of_row, dtype) if len(rows) else rows
        lengths = [sum(source) for source in counts]
        parts = zip(torch.split(rows, lengths), torch.split(of_row, lengths), strict=True)
        results = [self._of_source(source, *part, dtype) for source, part in enumerate(parts) if lengths[source]]
        together = torch.cat(results) if results else rows[:0]
        absent = [source for source, length in enumerate(lengths) if not length]
        if absent and together.requires_grad:
            together.register_hook(lambda _: self._tell_of(absent))  # type: ignore[no-untyped-call]
        return together

    def _of_source(self, source: int, rows: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the results of one source's rows [R, H], each with one expert, whose weight is one.

        A batch of one product has other bits on CPUs than the same product in a larger one: it gets a second row.
        """
        alone = len(rows) == 1 and self._implementation == BATCHED
        if alone:
            rows, experts = rows.expand(2, -1), experts.expand(2)
        with self._leaves(source):
            result: Tensor = self.inner(rows, experts[:, None], rows.new_ones(len(rows), 1, dtype=dtype))
        return result[:1] if alone else result

    @contextmanager
    def _leaves(self, source: int) -> Iterator[None]:
        """Let the module read its parameters through leaves of their own, whose gradients are those of one source."""
        if not (torch.is_grad_enabled() and self.takes):
            yield
            return
        own = {key: p for key, p in self.parameters().items() if key in self.takes}
        for key, p in own.items():
            leaf = nn.Parameter(p.detach())
            leaf.register_post_accumulate_grad_hook(_gradient_hook(self.takes[key], source))  # type: ignore[no-untyped-call]
            self._module._parameters[key] = leaf
        try:
            yield
        finally:
            self._module._parameters.update(own)

    def _tell_of(self, absent: list[int]) -> None:
        """Say in a backward that there are no gradients of these sources: what is complete can be reduced."""
        for take in self.takes.values():
            for source in absent:
                take(source, None)


def call_all(block: nn.Module, dispatches: Sequence[Dispatch]) -> None:
    """Let every forward of a module come to all these layers of it, without tokens where it has none for them."""

    def begins(*_: Any) -> None:
        for dispatch in dispatches:
            dispatch.called = False

    def ends(block: nn.Module, args: Any, output: Any) -> Any:
        missing = [dispatch for dispatch in dispatches if not dispatch.called]
        if not missing:
            return None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        for dispatch in missing:
            hidden = hidden + dispatch.without_tokens(hidden).to(hidden.dtype)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    block.register_forward_pre_hook(begins)
    block.register_forward_hook(ends)


def _unsorted(sorted_experts: Tensor, order: Tensor, lengths: list[int]) -> Tensor:
    """Return `order` such that each rank's part, sorted once more by the same sort, is in the order that it has here.

    A sort that is not stable also moves what is sorted; which way depends on nothing but what it compares.
    """
    parts = []
    for experts, own in zip(torch.split(sorted_experts, lengths), torch.split(order, lengths), strict=True):
        part = torch.empty_like(own)
        part[torch.sort(experts)[1]] = own
        parts.append(part)
    return torch.cat(parts)


def _gradient_hook(take: Take, source: int) -> Callable[[Tensor], None]:
    def taken(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        take(source, grad)

    return taken
