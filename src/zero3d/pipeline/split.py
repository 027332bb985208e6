"""One model chunk of a causal language model, with the model's own forward and parameter names.

    model     embedding      block 0       block 1         block 2       block 3       norm, head
    chunk 0   embedding      block 0       block 1         SendingBlock  SkippedBlock  SkippedModule   -> hidden state
    chunk 1   SkippedModule  SkippedBlock  ReceivingBlock  block 2       block 3       norm, head      -> output

ReceivingBlock gives the chunk's first block exactly the hidden state that was received, so whatever the model does
before its blocks (positions, scaling, dropout) happens on the first chunk only. SendingBlock keeps what the last
block returned, so norm and head happen on the last chunk only. In between the model's own forward makes
masks and rotary embeddings, in every chunk from the same micro-batch: `layer_types[i]`, `layer_idx` and
packed documents are as in the full model, because the list of blocks keeps its length.

Router logits (mixtures of experts) travel as one more tensor, [layers so far, tokens, experts], and
the last chunk's model computes its auxiliary loss of all of them.
No torch.distributed here: chunk k is called on what chunk k-1 returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.distributed.axis import Axis
from zero3d.errors import ConfigError
from zero3d.models.bases import base_of
from zero3d.models.chain import Chain, find_chain
from zero3d.models.copies import copy_with
from zero3d.models.images import INPUTS
from zero3d.models.packing import forward_options, inner_model
from zero3d.models.placeholders import (
    ChunkDone,
    ChunkTensors,
    ReceivingBlock,
    SendingBlock,
    SkippedBlock,
    SkippedModule,
)
from zero3d.pipeline.balance import TOKENS, Weights, chain_costs, cut
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.ties import Tie, ties_and_copies

OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


class ModelChunk(nn.Module):
    """One chunk of a model: the modules that it holds, run by the model's own forward. `split` makes it.

    chunk, chunks   which chunk of how many; `is_first`, `is_last`
    tied            ties of the whole model, on every chunk the same list
    width           of the hidden state

    Parameters keep the full model's names. Attributes it lacks (config, ...) are the model's.
    """

    def __init__(
        self, model: nn.Module, chunk: int, chunks: int, tied: Sequence[Tie], tensors: ChunkTensors, width: int
    ) -> None:
        super().__init__()
        # The model's own dicts: one set of modules under two roots, so that names get no prefix.
        self._modules = model._modules
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["_model"] = model  # not registered as a child
        self.chunk = chunk
        self.chunks = chunks
        self.tied = list(tied)
        self.width = width
        self._tensors = tensors
        if base_of(model) is not None and self.is_last:
            base_of(model).register_forward_hook(partial(_add_routed, tensors))
        self.train(model.training)

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.chunk == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns what the model returns."""
        return self.chunk == self.chunks - 1

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # asked for by copy before there is one
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._model, name)

    def forward(self, entering: Tensor, routed: Tensor | None = None, **batch: Any) -> Any:
        """Run this chunk.

        entering  token ids [batch, length] on the first chunk, else the hidden state [batch, length, hidden]
        routed    router logits [layers so far, tokens, experts] that the chunk before returned, if any
        batch     what the model's forward takes beside token ids (position_ids, attention_mask, labels, ...):
                  the same for all chunks. There is never a cache.
        Returns the full model's output on the last chunk. Before it, returns the hidden state, or (hidden state, router
        logits) if layers so far have routers and `output_router_logits` is on.
        """
        tensors = self._tensors
        self._model.training = self.training
        tensors.received, tensors.routed = (None if self.is_first else entering), routed
        try:
            return self._run(entering, batch)
        finally:
            tensors.received = tensors.routed = tensors.sent = None

    def _run(self, entering: Tensor, batch: dict[str, Any]) -> Any:
        model: Any = inner_model(self._model)
        base = base_of(model)
        if base is None:
            return self._run_plain(model, entering, batch)
        # The hidden state itself enters at the first block; here it tells shape, dtype and device.
        start = {"input_ids": entering} if self.is_first else {"inputs_embeds": entering.detach()}
        if not self.is_first:
            batch = {key: value for key, value in batch.items() if key not in INPUTS}
        if self.is_last:
            return model(**start, **batch | forward_options(model))
        batch = {key: value for key, value in batch.items() if key not in OF_THE_HEAD}
        output = base(**start, **batch | forward_options(base) | {"return_dict": True})
        routed = _join_routed(self._tensors.routed, getattr(output, "router_logits", None))
        return self._tensors.sent if routed is None else (self._tensors.sent, routed)

    def _run_plain(self, model: nn.Module, entering: Tensor, batch: dict[str, Any]) -> Any:
        ids = entering if self.is_first else torch.zeros(entering.shape[:-1], dtype=torch.long, device=entering.device)
        try:
            return model(ids, **batch)
        except ChunkDone:
            return self._tensors.sent


def split(model: nn.Module, counts: Sequence[int], chunk: int, blocks: str | None = None) -> ModelChunk:
    """Return chunk number `chunk` of a model whose blocks are dealt out as `counts` says.

    counts   blocks of each chunk, such as [3, 2] (`balance` finds them)
    blocks   name of the list of blocks, such as "model.layers"; found if left out
    The model stays as it is and shares its tensors with the chunk, but for the later copies of tied
    parameters. Real or meta parameters; no weights are read. Recomputation and compilation of blocks
    may come before or after, the engine after.
    Errors: a model that is no chain, counts that are not its blocks (ConfigError).
    """
    chain = find_chain(model, blocks)
    _check(chain, counts, chunk)
    ties, copies = ties_and_copies(model, chain, counts, chunk)
    tensors = ChunkTensors()
    replaced = _placeholders(model, chain, counts, chunk, tensors) | copies
    return ModelChunk(copy_with(model, replaced), chunk, len(counts), ties, tensors, chain.width)


def balance(
    model: nn.Module, stages: int, tokens: int, blocks: str | None = None, schedule: str | None = None
) -> list[int]:
    """Return how many blocks each chunk of `stages` pipeline stages should get, for micro-batches of `tokens`.

    `pipeline/balance.py` has the costs. Width and vocabulary are those of the largest embedding.
    Errors: a model that is no chain, fewer blocks than chunks of this schedule (ConfigError).
    """
    chain = find_chain(model, blocks)
    order = Schedule.of(schedule)
    order.check_blocks(chain.length, stages, chain.blocks)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    table = max(embeddings, key=lambda m: m.weight.numel(), default=None)
    vocab, hidden = (0, 0) if table is None else (table.num_embeddings, table.embedding_dim)
    before, after = (
        sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
        for names in (chain.before, chain.after)
    )
    weights = [
        active_weights(block, getattr(model, "config", None)) for block in model.get_submodule(chain.blocks).children()
    ]
    costs = chain_costs(before, weights, after, tokens, hidden, vocab)
    return cut(costs.blocks, stages * order.chunks_per_rank, costs.before, costs.after)


def take_chunks(model: nn.Module, axis: Axis, schedule: Schedule, blocks: str | None) -> dict[int, nn.Module]:
    """Return this rank's chunks of the model by number; without pipeline the model itself."""
    if axis.size == 1:
        return {0: model}
    counts = balance(model, axis.size, TOKENS, blocks, schedule.name)
    if schedule.splits_backward and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        warnings.warn(
            f"schedule {schedule.name!r} takes gradients of inputs and of each group of weights apart, and torch's "
            "checkpoint, which this model's gradient_checkpointing uses, runs a block's forward again for every one: "
            "right, but several times the compute. zero3d.activations.recompute(model, 'full') runs it again once.",
            stacklevel=6,
        )
    return {chunk: split(model, counts, chunk, blocks) for chunk in schedule.chunks_of(axis.rank, axis.size)}


def active_weights(block: nn.Module, config: Any) -> Weights:
    """Return numbers of a block's parameters: all, and the ones that a token meets (`num_experts_per_tok` experts)."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    met = getattr(config, "num_experts_per_tok", None)
    total = sum(p.numel() for p in block.parameters())
    if not experts or not met:
        return Weights(total)
    fused = sum(p.numel() for p in block.parameters() if p.dim() == 3 and p.shape[0] == experts)
    return Weights(total, total - fused + fused * met // experts)


def _check(chain: Chain, counts: Sequence[int], chunk: int) -> None:
    """Raise ConfigError where `counts` do not deal out all blocks, or there is no such chunk."""
    if sum(counts) != chain.length or min(counts) < 1:
        raise ConfigError(
            f"counts={list(counts)} must be whole numbers from 1 that sum to the {chain.length} blocks of "
            f"{chain.blocks}, and sum to {sum(counts)}: pass balance(model, {len(counts)}, tokens)."
        )
    if not 0 <= chunk < len(counts):
        raise ConfigError(f"chunk={chunk} is none of {len(counts)} chunks: pass 0 to {len(counts) - 1}.")


def _placeholders(
    model: nn.Module, chain: Chain, counts: Sequence[int], chunk: int, tensors: ChunkTensors
) -> dict[nn.Module | Tensor, object]:
    """Return the placeholders in this chunk for modules of other chunks, by the module."""
    first, stop, ends = sum(counts[:chunk]), sum(counts[: chunk + 1]), base_of(model) is None
    replaced: dict[nn.Module | Tensor, object] = {}
    for index, block in enumerate(model.get_submodule(chain.blocks).children()):
        if index == first - 1:
            replaced[block] = ReceivingBlock(block, chain.tuples, tensors)
        elif index == stop:
            replaced[block] = SendingBlock(block, chain.tuples, tensors, ends)
        elif not first <= index < stop:
            replaced[block] = SkippedBlock(block, chain.tuples, tensors)
    outer_modules = (chain.before if chunk > 0 else ()) + (chain.after if chunk < len(counts) - 1 else ())
    replaced |= {model.get_submodule(name): SkippedModule(model.get_submodule(name), tensors) for name in outer_modules}
    return replaced


def _join_routed(routed: Tensor | None, own: Sequence[Tensor] | None) -> Tensor | None:
    """Return router logits of earlier chunks and of this one, [layers, tokens, experts]."""
    stacks = [] if routed is None else [routed]
    stacks += [torch.stack(tuple(own))] if own else []
    return torch.cat(stacks) if stacks else None


def _add_routed(tensors: ChunkTensors, base: nn.Module, args: Any, output: Any) -> None:
    """Give the head the router logits of all layers: a forward hook of the last chunk's base model."""
    if tensors.routed is not None:
        output["router_logits"] = (*tensors.routed.unbind(), *(output.get("router_logits") or ()))
