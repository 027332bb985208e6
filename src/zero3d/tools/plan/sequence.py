"""What a sequence axis does to a plan: heads of attention, what it keeps and sends, by sequence/shares.py. No torch.

                 of an attention, for each of a rank's tokens          sp 1              heads              gather
                 ----------------------------------------------------  ----------------  -----------------  ---------
    kept         queries                                               H                 H                  H
                 keys and values                                       2 K               2 K, or 2 H        2 K sp
                 output                                                H                 2 H, as it is
                                                                                         computed and sent  H
    sent, of sp  queries, keys, values, output                         -                 (2 H + 2 K) / sp   2 K

H heads of queries and K of keys, in elements of a head. Keys are repeated for each head of queries (2 H) where ranks
would share one of theirs. Under a mask Hugging Face repeats them at any sp; it has a row of S bytes for each token that
attends, in the run's width: in `heads` all S of them on every rank.

Convolutions and scans of hybrids send what `Halo.sent` and `Scanned.sent` say, or where states pass `States.sent`, of
the heads and channels that tp leaves a rank. They count as keeping no more than at sp 1, though each scan of a state
keeps what its kernel does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from zero3d.account.traffic import Moved
from zero3d.sequence.choice import weigh
from zero3d.sequence.shares import Attended, Heads, Scanned, Sharing, loss_values
from zero3d.spec.dtypes import FP32
from zero3d.spec.mesh import AUTO, HEADS, PREFIX, Mesh
from zero3d.spec.sizes import parse_size
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.rank_model import chunks_of_rank
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan

MASKED = parse_size(Mesh.sp_mask_budget, "mesh.sp_mask_budget")  # where a file says nothing else


class _Widths(NamedTuple):
    """Elements of a head: of queries and keys, and of values."""

    key: int
    value: int


def sp_refused(model: ModelSpec, dp: int, tp: int, sp: int, by_heads: bool = True, mixers: str = AUTO) -> str | None:
    """Say why an sp degree cannot be, None where it can.

    by_heads  attention is shared out by these alone
    mixers    mesh.sp_mixers
    """
    if dp % sp:
        return f"sp does not divide dp {dp}"
    if model.mixing is not None:
        return f"sp cuts sequences that attention and known recurrences mix, and {model.name} has {model.mixing}"
    mixers = _chosen(model, sp, tp) if mixers == AUTO else mixers
    shared = (scan for part in model.parts for scan in part.scans if mixers == HEADS or not scan.passes)
    scanned = min((scan.over(tp).heads for scan in shared), default=sp)
    if scanned < sp:
        return f"sp is more than the {scanned} heads of recurrences, which they share"
    if by_heads and 0 < model.heads < tp * sp:
        return f"sp x tp = {sp * tp} is more than the {model.heads} attention heads, which they share"
    return f"a sequence of {model.length} tokens has no {sp} parts" if model.length < sp else None


def masks_fit(model: ModelSpec, tp: int, sp: int) -> bool:
    """Return whether an engine would take the masks that a model needs at an sp degree, by what is set for these.

    Rows of queries need a byte for each token that they may see; heads of whole sequences where these are packed.
    """
    if not any(block.attends for block in model.blocks):
        return True
    by_heads = Sharing(sp, "auto", False, MASKED).by_heads(model.heads // tp, max(1, model.kv_heads // tp))
    rows = -(-model.length // sp) if not by_heads else model.length if "packed" in model.provenance else 0
    return rows * model.length <= MASKED


def attention(model: ModelSpec, plan: ParallelPlan) -> Attended:
    """Return the calls of a block's attention, alike in all blocks that have one."""
    query, key = model.heads // plan.tp, max(1, model.kv_heads // plan.tp)
    sharing = Sharing(plan.sp, plan.mesh.sp_kind, policy_of(plan).exact, MASKED)
    by_heads = sharing.by_heads(query, key)
    if by_heads:
        key *= Heads.of(query, key, plan.sp, sharing.repeats).repeat
    widths, itemsize = _widths(model), plan.compute.itemsize
    trained = (True, True, True)
    return Attended(plan.micro_batch, model.length, query, key, *widths, itemsize, trained, by_heads)


def _widths(model: ModelSpec) -> _Widths:
    """Return how wide heads are, which need not be hidden / heads."""
    block = next((block for block in model.blocks if block.attends), model.blocks[0])
    weights = [weight for unit in block.units for weight in unit.weights if len(weight.shape) == 2]
    for name, heads in (("k_proj.weight", model.kv_heads), ("q_proj.weight", model.heads)):  # which may have gates, too
        for weight in weights:
            if weight.name.endswith(name):
                return _Widths(*(2 * (weight.shape[0] // heads,)))
    return _Widths(*(2 * (model.hidden // max(1, model.heads),)))


def kept_more(model: ModelSpec, plan: ParallelPlan) -> float:
    """Return the bytes that an attention keeps of a micro-batch beyond what it keeps of as many tokens at sp 1."""
    if plan.sp == 1:
        return 0.0
    call, masked = attention(model, plan), "packed" in model.provenance
    at_one = call.query if masked else max(1, model.kv_heads // plan.tp)
    if call.by_heads:
        keys, output = call.query if masked else call.key, call.query * call.value
        mask = (plan.sp - 1) * model.length if masked else 0
    else:
        keys, output = call.query * plan.sp, 0  # repeated, under a mask of these rows
        mask = 0 if masked else model.length
    more = (keys - at_one) * (call.width + call.value) + output + mask
    return float(plan.tokens(model.length) * call.itemsize * more)


def mixers_of(model: ModelSpec, plan: ParallelPlan) -> str:
    """Return how a plan shares recurrences out: of auto what a run takes (train/setup/recurrences.py)."""
    asked = plan.mesh.sp_mixers
    if plan.sp == 1 or not any(scan.passes for part in model.parts for scan in part.scans):
        return HEADS
    return asked if asked != AUTO else _chosen(model, plan.sp, plan.tp)


@lru_cache(maxsize=64)
def _chosen(model: ModelSpec, sp: int, tp: int) -> str:
    weighed = weigh(kinds_of_scans(model, tp), sp)
    return HEADS if weighed is None else weighed.kind


def kinds_of_scans(model: ModelSpec, tp: int = 1) -> list[Scanned]:
    """Return a model's scans as choice.py weighs them, one of each kind."""
    scans = (scan for part in model.parts for scan in part.scans)
    return list(dict.fromkeys(replace(scan.over(tp).of_a_run(model.length), divided=False) for scan in scans))


def exchanged(model: ModelSpec, plan: ParallelPlan, attends: bool = True, scans: Iterable[Scanned] = ()) -> list[float]:
    """Return the bytes that a rank has for all ranks of its group, itself among them, in each exchange of a forward."""
    if plan.sp == 1:
        return []
    calls = [scan.over(plan.tp).at(plan.micro_batch, plan.compute.itemsize) for scan in scans]
    by_states = mixers_of(model, plan) == PREFIX
    scanned = [
        float(nbytes)
        for each in calls
        for nbytes in ([plan.sp * each.states.nbytes] if by_states and each.passes else each.exchanged(plan.sp))
    ]
    if not attends:
        return scanned
    call, tokens = attention(model, plan), plan.tokens(model.length)
    if call.by_heads:
        elements = [call.query * call.width, call.key * call.width, call.key * call.value, call.query * call.value]
    else:
        elements = [plan.sp * call.key * call.width, plan.sp * call.key * call.value]
    return scanned + [float(tokens * call.itemsize * each) for each in elements]


def scanned_again(model: ModelSpec, plan: ParallelPlan, scans: Iterable[Scanned]) -> float:
    """Return the operations of a rank's scans beyond one of each, of a micro-batch forward and backward."""
    if plan.sp == 1 or mixers_of(model, plan) != PREFIX:
        return 0.0
    calls = (scan.over(plan.tp).at(plan.micro_batch, plan.compute.itemsize) for scan in scans)
    return float(sum((each.scans - 1) * each.operations * each.scanned(plan.sp) for each in calls))


def traffic(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> Mapping[str, Moved]:
    """Return what the first rank of an sp group sends in a step."""
    parts = [part for chunk in chunks_of_rank(model, plan, pp_stage).values() for part in chunk]
    forwards, call = 1 if plan.activations == "none" else 2, attention(model, plan)
    calls: list[Any] = [call for part in parts if part.kind == "block" and part.attends]
    mixed: list[Any] = [each for part in parts for each in (*part.convolutions, *part.scans)]
    mixed = [each.over(plan.tp).at(plan.micro_batch, call.itemsize) for each in mixed]
    by_states = mixers_of(model, plan) == PREFIX
    calls += [each.states if by_states and isinstance(each, Scanned) and each.passes else each for each in mixed]
    once = [each.sent(0, plan.sp, backward=False).times(forwards) for each in calls]
    once += [each.sent(0, plan.sp, backward=True) for each in calls]
    rows = Moved.total(once).times(plan.accumulate)
    values = loss_values(plan.micro_batch, model.length, plan.sp)
    losses = [Moved(1, values, values * max(FP32.itemsize, call.itemsize))]
    if model.routers:
        logits = loss_values(model.routers * model.experts * plan.micro_batch, model.length, plan.sp)
        losses.append(Moved(1, logits, logits * call.itemsize))
    has_loss = any(part.kind == "head" for part in parts)
    of_losses = Moved.total(losses).times(plan.accumulate)
    return {"pass_rows sp": rows} | ({"exchange sp": of_losses} if has_loss else {})
