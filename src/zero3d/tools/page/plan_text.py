"""The answer of `zero3d plan` as tables for people; plan_json.py has it as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from zero3d.data.files import FILL_ME
from zero3d.distributed.degrees import AXES, FOLDS
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.text import GIB, binary, columns, count, size
from zero3d.spec.tiers import DEVICE, OPTIMIZER, TIERS, tiers_of
from zero3d.spec.zero import Zero
from zero3d.tools.plan.bill import Bill
from zero3d.tools.plan.goodput import GPU_HOURS_BETWEEN_FAILURES, goodput
from zero3d.tools.plan.inputs import without_effect
from zero3d.tools.plan.ladder import Rung, differs
from zero3d.tools.plan.links import Way, as_words, fastest
from zero3d.tools.plan.margin import Ends, Margin, Range
from zero3d.tools.plan.rollout import Rollout, Split
from zero3d.tools.plan.search import (
    DEVICE_MEMORY,
    LONG,
    Rejection,
    Row,
    SearchResult,
    Target,
    memory_of,
    sequence_ways,
    ways,
)
from zero3d.tools.plan.spec import APART, ClusterSpec, Estimate, Memory, ModelSpec, ParallelPlan, Seconds
from zero3d.tools.plan.what_if import Moved, WhatIf

KNOBS = 5  # what-if lines
LACKING = "~"  # marks plans that fit without their margin
LINKS_HEAD = ("way", "settings", "GPU GiB", "step s", "of it dp", "unrounded")
LINKS_TITLE = "Ways to send data-parallel traffic between nodes, each with the best plan that has any"
WAY_HEAD = ("mesh", "ZeRO", "GPU GiB", "step s", "why")


class Answer(NamedTuple):
    """A search with at least one plan, and what was asked.

    tokens  of the whole training; price: of a GPU-hour
    links   ways to train over links between nodes, where a file says what these are
    ends    what would no longer fit beside the first plan, where that was looked for
    """

    model: ModelSpec
    cluster: ClusterSpec
    target: Target
    result: SearchResult
    ladder: Sequence[Rung]
    knobs: Sequence[WhatIf]
    tokens: float | None = None
    price: float | None = None
    links: Sequence[Way] = ()
    ends: Ends | None = None

    @property
    def best(self) -> Row:
        """Return the first plan."""
        return self.result.rows[0]

    @property
    def room(self) -> float:
        """Return the bytes of a GPU in which a plan must fit with its margin."""
        return self.target.room

    @property
    def margin(self) -> Margin:
        """Return the margin of the first plan's memory, either way."""
        return self.target.margin_for(self.model, self.best.plan)

    @property
    def limit(self) -> float:
        """Return the bytes of a GPU that may be planned for plans like the first."""
        return self.target.usable(self.model, self.best.plan)


def as_text(answer: Answer, top: int) -> str:
    """Write everything, the ranked table first."""
    shown = distinct(answer.result.rows)[:top]
    lines = [*heading(answer.model, answer.cluster, answer.target.sequences), "", *headline(answer), ""]
    lines += _ranked(shown, answer)
    for title, found in compared_ways(answer):
        lines += ["", f"{title}:", *columns([("", *WAY_HEAD), *way_rows(found)], "<<<>><")]
    lines += ["", *links_lines(answer.links, answer.cluster, answer.limit)] if answer.links else []
    lines += ["", *_rejected(answer.result), "", *_what_if(answer), "", *_ladder(answer), "", *costs(answer)]
    return "\n".join(lines)


def heading(model: ModelSpec, cluster: ClusterSpec, sequences: int) -> Iterator[str]:
    """Yield lines: what is trained, where, in which portions."""
    trainable = "" if model.trainable == model.params else f" ({count(model.trainable)} of them trainable)"
    yield (
        f"{model.name}: {count(model.weights)} parameters{trainable}, {len(model.blocks)} blocks of {model.hidden:,}, "
        f"sequences of {model.length:,} tokens ({model.provenance})"
    )
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.per_node}"
    machines = f" in {cluster.hosts} machines" if cluster.hosts > cluster.nodes else ""
    each = f" ({cluster.inside.to(1) / 1e9:g} to each other GPU)" if cluster.inside.partners else ""
    yield (
        f"{cluster.gpus} x {cluster.gpu.name} with {binary(cluster.gpu.memory)} ({nodes}{machines}; "
        f"{cluster.inside.bandwidth / 1e9:g} GB/s inside{each}, {cluster.across.bandwidth / 1e9:g} GB/s across per GPU)"
    )
    yield f"{sequences:,} sequences = {sequences * model.length:,} tokens a step"


def headline(answer: Answer) -> Iterator[str]:
    """Yield lines: the first plan, its memory and its step with their ranges, and what would end it."""
    row, cluster = answer.best, answer.cluster
    memory = Range.of(row.estimate.memory.device, answer.margin.share)
    yield f"{answer.target.goal.capitalize()}: {short(row.plan)}"
    left = answer.room - memory.high
    rest = f"{binary(left)} left{would_end(answer.ends)}" if left >= 0 else f"{binary(-left)} of the margin lacking"
    yield f"   {binary(memory.mid)} ({gib(memory.low)}-{gib(memory.high)}) of {binary(answer.room)}, {rest}"
    yield f"   {_seconds(row.estimate.seconds)} s a step, MFU {100 * mfu(row, cluster):.0f} %"
    yield f"   margin {100 * answer.margin.share:.3g} %: {answer.margin.origin}"
    yield from (f"   {line}" for line in without_bf16(row.plan, cluster))


def without_bf16(plan: ParallelPlan, cluster: ClusterSpec) -> Iterator[str]:
    """Yield a line where a card does not multiply in bf16: what a plan has instead, or what it should."""
    if cluster.gpu.bf16:
        return
    card = f"{cluster.gpu.name} does not multiply in bf16"
    if plan.precision == "bf16":
        yield f"{card}: these are the rates of precision=fp16, and bf16 is slower"
    elif plan.precision == "fp16":
        yield f"{card}: planned in fp16, whose loss is scaled (precision: fp16)"


def would_end(ends: Ends | None) -> str:
    """Say what would no longer fit."""
    if ends is None or ends == Ends(None, None):
        return ""
    longer = [] if ends.length is None else [f"a sequence of more than {ends.length:,} tokens"]
    more = [] if ends.micro_batch is None else [f"a micro-batch of {ends.micro_batch + 1:,}"]
    return f": {' or '.join([*longer, *more])} would not fit"


def gib(nbytes: float) -> str:
    """Write bytes of a device in GiB, without the unit."""
    return f"{nbytes / GIB:.1f}"


def around(nbytes: float, margin: float) -> str:
    """Write bytes of a device in GiB, and their range."""
    memory = Range.of(nbytes, margin)
    return f"{gib(memory.mid)} ({gib(memory.low)}-{gib(memory.high)})"


def mfu(row: Row, cluster: ClusterSpec) -> float:
    """Return the useful operations of a step over those of all GPUs' peak in that time."""
    return row.estimate.flops / (row.estimate.seconds.mid * row.plan.world * cluster.gpu.flops)


def mesh(plan: ParallelPlan) -> str:
    """Name the degrees: pp 8 x dp 2 x tp 8."""
    text = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)
    degrees = {fold: getattr(plan, fold.name) for fold in FOLDS}
    folds = [f"{fold.name} {degree}" for fold, degree in degrees.items() if degree != (fold.usual or plan.dp)]
    return f"{text} ({', '.join(folds)})" if folds else text


def settings(plan: ParallelPlan) -> str:
    """Name what a plan says beside degrees, stage and micro-batch, in few words."""
    words = [plan.schedule] if plan.pp > 1 else []
    words += [] if plan.activations == "none" else [f"recompute {plan.activations}"]
    words += ["loss in tiles"] if plan.tiled_loss is True else []
    words += [] if plan.quantize is None else [f"base in {plan.quantize}"]
    return ", ".join([*words, *_said(plan.zero, plan), *_said(plan.mesh, plan), *_said(plan.offload, plan)]) or "-"


def _said(section: Zero | Mesh | Offload, plan: ParallelPlan) -> Iterator[str]:
    """Yield what a section says of a plan that is not by default, and not on the device, in words that it declares."""
    silent = without_effect(plan)
    for key in fields(section):
        value = getattr(section, key.name)
        if key.metadata["said"] and key.name not in silent and value not in (key.default, DEVICE):
            of_all = key.name == OPTIMIZER and plan.offload.fraction < 1
            share = f"{100 * plan.offload.fraction:g} % of " if of_all else ""
            yield share + key.metadata["said"].format(value)


def short(plan: ParallelPlan) -> str:
    """Describe a plan in a sentence."""
    text = f"{mesh(plan)}, stage {plan.zero.stage}, micro-batch {plan.micro_batch}, {settings(plan)}"
    return text.removesuffix(", -")


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the best row of each mesh, ZeRO stage, schedule and place of states."""
    kept: dict[tuple[object, ...], Row] = {}
    for row in rows:
        plan, away = row.plan, row.plan.offload
        degrees = plan.pp, plan.dp, plan.tp, plan.ep, plan.sp, plan.shard
        places = away.optimizer, away.params, away.gradients
        kept.setdefault((*degrees, plan.zero.stage, plan.schedule, *places), row)
    return list(kept.values())


def _ranked(rows: Sequence[Row], answer: Answer) -> Iterator[str]:
    target = answer.target
    yield f"Plans that fit {binary(answer.room)} of a GPU with the margin, {target.goal} first:"
    apart = held_apart(rows)
    head = ("", "mesh", "ZeRO", "micro x accum", "settings", "GPU GiB", "host GB", *(f"{name} GB" for name in apart))
    table = [(*head, "step s", "tokens/s/GPU", "MFU", "why")]
    for place, row in enumerate(rows, 1):
        plan, memory, seconds = row.plan, row.estimate.memory, row.estimate.seconds
        rate = row.estimate.tokens / seconds.mid / plan.world
        table.append(
            (
                f"{LACKING if row.lacks else ''}{place}",
                mesh(plan),
                str(plan.zero.stage),
                f"{plan.micro_batch} x {plan.accumulate}",
                settings(plan),
                around(memory.device, target.margin_for(answer.model, plan).share),
                f"{memory.host / 1e9:.0f}",
                *(f"{memory.tiers[name] / 1e9:.0f}" for name in apart),
                _seconds(seconds),
                f"{rate:,.0f}",
                f"{100 * mfu(row, answer.cluster):.0f} %",
                ", ".join([*lacking(row), row.reason]),
            )
        )
    yield from columns(table, "><<<<>>" + ">" * len(apart) + ">>><")
    if any(row.lacks for row in rows):
        yield f"   {LACKING} fits, and has less room beyond it than the margin."
    if rows and rows[0].plan.offload.states and target.offload == "auto":
        yield "   No plan fits with all states on the GPU: in these plans states leave it."
    elif rows and rows[0].plan.offload.activations_leave:
        yield "   No plan fits with the inputs of recomputed blocks on the GPU: in these plans they wait on the host."
    yield from (f"   {line}" for line in places_lines(rows[0].estimate.memory))


def lacking(row: Row) -> list[str]:
    """Say in a cell how many bytes of the margin a plan lacks; nothing where it has the whole margin."""
    return [f"lacks {binary(row.lacks)} of the margin"] if row.lacks else []


def compared_ways(answer: Answer) -> Iterator[tuple[str, Sequence[tuple[str, Row | None]]]]:
    """Yield titles and the best plan of each way to place experts, and to hold long sequences, where there are any."""
    model, goal, rows = answer.model, answer.target.goal, answer.result.rows
    if model.experts:
        yield f"Where the {model.experts} experts of a layer are, the {goal} plan of each way", list(ways(rows))
    if model.length >= LONG:
        title = f"Where the {model.length:,} tokens of a sequence are, the {goal} plan of each way"
        yield title, list(sequence_ways(rows))


def way_rows(found: Sequence[tuple[str, Row | None]]) -> list[tuple[str, ...]]:
    """Return rows of a table below WAY_HEAD, the name of each way first."""
    none = ("", "", "", "", "none of these fits")
    return [(name, *(none if row is None else _way(row))) for name, row in found]


def _way(row: Row) -> tuple[str, ...]:
    memory, seconds = row.estimate.memory, row.estimate.seconds
    return mesh(row.plan), str(row.plan.zero.stage), gib(memory.device), figure(seconds.mid), row.reason


def links_lines(links: Sequence[Way], cluster: ClusterSpec, limit: float) -> Iterator[str]:
    """Yield lines: what each way to train sends between nodes of several GPUs, how long it takes, and the fastest."""
    yield f"{LINKS_TITLE}:"
    yield from columns([LINKS_HEAD, *links_rows(links, cluster, limit)], "<<>>><")
    for narrow, what in ((False, "unchanged"), (True, "unchanged or rounded")):
        best = fastest(links, cluster, limit, narrow)
        yield f"   Fastest with numbers sent {what}: {' '.join(as_words(best.settings)) or 'flat'}"


def links_rows(links: Sequence[Way], cluster: ClusterSpec, limit: float) -> list[tuple[str, ...]]:
    """Return rows of a table below LINKS_HEAD."""
    table: list[tuple[str, ...]] = []
    for way in links:
        memory, seconds = way.estimate.memory, way.estimate.seconds
        full = memory.device > limit or bool(memory.lacks(cluster))
        cells = (gib(memory.device), figure(seconds.mid), figure(seconds.parts.get("dp", 0.0)))
        said = "does not fit" if full else "rounded" if way.rounds else "yes"
        table.append((way.name, " ".join(as_words(way.settings)) or "-", *cells, said))
    return table


def held_apart(rows: Sequence[Row]) -> list[str]:
    """Return the tiers that a table has a column for: those, beside the host, in which any of its plans has bytes."""
    return [name for name in APART if any(row.estimate.memory.tiers[name] for row in rows)]


def places_lines(memory: Memory) -> Iterator[str]:
    """Yield a line for each place off the device: what a rank has of states there."""
    for place, parts in memory.away.items():
        cells = ", ".join(f"{name} {size(int(nbytes), keep_zero=True)}" for name, nbytes in parts.items())
        yield f"states of a rank on the {place}: {cells} = {size(int(sum(parts.values())), keep_zero=True)}"


def _seconds(seconds: Seconds) -> str:
    return f"{figure(seconds.mid)} ({figure(seconds.low)}-{figure(seconds.high)})"


def figure(value: float) -> str:
    """Write three digits, or all of a whole number."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rejected(result: SearchResult) -> Iterator[str]:
    others = " Why the others do not:" if result.rejected else ""
    few = sum(row.lacks > 0 for row in result.rows)
    without = f" ({few:,} of them {LACKING}, with less than the margin)" if few else ""
    yield f"{result.tried:,} plans, of which {len(result.rows):,} fit{without}.{others}"
    for rejection in result.rejected:
        near = f"; the nearest needs {missed(rejection)} more: {short(rejection.nearest)}" if rejection.nearest else ""
        yield f"   {rejection.plans:,}: {rejection.reason}{near}" + (f", {rejection.sum}" if rejection.sum else "")


def missed(rejection: Rejection) -> str:
    """Write the bytes by which the nearest plan missed: of a device in GiB, of other tiers in GB."""
    device = rejection.reason == DEVICE_MEMORY
    return binary(rejection.excess) if device else size(int(rejection.excess))


def _what_if(answer: Answer) -> Iterator[str]:
    best = answer.best
    what = "memory of the fullest GPU, time of a step, what moves the peak"
    yield f"What if one setting of the first plan changed ({what}):"
    rows = knob_rows(answer.knobs[:KNOBS], best, answer.limit, answer.cluster)
    yield from columns(rows, "<>><<") if rows else ["   nothing to change"]


def knob_rows(knobs: Sequence[WhatIf], row: Row, limit: float, cluster: ClusterSpec) -> list[tuple[str, ...]]:
    """Return rows of a table: change, memory, time of a step, what moves the peak, when that is, and what is too small.

    That is a GPU's limit, or a node's tiers.
    """
    mid = row.estimate.seconds.mid
    return [
        (
            knob.change,
            f"{knob.memory / GIB:+.1f} GiB",
            f"{100 * knob.seconds / mid:+.1f} %",
            _moved(knob.moved),
            _misfit(knob.estimate.memory, limit, cluster),
        )
        for knob in knobs
    ]


def _moved(moved: Moved | None) -> str:
    return "" if moved is None else f"{moved.category} {moved.nbytes / GIB:+.1f} GiB at {moved.instant}"


def _misfit(memory: Memory, limit: float, cluster: ClusterSpec) -> str:
    if memory.device > limit:
        return "does not fit"
    return next((f"the {name} has less" for name in memory.lacks(cluster)), "")


def ladder_title(answer: Answer) -> str:
    """Return what heads the ladder."""
    n = answer.ladder[0].plan.dp
    return f"The ladder of ZeRO stages and offload, with N = {n} data-parallel ranks and full recomputation"


def _ladder(answer: Answer) -> Iterator[str]:
    yield f"{ladder_title(answer)}:"
    rows = [("stage", "states GiB", "GPU GiB", "host GB", "step s", "")]
    for rung in answer.ladder:
        memory = rung.estimate.memory
        rows.append(
            (
                rung.name,
                gib(memory.states),
                gib(memory.device),
                f"{memory.host / 1e9:.0f}",
                figure(rung.estimate.seconds.mid),
                "" if rung.fits else "does not fit",
            )
        )
    yield from columns(rows, "<>>>><")
    differing = differs(answer.ladder)
    yield f"   {differing or 'the rule of thumb (1, 2, 2 + offload, 3, 3 + offload) holds for this N'}."


def costs(answer: Answer) -> Iterator[str]:
    """Yield lines on host memory, GPU-hours, how often to save, and what must be known of these figures."""
    estimate, cluster = answer.best.estimate, answer.cluster
    processes = min(cluster.per_node, answer.best.plan.world)
    whole = size(4 * processes * answer.model.weights)
    yield (
        f"Host memory: {size(int(estimate.memory.host))} of {size(int(cluster.host_memory))} for {processes} ranks, "
        f"which read slices of the model; if each loaded the full fp32 model, they would take {whole}."
    )
    yield from cost_lines(estimate, cluster, answer.tokens, answer.price)
    good = goodput(answer.model, cluster)
    yield (
        f"Checkpoints: every {_duration(good.every)} (a save takes {_duration(good.save)}, a failure comes every "
        f"{_duration(good.mtbf)} at {GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU-hours each): {100 * good.share:.1f} % of the "
        "time trains."
    )
    for note in estimate.notes:
        yield f"Note: {note}"


def cost_lines(estimate: Estimate, cluster: ClusterSpec, tokens: float | None, price: float | None) -> Iterator[str]:
    """Yield lines: GPU-hours, energy and money, for a billion tokens and for all of the training where it is known."""
    billion = Bill.of(estimate, cluster, 1e9, price)
    watts = "" if cluster.gpu.power is None else f" ({cluster.gpu.power:g} W a card, {power_from(cluster)})"
    yield f"Cost: {billion.hours:,.1f} GPU-hours per billion tokens{_energy(billion)}{watts}{_money(billion, price)}."
    if tokens:
        whole = Bill.of(estimate, cluster, tokens, price)
        yield (
            f"   {count(tokens)} tokens: {whole.hours:,.0f} GPU-hours, {whole.days:,.1f} days{_energy(whole)}"
            f"{_money(whole, price)}."
        )


def power_from(cluster: ClusterSpec) -> str:
    """Return the source of a card's watts."""
    return cluster.provenance.get("gpu.power", cluster.provenance.get("gpu", "user"))


def _energy(bill: Bill) -> str:
    return "" if bill.kwh is None else f", {figure(bill.kwh)} kWh at full power"


def _money(bill: Bill, price: float | None) -> str:
    return "" if bill.money is None else f", {bill.money:,.0f} at {price:g} each"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{figure(seconds / length)} {unit}"
    return f"{seconds:.3g} s"


def head(answer: Answer, asks: bool) -> str:
    """Write the comment at the top of an emitted file. asks: its data are to be filled in."""
    plan, estimate = answer.best.plan, answer.best.estimate
    nodes = f" --nodes {answer.cluster.hosts}" if answer.cluster.hosts > 1 else ""
    return (
        f"# {short(plan)}\n"
        f"# planned: {around(estimate.memory.device, answer.margin.share)} GiB of each GPU, "
        f"{_seconds(estimate.seconds)} s a step, on {answer.cluster.gpus} x {answer.cluster.gpu.name}\n"
        f"# start: zero3d launch torchrun THIS_FILE{nodes} --gpus-per-node {answer.cluster.on_host}\n"
        "# output is a folder that all machines share\n"
        + (
            f"# {FILL_ME} stands for your data, and for the folder of the model's tokenizer (leave that out for token "
            "ids in .npy files)\n"
            if asks
            else "# data.train is the text of Python's standard library until you say data.train: FILES\n"
        )
    )


# --- nothing fits -------------------------------------------------------------------------------


def nothing_fits(
    model: ModelSpec, cluster: ClusterSpec, target: Target, result: SearchResult, larger: tuple[int, Row] | None
) -> str:
    """Write one line: the nearest plan, and what would make it fit."""
    outcome = (
        f"{model.name} ({count(model.weights)} parameters, {model.length:,} tokens) fits no plan on {cluster.gpus} x "
        f"{cluster.gpu.name} within {binary(target.room)}: {result.tried:,} plans tried"
    )
    nearest = min((r for r in result.rejected if r.nearest), key=lambda rejection: rejection.excess, default=None)
    if nearest is None:
        return f"{outcome}, {_reasons(result.rejected)}. {_other_batch(model, cluster, target)}"
    miss = f"{outcome}. Nearest: {nearest.reason} is short by {missed(nearest)} with {_named(nearest)}"
    if larger is None:
        for name in tiers_of(OPTIMIZER):
            if nearest.reason == memory_of(name):
                return f"{miss}{f': {nearest.sum}' if nearest.sum else ''}. Pass more --nodes{_beyond(name)}."
        return f"{miss}. Pass a larger --gpu, a shorter --seq, or --lora."
    return f"{miss}. It fits on --gpus {larger[0]}: {short(larger[1].plan)}."


def _beyond(tier: str) -> str:
    """Say what else to pass where a tier is too small: the next with its own memory; the field that says its size."""
    names, capacity = tiers_of(OPTIMIZER), TIERS[tier].capacity
    further = [f", --offload {name}" for name in names[names.index(tier) + 1 :] if not TIERS[name].on_host]
    return "".join(further[:1]) + (f", or a --cluster file with more {capacity}" if isinstance(capacity, str) else "")


def _other_batch(model: ModelSpec, cluster: ClusterSpec, target: Target) -> str:
    """Say what to pass where no plan was left to price: mostly sequences that dp does not divide."""
    whole = -(-target.sequences // cluster.gpus) * cluster.gpus
    if whole == target.sequences:
        return "Pass other --gpus."
    tokens = whole * model.length
    return f"Pass --tokens-per-batch {tokens} ({whole} sequences of {model.length:,} for {cluster.gpus} GPUs)."


def _named(rejected: Rejection) -> str:
    return short(rejected.nearest) if rejected.nearest else "no plan"


def _reasons(rejected: Sequence[Rejection]) -> str:
    return ", ".join(f"{rejection.plans:,}: {rejection.reason}" for rejection in rejected)


# --- one plan -----------------------------------------------------------------------------------


def terms(parts: Mapping[str, float], total: float, scale: float, unit: str) -> Iterator[str]:
    """Yield lines of a breakdown with shares, the largest first; what is below 0.05 % is left out."""
    rows = [
        (name, f"{figure(value / scale)} {unit}", f"{100 * value / total:.1f} %")
        for name, value in sorted(parts.items(), key=lambda item: -abs(item[1]))
        if abs(value) > 5e-4 * total
    ]
    yield from columns(rows, "<>>")


def memory_lines(memory: Memory) -> Iterator[str]:
    """Yield lines: the four meanings of memory, and what is there at the peak."""
    yield f"Memory of the fullest GPU: {memory.device / GIB:.2f} GiB as a device monitor shows it"
    yield from columns(
        [
            ("model states", f"{memory.states / GIB:.2f} GiB"),
            ("most allocated", f"{memory.allocated / GIB:.2f} GiB"),
            ("reserved for it", f"{memory.reserved / GIB:.2f} GiB"),
            ("of the fullest host", f"{memory.host / 1e9:.2f} GB"),
            *((f"of its {name}", f"{held / 1e9:.2f} GB") for name, held in memory.tiers.items() if held),
        ],
        "<>",
    )
    for line in places_lines(memory):
        yield f"{line[0].upper()}{line[1:]}"
    yield f"At the peak, {memory.instant}:"
    yield from terms(memory.parts, memory.allocated, GIB, "GiB")


HELD = {  # what is alive at an instant, by what it is for
    "weights, optimizer": ("parameters", "optimizer", "ring"),
    "gradients": ("gradients",),
    "activations": ("activations", "temporary", "passed", "batch"),
    "buffers": ("gathered", "bucket", "wire"),
    "padding": ("padding",),
}


def shown_instants(instants: Sequence[tuple[str, Mapping[str, float]]]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield instants; of the blocks between the first and the last whose backward it is, only one that is the peak."""
    of_blocks = [
        at for at, (name, _) in enumerate(instants) if name.startswith("backward of") and "the embedding" not in name
    ]
    peak = max(range(len(instants)), key=lambda at: sum(instants[at][1].values()))
    yield from (each for at, each in enumerate(instants) if at == peak or at not in of_blocks[1:-1])


def instant_lines(instants: Sequence[tuple[str, Mapping[str, float]]]) -> Iterator[str]:
    """Yield a table of what is alive at each instant of a step."""
    yield "Alive at each instant of a step, in GiB:"
    rows = [
        (name, *(figure(sum(parts.get(each, 0.0) for each in of) / GIB) for of in (parts, *HELD.values())))
        for name, parts in shown_instants(instants)
    ]
    yield from columns([("", "all", *HELD), *rows], "<" + ">" * (1 + len(HELD)))


def time_lines(row: Row, cluster: ClusterSpec) -> Iterator[str]:
    """Yield lines: a step's seconds, what they go into, and what a rank sends."""
    estimate, world = row.estimate, row.plan.world
    seconds = estimate.seconds
    rate = estimate.tokens / seconds.mid
    yield (
        f"A step of {estimate.tokens:,} tokens: {_seconds(seconds)} s, {rate:,.0f} tokens/s "
        f"({rate / world:,.0f} per GPU), {estimate.flops / seconds.mid / world / 1e12:.1f} useful TFLOP/s per GPU, "
        f"MFU {100 * mfu(row, cluster):.0f} %"
    )
    yield from terms(seconds.parts, seconds.mid, 1.0, "s")
    yield "Sent by the busiest rank in a step:"
    yield from columns(
        [(name, size(int(value))) for name, value in estimate.traffic.items()] or [("nothing", "")], "<>"
    )


def rollout_lines(rollout: Rollout, split: Split) -> Iterator[str]:
    """Yield lines: what a step of reinforcement learning is split into, and a stream of weights by link."""
    stream = split.streaming
    slowest = max(stream.seconds.values())
    yield ""
    yield (
        f"A step of reinforcement learning: {rollout.prompts:,} prompts x {rollout.samples:,} completions of "
        f"{rollout.new:,} tokens"
    )
    gpus = "one GPU" if split.sampler == 1 else f"{split.sampler} GPUs"
    yield from columns(
        [
            ("sampling, at least", f"{split.sampling:.3g} s", f"a copy of the model on {gpus}"),
            ("streaming", f"{slowest:.3g} s", f"{size(int(stream.nbytes))}, over the slowest link"),
            ("training", f"{split.training:.3g} s", f"{split.steps:,} steps"),
        ],
        "<><",
    )
    yield "A stream of all weights:"
    yield from columns([(name, f"{seconds:.3g} s") for name, seconds in stream.seconds.items()], "<>")
