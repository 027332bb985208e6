"""The HTML reports: well-formed, self-contained, escaped, small, and laid out by a browser without cuts or overlaps."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest
from markupsafe import escape
from run_records import records, resume, skip, timed, written

from zero3d.distributed.degrees import Degrees
from zero3d.spec import palette
from zero3d.tools.cli.main import main
from zero3d.tools.cli.report_page import report_page
from zero3d.tools.cli.run_folder import read_run
from zero3d.tools.cli.simulate import Room, as_text
from zero3d.tools.page.charts import BOTTOM, HEIGHT, TOP, Stretch, areas
from zero3d.tools.page.paint import attributes
from zero3d.tools.page.plan_page import front, plan_page
from zero3d.tools.page.plan_text import WIDTH, Answer, around, headline
from zero3d.tools.page.simulation_page import simulation_page
from zero3d.tools.page.svg import NAMESPACE, Scale
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.ladder import ladder
from zero3d.tools.plan.search import Rejection, Row, SearchResult, Target
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import Estimate, Memory, ParallelPlan, Seconds
from zero3d.tools.plan.timeline import order
from zero3d.tools.plan.what_if import what_if
from zero3d.tools.sim.result import (
    FlopCount,
    Instant,
    LiveTensor,
    Mark,
    Peak,
    PipelineAction,
    RankResult,
    Simulation,
    StateEntry,
    Timeline,
    TrafficEntry,
)

EVIL = '<script>alert("1")</script> & "quotes" \x00'
MODEL = gpt(32, 4096, 32, 50304, 2048)
PLACE = cluster("a100-80", 64, 8)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEATH = {"version": 1, "kind": "died", "cause": EVIL, "step": 12, "ranks": []}
RUN = {
    "version": 1, "ranks": 1024, "stage": 3, "precision": "bf16", "steps": 20_000, "session_steps": 200, "peak_held": 10**9, "ended": None,
    "memory": [
        {"consumer": name, "dtype": "bf16", "formula": 10**8, "at_most": False, "measured": 10**8 * (1 + place), "agrees": True, "place": "device"}
        for place, name in enumerate(("parameters", "gradients", "optimizer states", "padding", "temporary: gathered", "activations"))
    ],
    "traffic": [{"op": EVIL.replace("\x00", ""), "formula": {"calls": 1, "elements": 2, "bytes": 4}, "measured": {"calls": 1, "elements": 2, "bytes": 4}, "equal": True}],
    "engine": {"versions": {"torch": EVIL}},
}  # fmt: skip
CATEGORIES = ("parameters", "gradients", "optimizer", "padding", "gathered", "bucket", "buffers", "activations")


def price(model, place, plan):
    """Some figures: more memory, less time, neither in a straight line."""
    used = (
        18e9 / (1 + plan.zero.stage)
        + 2e9 * plan.micro_batch
        + 1e9 * (plan.dp * 7 % 11)
        + (plan.activations == "none") * 9e9
    )
    seconds = 3 + 60e9 / used + plan.zero.stage * 0.3 + plan.dp * 5 % 13 / 4 + (plan.activations == "full") * 2
    parts = {"states": 0.6 * used, "activations": 0.3 * used, "logits": 0.1 * used}
    spent = {"matrices": 0.8 * seconds, "tp": 0.15 * seconds, "bubble": 0.05 * seconds}
    memory = Memory(0.6 * used, used, used, used + 1e9, 3e11, parts)
    return Estimate(memory, Seconds(0.85 * seconds, seconds, 1.2 * seconds, spent), {}, 2**20, 1e17, ("A note.",))


def answer(rows=40, name=MODEL.name):
    model = replace(MODEL, name=name)
    plans = [
        ParallelPlan(
            dp=1 + i, tp=1 + i % 8, pp=1 + i % 3, stage=i % 4, activations=("none", "selective", "full")[i // 4 % 3]
        )
        for i in range(rows)
    ]
    result = sorted(
        (Row(p, price(model, PLACE, p), f"tp +{p.tp} s") for p in plans), key=lambda r: r.estimate.seconds.mid
    )
    rejected = [Rejection("the GPU's memory", 1234, plans[0], 22.7e6), Rejection("<more> stages than blocks", 1)]
    best, target = result[0], Target(512, 81.6e9, margin=0.0)
    rungs = ladder(model, PLACE, target, price)
    knobs = what_if(best, model, PLACE, price)
    return Answer(model, PLACE, target, SearchResult(result, rejected, rows + 1235), rungs, knobs, 1e12, 2.0)


def in_categories(found):
    """The same answer, with memory by all categories."""

    def of(row):
        memory = row.estimate.memory
        parts = dict.fromkeys(reversed(CATEGORIES), memory.allocated / len(CATEGORIES))
        return row._replace(estimate=replace(row.estimate, memory=replace(memory, parts=parts)))

    return found._replace(result=found.result._replace(rows=[*map(of, found.result.rows)]))


def rank_result(rank, ranks, micro_batches, samples):
    at = Instant("backward", 1, rank, "model.layers.1.mlp")
    rows = [tuple(10**6 * (1 + c) * (1 + (i * 37 + c) % 101) for c in range(len(CATEGORIES))) for i in range(samples)]
    sums = [sum(row) for row in rows]
    marks = tuple(Mark(i * samples // 8, Instant(("forward", "backward")[i % 2], i // 2, rank, "")) for i in range(7))
    peak = Peak(
        max(sums),
        sums.index(max(sums)),
        at,
        dict.fromkeys(CATEGORIES, 1),
        (LiveTensor(10**6, "activations", "bfloat16", (4, 128), at),) * 10,
    )
    orders = [order("1f1b", r, ranks, micro_batches) for r in range(ranks)] if ranks > 1 else []
    return RankResult(
        rank, rank, 0, 0, (0,), 4, 10**6, (StateEntry("parameters", 2 * 10**6, 2 * 10**6), StateEntry("padding", 10, 12)), peak,
        Timeline(CATEGORIES, tuple(range(samples)), tuple(rows), (*marks, Mark(samples - 3, Instant("step", -1, 0, ""))), samples),
        (TrafficEntry("all_gather", "dp", "layers.0", 3, 1000, 2000), TrafficEntry("all_gather", "dp", "layers.1", 3, 1000, 2000)),
        (FlopCount("forward", "F", rank, 10**9), FlopCount("backward", "B", rank, 2 * 10**9)),
        (), tuple(tuple(PipelineAction(*event) for event in row) for row in orders), 1.5, 10**9,
    )  # fmt: skip


def simulation(ranks=2, micro_batches=6, samples=300, name="models/llama"):
    result = tuple(rank_result(rank, ranks, micro_batches, samples) for rank in range(ranks))
    schedule = "1f1b" if ranks > 1 else ""
    return Simulation(
        name, 2, "bf16", Degrees(ranks, 4, 1), schedule, 96, 4, micro_batches, 128, "nccl", result, ("A note.",)
    )


def run_page(found):
    """The page of a run with these records, which ended before its last step."""
    with TemporaryDirectory() as folder:
        for file, content in (("report.json", json.dumps(RUN)), ("watchdog.json", json.dumps(DEATH))):
            (Path(folder) / file).write_text(content)
        written(found, Path(folder))
        return report_page(read_run(folder))


MAKERS = {
    "a run": lambda: run_page(resume(skip(timed(records(200)), 1, 2, 90, 91), 60, 140)),
    "a run of three steps of an evil model": lambda: run_page(skip(records(3), 1)),
    "one plan": lambda: plan_page(answer(1), 10),
    "forty plans": lambda: plan_page(answer(40), 10),
    "2,000 plans of an evil model": lambda: plan_page(answer(2000, EVIL), 10),
    "one rank": lambda: simulation_page(simulation(1)),
    "two stages of an evil model": lambda: simulation_page(simulation(2, name=EVIL)),
    "20 stages": lambda: simulation_page(simulation(20, 48, 600)),
}


@cache
def page(name):
    return MAKERS[name]()


def tree(text):
    """A page or a drawing as elements, without the name space of drawings, which browsers know anyway."""
    return ElementTree.fromstring(text.replace(f' xmlns="{NAMESPACE}"', ""))


class Balanced(HTMLParser):
    """As a browser reads it: what is open at the end; every tag must close the one opened last."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.open += [tag] * (tag not in self.VOID)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_simulation_on_a_terminal_has_lines_no_wider_than_a_plans():
    found = simulation(name="models/" + "llama" * 10)
    sizes = dict.fromkeys(CATEGORIES, 123_456_789_012)
    states = tuple(StateEntry(name, 10, 10) for name in ("parameters", "gradients", "optimizer", "padding"))
    wide = [replace(rank, states=states, peak=replace(rank.peak, categories=sizes)) for rank in found.ranks]
    room = Room("rtx-4090", 24.0 * 2**30, 15 << 30, 7e8, 6e8, 2.3e8)
    lines = list(as_text(replace(found, ranks=wide), room))
    assert max(map(len, lines)) <= WIDTH < len(str(room))
    text = " ".join(" ".join(lines).split())
    assert str(room) in text
    assert ", ".join(f"{name} 123.5 GB" for name in sorted(CATEGORIES, reverse=True)) in text


@pytest.mark.parametrize("name", MAKERS)
def test_a_page_is_well_formed_small_and_needs_nothing_from_elsewhere(name):
    text = page(name)
    reader = Balanced()
    reader.feed(text)
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(reader.seen)
    assert not re.search(r"https?://|//\w+\.|url\(|@import|\bsrc=|\bhref=|\bnan\b|\binf\b", text.replace(NAMESPACE, ""))
    assert len(text.encode()) < 1e6
    for needed in ("prefers-color-scheme: dark", 'name="viewport"', 'content="light dark"', "default-src 'none'"):
        assert needed in text or escape(needed) in text


@pytest.mark.parametrize("name", MAKERS)
def test_every_drawing_has_a_title_and_a_description_and_only_known_classes(name):
    root = tree(page(name))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    drawings = list(root.iter("svg"))
    assert drawings
    for drawing in drawings:
        title, description = drawing[0], drawing[1]
        assert drawing.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text
        assert description.text
    style = next(root.iter("style")).text
    used = {each for element in root.iter() for each in (element.get("class") or "").split()}
    assert all(re.search(rf"\.{re.escape(each)}\b", style) for each in used), used


@pytest.mark.parametrize("name", MAKERS)
def test_a_drawing_that_is_taken_out_of_its_page_has_all_its_colours(name):
    """What is drawn says how, by attributes that its classes stand for; text has a size and a family of its own."""
    for drawing in tree(page(name)).iter("svg"):
        assert drawing.get("font-family")
        shown = [each for each in drawing.iter() if each.tag not in ("svg", "title", "desc")]
        assert shown[0].get("class") == "paper"
        for each in shown:
            painted = attributes(each.get("class"))
            assert painted.items() <= each.attrib.items()
            assert re.fullmatch("#[0-9a-f]{6}", next(value for value in painted.values() if value != "none"))
            assert each.tag != "text" or each.get("font-size")
            assert not any("var(" in value or "color-mix" in value for value in each.attrib.values())


def test_the_style_paints_what_the_attributes_do_by_variables_that_differ_on_a_dark_ground():
    text = page("forty plans")
    light, dark = colours(text, False), colours(text, True)
    for class_, attribute, variable in (("c3", "fill", "c3"), ("grid", "stroke", "line"), ("dim", "fill", "dim")):
        assert re.search(rf"svg \.{class_} {{[^}}]*\b{attribute}: var\(--{variable}\);", text)
        assert attributes(class_)[attribute] == light[variable] != dark[variable]
    assert "@media screen and (prefers-color-scheme: dark)" in text  # so that what is printed is light
    assert attributes("z0")["stroke"] == "#c6c7c8"  # a quarter of the text's colour on the card's


def test_a_category_has_the_palette_s_colour_in_both_pages():
    for text in (page("forty plans"), simulation_page(simulation(1)), plan_page(in_categories(answer(3)), 10)):
        listed = {"".join(item.itertext()): item[0].get("class") for item in tree(text).iter("li")}
        for name in CATEGORIES:
            if name in listed:
                assert attributes(listed[name])["fill"] == palette.CATEGORIES[name].light
    assert {*CATEGORIES} <= {*listed}


def test_a_models_name_stays_text():
    root = tree(plan_page(answer(3, EVIL), 10))
    said = EVIL.replace("\x00", "?")
    assert next(root.iter("h1")).text == f"How to train {said} on 64 x a100-80"
    assert next(root.iter("title")).text.startswith(said)


def test_the_page_says_what_was_found():
    target = answer(40)
    text = plan_page(target, 3)
    best = target.best
    assert around(best.estimate.memory.device, target.margin.share) in text
    assert all(line.strip() in text for line in headline(target))
    assert "needs 21.6 MiB more: pp 1 x dp 1 x tp 1" in text
    assert "&lt;more&gt; stages than blocks" in text
    assert "GPU-hours per billion tokens" in text
    assert "A note." in text
    ranked = next(tree(text).iter("tbody"))
    assert [row[0].text for row in ranked] == ["*1", "2", "3"]


@pytest.mark.parametrize("by_category", [False, True])
def test_a_part_has_its_colour_in_every_chart_and_no_other_has_it(by_category):
    root = tree(plan_page(in_categories(answer(40)) if by_category else answer(40), 10))
    drawn = {(hint[0].text.partition(":")[0], hint.get("class").split()[0]) for hint in root.iter("rect") if len(hint)}
    listed = {("".join(item.itertext()), item[0].get("class")) for item in root.iter("li")}
    assert drawn <= listed
    names, classes = zip(*listed, strict=True)
    assert len(set(names)) == len(set(classes)) == len(listed)
    assert {class_ for name, class_ in listed if name.startswith("ZeRO stage")} == {"z0", "z1", "z2", "z3"}


def test_of_more_parts_than_the_palette_has_colours_each_has_its_own():
    """As many as a mixture of experts has, with its optimizer on the host and sequences of 32,768 tokens."""
    held, spent = ([f"{what} {i}" for i in range(10)] for what in ("memory", "step"))

    def in_parts(row):
        memory, seconds = row.estimate.memory, row.estimate.seconds
        memory = replace(memory, parts=dict.fromkeys(held, memory.allocated / 10))
        seconds = replace(seconds, parts=dict.fromkeys(spent, seconds.mid / 10))
        return row._replace(estimate=replace(row.estimate, memory=memory, seconds=seconds))

    found = answer(3)
    page = plan_page(found._replace(result=found.result._replace(rows=[*map(in_parts, found.result.rows)])), 10)
    root = tree(page)
    listed = {item[0].get("class") for item in root.iter("li")} - {"z0", "z1", "z2"}
    assert listed == {f"c{i}" for i in range(21)}
    for dark in (False, True):
        own = colours(page, dark)
        series = [own[f"c{i}"] for i in range(21)]
        assert len(set(series)) == 21
        assert all(contrast(one, after) >= 1.25 for one, after in pairwise(series[11:]))
        assert all(contrast(one, own["card"]) >= 1.25 for one in series[12:])


def test_plan_writes_the_page_and_refuses_what_is_no_search(tmp_path, capsys):
    file = tmp_path / "plan.html"
    target = ["plan", "--params", "1e8", "--gpus", "1", "--tokens-per-batch", "4096", "--html"]
    assert main([*target, str(file)]) == 0
    assert "How to train GPT" in file.read_text(encoding="utf-8")
    assert main([*target, str(tmp_path / "none" / "plan.html")]) == 2
    assert main(["plan", "--theory", "--html", str(file)]) == 2
    assert "--html writes what a search finds" in capsys.readouterr().err


def test_the_bars_of_plans_have_the_numbers_of_the_table():
    root = tree(plan_page(answer(40), 10))
    ranked = next(root.iter("tbody"))
    numbered = [
        f"{row[0].text.lstrip('*')}:  {row[1].text}{'' if row[2].text == '-' else f', stage {row[2].text}'}"
        for row in ranked
    ][:8]
    assert numbered[0].startswith("1:  ")
    for name in ("memory", "step"):
        (drawing,) = (each for each in root.iter("svg") if each[0].get("id") == f"{name}-title")
        labels = [text.text for text in drawing.iter("text") if ":  " in text.text]
        assert len(labels) == 8
        assert all(label.startswith(wanted) for label, wanted in zip(labels, numbered, strict=True))


def test_more_memory_lies_higher_and_none_at_the_bottom():
    """Two series of 3 and 1, then 6 and 2 GB: the axis ends at 1.12 times 8."""
    drawn = areas("m", "t", [0, 1], [(3, 1), (6, 2)], [Stretch(0, "forward")], ["forward"], "GB", ["c0", "c1"])
    root = tree(drawn)
    (peak,) = (each for each in root.iter("line") if each.get("class") == "peak")
    bottom = HEIGHT - BOTTOM
    assert float(peak.get("y2")) == bottom
    assert float(peak.get("y1")) == pytest.approx(bottom - (bottom - TOP) / 1.12, abs=0.1)
    ticks = {
        float(each.text): float(each.get("y")) - 4.5 for each in root.iter("text") if each.get("text-anchor") == "end"
        and re.fullmatch(r"[0-9.]+", each.text)
    }  # fmt: skip
    assert ticks[0] == bottom
    assert [ticks[value] for value in sorted(ticks)] == sorted(ticks.values(), reverse=True)
    assert len(ticks) > 3


def test_the_front_is_what_no_other_plan_beats():
    rows = answer(200).result.rows

    def beaten(row):
        mine = row.estimate.memory.device, row.estimate.seconds.mid
        theirs = [(each.estimate.memory.device, each.estimate.seconds.mid) for each in rows]
        return any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in theirs)

    assert {id(row) for row in front(rows)} <= {id(row) for row in rows if not beaten(row)}
    assert {row.estimate.memory.device for row in front(rows)} == {
        row.estimate.memory.device for row in rows if not beaten(row)
    }


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 81.6, False), (3e-4, 5e-4, False), (2, 90, True), (0.003, 4e6, True)]
)
def test_an_axis_has_a_few_round_values_inside(low, high, log):
    scale = Scale(low, high, 0, 400, log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 10
    assert all(low <= tick <= high * 1.001 and 0 <= scale(tick) <= 400.1 for tick in ticks)
    assert log or all(f"{b - a:.3g}".strip("0.e-")[0] in "125" for a, b in pairwise(ticks))
    assert all(scale(b) - scale(a) >= 30 for a, b in pairwise(ticks))


def test_thinning_keeps_the_peak_and_differences_from_the_formula_stand_out():
    result = simulation(3, 4, 1000)
    text = simulation_page(result)
    assert f"peak {max(rank.peak.nbytes for rank in result.ranks) / 1e9:.4g} GB" in text
    assert '<span class="bad">-2</span>' in text
    assert "2,000" in text  # elements of both units together
    assert "4 kB" in text


def colours(style, dark):
    """The style's variables, as the dark scheme overrides them."""
    light, night = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    result = {}
    for block in (light, night)[: 1 + dark]:
        result |= dict(re.findall(r"--(\w+): (#\w{6})", block))
    return result


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_and_neighbouring_colours_differ_in_brightness(dark):
    result = colours(plan_page(answer(1), 1), dark)
    for text in ("text", "dim", "accent", "bad"):
        assert contrast(result[text], result["card"]) >= 4.5
        assert contrast(result[text], result["back"]) >= 4.5
    assert contrast(result["on"], result["c0"]) >= 4.5
    series = [result[f"c{i}"] for i in range(12)]
    assert len(set(series)) == 12
    for one, next_one in pairwise(series):
        assert contrast(one, next_one) >= 1.25, (one, next_one)


MEASURE = """
const told = [];
for (const frame of document.querySelectorAll('iframe')) {
  const page = frame.contentDocument, root = page.documentElement, name = frame.title;
  if (root.scrollWidth > root.clientWidth) told.push(name + ': wider than the screen by ' + (root.scrollWidth - root.clientWidth));
  const table = page.querySelector('.scroll');
  if (name.includes('plan') && root.clientWidth > 1100 && table.scrollWidth > table.clientWidth)
    told.push(name + ': columns hidden by ' + (table.scrollWidth - table.clientWidth));
  for (const svg of page.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    if (box.width < 200 || box.height < 40) told.push(name + ': a drawing of ' + box.width + ' x ' + box.height);
    for (const [words, t] of texts)
      if (t.left < box.left - 1 || t.right > box.right + 1 || t.top < box.top - 1 || t.bottom > box.bottom + 1) told.push(name + ': cut: ' + words);
    for (let i = 0; i < texts.length; i++) for (let k = i + 1; k < texts.length; k++) {
      const [a, b] = [texts[i][1], texts[k][1]];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
        told.push(name + ': overlap: ' + texts[i][0] + ' / ' + texts[k][0]);
    }
  }
  told.push(name + ': background ' + page.defaultView.getComputedStyle(page.body).backgroundColor);
}
document.body.textContent = 'MEASURED\\n' + told.join('\\n') + '\\nEND';
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_a_browser_lays_the_pages_out_without_cut_or_overlapping_labels_in_both_schemes(tmp_path):
    laid_out = (
        "one plan",
        "forty plans",
        "two stages of an evil model",
        "a run",
        "a run of three steps of an evil model",
    )
    screens = [(width, scheme) for width in (390, 1200) for scheme in ("light", "dark")]
    frames = "".join(
        f'<iframe title="{name} {width} {scheme}" width="{width}" height="900" style="color-scheme: {scheme}" srcdoc="{escape(page(name))}"></iframe>'
        for name in laid_out
        for width, scheme in screens
    )
    harness = tmp_path / "harness.html"
    harness.write_text(
        f"<!DOCTYPE html><meta charset='utf-8'><body>{frames}<script>addEventListener('load', () => {{{MEASURE}}})</script>"
    )
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom", harness.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "MEASURED" in done.stdout, done.stderr[-2000:]
    told = done.stdout.partition("MEASURED\n")[2].partition("\nEND")[0].split("\n")
    backgrounds = [line for line in told if ": background " in line]
    assert [line for line in told if line not in backgrounds] == []
    assert len(backgrounds) == len(laid_out) * len(screens)
    for line in backgrounds:
        assert line.endswith("rgb(14, 17, 22)" if " dark:" in line else "rgb(246, 247, 249)"), line
