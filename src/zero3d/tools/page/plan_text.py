"""The answer of `zero3d plan` as tables for people; plan_json.py has it as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from textwrap import wrap
from typing import NamedTuple

from zero3d.data.files import FILL_ME
from zero3d.distributed.degrees import AXES, FOLDS
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.text import GIB, binary, columns, count, size
from zero3d.spec.tiers import DEVICE, OPTIMIZER, TIERS, tiers_of
from zero3d.spec.zero import Zero
from zero3d.tools.plan.bill import Bill
from zero3d.tools.plan.choice import EQUAL, Choice, choose
from zero3d.tools.plan.goodput import GPU_HOURS_BETWEEN_FAILURES, goodput
from zero3d.tools.plan.inputs import without_effect
from zero3d.tools.plan.judged import judged
from zero3d.tools.plan.ladder import Rung, differs
from zero3d.tools.plan.lengths import Lengths
from zero3d.tools.plan.links import Way, as_words, fastest
from zero3d.tools.plan.margin import Ends, Margin, Range
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
from zero3d.tools.plan.what_if import Moved, WhatIf, faster

KNOBS = 5  # what-if lines
BARE = "# model.path has random weights, which adapters learn little on: name a folder with weights\n"
COMPILED = ", anew for each shape of a batch"
NARROW = 3  # plans shown that lack margin, where others have it
WIDTH = 120  # columns
TUNED = ("lora", "qlora")  # kinds of runs of which people ask what a card shows, not what is live
RECOMMENDED, LACKING = "*", "~"  # marks plans that fit without their margin
LINKS_HEAD = ("way", "settings", "GPU GiB", "step s", "of it dp s", "unrounded")
LINKS_TITLE = "Ways to send data-parallel traffic between nodes, each with the best plan that has any"
WAY_HEAD = ("mesh", "ZeRO", "GPU GiB", "step s", "why")


class Answer(NamedTuple):
    """A search with at least one plan, and what was asked.

    tokens  of the whole training; price: of a GPU-hour
    links   ways to train over links between nodes, where a file says what these are
    ends    what would no longer fit beside the recommended plan, where that was looked for
    batch   who says how large a step is, and what to type for another
    lengths of the file's own sequences; None where they decide nothing, or `unknown` says why nobody knows
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
    batch: str = ""
    lengths: Lengths | None = None
    unknown: str = ""

    @property
    def choice(self) -> Choice:
        """Return which plan is recommended."""
        return choose(self.result.rows, self.target.goal)

    @property
    def best(self) -> Row:
        """Return the recommended plan."""
        return self.choice.row

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
    """Write everything, the ranked table first, in lines of at most WIDTH columns."""
    lines = [*heading(answer.model, answer.cluster, answer.target.sequences, answer.batch), "", *headline(answer), ""]
    lines += _ranked(answer, top)
    for title, found in compared_ways(answer):
        lines += ["", f"{title}:", *columns([("", *WAY_HEAD), *way_rows(found)], "<<<>><")]
    lines += ["", *links_lines(answer.links, answer.cluster, answer.limit)] if answer.links else []
    lines += ["", *_rejected(answer.result), "", *_what_if(answer), "", *_ladder(answer), "", *costs(answer)]
    return "\n".join(folded(lines))


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of at most WIDTH columns: what is longer goes on below, further in."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 3)
        yield from wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def heading(model: ModelSpec, cluster: ClusterSpec, sequences: int, batch: str = "") -> Iterator[str]:
    """Yield lines: what is trained, where, in which portions. batch: who says how large a step is."""
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
    yield f"{sequences:,} sequences = {sequences * model.length:,} tokens a step{f': {batch}' if batch else ''}"


def headline(answer: Answer) -> Iterator[str]:
    """Yield lines: the recommended plan, why this one, its memory and step with their ranges, what would end it."""
    row, cluster = answer.best, answer.cluster
    memory = Range.of(row.estimate.memory.device, answer.margin.share)
    yield f"Recommended: {short(row.plan)}"
    yield f"   {why_this(answer.choice, answer.target.goal)}"
    left = answer.room - memory.high
    rest = (
        f"{binary(left)} left{would_end(answer.ends, row.plan)}"
        if left >= 0
        else f"{binary(-left)} of the margin lacking"
    )
    yield f"   needs {binary(memory.mid)} ({gib(memory.low)}-{gib(memory.high)}) of {binary(answer.room)}, {rest}"
    if answer.margin.kind in TUNED:
        yield f"   that is what the card reserves: {binary(row.estimate.memory.allocated)} of it are live tensors"
    yield f"   {seconds_text(row.estimate.seconds)} s a step, MFU {100 * mfu(row, cluster):.0f} %"
    yield f"   margin {100 * answer.margin.share:.3g} %: {answer.margin.origin}"
    yield from (f"   {line}" for line in without_bf16(row.plan, cluster))
    yield from (f"   {line}" for line in judged_lines(answer.model, cluster, row.plan))
    yield from (f"   {line}" for line in lengths_lines(answer.lengths, answer.unknown, row.plan))


def judged_lines(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> Iterator[str]:
    """Yield a line on what of a plan no published run was compared with."""
    said = judged(model, cluster, plan)
    yield from [] if said is None else [said]


def lengths_lines(lengths: Lengths | None, unknown: str, plan: ParallelPlan) -> Iterator[str]:
    """Yield a line on how long the sequences of a run's data are."""
    if lengths is not None:
        yield lengths.told(plan.micro_batch)
    elif unknown:
        yield f"all sequences are priced as of the full length: {unknown}"


def why_this(choice: Choice, goal: str) -> str:
    """Say by what a plan is recommended."""
    near = f"within {100 * EQUAL:g} % of "
    apart = "which predictions do not tell apart"
    if choice.equal == 1:
        return f"the {goal}: no other such plan is {near}it"
    if choice.row is choice.fastest:
        return f"the {goal}, and the simplest of {choice.equal:,} plans {near}it, {apart}"
    seconds = figure(choice.fastest.estimate.seconds.mid)
    return f"the simplest of {choice.equal:,} plans {near}the {goal} ({seconds} s a step), {apart}"


def without_bf16(plan: ParallelPlan, cluster: ClusterSpec) -> Iterator[str]:
    """Yield a line where a card does not multiply in bf16: what a plan has instead, or what it should."""
    if cluster.gpu.bf16:
        return
    card = f"{cluster.gpu.name} does not multiply in bf16"
    if plan.precision == "bf16":
        yield f"{card}: these are the rates of precision=fp16, and bf16 is slower"
    elif plan.precision == "fp16":
        yield f"{card}: planned in fp16, whose loss is scaled (precision: fp16)"


def would_end(ends: Ends | None, plan: ParallelPlan) -> str:
    """Say what would no longer fit, of what the same step can have."""
    if ends is None:
        return ""
    longer = [] if ends.length is None else [f"a sequence of more than {ends.length:,} tokens"]
    larger = None if ends.micro_batch is None else larger_micro_batch(plan, ends.micro_batch)
    more = [] if larger is None else [f"a micro-batch of {larger:,}"]
    return f": {' or '.join([*longer, *more])} would not fit" if longer or more else ""


def larger_micro_batch(plan: ParallelPlan, than: int) -> int | None:
    """Return the next micro-batch that divides a rank's sequences and that the schedule takes; None: there is none."""
    sequences, schedule = plan.micro_batch * plan.accumulate, Schedule.of(plan.schedule)
    for micro in range(than + 1, sequences + 1):
        if sequences % micro == 0:
            with suppress(ConfigError):
                if plan.pp > 1:
                    schedule.check(sequences // micro, plan.pp)
                return micro
    return None


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
    """Name the degrees: pp 8 x dp 2 x tp 8 (shard 8)."""
    return f"{axes(plan)} ({', '.join(_folds(plan))})" if _folds(plan) else axes(plan)


def axes(plan: ParallelPlan) -> str:
    """Name the degrees of the mesh itself."""
    return " x ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)


def _folds(plan: ParallelPlan) -> list[str]:
    """Name the degrees of axes that lie in dp, where they are not as usual."""
    degrees = {fold: getattr(plan, fold.name) for fold in FOLDS}
    return [f"{fold.name} {degree}" for fold, degree in degrees.items() if degree != (fold.usual or plan.dp)]


def settings(plan: ParallelPlan) -> str:
    """Name what a plan says beside degrees, stage and micro-batch, in few words."""
    words = [plan.schedule] if plan.pp > 1 else []
    words += [] if plan.activations == "none" else [f"recompute {plan.activations}"]
    words += ["loss in tiles"] if plan.tiled_loss is True else []
    words += [] if plan.quantize is None else [f"base in {plan.quantize}"]
    words += ["compiled"] if plan.compile else []
    words += ["moments in 8 bits"] if OPTIMIZERS[plan.optimizer].coded else []
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
    stage = "" if stage_of(plan) == "-" else f"stage {stage_of(plan)}, "
    text = f"{mesh(plan)}, {stage}micro-batch {plan.micro_batch}, {settings(plan)}"
    return text.removesuffix(", -")


def stage_of(plan: ParallelPlan) -> str:
    """Name a plan's ZeRO stage: over one rank all are alike, but for what may leave the device."""
    if plan.shard > 1:
        return str(plan.zero.stage)
    return f"{plan.zero.stage} (to offload)" if plan.zero.stage and plan.offload.states else "-"


def distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the best row of each mesh, ZeRO stage, schedule and place of states."""
    kept: dict[tuple[object, ...], Row] = {}
    for row in rows:
        plan, away = row.plan, row.plan.offload
        degrees = plan.pp, plan.dp, plan.tp, plan.ep, plan.sp, plan.shard
        places = away.optimizer, away.params, away.gradients
        narrow = plan.quantize, plan.optimizer, plan.zero.reduce_dtype
        kept.setdefault((*degrees, stage_of(plan), plan.schedule, *places, *narrow), row)
    return list(kept.values())


def shown(answer: Answer, top: int) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    """Return rows of tables with their places: those that fit, the recommended among them, and some without margin."""
    rows, best = answer.result.rows, answer.best
    parts = [row for row in rows if not row.lacks], [row for row in rows if row.lacks]
    fit, narrow = (list(enumerate(distinct(part), 1)) for part in parts)
    named = [(place, row) for place, row in fit[top:] if row is best]
    return fit[:top] + named, narrow[: NARROW if fit else top]


def _ranked(answer: Answer, top: int) -> Iterator[str]:
    """Yield tables of plans, two lines each: figures, and below them settings and why."""
    target, best = answer.target, answer.best
    fit, narrow = shown(answer, top)
    if fit:
        yield f"Plans that fit {binary(answer.room)} of a GPU with the margin, {target.goal} first:"
        yield from _table(fit, answer)
    if narrow:
        yield from [""] if fit else []
        yield f"Plans that fit {binary(answer.room)} of a GPU, with less beyond them than the margin ({LACKING}):"
        yield from _table(narrow, answer)
    if best.plan.offload.states and target.offload == "auto":
        yield "   No plan fits with all states on the GPU: in these plans states leave it."
    elif best.plan.offload.activations_leave:
        yield "   No plan fits with the inputs of recomputed blocks on the GPU: in these plans they wait on the host."
    if words := rounded(best.plan, target):
        yield f"   No plan fits without rounding more than was asked: these have {words}, and other bits by that."
    yield from (f"   {line}" for line in places_lines(best.estimate.memory))


def _table(rows: Sequence[tuple[int, Row]], answer: Answer) -> Iterator[str]:
    best, apart = answer.best, held_apart([row for _, row in rows])
    head = ("", "mesh", "ZeRO", "micro x accum", "GPU GiB", "host GB", *(f"{name} GB" for name in apart))
    table = [(*head, "step s", "tokens/s/GPU", "MFU")]
    for place, row in rows:
        plan, memory, seconds = row.plan, row.estimate.memory, row.estimate.seconds
        rate = row.estimate.tokens / seconds.mid / plan.world
        mark = RECOMMENDED if row is best else LACKING if row.lacks else ""
        table.append(
            (
                f"{mark}{place}",
                axes(plan),
                stage_of(plan),
                f"{plan.micro_batch} x {plan.accumulate}",
                around(memory.device, answer.target.margin_for(answer.model, plan).share),
                f"{memory.host / 1e9:.0f}",
                *(f"{memory.tiers[name] / 1e9:.0f}" for name in apart),
                figure(seconds.mid),
                f"{rate:,.0f}",
                f"{100 * mfu(row, answer.cluster):.0f} %",
            )
        )
    first, *lines = columns(table, "><<<>>" + ">" * len(apart) + ">>>")
    yield first
    indent = " " * (3 + max(len(cells[0]) for cells in table) + 2)
    for line, (_, row) in zip(lines, rows, strict=True):
        yield line
        words = [*_folds(row.plan), *([] if settings(row.plan) == "-" else [settings(row.plan)])]
        yield f"{indent}{'; '.join(filter(None, [', '.join(words), *lacking(row), row.reason]))}"
    if any(row is best for _, row in rows):
        yield f"   {RECOMMENDED} recommended"


def rounded(plan: ParallelPlan, target: Target) -> str:
    """Say what a plan rounds more than a target asks for; "" where it does not."""
    words = [f"a base in {plan.quantize}"] if plan.quantize != target.quantize else []
    words += ["moments in 8 bits"] if plan.optimizer != target.optimizer else []
    words += [f"reductions in {plan.zero.reduce_dtype}"] if plan.zero.reduce_dtype != Zero.reduce_dtype else []
    return ", ".join(words)


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
    return mesh(row.plan), stage_of(row.plan), gib(memory.device), figure(seconds.mid), row.reason


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


def seconds_text(seconds: Seconds) -> str:
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
    yield f"What if one setting of the recommended plan changed ({what}):"
    rows = knob_rows(answer.knobs[:KNOBS], best, answer.limit, answer.cluster)
    yield from columns(rows, "<>><<") if rows else ["   nothing to change"]
    if not best.lacks:
        usable = partial(answer.target.usable, answer.model)
        yield "   " + faster_line(faster(answer.knobs, best, usable, answer.cluster))


def faster_line(found: Sequence[WhatIf]) -> str:
    """Say which single changes are faster with the memory left."""
    words = (
        f"{knob.change} ({figure(knob.estimate.seconds.mid)} s a step, {gib(knob.estimate.memory.device)} GiB"
        f"{', rounds numbers' if knob.rounds else ''}{COMPILED if knob.change == 'train.compile: true' else ''})"
        for knob in found[:KNOBS]
    )
    return f"Faster with the memory left: {'; '.join(words) or 'no single change'}"


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
    plan = answer.ladder[0].plan
    return (
        f"The ladder of ZeRO stages and offload, with N = {plan.dp} data-parallel ranks, full recomputation and a "
        f"micro-batch of {plan.micro_batch}{', compiled' * plan.compile}"
    )


def rung_verdict(rung: Rung, room: float, cluster: ClusterSpec) -> str:
    """Say what a rung has no room for; "" where it fits with its margin."""
    if rung.fits:
        return ""
    if rung.estimate.memory.device <= room and not rung.estimate.memory.lacks(cluster):
        return f"{LACKING} lacks {binary(rung.lacks)} of the margin"
    return "does not fit"


def rungs(answer: Answer) -> Iterator[tuple[str, Rung]]:
    """Yield the rungs of the ladder with their names: over one rank stages are alike, but for what may leave it."""
    alone, told = answer.ladder[0].plan.dp == 1, False
    for rung in answer.ladder:
        away = bool(rung.plan.offload.states)
        if not alone:
            yield rung.name, rung
        elif away or not told:
            told = told or not away
            yield (f"{rung.plan.zero.stage} (to offload)" if away else "any stage"), rung


def _ladder(answer: Answer) -> Iterator[str]:
    yield f"{ladder_title(answer)}:"
    rows = [("stage", "states GiB", "GPU GiB", "host GB", "step s", "")]
    for name, rung in rungs(answer):
        memory = rung.estimate.memory
        rows.append(
            (
                name,
                gib(memory.states),
                around(memory.device, rung.margin.share),
                f"{memory.host / 1e9:.0f}",
                figure(rung.estimate.seconds.mid),
                rung_verdict(rung, answer.room, answer.cluster),
            )
        )
    yield from columns(rows, "<>>>><")
    if answer.ladder[0].plan.dp > 1:
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


def head(answer: Answer, asks: bool, bare: bool = False) -> str:
    """Write the comment at the top of an emitted file.

    asks  its data are to be filled in; bare: it has adapters, and its model no weights
    """
    plan, estimate = answer.best.plan, answer.best.estimate
    nodes = f" --nodes {answer.cluster.hosts}" if answer.cluster.hosts > 1 else ""
    return (
        f"# {short(plan)}\n"
        f"# planned: {around(estimate.memory.device, answer.margin.share)} GiB of each GPU, "
        f"{seconds_text(estimate.seconds)} s a step, on {answer.cluster.gpus} x {answer.cluster.gpu.name}\n"
        f"# start: zero3d launch torchrun THIS_FILE{nodes} --gpus-per-node {answer.cluster.on_host}\n"
        "# output is a folder that all machines share\n"
        + (
            f"# {FILL_ME} stands for your data, and for the folder of the model's tokenizer (leave that out for token "
            "ids in .npy files)\n"
            if asks
            else "# data.train is the text of Python's standard library until you say data.train: FILES\n"
        )
        + (BARE if bare else "")
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
