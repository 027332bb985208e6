"""One pipeline stage's part of a causal language model, with the model's own forward and parameter names.

    model    embedding      block 0       block 1         block 2       block 3       norm, head
    part 0   embedding      block 0       block 1         SendingBlock  SkippedBlock  SkippedModule   -> hidden state
    part 1   SkippedModule  SkippedBlock  ReceivingBlock  block 2       block 3       norm, head      -> output

ReceivingBlock gives the part's first block exactly the hidden state that was received, so whatever the model does
before its blocks (positions, scaling, dropout) happens on the first part only. SendingBlock keeps what the last
block returned, so norm and head happen on the last part only. In between the model's own forward makes
masks and rotary embeddings, in every part from the same micro-batch: `layer_types[i]`, `layer_idx` and
packed documents are as in the full model, because the list of blocks keeps its length.

Router logits (mixtures of experts) travel as one more tensor, [layers so far, tokens, experts], and
the last part's model computes its auxiliary loss of all of them.
No torch.distributed here: part k is called on what part k-1 returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.chain import Chain, base_of, copy_with, find_chain
from zero3d.models.masking import forward_options, inner_model
from zero3d.models.placeholders import (
    ChunkDone,
    ChunkTensors,
    ReceivingBlock,
    SendingBlock,
    SkippedBlock,
    SkippedModule,
)
from zero3d.pipeline.balance import Weights, chain_costs, cut
from zero3d.pipeline.schedules import Schedule

OF_THE_HEAD = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")


class Tie(NamedTuple):
    """One parameter that two parts hold, each a copy under its own name; `name` is the full model's.

    Their gradients have to be summed, and the parameter counted once in the norm and in checkpoints.
    """

    name: str
    part: int
    other_name: str
    other_part: int


class PipelinePart(nn.Module):
    """What one part of a pipeline holds and runs of a model; `split` makes it.

    part, parts   which part of how many; `is_first`, `is_last`
    tied          ties of the whole model, on every part the same list
    width         of the hidden state

    Parameters keep the full model's names. Attributes it lacks (config, ...) are the model's.
    """

    def __init__(
        self, model: nn.Module, part: int, parts: int, tied: Sequence[Tie], tensors: ChunkTensors, width: int
    ) -> None:
        super().__init__()
        # The model's own dicts: one set of modules under two roots, so that names get no prefix.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["_model"] = model  # not registered as a child
        self.part, self.parts, self.tied, self.width, self._tensors = part, parts, list(tied), width, tensors
        if base_of(model) is not None and self.is_last:
            base_of(model).register_forward_hook(partial(_add_routed, tensors))
        self.train(model.training)

    @property
    def is_first(self) -> bool:
        return self.part == 0

    @property
    def is_last(self) -> bool:
        return self.part == self.parts - 1

    def __getattr__(self, name: str) -> Any:
        if name == "_model":  # asked for by copy before there is one
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._model, name)

    def forward(self, entering: Tensor, routed: Tensor | None = None, **batch: Any) -> Any:
        """Run this part.

        entering  token ids [batch, length] on the first part, else the hidden state [batch, length, hidden]
        routed    router logits [layers so far, tokens, experts] that the part before returned, if any
        batch     what the model's forward takes beside token ids (position_ids, attention_mask, labels, ...):
                  the same for all parts. There is never a cache.
        Returns what the full model returns on the last part, before it the hidden state, or (hidden
        state, router logits) where layers so far have routers and `output_router_logits` is on.
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
        if self.is_last:
            return model(**start, **batch | forward_options(model))
        batch = {key: value for key, value in batch.items() if key not in OF_THE_HEAD}
        output = base(**start, **batch | forward_options(base) | {"return_dict": True})
        routed = _joined(self._tensors.routed, getattr(output, "router_logits", None))
        return self._tensors.sent if routed is None else (self._tensors.sent, routed)

    def _run_plain(self, model: nn.Module, entering: Tensor, batch: dict[str, Any]) -> Any:
        ids = entering if self.is_first else torch.zeros(entering.shape[:-1], dtype=torch.long, device=entering.device)
        try:
            return model(ids, **batch)
        except ChunkDone:
            return self._tensors.sent


def model_of(module: nn.Module) -> nn.Module:
    """The model that a part is of, with its class and methods; any other module is its own."""
    model: nn.Module = vars(module).get("_model", module)
    return model


def split(model: nn.Module, counts: Sequence[int], part: int, blocks: str | None = None) -> PipelinePart:
    """Part number `part` of a model whose blocks are dealt out as `counts` says.

    counts   blocks of each part, such as [3, 2] (`balance` finds them)
    blocks   name of the list of blocks, such as "model.layers"; found if left out
    The model stays as it is and shares its tensors with the part, but for the later copies of tied
    parameters. Real or meta parameters; no weights are read. Recomputation and compilation of blocks
    may come before or after, the engine after.
    Errors: a model that is no chain, counts that are not its blocks (ConfigError).
    """
    chain = find_chain(model, blocks)
    _check(chain, counts, part)
    ties, own = _ties(model, chain, counts, part)
    tensors = ChunkTensors()
    replaced = _others(model, chain, counts, part, tensors) | own
    return PipelinePart(copy_with(model, replaced), part, len(counts), ties, tensors, chain.width)


def balance(
    model: nn.Module, stages: int, tokens: int, blocks: str | None = None, schedule: str | None = None
) -> list[int]:
    """How many blocks each part of `stages` pipeline stages should get, for micro-batches of `tokens`.

    `pipeline/balance.py` has the costs. Width and vocabulary are those of the largest embedding.
    Errors: a model that is no chain, fewer blocks than parts of this schedule (ConfigError).
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
    return cut(costs.blocks, stages * order.parts_per_rank, costs.before, costs.after)


def active_weights(block: nn.Module, config: Any) -> Weights:
    """A block's parameters; of fused experts [experts, ., .] a token meets `num_experts_per_tok`."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    met = getattr(config, "num_experts_per_tok", None)
    total = sum(p.numel() for p in block.parameters())
    if not experts or not met:
        return Weights(total)
    fused = sum(p.numel() for p in block.parameters() if p.dim() == 3 and p.shape[0] == experts)
    return Weights(total, total - fused + fused * met // experts)


def _check(chain: Chain, counts: Sequence[int], part: int) -> None:
    if sum(counts) != chain.length or min(counts) < 1:
        raise ConfigError(
            f"counts={list(counts)} must be whole numbers from 1 that sum to the {chain.length} blocks of "
            f"{chain.blocks}, and sum to {sum(counts)}: pass balance(model, {len(counts)}, tokens)."
        )
    if not 0 <= part < len(counts):
        raise ConfigError(f"part={part} is none of {len(counts)} parts: pass 0 to {len(counts) - 1}.")


def _part_of(name: str, chain: Chain, counts: Sequence[int]) -> int:
    """The part that a parameter of this name is on."""
    if name.startswith(chain.blocks + "."):
        index = int(name[len(chain.blocks) + 1 :].partition(".")[0])
        return next(part for part in range(len(counts)) if index < sum(counts[: part + 1]))
    return 0 if any(name.startswith(room + ".") for room in chain.before) else len(counts) - 1


def _ties(
    model: nn.Module, chain: Chain, counts: Sequence[int], part: int
) -> tuple[list[Tie], dict[nn.Module | Tensor, object]]:
    """Ties across parts, and the copies that `part` gets of parameters which another part owns."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, {}).setdefault(_part_of(name, chain, counts), name)
    ties: list[Tie] = []
    own: dict[nn.Module | Tensor, object] = {}
    for p, places in names.items():
        owner, *others = places
        ties += [Tie(places[owner], owner, places[other], other) for other in others]
        if part in others:
            own[p] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    return ties, own


def _others(
    model: nn.Module, chain: Chain, counts: Sequence[int], part: int, tensors: ChunkTensors
) -> dict[nn.Module | Tensor, object]:
    """What stands in the part where modules of other parts were."""
    first, stop, ends = sum(counts[:part]), sum(counts[: part + 1]), base_of(model) is None
    replaced: dict[nn.Module | Tensor, object] = {}
    for index, block in enumerate(model.get_submodule(chain.blocks).children()):
        if index == first - 1:
            replaced[block] = ReceivingBlock(block, chain.tuples, tensors)
        elif index == stop:
            replaced[block] = SendingBlock(block, chain.tuples, tensors, ends)
        elif not first <= index < stop:
            replaced[block] = SkippedBlock(block, chain.tuples, tensors)
    rooms = (chain.before if part > 0 else ()) + (chain.after if part < len(counts) - 1 else ())
    replaced |= {model.get_submodule(name): SkippedModule(model.get_submodule(name), tensors) for name in rooms}
    return replaced


def _joined(routed: Tensor | None, own: Sequence[Tensor] | None) -> Tensor | None:
    """Router logits of earlier parts and of this one, [layers, tokens, experts]."""
    stacks = [] if routed is None else [routed]
    stacks += [torch.stack(tuple(own))] if own else []
    return torch.cat(stacks) if stacks else None


def _add_routed(tensors: ChunkTensors, base: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the last part's base model: the head finds the router logits of all layers."""
    if tensors.routed is not None:
        output["router_logits"] = (*tensors.routed.unbind(), *(output.get("router_logits") or ()))
