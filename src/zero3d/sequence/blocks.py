"""Masks that are too large to be made: flex attention, which asks a function of two places about blocks of them.

    dense     batch x S x S bytes, made before a forward                     up to mesh.sp_mask_budget
    blocks    a number for each block of 128 x 128 that is not empty,        beyond, where the device has such kernels
              and the function, of which kernels make what they need

Its bits are its own, at any sp: by heads each is computed as one rank would compute it with flex attention.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from zero3d.sequence.shares import MaskTooLarge

FLEX = "flex_attention"  # transformers' name of the function, and of what makes its masks


class Blocks:
    """Says whether flex attention may stand in for a decoder's own attention, and says once that it does.

    speaks  this rank tells people
    """

    def __init__(self, decoder: Any, device: torch.device, speaks: bool) -> None:
        self._why_not = why_not(decoder, device)
        self._speaks = speaks

    def take(self, refused: MaskTooLarge) -> str:
        """Return the name of what makes masks in blocks, in the place of a dense one. Raises MaskTooLarge."""
        if self._why_not is not None:
            raise MaskTooLarge(f"{refused} Flex attention, which needs no such mask, is not used: {self._why_not}.")
        if self._speaks:
            self._speaks = False
            warnings.warn(
                f"{str(refused).partition(':')[0]}: flex attention is used instead, with masks in blocks. Its bits are "
                "its own.",
                stacklevel=2,
            )
        return FLEX


def why_not(decoder: Any, device: torch.device) -> str | None:
    """Return the reason why flex attention cannot replace a decoder's attention function, or None if it can."""
    if device.type == "cpu":
        return "torch has no backward of it for CPUs"
    if not getattr(decoder, "_supports_flex_attn", False):
        return f"{type(decoder).__name__} has none"
    if getattr(decoder.config.get_text_config(), "attention_dropout", 0):
        return "it has no dropout, and attention_dropout is not 0"
    return None


def rows_of(mask: Any, rows: range) -> Any:
    """Return the rows of a mask in blocks."""
    batch, _, _, length = mask.shape
    of_all = mask.mask_mod

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Any:
        return of_all(b, h, query + rows.start, key)

    return _made(seen, batch, rows, length, mask.kv_num_blocks.device)


def causal_rows(rows: range, length: int, device: torch.device) -> Any:
    """Return the rows of a causal mask, in blocks."""

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + rows.start >= key

    return _made(seen, None, rows, length, device)


def _made(seen: Any, batch: int | None, rows: range, length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    compiles = device.type != "cpu"  # else the whole mask would be made on the way
    return create_block_mask(seen, batch, None, len(rows), length, device, _compile=compiles)
