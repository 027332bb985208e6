"""`zero3d simulate --html FILE`: a step of one rank of each class as a page: what it holds, does and sends.

key figures | memory over time per rank class, its peak and the ten largest tensors | the pipeline | states against
formula | traffic | FLOPs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from zero3d.spec.text import count, size
from zero3d.tools.page import frame
from zero3d.tools.page.charts import Slot, Stretch, areas, lanes
from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import category_class
from zero3d.tools.sim.chrome import describe
from zero3d.tools.sim.gantt import Gantt, gantt
from zero3d.tools.sim.result import RankResult, Simulation, Timeline

DRAWN = 16  # ranks whose memory is drawn: the fullest
POINTS, FINEST = 2400, 480  # samples of all charts together, and of one at most
SLOTS, NAMED = 6000, 1500  # actions of a pipeline that are drawn, and up to which each may bear its number
PHASES = ("forward", "backward", "recomputed", "step")
KINDS = {"F": 0, "B": 1, "I": 1, "W": 2}  # of actions, as colours
SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def simulation_page(simulation: Simulation) -> str:
    """Write the page."""
    degrees = simulation.degrees
    chart = gantt(simulation)
    return frame.page(
        f"{simulation.model}: a step of {degrees.world:,} ranks",
        tag("h1", f"A step of {simulation.model} on {degrees.world:,} ranks"),
        frame.paragraph(
            f"{degrees}, ZeRO stage {simulation.stage}, {simulation.precision}, {simulation.backend}; batch "
            f"{simulation.batch:,} = micro-batch {simulation.micro_batch} x accumulate {simulation.accumulate} x dp "
            f"{degrees.dp}, sequences of {simulation.length:,} tokens. None of these ranks is there: the engine ran "
            "dry.",
            "dim",
        ),
        *(frame.paragraph(note) for note in simulation.notes),
        frame.tiles(_figures(simulation, chart)),
        _memory(simulation),
        *([_pipeline(simulation, chart)] if chart else []),
        frame.pair(_states(simulation), _flops(simulation)),
        _traffic(simulation),
    )


def _figures(simulation: Simulation, chart: Gantt | None) -> Iterator[tuple[str, str, str]]:
    fullest = max(simulation.ranks, key=lambda rank: rank.peak.nbytes)
    hardest = max(simulation.ranks, key=lambda rank: sum(work.flops for work in rank.work))
    busiest = max(simulation.ranks, key=lambda rank: sum(entry.nbytes for entry in rank.traffic))
    held = sum(state.held for state in fullest.states)
    yield "Peak of the fullest rank", size(fullest.peak.nbytes), f"rank {fullest.rank}: {describe(fullest.peak.at)}"
    yield "States and padding of it", size(held), f"{count(fullest.elements)} parameters of its units"
    flops = sum(work.flops for work in hardest.work)
    yield "Most work of a rank", _with_unit(flops, "FLOP"), f"rank {hardest.rank}, a step"
    yield "Most sent by a rank", size(sum(entry.nbytes for entry in busiest.traffic)), f"rank {busiest.rank}, a step"
    if chart:
        yield "Pipeline idle", f"{100 * float(chart.bubble):.1f} %", f"of the work, {simulation.schedule}"
    yield (
        "Simulated",
        f"{len(simulation.ranks):,} ranks",
        f"in {sum(rank.seconds for rank in simulation.ranks):.0f} s of processes",
    )


def _with_unit(value: float, unit: str) -> str:
    prefix, scale = _scale(value)
    return f"{value / scale:.3g} {prefix}{unit}"


def _scale(value: float) -> tuple[str, float]:
    return next((pair for pair in SCALES if value >= pair[1]), SCALES[-1])


# --- memory -------------------------------------------------------------------------------------


def _memory(simulation: Simulation) -> Markup:
    fullest = sorted(simulation.ranks, key=lambda rank: -rank.peak.nbytes)[:DRAWN]
    drawn = [rank for rank in simulation.ranks if rank in fullest]
    names = drawn[0].timeline.categories
    used = [i for i in range(len(names)) if any(row[i] for rank in drawn for row in rank.timeline.rows)]
    seen = {mark.at.micro_batch for rank in drawn for mark in rank.timeline.marks} - {-1}
    remark = f"The fullest {len(drawn)} of {len(simulation.ranks)} ranks. " * (len(drawn) < len(simulation.ranks))
    remark += f"{len(seen)} of {simulation.accumulate} micro-batches: the others repeat them. " * (
        len(seen) < simulation.accumulate
    )
    points = min(FINEST, POINTS // len(drawn))
    return frame.card(
        "Memory over a step, by category",
        frame.legend([names[i] for i in used], [category_class(names[i]) for i in used]),
        tag("p", remark, "The strip below each chart: ", *_phase_names(), class_="dim"),
        frame.pair(*(_rank_memory(rank, points) for rank in drawn)),
    )


def _phase_names() -> Iterator[Markup]:
    for i, phase in enumerate(PHASES):
        yield tag("span", tag("i", "", class_=f"p{i}"), phase, class_="key")


def _rank_memory(rank: RankResult, points: int) -> Markup:
    prefix, scale = _scale(rank.peak.nbytes)
    times, rows = _thinned(rank.timeline, points)
    marks = [Stretch(mark.event, mark.at.phase) for mark in rank.timeline.marks if mark.at.phase in PHASES]
    title = f"Rank {rank.rank}: pp {rank.pp}, dp {rank.dp}, for {rank.stands_for:,} alike"
    chart = areas(
        f"memory-{rank.rank}",
        title,
        times,
        [[nbytes / scale for nbytes in row] for row in rows],
        marks or [Stretch(times[0], PHASES[0])],
        PHASES,
        f"{prefix}B",
        [category_class(name) for name in rank.timeline.categories],
    )
    peak = rank.peak
    where = f"{describe(peak.at)}{f' in {peak.at.module}' if peak.at.module else ''}"
    tensors = [
        (size(t.nbytes), t.category, f"{t.dtype} {list(t.shape)}", t.made.module or "-", describe(t.made))
        for t in peak.largest
    ]
    head = ("Size", "Category", "Tensor", "Module", "Made in")
    largest = frame.more("Largest tensors at the peak", frame.table("Largest tensors", head, tensors, "><<<<"))
    return tag(
        "div", tag("h3", title), chart, frame.paragraph(f"Peak: {peak.nbytes:,} bytes, {where}.", "dim"), largest
    )


def _thinned(line: Timeline, points: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return, from the step's beginning on, the instant with the most bytes of each of so many stretches."""
    start = line.marks[0].event if line.marks else 0
    kept: dict[int, tuple[int, tuple[int, ...]]] = {}
    width = max(1, line.total - start) / points
    for event, row in zip(line.events, line.rows, strict=True):
        stretch = int((event - start) / width)
        if event >= start and (stretch not in kept or sum(row) > sum(kept[stretch][1])):
            kept[stretch] = event, row
    chosen = [*kept.values()] or [(line.events[-1], line.rows[-1])]
    return [event for event, _ in chosen], [row for _, row in chosen]


# --- the pipeline -------------------------------------------------------------------------------


def _pipeline(simulation: Simulation, chart: Gantt) -> Markup:
    """Draw the lanes, or their beginning where there are too many actions."""
    most = max(1, SLOTS // len(chart.rows))
    cut = any(len(row) > most for row in chart.rows)
    end = min(row[most - 1].end for row in chart.rows if len(row) > most) if cut else chart.span
    prefix, scale = _scale(end) if chart.unit == "FLOPs" else ("", 1.0)
    named = sum(len(row) for row in chart.rows) <= NAMED
    rows = {
        f"pp {stage}": [
            Slot(
                slot.start / scale,
                slot.end / scale,
                KINDS[slot.action.kind],
                str(slot.action.micro_batch) if named else "",
                slot.action.chunk // len(chart.rows) % 2,
            )
            for slot in row
            if slot.end <= end
        ]
        for stage, row in enumerate(chart.rows)
    }
    kinds = {slot.action.kind for row in chart.rows for slot in row}
    unit = f"{prefix}FLOP of one rank" if chart.unit == "FLOPs" else "forwards of one part"
    title = f"The pipeline: {simulation.schedule}, idle {100 * float(chart.bubble):.1f} % of the work"
    names = ["forward", "backward of inputs" if "W" in kinds else "backward", "gradients of weights"]
    shown = names[:3] if "W" in kinds else names[:2]
    remark = "Numbers are micro-batches; what is sent costs no time here."
    return frame.card(
        title,
        frame.paragraph(f"{'Its beginning. ' if cut else ''}{remark}", "dim"),
        frame.legend(shown, [f"k{i}s0" for i in range(len(shown))]),
        frame.wide(lanes("pipeline", title, rows, end / scale, unit), title),
    )


# --- tables -------------------------------------------------------------------------------------


def _states(simulation: Simulation) -> Markup:
    rows = [
        (
            rank.rank,
            state.place,
            state.category,
            f"{state.held:,}",
            f"{state.formula:,}",
            _difference(state.held - state.formula),
        )
        for rank in simulation.ranks
        for state in (*rank.states, *rank.away)
    ]
    head = ("Rank", "Place", "Category", "Held", "By formula", "Difference")
    remark = "Bytes: the arenas' accounts against the formula."
    return frame.card("States", frame.paragraph(remark, "dim"), frame.table("States", head, rows, "><<>>>", low=True))


def _difference(value: int) -> object:
    return tag("span", f"{value:+,}", class_="bad") if value else "equal"


def _flops(simulation: Simulation) -> Markup:
    phases = ("forward", "backward", "recomputed")
    rows = [
        (rank.rank, *(_work([rank.flops(phase)]) for phase in phases), _work(map(rank.flops, phases)))
        for rank in simulation.ranks
    ]
    head = ("Rank", *(phase.capitalize() for phase in phases), "Together")
    remark = "Multiplications and additions of matrix products and attention, per rank and step."
    return frame.card("FLOPs", frame.paragraph(remark, "dim"), frame.table("FLOPs", head, rows, ">>>>>", low=True))


def _work(parts: Sequence[int] | Iterator[int]) -> str:
    return _with_unit(sum(parts), "FLOP")


def _traffic(simulation: Simulation) -> Markup:
    """Draw the ledger of each rank, units together."""
    rows = [
        (rank.rank, axis, op, f"{calls:,}", f"{elements:,}", size(nbytes))
        for rank in simulation.ranks
        for (axis, op), (calls, elements, nbytes) in _totals(rank)
    ]
    head = ("Rank", "Axis", "Operation", "Calls", "Elements", "Bytes")
    remark = "What a rank sends in a step, which is what it receives."
    if not rows:
        return frame.card("Traffic", frame.paragraph("Nothing is sent."))
    return frame.card("Traffic", frame.paragraph(remark, "dim"), frame.table("Traffic", head, rows, "><<>>>", low=True))


def _totals(rank: RankResult) -> Sequence[tuple[tuple[str, str], tuple[int, int, int]]]:
    """Return (axis, operation) -> calls, elements, bytes."""
    totals: dict[tuple[str, str], tuple[int, int, int]] = {}
    for entry in rank.traffic:
        calls, elements, nbytes = totals.get((entry.axis, entry.op), (0, 0, 0))
        totals[entry.axis, entry.op] = calls + entry.calls, elements + entry.elements, nbytes + entry.nbytes
    return sorted(totals.items())
