"""Scans whose states pass from rank to rank, in the place of heads: what is sent does not grow with the sequence.

A state is multiplied and added to by each token, so over a rank's rows, too: S -> M S + b. Each rank computes its own M
and b, all ranks behind it get them, and one scan more begins with the state that the ranks before it come to.

    rank 0  |  b0        rank 1  |  M1, b1        rank 2  |  M2, b2
    S = 0                S = b0                   S = M1 b0 + b1

Of packed documents they are those of the one that goes on at the rank's right end: M is 0 where a document begins on
the rank, and the state that came is that of the first one alone, unless one begins at the cut. Documents with as many
chunks are scanned at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zero3d.distributed.collectives import Comm
from zero3d.models.mixing import SCANS, Call
from zero3d.models.packed_documents import Documents, Inside
from zero3d.sequence.exchange import passed
from zero3d.sequence.shares import States

CHUNK = 64  # tokens of a delta rule's chunk where none is given


class Names(NamedTuple):
    """A function's names for the state that it begins with, and for that it is to return the last one."""

    begin: str
    end: str
    times: bool  # states [K, V] are multiplied by matrices [K, K], else by numbers


DELTA = Names("initial_state", "output_final_state", True)
STATES = {
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba2_chunk_scan": Names("initial_states", "return_final_states", False),
}


class Piece(NamedTuple):
    """Tokens of a row on this rank that are of one document. goes_on: it began on a rank before this one."""

    row: int
    tokens: range
    goes_on: bool


def scan_rows(
    rows: Sequence[range], function: str, call: Call, documents: Documents | None, inside: Inside, comm: Comm, name: str
) -> tuple[Any, States]:
    """Return what a scan makes of this rank's rows of sequences, and what describes the call."""
    batch = len(next(iter(_timed(function, call).values())))
    pieces = [list(_pieces(row, rows[comm.rank], documents, comm.rank == 0)) for row in range(batch)]
    factors, states = _own_states(function, call, pieces, inside)
    came, noted = _passed(factors, states, comm, name)
    state, width = torch.zeros_like(states), factors[0, 0].numel()
    for part in torch.split(came, states.shape[0] * states.shape[1]) if len(came) else ():
        factor, added = part[:, :width].view(factors.shape), part[:, width:].view(states.shape)
        state = (factor @ state if STATES[function].times else factor * state) + added
    made: dict[Piece, Tensor] = {}
    for some in _alike([piece for of_row in pieces for piece in of_row], lambda piece: -(-len(piece.tokens) // CHUNK)):
        begin = None
        if any(piece.goes_on for piece in some):
            came_to = (state[piece.row] if piece.goes_on else torch.zeros_like(state[piece.row]) for piece in some)
            begin = torch.stack(list(came_to))
        output = inside(_together(function, call, some).replaced(**{STATES[function].begin: begin}), None)
        of_pieces = output[0] if isinstance(output, tuple) else output
        made |= {piece: of_pieces[n, : len(piece.tokens)] for n, piece in enumerate(some)}
    whole = torch.stack([torch.cat([made[piece] for piece in of_row]) for of_row in pieces])
    whole = whole + came[:0].sum().to(whole.dtype)  # 0: all ranks take part in the backward
    return ((whole, None) if isinstance(output, tuple) else whole), noted


def _pieces(row: int, own: range, documents: Documents | None, first: bool) -> Iterator[Piece]:
    """Yield the pieces of a row. first: this is the first rank, on which nothing goes on."""
    if documents is None:
        yield Piece(row, range(len(own)), not first)
        return
    goes_on = not first and not documents.begins_at(row, own.start)
    for number, tokens in enumerate(documents.segments(row, own)):
        yield Piece(row, tokens, goes_on and not number)


def _own_states(function: str, call: Call, pieces: Sequence[Sequence[Piece]], inside: Inside) -> tuple[Tensor, Tensor]:
    """Return by what a state is multiplied over each row, and what is added: of the document at its right end."""
    names = STATES[function]
    found: dict[Piece, tuple[Tensor, Tensor]] = {}
    ends = [of_row[-1] for of_row in pieces]
    for some in _alike(ends, lambda piece: (len(piece.tokens), piece.goes_on)):
        last = _together(function, call, some)
        _, state = inside(last.replaced(**{names.begin: None, names.end: True}), None)
        size = state.shape[2] if names.times else 1
        factor = state.new_zeros(*state.shape[:2], size, size)
        if some[0].goes_on:
            factor = _factor(function, last, state, inside)
        found |= {piece: (factor[n], state[n]) for n, piece in enumerate(some)}
    factors, states = zip(*(found[piece] for piece in ends), strict=True)
    return torch.stack(factors), torch.stack(states)


def _alike(pieces: Iterable[Piece], of: Callable[[Piece], Any]) -> list[list[Piece]]:
    """Return pieces of which something is the same together: those that are scanned at once."""
    found: dict[Any, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(of(piece), []).append(piece)
    return list(found.values())


def _together(function: str, call: Call, pieces: Sequence[Piece]) -> Call:
    """Return the call of these pieces as a batch, with zeros behind those that are not the longest."""
    first, rows = pieces[0], [piece.row for piece in pieces]
    if len({piece.tokens for piece in pieces}) == 1 and rows == list(range(first.row, first.row + len(rows))):
        tokens = slice(first.tokens.start, first.tokens.stop)
        parts = {name: t[first.row : rows[-1] + 1, tokens] for name, t in _timed(function, call).items()}
        return call.replaced(**parts)
    longest = max(len(piece.tokens) for piece in pieces)
    given = {
        name: torch.stack([_filled(t[piece.row, piece.tokens.start : piece.tokens.stop], longest) for piece in pieces])
        for name, t in _timed(function, call).items()
    }
    return call.replaced(**given)


def _filled(t: Tensor, length: int) -> Tensor:
    return F.pad(t, (*(0, 0) * (t.dim() - 1), 0, length - len(t)))


def _timed(function: str, call: Call) -> Mapping[str, Tensor]:
    return {name: t for name in SCANS[function].time if isinstance(t := call.given.get(name), Tensor)}


def _factor(function: str, call: Call, state: Tensor, inside: Inside) -> Tensor:
    """Return what a state is multiplied by over the tokens of a call: [B, H, K, K], or [B, H, 1, 1]."""
    given = call.given
    if STATES[function].times:
        width = state.shape[2]
        unit = torch.eye(width, dtype=state.dtype, device=state.device).expand(*state.shape[:2], width, width)
        nothing = given["value"].new_zeros(*given["value"].shape[:3], width)
        factor: Tensor = inside(call.replaced(value=nothing, initial_state=unit, output_final_state=True), None)[1]
        return factor
    steps = given["dt"] if given.get("dt_bias") is None else given["dt"] + given["dt_bias"].to(given["dt"].dtype)
    steps = F.softplus(steps) if given.get("dt_softplus") else steps
    steps = steps.clamp(*given.get("dt_limit", (0.0, float("inf"))))
    return torch.exp((steps.to(state.dtype) * given["A"].to(state.dtype)).sum(1))[..., None, None]


def _passed(factors: Tensor, states: Tensor, comm: Comm, name: str) -> tuple[Tensor, States]:
    """Send this rank's to all behind it, and return those of the ranks before it; what describes the call, too."""
    batch, heads = states.shape[:2]
    sent = torch.cat([factors.flatten(2), states.flatten(2)], -1).flatten(0, 1)
    noted = States(batch, heads, sent.shape[1], sent.element_size(), sent.requires_grad)
    sends = [len(sent) if other > comm.rank else 0 for other in range(comm.size)]
    receives = [len(sent) if other < comm.rank else 0 for other in range(comm.size)]
    out = torch.cat([sent] * (comm.size - 1 - comm.rank)) if comm.rank < comm.size - 1 else sent[:0]
    return passed(out, sends, receives, comm, name), noted
