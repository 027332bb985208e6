"""What attends where a mask is too large to be made: kernels that are told where documents end, or ask a function.

    dense        batch x S x S bytes, made before a forward                  up to mesh.sp_mask_budget
    documents    where each ends, for flash attention, which knows           beyond, where such a kernel is there and
                 windows and causal rows, too                                computes what the model does
    blocks       a number for each block of 128 x 128 that is not empty,     else, where the device has such kernels
                 and a function of two places, for flex attention

Their bits are their own, at any sp: by heads each is computed as one rank would compute it with that kernel.

A flash kernel lets the last query of a document see its last key. So the documents of some rows of queries have keys
up to the last row, and what is behind it is a document of its own, without queries. Rows 2 to 4 of 8, in documents of
3, 3 and 2:

    0 1 2 | 3 4 5 | 6 7    keys end at 0 3 5 6 8, where 5 is the end of the rows
        2 | 3 4            queries at  0 1 3 3 3
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.sequence.shares import MaskTooLarge

FLEX = "flex_attention"  # transformers' name of the function, and of what makes its masks
FLASH = (("flash_attention_3", (9, 0), (10, 0)), ("flash_attention_2", (8, 0), (99, 0)))  # from a card up to below one
WINDOWS = ("full_attention", "sliding_attention")  # kinds of layers that flash kernels compute
LARGEST_HEAD = 256  # numbers of a head that they take
ENDS = "cu_seq_lens_q"  # transformers' name for where documents end
DENSE = "dense"


class Documents(NamedTuple):
    """Tells kernels without masks where documents end, with a 0 before the first: int32 [documents + 1].

    query, key  in the rows of a micro-batch's sequences, one behind the other
    longest     of queries, of keys: no document has more
    """

    query: Tensor
    key: Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, ends: Tensor, length: int) -> Documents:
        """Return those of whole sequences of `length`."""
        return cls(ends, ends, (length, length))

    def of_rows(self, rows: range, batch: int) -> Documents:
        """Return those whose queries are some rows of each of `batch` sequences, and their keys."""
        here, length = len(rows), self.longest[1]
        behind = torch.arange(batch, device=self.key.device, dtype=self.key.dtype) * length + rows.stop
        key = torch.cat([self.key, behind]).sort().values
        query = key // length * here + (key % length - rows.start).clamp(0, here)
        return Documents(query, key, (here, length))

    def options(self) -> dict[str, Any]:
        """Return what flash attention is called with, by transformers' names."""
        longest = dict(zip(("max_length_q", "max_length_k"), self.longest, strict=True))
        fixed = torch.are_deterministic_algorithms_enabled() or None  # None: as its environment says
        return {ENDS: self.query, "cu_seq_lens_k": self.key, "deterministic": fixed, **longest}


class Fallback:
    """Says what stands in for a decoder's own attention where a mask would be too large, and says once that it does.

    speaks  this rank tells people
    flash   name of the flash kernel that may, or None
    """

    def __init__(self, decoder: Any, device: torch.device, speaks: bool) -> None:
        self.flash = flash_kernel(decoder, device)
        self._why_not = why_not(decoder, device)
        self._silent: set[str | None] = set() if speaks else {FLEX, self.flash}

    def choose(self, refused: MaskTooLarge, documents: bool) -> str:
        """Return the name of what attends in the place of a dense mask. Raises MaskTooLarge.

        documents  where these end says all that the mask would, beside windows
        """
        if documents and self.flash is not None:
            self._say(refused, self.flash, f"{self.flash} is used instead, which is told where documents end")
            return self.flash
        if self._why_not is not None:
            raise MaskTooLarge(f"{refused} Flex attention, which needs no such mask, is not used: {self._why_not}.")
        self._say(refused, FLEX, "flex attention is used instead, with masks in blocks")
        return FLEX

    def describe(self, budget: int) -> str:
        """Return how masks of up to and beyond `budget` bytes are made, on which an accelerator's bits depend."""
        names = [*filter(None, [self.flash]), *([] if self._why_not else [FLEX])]
        return f"{' or '.join(names)} beyond {budget:,} B" if names else DENSE

    def _say(self, refused: MaskTooLarge, name: str, what: str) -> None:
        if name not in self._silent:
            self._silent.add(name)
            warnings.warn(
                f"{str(refused).partition(':')[0]}: {what}. Its results differ in their last bits.", stacklevel=3
            )


def why_not(decoder: Any, device: torch.device) -> str | None:
    """Return the reason why flex attention cannot replace a decoder's attention function, or None if it can."""
    if device.type == "cpu":
        return "torch has no backward of it for CPUs"
    if not getattr(decoder, "_supports_flex_attn", False):
        return f"{type(decoder).__name__} has none"
    if getattr(decoder.config.get_text_config(), "attention_dropout", 0):
        return "it has no dropout, and attention_dropout is not 0"
    return None


def flash_kernel(decoder: Any, device: torch.device) -> str | None:
    """Return the flash kernel that is installed and can replace a decoder's causal attention function, if there is one.

    Models whose heads have sinks name the kernels that know these.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or isinstance(torch.empty(0), FakeTensor):
        return None  # in a dry run documents have no ends
    text = decoder.config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = next((p.dtype for p in decoder.parameters() if p.is_floating_point()), None)
    causal = all(getattr(module, "is_causal", True) for module in decoder.modules())
    windows = set(getattr(text, "layer_types", None) or ()) <= set(WINDOWS)
    chunks = getattr(text, "attention_chunk_size", None) is not None
    if dtype not in (torch.bfloat16, torch.float16) or head > LARGEST_HEAD or not causal:
        return None
    if chunks or not windows or not getattr(decoder, "_supports_flash_attn", False):
        return None
    known, card = getattr(decoder, "_compatible_flash_implementations", None), torch.cuda.get_device_capability(device)
    fitting = [name for name, least, below in FLASH if least <= card < below and (known is None or name in known)]
    return next((name for name in fitting if _is_installed(name)), None)


def _is_installed(flash: str) -> bool:
    from transformers import utils

    number = flash.rpartition("_")[2]
    return bool(getattr(utils, f"is_flash_attn_{number}_available")())


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
