"""Targets, the ratios measured against them, and how results are shown.

    ours        peer              limit         ours        peer              limit
    stage 3     fsdp2-reshard     0.80x time    stage 3     plain             1.20x time (ranks > 1)
    stage 2     fsdp2-noreshard   0.85x time    any stage   plain             1.03x time (ranks = 1)
    stage 1     ddp               0.95x time    exact 2, 3  stages 2, 3       1.05x time (ranks > 1)
    stage 0     ddp               1.00x time
    stage S     deepspeed-S       0.80x time (ranks > 1; not stage 0 in bf16)

    stage 3     fsdp2-reshard     0.97x alive at the peak of a step (1.00x with several micro-batches or on one rank),
                                  1.00x at rest, 0.95x process memory (1.00x on one rank), weights kept or cast
    cast 3      stage 3           1.01x time (ranks > 1)
    stage 2     fsdp2-noreshard   1.00x process memory (ranks > 1)

A time target is met or missed by the ratio of medians; the ratio of minimums stands beside it.
DeepSpeed's bf16 stage 0 is another computation (`deepspeed_peer.py`): it is shown, and neither its
time nor its loss is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

LOSS_TOLERANCE = 1e-3
MIB = 2**20
MEMORY = {"peak of a step": "step", "at rest": "held", "process memory": "process"}  # as memory.py calls them
OTHER_COMPUTATION = ("bf16", "deepspeed-0")  # precision, variant


class Target(NamedTuple):
    """`ours` takes at most `limit` of what `peer` takes."""

    kind: str  # "time" | one of MEMORY
    ours: str
    peer: str
    limit: float


SEVERAL_RANKS = (
    Target("time", "zero3d-3", "fsdp2-reshard", 0.80),
    Target("time", "zero3d-2", "fsdp2-noreshard", 0.85),
    Target("time", "zero3d-1", "ddp", 0.95),
    Target("time", "zero3d-0", "ddp", 1.00),
    Target("time", "zero3d-3", "plain", 1.20),
    *(Target("time", f"zero3d-{stage}", f"deepspeed-{stage}", 0.80) for stage in range(4)),
    *(Target("time", f"zero3d-exact-{stage}", f"zero3d-{stage}", 1.05) for stage in (2, 3)),
    Target("process memory", "zero3d-3", "fsdp2-reshard", 0.95),
    Target("process memory", "zero3d-cast-3", "fsdp2-reshard", 0.95),
    Target("process memory", "zero3d-2", "fsdp2-noreshard", 1.00),
    Target("time", "zero3d-cast-3", "zero3d-3", 1.01),
)
ONE_RANK = (
    *(Target("time", f"zero3d-{stage}", "plain", 1.03) for stage in range(4)),
    Target("process memory", "zero3d-3", "fsdp2-reshard", 1.00),
    Target("process memory", "zero3d-cast-3", "fsdp2-reshard", 1.00),
)


def targets(ranks: int, accumulate: int) -> tuple[Target, ...]:
    """The targets of a run."""
    peak = 0.97 if ranks > 1 and accumulate == 1 else 1.00
    of_memory = (
        target
        for ours in ("zero3d-3", "zero3d-cast-3")
        for target in (
            Target("peak of a step", ours, "fsdp2-reshard", peak),
            Target("at rest", ours, "fsdp2-reshard", 1.00),
        )
    )
    return (*(SEVERAL_RANKS if ranks > 1 else ONE_RANK), *of_memory)


def variant_names(
    engines: list[str], stages: list[int], exact: str = "off", weights: str = "kept", autocast: str = "off"
) -> list[str]:
    """What to run: the stages asked for and the peers that these engines name.

    exact, autocast  off, on or both
    weights          of stage 3: kept, cast or both
    """
    ours = {"off": ["zero3d"], "on": ["zero3d-exact"], "both": ["zero3d", "zero3d-exact"]}[exact]
    ours = {"off": ours, "on": ["zero3d-autocast"], "both": [*ours, "zero3d-autocast"]}[autocast]
    names = [f"{name}-{stage}" for name in ours for stage in stages]
    if weights == "cast":
        names = [name for name in names if name != "zero3d-3"]
    of_engine = {
        "zero3d": [*names, *(["zero3d-cast-3"] if weights != "kept" else [])],
        "fsdp2": [name for stage, name in ((3, "fsdp2-reshard"), (2, "fsdp2-noreshard")) if stage in stages],
        "ddp": ["ddp"],
        "plain": ["plain"],
        "deepspeed": [f"deepspeed-{stage}" for stage in stages],
    }
    return [name for engine in engines for name in of_engine[engine]]


def compare(
    ranks: int, precision: str, variants: Mapping[str, Mapping[str, Any]], accumulate: int = 1
) -> list[dict[str, Any]]:
    """Every target whose two sides were measured and are the same computation."""
    rows = []
    for target in targets(ranks, accumulate):
        measured = target.ours in variants and target.peer in variants
        if not measured or (precision, target.peer) == OTHER_COMPUTATION:
            continue
        ours, peer = variants[target.ours], variants[target.peer]
        if target.kind == "time" and "median" in ours:
            ratio, best = ours["median"] / peer["median"], ours["min"] / peer["min"]
        elif target.kind in MEMORY and "memory" in ours:
            key = MEMORY[target.kind]
            ratio, best = ours["memory"][key] / peer["memory"][key], None
        else:
            continue
        rows.append({**target._asdict(), "ratio": ratio, "ratio_of_minimums": best, "met": ratio <= target.limit})
    return rows


def agreement(ranks: int, precision: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How far losses lie apart; without communication several ranks train different models."""
    losses = {
        name: v["loss"]
        for name, v in variants.items()
        if (ranks == 1 or name != "plain") and (precision, name) != OTHER_COMPUTATION
    }
    if not losses:
        return {"spread": 0.0, "tolerance": LOSS_TOLERANCE, "met": True}
    middle = median(losses.values())
    spread = (max(losses.values()) - min(losses.values())) / middle
    return {"spread": spread, "tolerance": LOSS_TOLERANCE, "met": spread <= LOSS_TOLERANCE}


def show(result: Mapping[str, Any]) -> str:
    """The whole result as text."""
    return "\n".join([*_variant_lines(result["variants"]), "", *_target_lines(result)])


def _variant_lines(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    timed = all("median" in v for v in variants.values())
    seconds = f"{'min s':>9}{'median s':>10}" if timed else ""
    head = f"{'variant':<16}{seconds}{'loss':>10}"
    with_memory = any("memory" in v for v in variants.values())
    if with_memory:
        head += f"{'held MiB':>10}{'step MiB':>10}{'process MiB':>13}{'steady MiB':>12}"
    lines = [head]
    for name, v in variants.items():
        seconds = f"{v['min']:>9.4f}{v['median']:>10.4f}" if timed else ""
        line = f"{name:<16}{seconds}{v['loss']:>10.5f}"
        if with_memory:
            held, step, process, steady = (v["memory"][key] / MIB for key in ("held", "step", "process", "steady"))
            line += f"{held:>10.1f}{step:>10.1f}{process:>13.1f}{steady:>12.1f}"
        lines.append(line)
    return lines


def _target_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{'target':<50}{'ratio':>8}{'of minimums':>13}{'met':>6}"] if result["ratios"] else []
    for row in result["ratios"]:
        what = f"{row['ours']} <= {row['limit']:.2f}x {row['peer']} {row['kind']}"
        best = "" if row["ratio_of_minimums"] is None else f"{row['ratio_of_minimums']:.3f}"
        lines.append(f"{what:<50}{row['ratio']:>8.3f}{best:>13}{'yes' if row['met'] else 'NO':>6}")
    losses = result["losses"]
    what = f"losses agree to {losses['tolerance']:g}"
    return [*lines, f"{what:<50}{losses['spread']:>8.1e}{'':>13}{'yes' if losses['met'] else 'NO':>6}"]
