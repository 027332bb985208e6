"""`zero3d plan --html FILE`: the answer of a search as a page.

key figures of the best plan | ranked table | memory against time of all that fits | memory and step by parts of the
first plans | the ladder | what if | what was left out | costs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from zero3d.spec.text import GIB, binary
from zero3d.tools.page import frame
from zero3d.tools.page.charts import Axis, Bar, Dot, bars, scatter
from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import classes_of, series_needed
from zero3d.tools.page.plan_text import (
    LACKING,
    LINKS_HEAD,
    LINKS_TITLE,
    RECOMMENDED,
    WAY_HEAD,
    Answer,
    around,
    compared_ways,
    costs,
    gib,
    heading,
    headline,
    held_apart,
    knob_rows,
    lacking,
    ladder_title,
    links_rows,
    mesh,
    mfu,
    missed,
    places_lines,
    rung_verdict,
    settings,
    short,
    shown,
    stage_of,
    way_rows,
    why_this,
)
from zero3d.tools.page.svg import shade
from zero3d.tools.plan.bill import Bill
from zero3d.tools.plan.ladder import RULE, differs
from zero3d.tools.plan.search import Row
from zero3d.tools.plan.spec import Estimate, Seconds

BARS = 8  # plans that are drawn in parts
GB = 1e9
BEYOND = "allocator and contexts"  # what a device holds beyond what is allocated at the peak


def plan_page(answer: Answer, top: int) -> str:
    """Write the page, with `top` plans in its table."""
    fit, narrow = shown(answer, top)
    rows = [*fit, *narrow]
    memory, step = _memory_bars(rows[:BARS]), _step_bars(rows[:BARS])
    classes, limit = classes_of(_series(memory), _series(step)), answer.limit / GIB
    return frame.page(
        f"{answer.model.name} on {answer.cluster.gpus} x {answer.cluster.gpu.name}",
        tag("h1", f"How to train {answer.model.name} on {answer.cluster.gpus} x {answer.cluster.gpu.name}"),
        *(
            frame.paragraph(line, "dim")
            for line in heading(answer.model, answer.cluster, answer.target.sequences, answer.batch)
        ),
        *(frame.paragraph(line.strip()) for line in headline(answer)),
        frame.tiles(_figures(answer)),
        _ranked(answer, rows),
        *_ways(answer),
        _pareto(answer),
        frame.pair(
            _stacked("memory", "Memory of the fullest GPU at its peak", memory, classes, "GiB", limit),
            _stacked("step", "What a step's seconds go into", step, classes, "s"),
        ),
        frame.pair(_ladder(answer), _what_if(answer)),
        frame.pair(_left_out(answer), _costs(answer)),
        series=series_needed(classes.values()),
    )


def _figures(answer: Answer) -> Iterator[tuple[str, str, str]]:
    best, cluster = answer.best, answer.cluster
    memory, seconds, world = best.estimate.memory, best.estimate.seconds, best.plan.world
    rate = best.estimate.flops / seconds.mid / world
    stage = "" if stage_of(best.plan) == "-" else f"ZeRO stage {stage_of(best.plan)}, "
    more = f"{stage}micro-batch {best.plan.micro_batch}, {settings(best.plan)}"
    yield "Recommended plan", mesh(best.plan), more.removesuffix(", -")
    yield "Step", f"{_digits(seconds.mid)} s", f"{_between(seconds)} s"
    card, room = binary(cluster.gpu.memory), binary(answer.room)
    allowed = f"GiB, of {card}" if card == room else f"GiB, of {room} that may be used of {card}"
    yield "Memory of a GPU", around(memory.device, answer.margin.share), allowed
    yield "Memory of a host", f"{memory.host / GB:,.0f} GB", f"of {cluster.host_memory / GB:,.0f} GB"
    useful = f"{rate / 1e12:.0f} TFLOP/s, MFU {100 * mfu(best, cluster):.0f} %"
    yield "Tokens per second and GPU", f"{best.estimate.tokens / seconds.mid / world:,.0f}", useful
    yield "GPU-hours", f"{Bill.of(best.estimate, cluster, 1e9, None).hours:,.0f}", "per billion tokens"
    yield "Plans that fit", f"{len(answer.result.rows):,}", f"of {answer.result.tried:,} tried"


def _digits(value: float) -> str:
    """Write three digits, and all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _between(seconds: Seconds) -> str:
    return f"{_digits(seconds.low)} to {_digits(seconds.high)}"


def _ranked(answer: Answer, rows: Sequence[tuple[int, Row]]) -> Markup:
    title = f"Plans that fit {binary(answer.room)} of a GPU with the margin, {answer.target.goal} first"
    apart = held_apart([row for _, row in rows])
    more = [f"{name.capitalize()} GB" for name in apart]
    head = ("", "Mesh", "ZeRO", "Micro x accum", "Settings", "GPU GiB", "Host GB", *more)
    remark = (
        f"The best plan of each mesh, ZeRO stage, schedule and place of states. {RECOMMENDED} recommended: "
        f"{why_this(answer.choice, answer.target.goal)}. {LACKING} has less room beyond it than the margin."
    )
    return frame.card(
        title,
        frame.paragraph(remark, "dim"),
        frame.table(
            title,
            (*head, "Step s", "Tokens/s per GPU", "MFU", "Why"),
            _cells(rows, answer),
            "><><=>>" + ">" * len(apart) + ">>>=",
        ),
        *(frame.paragraph(f"{line[0].upper()}{line[1:]}.") for line in places_lines(answer.best.estimate.memory)),
    )


def _cells(rows: Sequence[tuple[int, Row]], answer: Answer) -> Iterator[tuple[object, ...]]:
    apart, best = held_apart([row for _, row in rows]), answer.best
    for place, row in rows:
        plan, memory, seconds = row.plan, row.estimate.memory, row.estimate.seconds
        yield (
            f"{RECOMMENDED if row is best else LACKING if row.lacks else ''}{place}",
            mesh(plan),
            stage_of(plan),
            f"{plan.micro_batch} x {plan.accumulate}",
            settings(plan),
            around(memory.device, answer.target.margin_for(answer.model, plan).share),
            f"{memory.host / GB:,.0f}",
            *(f"{memory.tiers[name] / GB:,.0f}" for name in apart),
            f"{_digits(seconds.mid)} ({_between(seconds)})",
            f"{row.estimate.tokens / seconds.mid / plan.world:,.0f}",
            f"{100 * mfu(row, answer.cluster):.0f} %",
            ", ".join([*lacking(row), row.reason]),
        )


def _ways(answer: Answer) -> Iterator[Markup]:
    """Yield a card for each question of which the terminal has a table: experts, long sequences, links."""
    for title, found in compared_ways(answer):
        yield frame.card(title, frame.table(title, ("", *map(_title, WAY_HEAD)), way_rows(found), "<<<>><"))
    if answer.links:
        rows = links_rows(answer.links, answer.cluster, answer.limit)
        head = list(map(_title, LINKS_HEAD))
        yield frame.card(LINKS_TITLE, frame.table(LINKS_TITLE, head, rows, "<<>>><"))


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


# --- memory against time ------------------------------------------------------------------------


def front(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that no other beats on both memory and time, from the least memory on."""
    line: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.estimate.memory.device, row.estimate.seconds.mid)):
        if not line or row.estimate.seconds.mid < line[-1].estimate.seconds.mid:
            line.append(row)
    return line


def _pareto(answer: Answer) -> Markup:
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(answer.result.rows, key=lambda row: row.plan.zero.stage):
        groups.setdefault(f"ZeRO stage {row.plan.zero.stage}", []).append(_place(row.estimate))
    best = front(answer.result.rows)
    dots = [Dot(*_place(row.estimate), f"{_figures_of(row)} with {short(row.plan)}") for row in best]
    across = Axis("memory of a GPU (GiB)", answer.limit / GIB)
    chart = scatter("pareto", "Memory against time of all plans that fit", groups, dots, across, Axis("step (s)"))
    head = ("GPU GiB", "Step s", "Plan")
    rows = [(gib(row.estimate.memory.device), _digits(row.estimate.seconds.mid), short(row.plan)) for row in best]
    return frame.card(
        "What memory buys",
        frame.paragraph("Every plan that fits. Those on the line: none needs less memory and is as fast.", "dim"),
        frame.pair(
            tag("div", frame.legend(list(groups), [shade(i) for i in range(len(groups))]), chart),
            tag("div", tag("h3", "On the line"), frame.table("Plans on the line", head, rows, ">>=", low=True)),
        ),
    )


def _place(estimate: Estimate) -> tuple[float, float]:
    return estimate.memory.device / GIB, estimate.seconds.mid


def _figures_of(row: Row) -> str:
    return f"{gib(row.estimate.memory.device)} GiB, {_digits(row.estimate.seconds.mid)} s"


# --- parts --------------------------------------------------------------------------------------


def _memory_bars(rows: Sequence[tuple[int, Row]]) -> list[Bar]:
    return [Bar(_name(i, row), _held(row.estimate), f"{gib(row.estimate.memory.device)} GiB") for i, row in rows]


def _step_bars(rows: Sequence[tuple[int, Row]]) -> list[Bar]:
    return [Bar(_name(i, row), row.estimate.seconds.parts, f"{_digits(row.estimate.seconds.mid)} s") for i, row in rows]


def _stacked(
    name: str, title: str, drawn: Sequence[Bar], classes: Mapping[str, str], unit: str, limit: float = 0.0
) -> Markup:
    series = {part: classes[part] for part in _series(drawn)}
    legend = frame.legend(list(series), list(series.values()))
    return frame.card(title, legend, bars(name, title, drawn, series, unit, limit))


def _held(estimate: Estimate) -> Mapping[str, float]:
    """Return the parts at the peak in GiB, and what the device holds beyond them."""
    memory = estimate.memory
    inside = memory.parts or {"allocated": memory.allocated}
    beyond = {BEYOND: memory.device - memory.allocated}
    return {name: value / GIB for name, value in {**inside, **beyond}.items()}


def _name(place: int, row: Row) -> str:
    plan = row.plan
    stage = "" if stage_of(plan) == "-" else f", stage {stage_of(plan)}"
    return f"{place}:  {mesh(plan)}{stage}" + (f", {plan.schedule}" if plan.pp > 1 else "")


def _series(rows: Sequence[Bar]) -> list[str]:
    """Return the parts that can be seen somewhere, as they first come; what is beyond all of them last."""
    most = max(sum(row.parts.values()) for row in rows)
    seen = dict.fromkeys(name for row in rows for name, value in row.parts.items() if value > 5e-4 * most)
    return sorted(seen, key=lambda name: name == BEYOND)


# --- tables -------------------------------------------------------------------------------------


def _ladder(answer: Answer) -> Markup:
    rows = [
        (
            rung.name,
            gib(rung.estimate.memory.states),
            around(rung.estimate.memory.device, rung.margin.share),
            f"{rung.estimate.memory.host / GB:,.0f}",
            _digits(rung.estimate.seconds.mid),
            "yes" if rung.fits else tag("span", rung_verdict(rung, answer.room, answer.cluster), class_="bad"),
        )
        for rung in answer.ladder
    ]
    head = ("ZeRO stage", "States GiB", "GPU GiB", "Host GB", "Step s", "Fits")
    title = ladder_title(answer)
    verdict = differs(answer.ladder) or f"The rule of thumb ({', '.join(RULE)}) holds here"
    return frame.card(
        title,
        frame.paragraph("From the most bytes of states on the GPU to the fewest.", "dim"),
        frame.table(title, head, rows, "<>>>><"),
        frame.paragraph(f"{verdict[0].upper()}{verdict[1:]}."),
    )


def _what_if(answer: Answer) -> Markup:
    rows = knob_rows(answer.knobs, answer.best, answer.limit, answer.cluster)
    title = "What if one setting of the best plan changed"
    remark = frame.paragraph("Those that free the most memory per second of a step come first.", "dim")
    head = ("Setting", "Memory", "Step", "What moves the peak", "")
    return frame.card(
        title, remark, frame.table(title, head, rows, "<>><<") if rows else frame.paragraph("Nothing to change.")
    )


def _left_out(answer: Answer) -> Markup:
    rows = [
        (
            f"{rejection.plans:,}",
            rejection.reason,
            f"needs {missed(rejection)} more: {short(rejection.nearest)}" if rejection.nearest else "-",
        )
        for rejection in answer.result.rejected
    ]
    title = f"{answer.result.tried:,} plans, of which {len(answer.result.rows):,} fit: why the others do not"
    if not rows:
        return frame.card(title, frame.paragraph("Nothing: all of them fit."))
    return frame.card(title, frame.table(title, ("Plans", "Why", "The nearest"), rows, ">=="))


def _costs(answer: Answer) -> Markup:
    return frame.card("Costs", *(frame.paragraph(line.strip()) for line in costs(answer)))
