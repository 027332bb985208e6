"""Sums of a shard over ranks with slow links between them: every rank's term travels in a narrow form, coded once.

    form      a term as it travels               the largest error of an element
    bf16      each element in bf16               2^-8 of it
    int8      blocks of 256 (block_codec.py)     1/254 of its block's largest magnitude; with noise 1/127
    int4      the same                           1/14; with noise 1/7

    ranks     what each gets                                     it sends, of n elements
    few       all terms                                          (R - 1) n in that form
    more      all terms of its part, then all summed parts       (R-1)/R n in that form, and (R-1)/R n of sums as they
                                                                 are

The choice between the two follows from the bytes alone (`block_bytes.all_get_terms`). Either way terms are decoded,
this rank's own too, and added up in the shard's dtype in rank order: the bits are the same on all ranks, and in both
ways. With noise a code is rounded up or down by chance, so that the mean of many is the term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero3d.distributed.axis import Call, Pending
from zero3d.distributed.block_bytes import BITS, NARROW, all_get_terms, coding_scratch
from zero3d.distributed.block_codec import BlockCodec
from zero3d.memory.arena import Arena


class Codec(Protocol):
    """Encodes terms and decodes them."""

    def message_bytes(self, elements: int) -> int:
        """Return the bytes of a message."""

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, noise: torch.Generator | None) -> None:
        """Write values [n] as a message."""

    def decode(self, messages: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Write the values of a message into `out` [n]."""


class Narrow:
    """Writes each element in bf16."""

    def message_bytes(self, elements: int) -> int:
        return elements * torch.bfloat16.itemsize

    def encode(self, values: Tensor, message: Tensor, scratch: Tensor, noise: torch.Generator | None) -> None:
        message.view(torch.bfloat16).copy_(values)

    def decode(self, messages: Tensor, out: Tensor, scratch: Tensor) -> None:
        out.copy_(messages.view(torch.bfloat16))


class Exchanges(Protocol):
    """Moves tensors between the ranks of an axis (`collectives.Algorithm`)."""

    def all_gather(self, call: Call, full: Tensor, shard: Tensor | None = None) -> Pending: ...

    def all_to_all(self, call: Call, full: Tensor, take: Callable[[list[Tensor]], object]) -> Pending: ...


class CodedSum(NamedTuple):
    """Sums a shard [n], in place, over `size` ranks of which this one is number `rank`."""

    form: str
    rank: int
    size: int
    exchanges: Exchanges
    arena: Arena

    @property
    def codec(self) -> Codec:
        """Return what codes terms."""
        return Narrow() if self.form == NARROW else BlockCodec(BITS[self.form])

    def start(self, call: Call, shard: Tensor, noise: torch.Generator | None) -> Pending:
        """Begin to send this rank's term; the sum is there when the result has been waited for."""
        gathers = all_get_terms(self.size, BITS[self.form])
        parts = [shard] if gathers else list(shard.view(self.size, -1))
        nbytes = self.codec.message_bytes(parts[0].numel())
        messages = self.arena.borrow("wire", self.size * nbytes, torch.uint8)
        rows = list(messages.view(self.size, -1))
        scratch = self._scratch(parts[0], 1 if noise is None else 2)
        for row, part in zip([rows[self.rank]] if gathers else rows, parts, strict=True):
            self.codec.encode(part, row, scratch, noise)
        self.arena.give_back("wire", scratch)
        if gathers:
            pending = self.exchanges.all_gather(call, messages)
        else:
            pending = self.exchanges.all_to_all(call, messages, lambda terms: self._add_up(terms, parts[self.rank]))

        def finish() -> None:
            pending.wait()
            if gathers:
                self._add_up(rows, shard)
            self.arena.give_back("wire", messages)
            if not gathers:
                self.exchanges.all_gather(call._replace(op="all_reduced"), shard).wait()

        return Pending(finish)

    def _add_up(self, terms: list[Tensor], out: Tensor) -> None:
        """Set out = ((t0 + t1) + t2) + ... of decoded terms."""
        scratch = self._scratch(out)
        self.codec.decode(terms[0], out, scratch)
        term = self.arena.borrow("wire", out.numel(), out.dtype)
        for message in terms[1:]:
            self.codec.decode(message, term, scratch)
            out.add_(term)
        self.arena.give_back("wire", term)
        self.arena.give_back("wire", scratch)

    def _scratch(self, values: Tensor, times: int = 1) -> Tensor:
        elements = times * coding_scratch(values.numel(), values.device.type)
        return self.arena.borrow("wire", elements, torch.float32)
