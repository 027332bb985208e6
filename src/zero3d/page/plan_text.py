"""What `zero3d plan` found, as tables for people and as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zero3d.page.text import columns, count, size
from zero3d.plan.goodput import GPU_HOURS_BETWEEN_FAILURES, goodput
from zero3d.plan.ladder import Rung, differs
from zero3d.plan.search import Asked, Found, Rejected, Row, WhatIf
from zero3d.plan.spec import ClusterSpec, Estimate, Memory, ModelSpec, ParallelPlan, Seconds

KNOBS = 5  # what-if lines


class Answer(NamedTuple):
    """A search that found something. tokens: of the whole training; price: of a GPU-hour."""

    model: ModelSpec
    cluster: ClusterSpec
    asked: Asked
    found: Found
    ladder: Sequence[Rung]
    knobs: Sequence[WhatIf]
    tokens: float | None = None
    price: float | None = None

    @property
    def best(self) -> Row:
        return self.found.rows[0]


# --- text ---------------------------------------------------------------------------------------


def as_text(answer: Answer, top: int) -> str:
    """Everything, the ranked table first."""
    shown = distinct(answer.found.rows)[:top]
    lines = [*heading(answer.model, answer.cluster, answer.asked.sequences), ""]
    lines += _ranked(shown, answer.asked)
    lines += ["", *_rejected(answer.found), "", *_what_if(answer), "", *_ladder(answer), "", *costs(answer)]
    return "\n".join(lines)


def heading(model: ModelSpec, cluster: ClusterSpec, sequences: int) -> Iterator[str]:
    """What is trained, where, in which portions."""
    trainable = "" if model.trainable == model.params else f" ({count(model.trainable)} of them trainable)"
    yield (
        f"{model.name}: {count(model.params)} parameters{trainable}, {len(model.blocks)} blocks of {model.hidden:,}, "
        f"sequences of {model.length:,} tokens ({model.provenance})"
    )
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.per_node}"
    yield (
        f"{cluster.gpus} x {cluster.gpu.name} with {size(int(cluster.gpu.memory))} ({nodes}; "
        f"{cluster.inside.bandwidth / 1e9:g} GB/s inside, {cluster.across.bandwidth / 1e9:g} GB/s across per GPU)"
    )
    yield f"{sequences:,} sequences = {sequences * model.length:,} tokens a step"


def mesh(plan: ParallelPlan) -> str:
    """pp 8 x dp 2 x tp 8"""
    return f"pp {plan.pp} x dp {plan.dp} x tp {plan.tp}"


def settings(plan: ParallelPlan) -> str:
    """What else a plan says, in few words."""
    words = [plan.schedule] if plan.pp > 1 else []
    words += [] if plan.activations == "none" else [f"recompute {plan.activations}"]
    words += ["sequence parallel"] if plan.sequence_parallel else []
    words += [f"offload to {plan.offload}"] if plan.offload != "none" else []
    return ", ".join(words) or "-"


def short(plan: ParallelPlan) -> str:
    """A plan in a sentence."""
    return f"{mesh(plan)}, stage {plan.stage}, micro-batch {plan.micro_batch}, {settings(plan)}".removesuffix(", -")


def distinct(rows: Sequence[Row]) -> list[Row]:
    """The best row of each mesh, ZeRO stage and schedule."""
    kept: dict[tuple[object, ...], Row] = {}
    for row in rows:
        plan = row.plan
        kept.setdefault((plan.pp, plan.dp, plan.tp, plan.stage, plan.schedule), row)
    return list(kept.values())


def _ranked(rows: Sequence[Row], asked: Asked) -> Iterator[str]:
    yield f"Plans that fit {size(int(asked.limit))} of a GPU, {asked.goal} first:"
    table = [("", "mesh", "ZeRO", "micro x accum", "settings", "GPU GB", "host GB", "step s", "tokens/s/GPU", "why")]
    for place, row in enumerate(rows, 1):
        plan, memory, seconds = row.plan, row.estimate.memory, row.estimate.seconds
        rate = row.estimate.tokens / seconds.mid / plan.world
        table.append((
            str(place), mesh(plan), str(plan.stage), f"{plan.micro_batch} x {plan.accumulate}", settings(plan),
            f"{memory.device / 1e9:.1f}", f"{memory.host / 1e9:.0f}", _seconds(seconds), f"{rate:,.0f}", row.reason,
        ))  # fmt: skip
    yield from columns(table, "><<<<>>>><")


def _seconds(seconds: Seconds) -> str:
    return f"{figure(seconds.mid)} ({figure(seconds.low)}-{figure(seconds.high)})"


def figure(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rejected(found: Found) -> Iterator[str]:
    yield f"{found.tried:,} plans: {len(found.rows):,} fit; left out were"
    for each in found.rejected:
        near = f"; nearest: +{size(int(each.excess))} with {short(each.nearest)}" if each.nearest else ""
        yield f"   {each.plans:,}: {each.reason}{near}"


def _what_if(answer: Answer) -> Iterator[str]:
    best = answer.best
    yield "What if, from the first plan, one setting changed (memory of the fullest GPU, time of a step):"
    rows = knob_rows(answer.knobs[:KNOBS], best, answer.asked.limit)
    yield from columns(rows, "<>><") if rows else ["   nothing to change"]


def knob_rows(knobs: Sequence[WhatIf], row: Row, limit: float) -> list[tuple[str, ...]]:
    """Change, memory, time of a step, and whether that still fits."""
    mid = row.estimate.seconds.mid
    return [
        (
            knob.change, f"{knob.memory / 1e9:+.1f} GB", f"{100 * knob.seconds / mid:+.1f} %",
            "does not fit" if knob.device > limit else "",
        )
        for knob in knobs
    ]  # fmt: skip


def _ladder(answer: Answer) -> Iterator[str]:
    n = answer.ladder[0].plan.dp
    yield f"The ladder for this model with N = {n} data-parallel ranks, blocks recomputed, by the bytes of its states:"
    rows = [("stage", "states GB", "GPU GB", "host GB", "step s", "")]
    for rung in answer.ladder:
        memory = rung.estimate.memory
        rows.append((
            rung.name, f"{memory.states / 1e9:.1f}", f"{memory.device / 1e9:.1f}", f"{memory.host / 1e9:.0f}",
            figure(rung.estimate.seconds.mid), "" if rung.fits else "does not fit",
        ))  # fmt: skip
    yield from columns(rows, "<>>>><")
    differing = differs(answer.ladder)
    yield f"   {differing or 'the rule of thumb (1, 2, 2 + offload, 3, 3 + offload) holds for this N'}."
    yield "   (Offload is priced, but not built yet: no plan above uses it.)"


def costs(answer: Answer) -> Iterator[str]:
    """GPU-hours, how often to save, and what must be known of these figures."""
    estimate, cluster = answer.best.estimate, answer.cluster
    processes = min(cluster.per_node, answer.best.plan.world)
    whole = size(4 * processes * answer.model.params)
    yield (
        f"Host memory: {size(int(estimate.memory.host))} of {size(int(cluster.host_memory))} for {processes} processes "
        f"which read slices. Would each load the whole model in fp32: {whole}."
    )
    billion = gpu_hours(estimate, cluster, 1e9)
    yield f"Cost: {billion:,.1f} GPU-hours per billion tokens{_money(billion, answer.price)}."
    if answer.tokens:
        hours = gpu_hours(estimate, cluster, answer.tokens)
        yield (
            f"   {count(answer.tokens)} tokens: {hours:,.0f} GPU-hours, {hours / cluster.gpus / 24:,.1f} days"
            f"{_money(hours, answer.price)}."
        )
    good = goodput(answer.model, cluster)
    yield (
        f"Checkpoints: every {_duration(good.every)} (a save takes {_duration(good.save)}, a failure comes every "
        f"{_duration(good.mtbf)} at {GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU-hours each): {100 * good.share:.1f} % of the "
        "time trains."
    )
    for note in estimate.notes:
        yield f"Note: {note}"


def gpu_hours(estimate: Estimate, cluster: ClusterSpec, tokens: float) -> float:
    """Of all GPUs together."""
    return tokens / estimate.tokens * estimate.seconds.mid * cluster.gpus / 3600


def _money(hours: float, price: float | None) -> str:
    return "" if price is None else f", {hours * price:,.0f} at {price:g} each"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{figure(seconds / length)} {unit}"
    return f"{seconds:.3g} s"


def head(answer: Answer) -> str:
    """The comment at the top of an emitted file."""
    plan, estimate = answer.best.plan, answer.best.estimate
    nodes = f" --nodes {answer.cluster.nodes}" if answer.cluster.nodes > 1 else ""
    return (
        f"# {short(plan)}\n"
        f"# planned: {estimate.memory.device / 1e9:.1f} GB of each GPU, {_seconds(estimate.seconds)} s a step, on "
        f"{answer.cluster.gpus} x {answer.cluster.gpu.name}\n"
        f"# start: zero3d launch torchrun THIS_FILE{nodes} --gpus-per-node {answer.cluster.per_node}\n"
        "# data.train is the text of Python's standard library until you say data.train: FILES\n"
    )


# --- nothing fits -------------------------------------------------------------------------------


def nothing_fits(
    model: ModelSpec, cluster: ClusterSpec, asked: Asked, found: Found, larger: tuple[int, Row] | None
) -> str:
    """One line: the nearest, and what would make it fit."""
    said = (
        f"{model.name} ({count(model.params)} parameters, {model.length:,} tokens) fits no plan on {cluster.gpus} x "
        f"{cluster.gpu.name} within {size(int(asked.limit))}: {found.tried:,} plans tried"
    )
    nearest = min((each for each in found.rejected if each.nearest), key=lambda each: each.excess, default=None)
    if nearest is None:
        return f"{said}, {_reasons(found.rejected)}. {_other_batch(model, cluster, asked)}"
    what = f"{said}. Nearest: {nearest.reason} is short by {size(int(nearest.excess))} with {_named(nearest)}"
    if larger is None:
        if "host" in nearest.reason:
            return f"{what}. Pass more --nodes, or a --cluster file with more host_memory."
        return f"{what}. Pass a larger --gpu, a shorter --seq, or --lora."
    return f"{what}. It fits on --gpus {larger[0]}: {short(larger[1].plan)}."


def _other_batch(model: ModelSpec, cluster: ClusterSpec, asked: Asked) -> str:
    """What to pass where no plan was left to price: mostly sequences that dp does not divide."""
    whole = -(-asked.sequences // cluster.gpus) * cluster.gpus
    if whole == asked.sequences:
        return "Pass other --gpus."
    tokens = whole * model.length
    return f"Pass --tokens-per-batch {tokens} ({whole} sequences of {model.length:,} for {cluster.gpus} GPUs)."


def _named(rejected: Rejected) -> str:
    return short(rejected.nearest) if rejected.nearest else "no plan"


def _reasons(rejected: Sequence[Rejected]) -> str:
    return ", ".join(f"{each.plans:,}: {each.reason}" for each in rejected)


# --- one plan -----------------------------------------------------------------------------------


def terms(parts: Mapping[str, float], total: float, scale: float, unit: str) -> Iterator[str]:
    """A breakdown with shares, the largest first; what is below 0.05 % is left out."""
    rows = [
        (name, f"{figure(value / scale)} {unit}", f"{100 * value / total:.1f} %")
        for name, value in sorted(parts.items(), key=lambda item: -abs(item[1]))
        if abs(value) > 5e-4 * total
    ]
    yield from columns(rows, "<>>")


def memory_lines(memory: Memory) -> Iterator[str]:
    """The four meanings of memory, and what is there at the peak."""
    yield f"Memory of the fullest GPU: {memory.device / 1e9:.2f} GB as a device monitor shows it"
    yield from columns(
        [
            ("model states", f"{memory.states / 1e9:.2f} GB"),
            ("most allocated", f"{memory.allocated / 1e9:.2f} GB"),
            ("reserved for it", f"{memory.reserved / 1e9:.2f} GB"),
            ("of the fullest host", f"{memory.host / 1e9:.2f} GB"),
        ],
        "<>",
    )
    yield f"At the peak, {memory.instant}:"
    yield from terms(memory.parts, memory.allocated, 1e9, "GB")


def time_lines(estimate: Estimate, world: int) -> Iterator[str]:
    """A step's seconds and what they go into."""
    seconds = estimate.seconds
    rate = estimate.tokens / seconds.mid
    yield (
        f"A step of {estimate.tokens:,} tokens: {_seconds(seconds)} s, {rate:,.0f} tokens/s "
        f"({rate / world:,.0f} per GPU), {estimate.flops / seconds.mid / world / 1e12:.1f} useful TFLOP/s per GPU"
    )
    yield from terms(seconds.parts, seconds.mid, 1.0, "s")
    yield "Sent by the busiest rank in a step:"
    yield from columns(
        [(name, size(int(value))) for name, value in estimate.traffic.items()] or [("nothing", "")], "<>"
    )


# --- json ---------------------------------------------------------------------------------------


def as_json(answer: Answer) -> dict[str, Any]:
    """Plain numbers; bytes and seconds."""
    good = goodput(answer.model, answer.cluster)
    return {
        "model": {
            "name": answer.model.name, "params": answer.model.params, "trainable": answer.model.trainable,
            "length": answer.model.length, "blocks": len(answer.model.blocks),
        },
        "gpus": answer.cluster.gpus,
        "gpu": answer.cluster.gpu.name,
        "sequences": answer.asked.sequences,
        "goal": answer.asked.goal,
        "limit_bytes": answer.asked.limit,
        "tried": answer.found.tried,
        "plans": [row_json(row) for row in distinct(answer.found.rows)],
        "rejected": [
            {"reason": r.reason, "plans": r.plans, "excess_bytes": r.excess,
             "nearest": None if r.nearest is None else plan_json(r.nearest)}
            for r in answer.found.rejected
        ],
        "what_if": [
            {"change": k.change, "memory_bytes": k.memory, "seconds": k.seconds} for k in answer.knobs
        ],
        "ladder": [{"rung": r.name, "fits": r.fits, **estimate_json(r.estimate)} for r in answer.ladder],
        "gpu_hours_per_billion_tokens": gpu_hours(answer.best.estimate, answer.cluster, 1e9),
        "checkpoint": good._asdict(),
    }  # fmt: skip


def row_json(row: Row) -> dict[str, Any]:
    """A ranked row."""
    return {"plan": plan_json(row.plan), "why": row.reason, **estimate_json(row.estimate)}


def plan_json(plan: ParallelPlan) -> dict[str, Any]:
    """All settings by name."""
    return dict(vars(plan))


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """All figures by name."""
    return estimate.as_dict()
