"""One model chunk of a causal language model, with the model's own forward and parameter names.

    model     embedding      block 0       block 1         block 2       block 3       norm, head
    chunk 0   embedding      block 0       block 1         SendingBlock  SkippedBlock  SkippedModule   -> hidden state
    chunk 1   SkippedModule  SkippedBlock  ReceivingBlock  block 2       block 3       norm, head      -> output

ReceivingBlock gives the chunk's first block exactly the hidden state that was received, so whatever the model does
before its blocks (positions, scaling, dropout) happens on the first chunk only. SendingBlock keeps what the last
block returned, so norm and head happen on the last chunk only. In between the model's own forward makes
masks and rotary embeddings, in every chunk from the same micro-batch: `layer_types[i]`, `layer_idx` and
packed documents are as in the full model, because the list of blocks keeps its length.

Where later chunks cannot make all of that, such as a vision-language model's positions, what the first one gave its
decoder comes with the hidden state (entry.py).

Router logits (mixtures of experts) travel as one more tensor, [layers so far, tokens, experts], and
the last chunk's model computes its auxiliary loss of all of them.
No torch.distributed here: chunk k is called on what chunk k-1 returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.distributed.axis import Axis
from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, language_model, sees_images
from zero3d.models.chain import Chain, find_chain, loose_parameter, refusal
from zero3d.models.copies import copy_with
from zero3d.models.images import is_for_towers, patches
from zero3d.models.packing import forward_options, inner_model, key_of
from zero3d.models.placeholders import (
    LENGTH,
    ChunkDone,
    ChunkTensors,
    ReceivingBlock,
    SendingBlock,
    SkippedBlock,
    SkippedModule,
)
from zero3d.pipeline.balance import BLIND, TOKENS, Tower, Weights, chain_costs, cut
from zero3d.pipeline.entry import EMBEDDINGS, MADE, Crossing, Entry, SentModule
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.stages_trial import NOTHING, find_entry
from zero3d.pipeline.ties import Tie, ties_and_copies

FINEST = 4  # blocks behind each of which a model is cut on trial, where nothing says where it will be
OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


_found: dict[object, tuple[Chain, Entry]] = {}  # of models that are alike there is one trial


class ModelChunk(nn.Module):
    """One chunk of a model: the modules that it holds, run by the model's own forward. `split` makes it.

    chunk, chunks   which chunk of how many; `is_first`, `is_last`
    tied            ties of the whole model, on every chunk the same list
    width           of the hidden state
    crossing        what goes in and out beside it; None where that is nothing

    Parameters keep the full model's names. Attributes it lacks (config, ...) are the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk: int,
        chunks: int,
        tied: Sequence[Tie],
        tensors: ChunkTensors,
        width: int,
        crossing: Crossing | None = None,
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
        self.crossing = crossing
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

    @property
    def whole(self) -> nn.Module:
        """Return the model with placeholders that the chunk runs."""
        model: nn.Module = self._model
        return model

    def forward(self, entering: Tensor, *more: Tensor, **batch: Any) -> Any:
        """Run this chunk.

        entering  token ids [batch, length] on the first chunk, else the hidden state [batch, length, hidden]
        more      what the chunk before returned behind it: router logits [layers so far, tokens, experts], if any; what
                  `crossing` takes
        batch     what the model's forward takes beside token ids (position_ids, attention_mask, labels, ...):
                  the same for all chunks. There is never a cache.
        Returns the full model's output on the last chunk. Before it, returns the hidden state, or a tuple of that,
        router logits if layers so far have routers and `output_router_logits` is on, and what `crossing` sends.
        """
        tensors, crossing, facts = self._tensors, self.crossing, None
        self._model.training = self.training
        given: dict[str, Any] = {}
        if crossing is not None and self.is_first:
            crossing.begin(batch)
        elif crossing is not None:
            routers, facts = len(more) - 1 - len(crossing.enters(self.chunk)), more[-1]
            entering, given = crossing.enter(entering, more[routers:-1], facts, self._whole_shape(entering, batch))
            more = more[:routers]
        tensors.received, tensors.routed = (None if self.is_first else entering), next(iter(more), None)
        try:
            output = self._run(entering, batch | given)
            if crossing is None or self.is_last:
                return output
            hidden, *routed = output if isinstance(output, tuple) else (output,)
            return (hidden, *routed, *crossing.leaving(hidden, self._whole_shape(hidden, batch), facts))
        finally:
            tensors.received = tensors.routed = tensors.sent = None
            if crossing is not None:
                crossing.forget()

    @staticmethod
    def _whole_shape(hidden: Tensor, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Return the shape of a micro-batch's token ids, of whose rows a hidden state may be a rank's share."""
        return hidden.shape[0], batch.get(LENGTH, hidden.shape[1])

    def _run(self, entering: Tensor, batch: dict[str, Any]) -> Any:
        model: Any = inner_model(self._model)
        base = base_of(model)
        if base is None:
            return self._run_plain(model, entering, batch)
        # The hidden state itself enters at the first block; here it tells shape, dtype and device.
        start = {"input_ids": entering} if self.is_first else {EMBEDDINGS: batch.pop(EMBEDDINGS, entering.detach())}
        if not self.is_first:
            batch = {key: value for key, value in batch.items() if not is_for_towers(key)}
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
    chain, entry = chain_of(model, blocks, counts)
    return _split(model, chain, entry, counts, chunk)


def chain_of(model: nn.Module, blocks: str | None, counts: Sequence[int] | None = None) -> tuple[Chain, Entry]:
    """Return the chain that a model is, and what later stages need beside the hidden state. Raises ConfigError.

    counts  blocks of each chunk; left out, those of a pipeline that is cut behind each of the first blocks
    """
    chain = find_chain(model, blocks)
    if counts is None:
        ones = min(chain.length - 1, FINEST)
        counts = [1] * ones + [chain.length - ones]
    _check(chain, counts, 0)
    return _entered(model, chain, counts)


def _entered(model: nn.Module, chain: Chain, counts: Sequence[int]) -> tuple[Chain, Entry]:
    """Return the chain and what later stages need beside the hidden state. Raises ConfigError.

    A vision-language model, and any whose later stages may miss something, is cut on trial: its stages must give what
    the whole does (stages_trial.py). A dry run, whose tensors have no values, takes what needs no trial.
    """
    if len(counts) == 1 or not (chain.doubt or chain.images):
        return chain, NOTHING
    for tie in ties_and_copies(model, chain, counts, 0)[0]:
        if all(name.startswith(f"{chain.blocks}.") for name in (tie.name, tie.other_name)):
            raise ConfigError(
                f"{refusal(model)}: {tie.name} is {tie.other_name}, too, and blocks of two stages would share it. "
                "Pass pp=1."
            )
    if not isinstance(torch.empty(0), FakeTensor):
        alike = key_of(inner_model(model))
        key = None if alike is None else (alike, replace(chain, images=None), tuple(counts))
        if key in _found:
            return _found[key]
        found = find_entry(model, chain, counts, partial(_split_on_trial, counts))
        if key is not None:
            _found[key] = found
        return found
    if chain.doubt:
        raise ConfigError(
            f"{refusal(model)} in a dry run, which cannot try what later stages are given: {chain.doubt}. Pass pp=1."
        )
    return chain, NOTHING


def _split_on_trial(counts: Sequence[int], model: nn.Module, chain: Chain, entry: Entry, chunk: int) -> ModelChunk:
    return _split(model, chain, entry, counts, chunk, ties=False)


def _split(
    model: nn.Module, chain: Chain, entry: Entry, counts: Sequence[int], chunk: int, ties: bool = True
) -> ModelChunk:
    _check(chain, counts, chunk)
    tied, copies = ties_and_copies(model, chain, counts, chunk) if ties else ([], {})
    tensors = ChunkTensors()
    crosses = bool(entry.leaves) and len(counts) > 1
    replaced = _placeholders(model, chain, counts, chunk, tensors, entry if crosses else None) | copies
    copy = copy_with(model, replaced)
    crossing = None
    if crosses:
        starts = [sum(counts[:number]) for number in range(len(counts))]
        crossing = Crossing(copy, entry, starts, chunk)
        for module in copy.modules():
            if isinstance(module, SentModule):
                module.crossing = crossing
        if chunk + 1 < len(counts):
            last = list(copy.get_submodule(chain.blocks).children())[starts[chunk + 1] - 1]
            last.register_forward_hook(partial(_keep_output, tensors))
    return ModelChunk(copy, chunk, len(counts), tied, tensors, chain.width, crossing)


def balance(
    model: nn.Module, stages: int, tokens: int, blocks: str | None = None, schedule: str | None = None
) -> list[int]:
    """Return how many blocks each chunk of `stages` pipeline stages should get, for micro-batches of `tokens`.

    `pipeline/balance.py` has the costs. Width and vocabulary are those of the largest embedding.
    Errors: a model that is no chain, fewer blocks than chunks of this schedule (ConfigError).
    """
    return _balanced(model, find_chain(model, blocks), stages, tokens, Schedule.of(schedule))


def _balanced(model: nn.Module, chain: Chain, stages: int, tokens: int, order: Schedule) -> list[int]:
    order.check_blocks(chain.length, stages, chain.blocks)
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    table = max(embeddings, key=lambda m: m.weight.numel(), default=None)
    vocab, hidden = (0, 0) if table is None else (table.num_embeddings, table.embedding_dim)
    before, after = (
        sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
        for names in (chain.before, chain.after)
    )
    before += sum(loose_parameter(model, name).numel() for name in chain.loose)
    weights = [
        active_weights(block, getattr(model, "config", None)) for block in model.get_submodule(chain.blocks).children()
    ]
    costs = chain_costs(before, weights, after, tokens, hidden, vocab, tower_of(model, chain.before))
    return cut(costs.blocks, stages * order.chunks_per_rank, costs.before, costs.after)


def tower_of(model: nn.Module, before: Sequence[str]) -> Tower:
    """Return the tower of a vision-language model, and the patches of one image. before: modules before its blocks."""
    if not sees_images(model):
        return BLIND
    text = language_model(model)
    outside = [model.get_submodule(name) for name in before if not name.startswith(f"{text}.")]
    return Tower(sum(p.numel() for module in outside for p in module.parameters()), patches(model))


def take_chunks(model: nn.Module, axis: Axis, schedule: Schedule, blocks: str | None) -> dict[int, nn.Module]:
    """Return this rank's chunks of the model by number; without pipeline the model itself."""
    if axis.size == 1:
        return {0: model}
    chain = find_chain(model, blocks)
    counts = _balanced(model, chain, axis.size, TOKENS, schedule)
    chain, entry = _entered(model, chain, counts)
    if schedule.splits_backward and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        warnings.warn(
            f"schedule {schedule.name!r} takes gradients of inputs and of each group of weights apart, and torch's "
            "checkpoint, which this model's gradient_checkpointing uses, runs a block's forward again for every one: "
            "right, but several times the compute. zero3d.activations.recompute(model, 'full') runs it again once.",
            stacklevel=6,
        )
    chunks = schedule.chunks_of(axis.rank, axis.size)
    return {chunk: _split(model, chain, entry, counts, chunk) for chunk in chunks}


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
    model: nn.Module, chain: Chain, counts: Sequence[int], chunk: int, tensors: ChunkTensors, entry: Entry | None
) -> dict[nn.Module | Tensor, object]:
    """Return the placeholders in this chunk for modules of other chunks, by the module; None for loose parameters.

    entry  what later chunks are given; with one, blocks are left at the output of the last, not the input of the next
    """
    first, stop, ends = sum(counts[:chunk]), sum(counts[: chunk + 1]), base_of(model) is None
    replaced: dict[nn.Module | Tensor, object] = {}
    for index, block in enumerate(model.get_submodule(chain.blocks).children()):
        if index == first - 1:
            replaced[block] = ReceivingBlock(block, chain.tuples, tensors)
        elif index == stop and entry is None:
            replaced[block] = SendingBlock(block, chain.tuples, tensors, ends)
        elif not first <= index < stop:
            replaced[block] = SkippedBlock(block, chain.tuples, tensors)
    outer_modules = (chain.before if chunk > 0 else ()) + (chain.after if chunk < len(counts) - 1 else ())
    sent = set() if entry is None else {leaf.name for leaf in entry.leaves if leaf.place[0] == MADE}
    for name in outer_modules:
        module = model.get_submodule(name)
        if name in sent and chunk > 0:
            replaced[module] = SentModule(module, name)
        else:
            replaced[module] = SkippedModule(module, tensors, projects=entry is not None and chunk > 0)
    loose = [loose_parameter(model, name) for name in chain.loose] if chunk > 0 else []
    return replaced | dict.fromkeys(loose)


def _keep_output(tensors: ChunkTensors, block: nn.Module, args: Any, output: Any) -> None:
    """Keep what is sent: a forward hook of a chunk's last block, where something may happen before the next."""
    tensors.sent = output[0] if isinstance(output, tuple) else output


def _join_routed(routed: Tensor | None, own: Sequence[Tensor] | None) -> Tensor | None:
    """Return router logits of earlier chunks and of this one, [layers, tokens, experts]."""
    stacks = [] if routed is None else [routed]
    stacks += [torch.stack(tuple(own))] if own else []
    return torch.cat(stacks) if stacks else None


def _add_routed(tensors: ChunkTensors, base: nn.Module, args: Any, output: Any) -> None:
    """Give the head the router logits of all layers: a forward hook of the last chunk's base model."""
    if tensors.routed is not None:
        output["router_logits"] = (*tensors.routed.unbind(), *(output.get("router_logits") or ()))
