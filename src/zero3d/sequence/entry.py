"""The language model's entry: each rank of an sp group goes on with its rows of a micro-batch, and masks of the whole.

input_ids or inputs_embeds  [B, S, ..]      its rows; of a pipeline's later stages they are that already
position_ids                [.., S]         its rows of the whole's, which are made as the decoder makes them where
                                            none are given (positions.py)
attention_mask              [B, S] or None  masks of the whole, as Hugging Face makes them: 4-D, one for each kind of
                                            layer, or None where attention itself is causal; recurrences get its rows
masks of images' tokens [B, S, ..]          its rows, and of the features that blocks add there those of its rows
where documents end (cu_seq_lens_q, ..)     left out: masks tell them apart by positions, or, where they would be too
                                            large, ends that are found in these and handed on to flash attention
other tensors of length S                   refused by name
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d.errors import ConfigError
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.packed_documents import Shared, Told, during, told
from zero3d.models.packing import document_ends
from zero3d.models.placeholders import LENGTH
from zero3d.sequence.blocks import ENDS, FLEX, Fallback
from zero3d.sequence.positions import Positions
from zero3d.sequence.shares import POINTWISE, MaskTooLarge, Sharing, even_parts

CUT = {"input_ids": 1, "inputs_embeds": 1, **dict.fromkeys(TOLD_APART, 1), "position_ids": -1}
ADDED = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}  # DeepStack's, by mask
PASSED_ON = ("attention_mask", "labels", "shift_labels")  # masks of the whole, and what the loss cuts
SLIDING = ("create_sliding_window_causal_mask", "create_masks_for_generate")  # one is in a file that makes such masks
OF_DOCUMENTS = (ENDS, "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # of packed ones


class Entry:
    """Gives the language model this rank's rows, as a forward pre-hook with keywords.

    implementation  name of the model's own attention function, for which masks are made
    sharing         how sequences are shared out over the ranks, of which this is number `rank`
    fallback        what stands in where masks would be too large
    positions       makes those of a sequence that comes without
    tell            is told how long the sequences of a forward are, and whether attention must hear where documents end
    mix             makes what runs convolutions and recurrences over such sequences, until the decoder ends
    """

    def __init__(
        self,
        decoder: nn.Module,
        implementation: str,
        rank: int,
        sharing: Sharing,
        fallback: Fallback,
        positions: Positions,
        tell: Callable[[int, bool], None],
        mix: Callable[[int], Shared],
    ) -> None:
        self._signature = inspect.signature(decoder.forward)
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        self._passes_on = inspect.Parameter.VAR_KEYWORD in kinds
        self._implementation = implementation
        self._rank = rank
        self._sharing, self._fallback = sharing, fallback
        self._positions = positions
        self._attends = any("Attention" in type(module).__name__ for module in decoder.modules())
        self._tell, self._mix = tell, mix
        self._open: list[Any] = []
        self._told: int | None = None
        self.open = True  # False: sequences go through whole

    def hear(self, _: nn.Module, __: Any, kwargs: Mapping[str, Any]) -> None:
        """Note how long sequences are, as a pre-hook of a model that may not hand this on to its decoder."""
        self._told = kwargs.get(LENGTH)

    def __call__(self, decoder: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]] | None:
        """Return this rank's arguments. Raises ConfigError."""
        if not self.open:
            return None
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "kwargs"} | dict(bound.get("kwargs", {}))
        given = {name: value for name, value in given.items() if name not in OF_DOCUMENTS}
        whole = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if whole is None:
            raise ConfigError(
                "mesh.sp needs input_ids or inputs_embeds, as a keyword or as the first argument; the model was "
                "given neither."
            )
        length = given.pop(LENGTH, self._told or whole.shape[1])
        self._check(length, given)
        made = None
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(length, device=whole.device)[None]  # from which masks are made
            made = self._positions.of(given.get("input_ids"), given.get("attention_mask"), length, whole.device)
        given["attention_mask"], ends = self._masks(decoder, whole.shape[0], length, given)
        if made is not None:
            given["position_ids"] = made
        self._tell(length, ends is not None)
        rows = even_parts(length, self._sharing.ranks)[self._rank]
        for name, dim in CUT.items():
            if given.get(name) is not None and (given[name] is not whole or whole.shape[1] == length):
                given[name] = given[name].narrow(dim, rows.start, len(rows))
        given["attention_mask"] = _padding_in(rows, given["attention_mask"], length)
        for mask, features in ADDED.items():
            if given.get(mask) is not None and given.get(features) is not None:
                given[mask], given[features] = _added_in(rows, given[mask], given[features])
        for name, value in given.items():
            if name not in (*CUT, *ADDED, *PASSED_ON) and isinstance(value, Tensor) and length in value.shape[:2]:
                raise ConfigError(
                    f"the model is given {name}, one dimension of which is the length of the sequence, {length:,}, "
                    "and mesh.sp does not know how to split it. Leave it out, or type mesh.sp=1."
                )
        if "position_ids" not in self._signature.parameters:
            given.pop("position_ids")  # which nothing in it looks at
        options: dict[str, Any] = {LENGTH: length} if self._passes_on else {}
        if ends is not None:
            options[ENDS] = ends
        if "use_cache" in self._signature.parameters or self._passes_on:
            options["use_cache"] = False
        around = during((told() or Told())._replace(shared=self._mix(length)))
        around.__enter__()
        self._open.append(around)
        return (), given | options

    @property
    def inside(self) -> bool:
        """Return whether a decoder has its rows."""
        return bool(self._open)

    def leave(self, *_: Any) -> None:
        """Note that the decoder's forward has ended, as its forward hook."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _check(self, length: int, given: Mapping[str, Any]) -> None:
        ranks = self._sharing.ranks
        if length < ranks:
            raise ConfigError(
                f"a sequence of {length} tokens cannot be split into mesh.sp={ranks} parts: pass longer ones, or "
                "mesh.sp=1."
            )
        if given.get("past_key_values") is not None:
            raise ConfigError("mesh.sp splits whole sequences and cannot use past_key_values: leave them out.")

    def _masks(
        self, decoder: nn.Module, batch: int, length: int, given: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Return the masks of whole sequences, as the model's layers take them, or else where documents end.

        Padding has no documents: what stands in for its mask is in blocks.
        """
        from transformers.masking_utils import create_masks_for_generate

        mask = given.get("attention_mask")
        if not self._attends:
            return mask, None
        if isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.dim() == 4):
            return mask, None
        config: Any = copy.copy(decoder.config)
        config._attn_implementation_internal = self._implementation
        if (kinds := getattr(config, "layer_types", None)) and not set(POINTWISE).isdisjoint(kinds):
            config.layer_types = [kind for kind in kinds if kind not in POINTWISE]  # or no mask is made at all
        files = [vars(sys.modules[each.__module__]) for each in type(decoder).__mro__]
        if not kinds and not any(name in file for file in files for name in SLIDING):  # Moshi's is of its cache alone
            vars(config)["sliding_window"] = None  # past checks of what a config may hold
        config.is_causal = any(getattr(module, "is_causal", False) for module in decoder.modules())
        dtype = next(p.dtype for p in decoder.parameters() if p.is_floating_point())
        positions = _of_text(given["position_ids"])
        like = torch.empty(1, dtype=dtype, device=given["position_ids"].device).expand(batch, length, 1)
        own = getattr(decoder, "create_masks_for_generate", None)
        make = create_masks_for_generate if own is None else own
        no_cache = None  # by its place: transformers 5.23 calls it past_key_values, and 5.24 otherwise
        make = partial(make, config, like, mask, no_cache, position_ids=positions)
        try:
            with Within(self._sharing, length):
                made = make()
            if own is None and kinds and not isinstance(made, Mapping):
                raise ConfigError(
                    f"transformers makes no masks for layers of the kinds {', '.join(sorted(set(kinds)))}, and mesh.sp "
                    "needs those of whole sequences: type mesh.sp=1."
                )
            return made, None
        except MaskTooLarge as refused:
            name = self._fallback.choose(refused, self._passes_on and mask is None)
            config._attn_implementation_internal = name
            if name == FLEX:
                return make(), None
            whole = torch.arange(length, device=like.device)[None] if positions is None else positions
            return make(), document_ends(whole.expand(batch, -1))


def _padding_in(rows: range, masks: Any, length: int) -> Any:
    """Return masks with the rows of those of padding [B, S], which recurrences multiply their inputs by."""
    if isinstance(masks, Mapping):
        return {name: _padding_in(rows, mask, length) for name, mask in masks.items()}
    is_of_padding = isinstance(masks, Tensor) and masks.dim() == 2 and masks.shape[1] == length
    return masks[:, rows.start : rows.stop] if is_of_padding else masks


def _added_in(rows: range, mask: Tensor, features: Any) -> tuple[Tensor, Any]:
    """Return the rows of a mask of images' tokens, and which of their features are added in these.

    mask      [B, S] or [B, S, width]
    features  [tokens in the mask, width], several in a list or by block
    """
    tokens = mask if mask.dim() == 2 else mask[..., 0]
    within = torch.zeros_like(tokens)
    within[:, rows.start : rows.stop] = True
    own = within[tokens]
    cut = (
        {block: each[own] for block, each in features.items()}
        if isinstance(features, Mapping)
        else [each[own] for each in features]
    )
    return mask.narrow(1, rows.start, len(rows)), cut


class Within(TorchDispatchMode):
    """Refuses, inside, what would make a mask that takes more than it may, before it is made."""

    def __init__(self, sharing: Sharing, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sharing, self._length = sharing, length

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [t.shape for t in args if isinstance(t, Tensor)]
        with suppress(RuntimeError):  # of a function that broadcasts nothing
            shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
            elements = shape.numel()
            if elements >= self._length**2 and not func.is_view:
                self._sharing.check_mask(elements, 1, self._length)
        return func(*args, **(kwargs or {}))


def _of_text(positions: Tensor) -> Tensor | None:
    """Return the positions [B, S] from which packed documents are told: of M-RoPE's the first of four, if there."""
    if positions.dim() == 2:
        return positions
    return positions[0] if len(positions) == 4 else None
