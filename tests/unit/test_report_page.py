"""`zero3d report OUTPUT --html`: what the page of a run has, whatever its folder is like."""

import json
import math
import re

import pytest
from lock_holder import locked_by_another
from run_records import MIB, records, resume, skip, slow, written
from test_pages import tree
from test_report_verb import REPORT, WATCHDOG, left

from zero3d.spec import palette
from zero3d.tools.cli.main import main
from zero3d.tools.cli.report_page import report_page
from zero3d.tools.cli.run_folder import read_run
from zero3d.tools.page.curves import STRETCHES, Curve, curves, thinned
from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import MARKS, attributes
from zero3d.tools.page.svg import Scale, x_axis
from zero3d.train.curve import last_average
from zero3d.train.folder import Folder
from zero3d.train.stragglers import Slow
from zero3d.train.tables import MemoryRow

MEMORY = [
    MemoryRow("parameters", "bf16", 1_426_752, False, 1_426_752, True),
    MemoryRow("gradients", "fp32", 2_000_000, False, 2_000_004, False),
    MemoryRow("optimizer states", "fp32", 5_000_000, False, 5_000_000, True, "host"),
    MemoryRow("temporary: gathered", "bf16", 900, True, 800, True),
    MemoryRow("activations", "bf16", None, False, 3_000_000, None),
]
FULL = REPORT | {"memory": [row.as_json() for row in MEMORY], "hosts": ["node1", "node2"]}


def page(folder, found=None, report=FULL, **files):
    """The page of a run with these records, as elements."""
    output = left(folder, report, 0, **files)
    if found is not None:
        written(found, folder)
    return tree(report_page(read_run(output)))


def cards(root):
    """Cards by their headings."""
    return {card.find("h2").text: card for card in root.iter("section")}


def words(element):
    return " ".join(" ".join(element.itertext()).split())


def tiles(root):
    (found,) = (each for each in root.iter("dl") if each.get("class") == "tiles")
    return {words(tile.find("dt")): words(tile.find("dd")) for tile in found}


def drawing(root, name):
    """The drawing of this name; None where there is none."""
    return next((each for each in root.iter("svg") if each[0].get("id") == f"{name}-title"), None)


def rows(card):
    return [[words(cell) for cell in row] for row in card.iter("tr")][1:]


def test_the_page_of_a_finished_run_has_all_of_it(tmp_path):
    found = resume(skip(records(60), 1, 2), 30)
    for record in found:
        record |= {"tokens_per_s_per_rank": 500.0, "tflops_per_rank": 200.0, "mfu": 0.4}
    found[-1] |= {"forward_s": 0.1, "forward_s_least": 0.05, "forward_s_largest": 0.2, "backward_s": 0.3}
    root = page(tmp_path, found)
    assert next(root.iter("h1")).text == "demo on 2 ranks: finished"
    shown = tiles(root)
    assert shown["Step"] == "60 of 12 2 skipped, resumed once"
    assert shown["Held-out loss"].startswith("2.7619")
    assert "500 a rank" in shown["Tokens per second"]
    assert shown["MFU"] == "40.0 % 200.0 TFLOP/s a rank"
    assert shown["Peak memory"].startswith("482.3 MB")
    assert shown["Time"] == "0 min 30 s 60 steps"
    assert [*cards(root)] == [
        "Curves", "Memory over the run", "What rank 0 holds", "Memory of rank 0 of 2, in bytes", "Where a step went",
        "Traffic of rank 0 of 2 in 12 steps", "Settings", "What the engine made of settings", "Versions",
    ]  # fmt: skip
    memory = rows(cards(root)["Memory of rank 0 of 2, in bytes"])
    assert memory[0] == ["device", "parameters", "bf16", "1,426,752", "equal", "1,426,752"]
    assert memory[1][3:5] == ["2,000,004", "UNEQUAL"]
    assert memory[3] == ["device", "gathered weights", "bf16", "800", "at most", "900"]
    assert memory[4][4:] == ["", ""]
    assert rows(cards(root)["Traffic of rank 0 of 2 in 12 steps"]) == [
        ["all_gather", "4", "1,000", "2,000", "equal", "2,000"]
    ]
    parts = rows(cards(root)["Where a step went"])
    assert ["forward", "0.1", "25.0 %", "0.05", "0.2"] in parts
    assert ["optimizer.lr", "0.001", "0.0003"] in rows(cards(root)["Settings"])
    assert not [*root.iter("code")]  # nothing to go on with


def test_key_figures_have_units_with_digits_and_room_to_stay_on_a_line(tmp_path):
    found = [record | {"tflops_per_rank": 0.00364} for record in records(12)]
    root = page(tmp_path, found, FULL | {"steps": 123_456})
    shown = tiles(root)
    assert shown["Model FLOP/s"] == "3.64 GFLOP/s a rank; the device's peak is not known"
    assert shown["Peak memory"].endswith("MB of rank 0's process")
    assert words(cards(root)["Memory over the run"].find("ul")) == "of the process"
    (long,) = (each for each in root.iter("div") if each.get("class") == "long")
    assert words(long) == "Step 12 of 123,456 none skipped"
    for record in found:
        record |= {"tflops_per_rank": 123.45, "reserved_bytes": 700 * MIB}
    shown = tiles(page(tmp_path, found))
    assert shown["Model FLOP/s"].startswith("123.5 TFLOP/s a rank")
    assert shown["Peak memory"].endswith("MB rank 0")


def test_the_curves_have_the_marks_of_what_happened_and_a_legend_that_names_them(tmp_path):
    root = page(tmp_path, slow(resume(skip(records(60), 1, 2, 31), 30), 40, 45))
    for name in ("loss", "rate", "norm", "speed"):
        paths = {each.get("class"): each for each in drawing(root, name).iter("path")}
        drawn = {kind: paths[kind].get("d").count("M") for kind in MARKS}
        assert drawn == {"saved": 9, "skipped": 3, "slow": 2, "resumed": 1}
        assert paths["skipped"].find("title").text == "step skipped: 3"
        lows = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)", paths["saved"].get("d"))]
        highs = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)", paths["skipped"].get("d"))]
        assert min(lows) > 150 > 40 > max(highs)
    legend = [words(item) for item in next(each for each in root.iter("ul"))]
    assert legend == [
        "each step",
        "average",
        "held out",
        "\u25b2 checkpoint saved (9)",
        "\u00d7 step skipped (3)",
        "\u25bc slow rank named (2)",
        "\u00a6 run resumed (1)",
    ]
    classes = {each.get("class") for each in drawing(root, "loss").iter("path")}
    assert {"raw", "average", "held"} <= classes
    assert "held" not in {each.get("class") for each in drawing(root, "norm").iter("path")}
    begins = {
        re.match(r"M[\d.]+", each.get("d"))[0]
        for name in ("rate", "norm", "speed")
        for each in drawing(root, name).iter("path")
        if each.get("class") == "average"
    }
    assert len(begins) == 2  # of all steps, and of those that have a norm: the axes are one above the other


def test_key_figures_and_words_of_drawings_are_of_the_end_and_a_resume_before_the_first_step_is_inside(tmp_path):
    found = resume(records(40), 16)[16:]
    found[5]["peak_memory_bytes"] = 600 * MIB
    root = page(tmp_path, found)
    shown, losses = tiles(root), [record["loss"] for record in found]
    average, many = last_average(losses)
    assert shown["Loss"].startswith(f"{average:.4f} average of the last {many}; last step {losses[-1]:.4f}")
    assert shown["Peak memory"].startswith("629.1 MB")
    loss = drawing(root, "loss")
    assert f": {losses[0]:.4g} at step 17, {losses[-1]:.4g} at step 40" in loss.find("desc").text
    assert "resumed" in {each.get("class") for each in loss.iter("path")}
    axis = tree(tag("svg", *x_axis(Scale(0.5, 3.5, 0, 100), 0, 10, "step", whole=True)))
    assert [each.text for each in axis.iter("text")] == ["1", "2", "3", "step"]


def test_memory_is_drawn_over_the_run_and_by_consumer_in_the_palette_s_colours(tmp_path):
    found = records(60)
    for record in found:
        record["reserved_bytes"] = 700 * MIB
    root = page(tmp_path, found)
    assert words(cards(root)["Memory over the run"].find("ul")) == "allocated reserved"
    lines = {each.get("class"): each.get("d") for each in drawing(root, "memory").iter("path")}
    heights = [float(y) for y in re.findall(r" ([\d.]+)", lines["average"])]
    assert (
        heights[0] > heights[-1] > float(re.findall(r" ([\d.]+)", lines["raw"])[0])
    )  # it rose, below what is reserved
    drawn = {
        each.find("title").text.partition(":")[0]: each.get("fill")
        for each in drawing(root, "held").iter("rect")
        if len(each)
    }
    assert drawn == {
        "parameters": palette.light("parameters"), "gradients": palette.light("gradients"),
        "optimizer states": palette.light("optimizer"), "activations": palette.light("activations"),
        "gathered weights": palette.light("gathered"),
    }  # fmt: skip
    labels = [each.text for each in drawing(root, "held").iter("text")]
    assert [each for each in labels if each.startswith("on ")] == ["on the device", "on the host"]


def test_parts_of_a_step_have_whiskers_over_ranks_and_colours_that_memory_has_not(tmp_path):
    found = records(12)
    found[-1] |= {
        "forward_s": 0.1,
        "forward_s_least": 0.05,
        "forward_s_largest": 0.2,
        "backward_s": 0.3,
        "gathers_s": 0.00001,
    }
    root = page(tmp_path, found)
    (whisker,) = (each for each in drawing(root, "ranks").iter("path") if each.get("class") == "whisker")
    begin, end = map(float, re.match(r"M([\d.]+) [\d.]+H([\d.]+)", whisker.get("d")).groups())
    bars = {
        each.get("class").split()[0]: float(each.get("width")) + 4
        for each in drawing(root, "ranks").iter("rect")
        if "part" in each.get("class")
    }
    assert begin < sorted(bars.values())[0] < end
    memory = {each.get("class").split()[0] for each in drawing(root, "held").iter("rect") if len(each)}
    assert len(bars) == 2
    assert not memory & {*bars}


SLOW = Slow(1, 0.08, 40, 50, {"compute": 0.01, "data": 0.12, "save": 0.0, "host": -0.005})


def test_a_slow_rank_is_named_with_its_host_and_the_part_that_takes_longest(tmp_path):
    found = records(50)
    found[20] |= SLOW._replace(rank=0).fields()
    found[40] |= SLOW.fields()
    card = cards(page(tmp_path, found))["A slow rank"]
    assert "At step 41: slowest rank 1 (node2): +8 % over the median in 40 of 50 steps: data." in words(card)
    assert "zero3d doctor --run" in words(card)
    assert rows(card) == [["compute", "+0.01"], ["data", "+0.12"], ["save", "+0"], ["host", "-0.005"]]
    found[40] |= {"slowest_rank": 7}
    assert "slowest rank 7: +8 %" in words(cards(page(tmp_path, found))["A slow rank"])
    found[40] |= {"slowest_over": None}
    assert "A slow rank" not in cards(page(tmp_path, found))


def test_the_sample_at_the_end_is_on_the_page_with_its_lines(tmp_path):
    root = page(tmp_path, records(12), FULL | {"sample": "def <f>(x):\n    return x"})
    assert "def <f>(x):\n    return x" in "".join(cards(root)["A sample"].itertext())
    assert "A sample" not in cards(page(tmp_path, records(12), FULL | {"sample": ""}))


@pytest.mark.parametrize(("ended", "files", "saved", "said"), [
    ({"how": "stopped", "why": "step 5 of 12 is saved"}, {}, True, ("stopped", "step 5 of 12 is saved", "To go on: zero3d train {}/config.yaml --resume auto --ranks=2")),
    ({"how": "failed", "why": "NonFiniteError: <b>"}, {}, False, ("failed", "NonFiniteError: <b>", "Nothing is saved. To start anew: zero3d train {}/config.yaml --overwrite")),
    (None, {"watchdog.json": WATCHDOG}, True, ("died", "watchdog: rank 1 was killed by SIGKILL", "--resume auto")),
])  # fmt: skip
def test_how_a_run_ended_and_what_to_type_stand_at_the_head(tmp_path, ended, files, saved, said):
    if saved:
        (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    root = page(tmp_path, records(12), FULL | {"ended": ended}, **files)
    state, *lines = said
    assert next(root.iter("h1")).text.endswith(f": {state}")
    head = words(root).partition("Step 12")[0]
    assert all(line.format(tmp_path) in head for line in lines)


def test_a_run_under_way_says_so_and_nothing_of_going_on(tmp_path):
    output = left(tmp_path, FULL | {"ended": None}, 0)
    with locked_by_another(tmp_path):
        root = tree(report_page(read_run(output)))
    assert next(root.iter("h1")).text == "demo on 2 ranks: still running"
    assert tiles(root) == {"Step": "none yet no record of a step is there"}
    assert "Curves" not in cards(root)
    assert not [*root.iter("code")]


@pytest.mark.parametrize("report", [
    None,
    [1],
    {"ended": 3, "memory": [{"consumer": "\x1b[31m"}], "engine": [], "ranks": {}, "steps": "x", "hosts": "abc"},
    REPORT | {"memory": [REPORT["memory"][0] | {"measured": "many"}], "engine": {"versions": 3, "settings": [None, {}], "times": [{"part": 3}]}},
    REPORT | {"traffic": [{}], "peak_held": None, "stage": "\x1b[31m" * 99, "ranks": True},
])  # fmt: skip
def test_a_damaged_folder_has_a_page_of_what_is_left(tmp_path, report):
    root = page(tmp_path, records(12), report)
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 13, "lo')
    root = tree(report_page(read_run(str(tmp_path))))
    assert {"Curves", "Settings", "Not shown"} <= {*cards(root)}
    assert "1 line of" in words(cards(root)["Not shown"])


def test_values_that_nobody_can_draw_are_passed_over(tmp_path):
    odd = [
        {"step": 4},
        {
            "step": 4,
            "loss": 1e300,
            "lr": -1e300,
            "grad_norm": math.inf,
            "tokens_per_s": 0,
            "seconds": 1e308,
            "memory_bytes": 1e299,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in odd).replace("Infinity", "1e999")
    )
    root = tree(report_page(read_run(left(tmp_path, FULL, 0))))
    assert drawing(root, "loss") is None
    assert drawing(root, "speed") is not None
    assert tiles(root)["Loss"].startswith("not finite")


def test_the_page_of_a_long_run_is_small_and_keeps_its_highest_and_lowest_values(tmp_path):
    found = records(5000)
    found[3210]["loss"], found[4000]["loss"] = 5.75, 0.5
    output = left(tmp_path, FULL, 0)
    written(found, tmp_path)
    text = report_page(read_run(output))
    assert len(text.encode()) < 300_000
    (line,) = (each.get("d") for each in drawing(tree(text), "loss").iter("path") if each.get("class") == "raw")
    heights = [float(y) for y in re.findall(r" ([\d.]+)", line)]
    assert heights.index(max(heights)) > heights.index(min(heights[300:]))
    assert len(heights) <= 2 * STRETCHES + 2


def test_thinning_keeps_ends_extremes_and_gaps():
    points = [(float(step), math.sin(step)) for step in range(20_000)]
    points[777] = (777.0, 50.0)
    points[9_000:9_500] = [(float(step), math.nan) for step in range(9_000, 9_500)]
    kept = thinned(points)
    assert len(kept) <= 2 * STRETCHES + 2
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[777] in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert any(math.isnan(value) for _, value in kept)
    assert thinned(points[:500]) == points[:500]


def test_a_value_above_the_range_lies_on_the_upper_edge_and_its_height_is_said():
    root = tree(
        curves(
            "x",
            "loss",
            [Curve("raw", [(1, 1.0), (2, 900.0), (3, 2.0), (4, math.nan), (5, 1.0)])],
            (1.0, 2.0),
            (1, 5),
            {},
        )
    )
    assert "highest 900" in [each.text for each in root.iter("text")]
    (path,) = (each for each in root.iter("path"))
    heights = [float(y) for y in re.findall(r" ([\d.]+)", path.get("d"))]
    assert min(heights) == heights[1] == 34.0
    (dot,) = root.iter("circle")  # a single value between gaps
    assert attributes("raw-dot").items() <= dot.attrib.items()


def test_the_page_is_written_into_the_folder_or_where_it_is_asked_for(tmp_path, capsys):
    output = left(tmp_path)
    assert main(["report", output, "--html"]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    other = tmp_path / "other.html"
    assert main(["report", output, "--html", str(other), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["state"] == "finished"
    assert printed.err == f"written: {other}\n"
    assert main(["report", output, "--html", str(tmp_path / "none" / "x.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_run_that_begins_anew_clears_its_pictures_and_pages_and_those_of_earlier_versions(tmp_path):
    left(tmp_path)
    for name in ("report.html", "run.png", "loss.png", "trace.json", "trace-rank-3.json", "mine.txt"):
        (tmp_path / name).touch()
    Folder(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_only_the_report_says_of_a_slow_rank_is_shown(tmp_path):
    root = page(tmp_path, records(12), FULL | {"slowest": "rank 1 on node2 was slow\x1b[31m"})
    assert words(cards(root)["A slow rank"]) == "A slow rank rank 1 on node2 was slow [31m"
    assert "A slow rank" not in cards(page(tmp_path, records(12), FULL | {"slowest": ["x"]}))
