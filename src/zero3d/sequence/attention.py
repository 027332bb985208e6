"""Attention over sequences that ranks share out, by the model's own attention function.

Hugging Face calls what `ALL_ATTENTION_FUNCTIONS` has under the name in the configuration:

    function(module, query, key, value, mask, **options) -> (output [B, S, H, D], weights)
    query        [B, H, S, D]      key, value  [B, K, S, D]      mask  [B or 1, H or 1, S, S], None, or what stands in
                                                                       for one that is too large (blocks.py)

The one in its place is given this rank's rows, and has two ways:

    heads    exchange them for whole sequences of this rank's heads, call the original with a stand-in for the module
             that has as many, exchange its output back
    gather   gather the keys and values of whole sequences, call the original with this rank's rows of queries
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.sequence.blocks import ENDS, FLEX, Documents, Fallback, causal_rows, rows_of
from zero3d.sequence.exchange import gather_rows, to_heads, to_rows
from zero3d.sequence.shares import Attended, Heads, MaskTooLarge, Sharing, even_parts

Function = Callable[..., tuple[Tensor, Any]]

PER_HEAD = ("s_aux", "sinks")  # of a module or an option: [H]


class SharedAttention:
    """Calls a model's attention function for sequences that the ranks of a group share out.

    original  the function that the model would have called; `additive`: it adds masks instead of selecting by them
    comm      the sp group
    shares    how it is shared out
    fallback  what attends where a mask would be too large
    names     of the modules that attend, in the ledger
    calls     by name: how often alike ones were forward, and backward
    length    of the sequences that entered the model last, for attentions that are not told
    """

    def __init__(
        self,
        original: Function,
        additive: bool,
        comm: Comm,
        shares: Sharing,
        fallback: Fallback,
        names: Mapping[nn.Module, str],
    ) -> None:
        self._original, self._additive = original, additive
        self._comm, self._shares = comm, shares
        self._fallback = fallback
        self._blocked = WeakKeyDictionary[Any, Any]()  # rows of masks in blocks
        self._causal: dict[int, Any] = {}  # by length of the sequence
        self._names = WeakKeyDictionary(names)
        self.calls: dict[str, Counter[tuple[Attended, bool]]] = defaultdict(Counter)
        self.length, self._by_documents = 0, False

    def tell(self, length: int, by_documents: bool) -> None:
        """Hear how long the sequences are that enter the model, and whether it hands on where their documents end."""
        self.length, self._by_documents = length, by_documents

    @_disable_dynamo
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sequence_length: int = 0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return this rank's rows of the output, [B, rows, H, D].

        sequence_length  of the whole, where the model hands its entry's further options on to its attention; recomputed
                         forwards are given it again

        Moves what `Attended.sent` says. Compiled blocks call it between two graphs.
        """
        comm, name, mask = self._comm, self._names.get(module, type(module).__name__), attention_mask
        ends = options.pop(ENDS, None)
        _check(name, query, key, options)
        length = sequence_length or self.length
        rows = even_parts(length, comm.size)
        if query.shape[2] != len(rows[comm.rank]):
            raise ConfigError(
                f"{name} attends over {query.shape[2]:,} rows, but this rank has {len(rows[comm.rank]):,} of a "
                f"sequence of {length:,}: use one length at a time, or type mesh.sp=1."
            )
        if mask is not None:
            _check_mask(name, mask, length)
        seen: Any = mask if ends is None else Documents.of(ends, length)
        if seen is None and self._by_documents and not sequence_length:
            raise ConfigError(
                f"{name} cannot be told where documents end, because its model passes no extra options to its "
                "attention, and the mask that would tell it is larger than mesh.sp_mask_budget: raise that, or type "
                "mesh.sp=1."
            )
        by_heads = self._shares.by_heads(query.shape[1], key.shape[1])
        if by_heads:
            heads = Heads.of(query.shape[1], key.shape[1], comm.size, self._shares.repeats)
            key, value = (_repeated(t, heads.repeat) for t in (key, value))
        trained = (query.requires_grad, key.requires_grad, value.requires_grad)
        shapes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        call = Attended(len(query), length, *shapes, query.element_size(), trained, by_heads)
        self.calls[name][call, False] += 1
        if by_heads:
            output = self._by_heads(module, (query, key, value), seen, options, (rows, heads), name)
        else:
            output = self._by_rows(module, (query, key, value), seen, options, rows, name)
        hooked = output if by_heads else key
        if hooked.requires_grad:
            hooked.register_hook(partial(self._note_backward, name, call))  # type: ignore[no-untyped-call]
        return output, None

    def _by_heads(
        self,
        module: nn.Module,
        qkv: Sequence[Tensor],
        mask: Any,
        options: Mapping[str, Any],
        parts: tuple[Sequence[range], Heads],
        name: str,
    ) -> Tensor:
        """Attend over whole sequences with this rank's heads."""
        comm, (rows, heads) = self._comm, parts
        query = to_heads(qkv[0], rows, heads.query, comm, name)
        key, value = (to_heads(t, rows, heads.key, comm, name) for t in qkv[1:])
        own = heads.query[comm.rank]
        given = dict(options) | {option: _own(t, own, 0) for option, t in options.items() if option in PER_HEAD}
        if "position_bias" in given:
            given["position_bias"] = _own(given["position_bias"], own, 1)
        stand_in = StandIn(module, own, query.shape[1] // key.shape[1])
        if not isinstance(mask, Documents):
            mask = _own(mask, own, 1)
        output = self._attend(stand_in, (query, key, value), mask, given)
        return to_rows(output, rows, heads.query, comm, name)

    def _by_rows(
        self,
        module: nn.Module,
        qkv: Sequence[Tensor],
        mask: Any,
        options: Mapping[str, Any],
        rows: Sequence[range],
        name: str,
    ) -> Tensor:
        """Attend with all heads from this rank's rows to whole sequences of keys and values."""
        query, length, own = qkv[0], rows[-1].stop, rows[self._comm.rank]
        key, value = (gather_rows(t, rows, self._comm, name) for t in qkv[1:])
        here, given = len(own), dict(options)
        if mask is None and _is_causal(module, options):
            mask = self._causal_mask(own, length, query)
        elif isinstance(mask, Documents):
            mask = mask.of_rows(own, len(query))
        elif is_blocked(mask):
            mask = self._rows_of(mask, own)
        elif mask is not None and mask.shape[-2] == length:
            mask = mask[..., own.start : own.stop, :]
        pads = query.device.type == "cpu" and (mask is None or isinstance(mask, Tensor))
        more = _rows_like_whole(here, length) - here if pads else 0
        bias = given.get("position_bias")
        if bias is not None and bias.shape[2] == length:
            given["position_bias"] = F.pad(bias[:, :, own.start : own.stop], (0, 0, 0, more))
        if more and mask is not None and mask.shape[-2] == here:
            mask = F.pad(mask, (0, 0, 0, more), value=not self._additive)
        attends: Any = module
        if isinstance(mask, Documents):
            attends = StandIn(module, range(query.shape[1]), query.shape[1] // key.shape[1])
        return self._attend(attends, (F.pad(query, (0, 0, 0, more)), key, value), mask, given)[:, :here]

    def _attend(self, module: Any, qkv: Sequence[Tensor], mask: Any, options: Mapping[str, Any]) -> Tensor:
        """Attend by the function for such a mask."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function, given = self._original, dict(options)
        if isinstance(mask, Documents):
            assert self._fallback.flash is not None, "it was taken"
            module.implementation = self._fallback.flash
            function, given, mask = ALL_ATTENTION_FUNCTIONS[module.implementation], given | mask.options(), None
        elif is_blocked(mask):
            function = ALL_ATTENTION_FUNCTIONS[FLEX]
        output, _ = function(module, *qkv, mask, **given)
        return output

    def _causal_mask(self, rows: range, length: int, query: Tensor) -> Any:
        """Return the rows of a causal mask, or what stands in for one that would be too large. Raises ConfigError."""
        try:
            self._shares.check_mask(len(rows) * length, query.element_size() if self._additive else 1, length)
        except MaskTooLarge as refused:
            if self._fallback.choose(refused, documents=True) != FLEX:
                ends = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device) * length
                return Documents.of(ends, length).of_rows(rows, len(query))
            if length not in self._causal:
                self._causal = {length: causal_rows(rows, length, query.device)}
            return self._causal[length]
        return _causal_rows(rows, length, query, self._additive)

    def _rows_of(self, mask: Any, rows: range) -> Any:
        """Return the rows of a mask in blocks, which all layers of its kind are given."""
        if mask not in self._blocked:
            self._blocked[mask] = rows_of(mask, rows)
        return self._blocked[mask]

    def _note_backward(self, name: str, call: Attended, _: Tensor) -> None:
        self.calls[name][call, True] += 1


class StandIn:
    """Stands for an attention module that has some of its heads alone: what is per head, and how many share a key.

    implementation  of attention, which its configuration names then; None: the one that it has
    """

    implementation: str | None = None

    def __init__(self, module: nn.Module, heads: range, groups: int) -> None:
        self._module, self._heads = module, heads
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "config" and self.implementation is not None:
            value = copy.copy(value)
            value._attn_implementation_internal = self.implementation
        return _own(value, self._heads, 0) if name in PER_HEAD else value


def is_blocked(mask: Any) -> bool:
    """Return whether a mask is in blocks."""
    return mask is not None and not isinstance(mask, (Tensor, Documents))


def _rows_like_whole(here: int, whole: int) -> int:
    """Return how many rows of queries torch's CPU kernel has to be given to cut them as it cuts whole sequences.

    It takes them in blocks of 32, from 192 on of 64, from 768 on of 256 (torch 2.13, FlashAttentionKernel.cpp), and a
    row's bits depend on how large its block is. Measured with 2 and 4 ranks of 16 rows and more and heads of 8 to 128,
    all rows then are those of the whole, unless that has less than 4 in its last block.
    """
    blocks = max(here, next((least for least in (768, 192) if whole >= least), 0))
    return -(-blocks // 32) * 32


def _is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    asked = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _causal_rows(rows: range, length: int, query: Tensor, additive: bool) -> Tensor:
    """Return the rows [1, 1, rows, S] of a causal mask."""
    places = torch.arange(length, device=query.device)
    seen = places[rows.start : rows.stop, None] >= places
    if additive:
        seen = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~seen, torch.finfo(query.dtype).min
        )
    return seen[None, None]


def _repeated(per_key: Tensor, times: int) -> Tensor:
    """Return [B, K times, S, D] of [B, K, S, D]: each head as often, one behind the other."""
    batch, keys, rows, width = per_key.shape
    return per_key[:, :, None].expand(batch, keys, times, rows, width).reshape(batch, keys * times, rows, width)


def _own(per_head: Tensor | None, heads: range, dim: int) -> Any:
    """Return what is of these heads; what has one entry is of all."""
    if per_head is None or per_head.shape[dim] == 1:
        return per_head
    return per_head.narrow(dim, heads.start, len(heads))


def _check(name: str, query: Tensor, key: Tensor, options: Any) -> None:
    if options.get("output_attentions"):
        raise ConfigError(
            "output_attentions returns the attention weights of all heads, but with mesh.sp each rank has only some "
            "of them: leave it out, or type mesh.sp=1."
        )
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{name} attends from {query.shape[2]} rows to {key.shape[2]} of another sequence (a cache, or "
            "cross-attention); mesh.sp is for self-attention only. Type mesh.sp=1."
        )
    known = (*PER_HEAD, "position_bias", "position_ids")
    for option, value in options.items():
        per_head = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == query.shape[1]
        if per_head and option not in known:
            raise ConfigError(
                f"{name} passes {option}, whose second dimension is the number of heads, {query.shape[1]}, to its "
                "attention, but mesh.sp does not know how to split it over heads. Type mesh.sp=1."
            )


def _check_mask(name: str, mask: Tensor, length: int) -> None:
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise ConfigError(
            f"{name} built its own mask of {mask.shape[-2]} x {mask.shape[-1]}, for this rank's part of a sequence of "
            f"{length:,}, and ignores the one for the whole sequence that mesh.sp passes in. Type mesh.sp=1."
        )
