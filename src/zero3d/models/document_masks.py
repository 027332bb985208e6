"""Masks of packed rows whose images attend in both directions: a row's own, and only inside a document.

    tokens          a [A A] b | [B] c [C C]         documents of a row; those of an image in brackets see each other
    token types     0  1 1  0 |  1  0  1 1
    the row's own   causal, a window, and blocks    as if it were one document: the model's own mask function
    inside          and query and key in one        what this adds

The first is right inside of a document, since causality, windows and blocks depend on where tokens are relative to
each other. transformers (masking_utils, 5.16-5.24) gets such rows wrong where it combines blocks with positions that
start again: Gemma 3's sliding layers look up blocks at a place in the document as if it were a place in the row.
And a block may run on: into an image at the start of the next document, or, of PaliGemma's prefixes, into all others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOLD_APART = (
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
)  # what some models take to tell images' tokens from others
MADE = ("eager", "sdpa")  # attention that takes masks as tensors
TAKES_SEVERAL = "attention_mask, dict)"  # in the source of a forward that takes a mask for each kind of layer


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return names of the token types by which a Hugging Face model makes blocks in masks of its own; else none."""
    make: Any = getattr(model, "create_masks_for_generate", None)
    takes = inspect.signature(make).parameters if make is not None else {}
    return tuple(name for name in TOLD_APART if name in takes)


class DocumentMasks:
    """Gives a forward the masks of packed rows whose token types are told.

    make    the model's own mask function
    kinds   names of token types that it takes
    several whether the forward takes a mask for each kind of layer
    config  of the text model, with the attention that the model has now
    """

    def __init__(
        self, make: Callable[..., Any], kinds: tuple[str, ...], several: bool, config: Any, dtype: torch.dtype
    ) -> None:
        self._make, self._kinds = make, kinds
        self._several = several
        self._config, self._dtype = config, dtype

    @classmethod
    def of(cls, model: nn.Module) -> DocumentMasks | None:
        """Return the masks of a Hugging Face model that has blocks; None for any other, and where kernels take none.

        model  without a wrapper of adapters
        """
        kinds = blocks_of(model)
        if not kinds:
            return None
        text: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        if text._attn_implementation not in MADE:
            return None
        make: Any = model.create_masks_for_generate
        config = copy.copy(text)  # in the model's own, sequence parallelism sets another attention
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        base: Any = model.base_model
        return cls(make, kinds, TAKES_SEVERAL in _source(base.forward), config, dtype)

    def of_documents(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what a forward is given, with masks where it has positions, token types, and no mask.

        position_ids  [B, L], or [4, B, L] whose first row is that of the text: a document begins where they do not rise
                      by one
        """
        positions = batch.get("position_ids")
        kinds = {name: batch[name] for name in self._kinds if isinstance(batch.get(name), Tensor)}
        if not isinstance(positions, Tensor) or not kinds or batch.get("attention_mask") is not None:
            return batch
        ids: Tensor = batch["input_ids"]
        text = (positions[0] if positions.dim() == 3 else positions).expand(ids.shape)
        number = torch.nn.functional.pad(text.diff() != 1, (1, 0)).cumsum(-1)
        same = (number[:, :, None] == number[:, None, :])[:, None]  # [B, 1, L, L]
        made = self._of_row(ids, kinds)
        if not isinstance(made, Mapping):
            return batch | {"attention_mask": _inside(made, same)}
        if not self._several:
            return batch
        return batch | {"attention_mask": {name: _inside(mask, same) for name, mask in made.items()}}

    def _of_row(self, ids: Tensor, kinds: Mapping[str, Tensor]) -> Any:
        """Return the masks of rows [B, L] of one document each."""
        like = torch.empty(1, dtype=self._dtype, device=ids.device).expand(*ids.shape, 1)
        no_mask = no_cache = None  # by their places: transformers 5.23 calls the cache otherwise than 5.24
        return self._make(self._config, like, no_mask, no_cache, position_ids=None, **kinds)


def _inside(mask: Tensor | None, same: Tensor) -> Tensor:
    """Return a mask [B, 1, L, L], of what is seen or to be added, inside documents; None is causal."""
    if mask is None:
        return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
