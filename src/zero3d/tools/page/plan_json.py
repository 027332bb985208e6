"""The answer of `zero3d plan` as plain numbers: bytes and seconds, what is whole as int."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zero3d.tools.page.plan_text import Answer, distinct, mfu, power_from
from zero3d.tools.plan.bill import Bill
from zero3d.tools.plan.goodput import goodput
from zero3d.tools.plan.judged import not_judged
from zero3d.tools.plan.ladder import Rung
from zero3d.tools.plan.lengths import Lengths
from zero3d.tools.plan.links import Way
from zero3d.tools.plan.margin import Ends, Margin, Range
from zero3d.tools.plan.search import LONG, Row, sequence_ways, ways
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec
from zero3d.tools.plan.what_if import WhatIf


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain values; bytes and seconds."""
    good = goodput(answer.model, answer.cluster)
    return {
        **plan_json(answer.model, answer.cluster, answer.best, answer.limit, answer.margin, answer.ends),
        "sequences": answer.target.sequences,
        "goal": answer.target.goal,
        "tried": answer.result.tried,
        "lengths": lengths_json(answer.lengths),
        "recommended": row_json(answer.best),
        "equal": answer.choice.equal,
        "plans": [row_json(row) for row in distinct(answer.result.rows)],
        "rejected": [
            {
                "reason": r.reason,
                "plans": r.plans,
                "excess_bytes": r.excess,
                "nearest": None if r.nearest is None else r.nearest.as_dict(),
                "of_host": r.sum or None,
            }
            for r in answer.result.rejected
        ],
        "what_if": knobs_json(answer.knobs),
        "experts": ways_json(ways(answer.result.rows)) if answer.model.experts else None,
        "long_sequences": ways_json(sequence_ways(answer.result.rows)) if answer.model.length >= LONG else None,
        "ladder": [_rung_json(rung) for rung in answer.ladder],
        "gpu_hours_per_billion_tokens": Bill.of(answer.best.estimate, answer.cluster, 1e9, None).hours,
        "cost": cost_json(answer.best.estimate, answer.cluster, answer.tokens, answer.price),
        "checkpoint": good._asdict(),
    } | ({"links": [_way_json(way) for way in answer.links]} if answer.links else {})


def _rung_json(rung: Rung) -> dict[str, Any]:
    said = {"rung": rung.name, "micro_batch": rung.plan.micro_batch, "fits": rung.fits, "margin": rung.margin.share}
    return said | {"lacks_bytes": rung.lacks, **estimate_json(rung.estimate)}


def plan_json(
    model: ModelSpec, cluster: ClusterSpec, row: Row, limit: float, margin: Margin, ends: Ends | None
) -> dict[str, Any]:
    """Return what was planned and where, and what is said of one plan beside its estimate. limit: for planned bytes."""
    return {
        "model": {
            "name": model.name,
            "params": model.weights,
            "trainable": model.trainable,
            "length": model.length,
            "blocks": len(model.blocks),
        },
        "gpus": cluster.gpus,
        "gpu": cluster.gpu.name,
        "limit_bytes": limit,
        "margin": margin.share,
        "margin_from": margin.origin,
        "device_range_bytes": Range.of(row.estimate.memory.device, margin.share)._asdict(),
        "fits_up_to": None if ends is None else ends._asdict(),
        "mfu": mfu(row, cluster),
        "not_judged": list(not_judged(model, cluster, row.plan)),
    }


def lengths_json(lengths: Lengths | None) -> dict[str, float] | None:
    """Return how long sampled sequences are; None where nobody looked."""
    if lengths is None:
        return None
    found = {"records": len(lengths.tokens), "mean": lengths.mean, "p99": lengths.high, "longest": lengths.tokens[-1]}
    return found | {"limit": lengths.limit}


def ways_json(found: Iterable[tuple[str, Row | None]]) -> dict[str, Any]:
    """Return the best plan of each way by its name, None where none fits."""
    return {name: None if row is None else row_json(row) for name, row in found}


def knobs_json(knobs: Sequence[WhatIf]) -> list[dict[str, Any]]:
    """Return single changes as plain values."""
    return [
        {
            "change": knob.change,
            "memory_bytes": knob.memory,
            "seconds": knob.seconds,
            "moved": None if knob.moved is None else knob.moved._asdict(),
        }
        for knob in knobs
    ]


def cost_json(estimate: Estimate, cluster: ClusterSpec, tokens: float | None, price: float | None) -> dict[str, Any]:
    """Return `cost_lines` as plain values."""
    return {
        "per_billion_tokens": Bill.of(estimate, cluster, 1e9, price)._asdict(),
        "training": {"tokens": tokens, **Bill.of(estimate, cluster, tokens, price)._asdict()} if tokens else None,
        "price": price,
        "watts": cluster.gpu.power,
        "watts_from": None if cluster.gpu.power is None else power_from(cluster),
    }


def _way_json(way: Way) -> dict[str, Any]:
    memory, seconds = way.estimate.memory.device, way.estimate.seconds.mid
    settings = {"way": way.name, "settings": dict(way.settings), "rounds": way.rounds}
    return settings | {"device_bytes": memory, "seconds": seconds}


def row_json(row: Row) -> dict[str, Any]:
    """Return a ranked row as plain values."""
    return {"plan": row.plan.as_dict(), "why": row.reason, "lacks_bytes": row.lacks, **estimate_json(row.estimate)}


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Return all figures of an estimate by name."""
    return estimate.as_dict()
