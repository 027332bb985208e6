"""The documents of a packed micro-batch, for functions that mix tokens; and which forward's they are.

    positions   0 1 2 3 0 1 | 0 0 1 0 1 2       [B, T], here 2 x 6
    spans       (0, 0, 4) (0, 4, 6) | (1, 0, 1) (1, 1, 3) (1, 3, 6)      row, first token, end
    places      0 1 2 3 0 1 | 0 0 1 0 1 2       in the document, whatever positions begin with
    numbers     0 0 0 0 1 1 | 0 1 1 2 2 2       of a row's documents
    ends        0 4 6 7 9 12                    in one row of all

A function is shared by all models of a file, and a recomputed forward runs behind newer ones. So what is told belongs
to the forward: `during` says it inside, and recomputation says it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Span = tuple[int, int, int]
M_ROPE_ROWS = 4  # of the text, of time, of height, of width


class Documents:
    """Says where documents are in a micro-batch: known on the host, and where its positions are.

    spans      of all documents, row by row
    positions  [B, T] as the model was given them; those of text, where there are several rows
    """

    def __init__(self, spans: tuple[Span, ...], positions: Tensor) -> None:
        self.spans, self.positions = spans, positions

    @classmethod
    def of(cls, positions: Tensor) -> Documents | None:
        """Return those of positions [B, T], or [4, B, T] of M-RoPE models; None where every row is one document.

        One begins with each row, and where positions do not rise by one. Three rows of M-RoPE are of time and place,
        in which an image's tokens rise otherwise, and tell nothing. Reads the device.
        """
        positions = positions[0] if positions.dim() == 3 and len(positions) == M_ROPE_ROWS else positions
        if isinstance(positions, FakeTensor) or positions.dim() != 2:
            return None
        begins = (positions.diff() != 1).tolist()
        spans: list[Span] = []
        for row, found in enumerate(begins):
            starts = [0, *(place + 1 for place, is_begin in enumerate(found) if is_begin)]
            spans += zip([row] * len(starts), starts, [*starts[1:], positions.shape[1]], strict=True)
        return None if len(spans) == positions.shape[0] else cls(tuple(spans), positions)

    @classmethod
    def of_numbers(cls, numbers: Tensor) -> Documents | None:
        """Return those of numbers [B, T] that change where a document begins (`seq_idx`). Reads the device."""
        return cls._begun(numbers.diff() != 0)

    @classmethod
    def of_ends(cls, ends: Tensor, shape: tuple[int, int]) -> Documents | None:
        """Return those of where documents end in one row of all (`cu_seq_lens_q`), cut into `shape`. Reads the device.

        A document that goes on in the next row is two: rows do not see each other.
        """
        if isinstance(ends, FakeTensor):
            return None
        begins = torch.zeros(math.prod(shape), dtype=torch.bool, device=ends.device)
        begins[ends[(ends > 0) & (ends < len(begins))].long()] = True
        return cls._begun(begins.view(shape)[:, 1:])

    @classmethod
    def _begun(cls, begins: Tensor) -> Documents | None:
        """Return documents whose first tokens are marked in [B, T - 1], the first of each row left out."""
        first = torch.ones(len(begins), 1, dtype=torch.bool, device=begins.device)
        places = torch.arange(begins.shape[1] + 1, device=begins.device).expand(len(begins), -1)
        started = torch.where(torch.cat([first, begins], 1), places, 0).cummax(1).values
        return cls.of(places - started)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each."""
        rows, tokens = self.positions.shape
        return rows, tokens

    def to(self, positions: Tensor) -> Documents:
        """Return the same documents beside positions where a forward has them."""
        return Documents(self.spans, positions[0] if positions.dim() == 3 else positions)

    @cached_property
    def places(self) -> Tensor:
        """Return each token's place in its document, int32 [B, T]."""
        return (
            torch.cat([torch.arange(stop - start, dtype=torch.int32) for _, start, stop in self.spans])
            .view(self.shape)
            .to(self.positions.device)
        )

    @cached_property
    def numbers(self) -> Tensor:
        """Return which of its row's documents each token is of, int32 [B, T], as kernels' `seq_idx`."""
        begins = self.places == 0
        return (begins.cumsum(-1) - 1).to(torch.int32)

    def segments(self, row: int, tokens: range) -> list[range]:
        """Return the parts of a row's documents that are among these tokens, counted from the first of them."""
        spans = [(max(a, tokens.start), min(b, tokens.stop)) for where, a, b in self.spans if where == row]
        return [range(a - tokens.start, b - tokens.start) for a, b in spans if a < b]

    def begins_at(self, row: int, token: int) -> bool:
        """Return whether a document begins there."""
        return any(where == row and start == token for where, start, _ in self.spans)

    def within(self, tokens: range) -> Part:
        """Return what is known of some tokens of each row."""
        return Part(*(t[:, tokens.start : tokens.stop] for t in (self.places, self.numbers)))

    @cached_property
    def ends_on_host(self) -> Tensor:
        """Return where documents end in one row of all, and 0 before: int64 [documents + 1], on the CPU."""
        lengths = torch.tensor([0, *(stop - start for _, start, stop in self.spans)])
        return lengths.cumsum(0)

    @cached_property
    def ends(self) -> Tensor:
        """Return the same where positions are, as kernels' `cu_seqlens`. One tensor for all layers."""
        return self.ends_on_host.to(self.positions.device)


class Part(NamedTuple):
    """Places and numbers, as of `Documents`, of some tokens of each row."""

    places: Tensor
    numbers: Tensor


Inside = Callable[[Any, Documents | Part | None], Any]  # runs a call as if its tokens were all that there are
Shared = Callable[[str, Any, Documents | None, Inside], Any]  # runs a call, by a function's name, of some tokens of all


class Told(NamedTuple):
    """Says what functions that mix tokens must know of the forward that calls them.

    documents  of a packed micro-batch; None where every row is one document
    in_pieces  modules that fused kernels would go past, taking weights out of them, are to be called
    shared     runs calls where the forward has some of the tokens that the documents are of; None: it has all
    """

    documents: Documents | None = None
    in_pieces: bool = False
    shared: Shared | None = None

    def concerns(self, makes_masks: bool, fuses: bool) -> bool:
        """Return whether a function must not be called as it is: one that makes masks, that fuses a mixer, or mixes."""
        if self.documents is not None:
            return True
        return (self.shared is not None and not makes_masks) or (self.in_pieces and fuses)


class _Traced:
    """Holds the same for torch.compile, which guards attributes of an object and no context variable.

    Ranks that are threads share it: a graph for packed rows asks again where it is run.
    """

    told: Told | None = None


_told: ContextVar[Told | None] = ContextVar("told", default=None)
_traced = _Traced()


def told() -> Told | None:
    """Return what the forward under way was told; None outside of those that are told anything."""
    return _traced.told if torch.compiler.is_compiling() else _told.get()


@contextmanager
def during(what: Told | None) -> Iterator[None]:
    """Tell functions that mix tokens, inside."""
    token, before = _told.set(what), _traced.told
    _traced.told = what
    try:
        yield
    finally:
        _traced.told = before
        _told.reset(token)


def carried(function: Any) -> Any:
    """Return a function that is told whenever it is called what is told now, as a recomputed forward must be."""
    now = told()

    def call(*args: Any, **kwargs: Any) -> Any:
        with during(now):
            return function(*args, **kwargs)

    return call
