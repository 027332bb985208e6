"""Scans whose states pass from rank to rank, in the place of heads: what is sent does not grow with the sequence.

A state is multiplied and added to by each token, so over a rank's rows, too: S -> M S + b. Each rank computes its own M
and b, all ranks behind it get them, and one scan more begins with the state that the ranks before it come to.

    rank 0  |  b0        rank 1  |  M1, b1        rank 2  |  M2, b2
    S = 0                S = b0                   S = M1 b0 + b1

Of packed documents they are those of the one that goes on at the rank's right end: M is 0 where a document begins on
the rank, and the state that came is that of the first one alone, unless one begins at the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zero3d.distributed.collectives import Comm
from zero3d.models.mixing import SCANS, Call
from zero3d.models.packed_documents import Documents, Inside
from zero3d.sequence.exchange import passed
from zero3d.sequence.shares import States


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


def scan_rows(
    rows: Sequence[range], function: str, call: Call, documents: Documents | None, inside: Inside, comm: Comm, name: str
) -> tuple[Any, States]:
    """Return what a scan makes of this rank's rows of sequences, and what describes the call."""
    names, own = STATES[function], rows[comm.rank]
    batch = next(iter(_timed(function, call).values())).shape[0]
    if documents is None:
        groups = [(range(batch), [range(len(own))], comm.rank > 0)]
    else:
        groups = [
            (range(row, row + 1), documents.segments(row, own), not documents.begins_at(row, own.start))
            for row in range(batch)
        ]
    parts = []
    for some, segments, goes_on in groups:
        last = _part(function, call, some, segments[-1])
        _, state = inside(last.replaced(**{names.begin: None, names.end: True}), None)
        size = state.shape[2] if names.times else 1
        factor = state.new_zeros(*state.shape[:2], size, size)
        if goes_on and len(segments) == 1:
            factor = _factor(function, last, state, inside)
        parts.append((factor, state))
    factors, states = (torch.cat(each) for each in zip(*parts, strict=True))
    came, noted = _passed(factors, states, comm, name)
    state, width = torch.zeros_like(states), factors[0, 0].numel()
    for part in torch.split(came, states.shape[0] * states.shape[1]) if len(came) else ():
        factor, added = part[:, :width].view(factors.shape), part[:, width:].view(states.shape)
        state = (factor @ state if names.times else factor * state) + added
    made, output = [], None
    for some, segments, goes_on in groups:
        of_row = []
        for number, segment in enumerate(segments):
            begin = state[some.start : some.stop] if goes_on and comm.rank and not number else None
            output = inside(_part(function, call, some, segment).replaced(**{names.begin: begin}), None)
            of_row.append(output[0] if isinstance(output, tuple) else output)
        made.append(torch.cat(of_row, 1))
    whole = torch.cat(made) + came[:0].sum().to(made[0].dtype)  # 0: all ranks take part in the backward
    return ((whole, None) if isinstance(output, tuple) else whole), noted


def _timed(function: str, call: Call) -> Mapping[str, Tensor]:
    return {name: t for name in SCANS[function].time if isinstance(t := call.given.get(name), Tensor)}


def _part(function: str, call: Call, some: range, tokens: range) -> Call:
    """Return the call of some tokens of some rows."""
    rows, times = slice(some.start, some.stop), slice(tokens.start, tokens.stop)
    return call.replaced(**{name: t[rows, times] for name, t in _timed(function, call).items()})


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
