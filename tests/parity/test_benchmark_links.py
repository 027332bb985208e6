"""benchmarks/links.py in small: what the planner says of its model, what is judged, and one unthrottled run on two hosts."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from two_hosts import why_not

from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec import Link

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import links

RESULTS = Path(links.__file__).parent / "results" / "links.json"
AS_FAST = 1.03  # times the fastest way's seconds: what the planner calls as fast (tools/plan/links.py::WORTH)


@pytest.fixture(scope="module")
def recorded():
    """What was measured at each rate, and what the planner says now of the links as they were measured then."""
    [run] = json.loads(RESULTS.read_text())["runs"]
    return links.planned_again(run["result"])["rates"]


def result(seconds, planned):
    """A result at one rate, with every way as fast as it says."""
    variants = {
        name: {"step": step, "of flat": step / seconds["flat"], "cable": 1e6, "ledger": 1e6, "first": step, "again": step, "loss": 1.0}
        for name, step in seconds.items()
    }  # fmt: skip
    return {"rates": {"200": planned | {"variants": variants}}}


def test_the_planner_names_every_variant_and_chooses_less_on_the_link_where_it_is_slow():
    arguments, local = links.parse([]), replace(cluster("cpu", 4, 2), inside=Link(1e9, 0.0, 0.0))
    slow, fast = (links.planned(replace(local, across=Link(rate, 0.0, 0.0)), arguments) for rate in (12.5e6, 1e15))
    assert list(slow["planned"]) == list(links.OPTIONS)
    assert slow["chosen"] == {"auto": "second", "narrow": "shard-int4"}
    assert fast["chosen"]["narrow"] in links.EXACT


@pytest.mark.parametrize(("choice", "names"), [("auto", links.EXACT), ("narrow", tuple(links.OPTIONS))])
def test_at_every_recorded_rate_the_planner_names_the_way_that_was_measured_as_the_fastest(recorded, choice, names):
    for rate, found in recorded.items():
        steps = {name: found["variants"][name]["step"] for name in names}
        assert steps[found["chosen"][choice]] <= AS_FAST * min(steps.values()), rate


def test_planned_ratios_to_flat_are_close_to_measured_ones_where_the_link_decides(recorded):
    for rate in ("100", "200"):
        planned, variants = recorded[rate]["planned"], recorded[rate]["variants"]
        for name in links.OPTIONS:
            measured = variants[name]["step"] / variants["flat"]["step"]
            assert planned[name] / planned["flat"] == pytest.approx(measured, abs=0.15), (rate, name)


@pytest.mark.parametrize(("sums", "met"), [(0.3, True), (0.4, False)])
def test_targets_are_judged_by_ratios_to_flat(sums, met):
    seconds = dict.fromkeys((*links.OPTIONS, *links.TORCH), 1.0) | {"shard-int8": sums, "second": 0.05}
    found = result(
        seconds, {"planned": dict.fromkeys(links.OPTIONS, 1.0), "chosen": {"auto": "second", "narrow": "shard-int8"}}
    )
    rows = {what.partition(",")[0]: (ratio, limit, least) for what, ratio, limit, least in links.judged(found)}
    ratio, limit, least = rows["flat's step of that with 8-bit sums"]
    assert least
    assert (ratio >= limit) == met
    assert rows["flat's gathers of those from second shards"][0] == pytest.approx(20)
    assert rows["narrow (shard-int8) of flat"] == (sums, 1.03, False)
    assert "chosen: second; if it may round: shard-int8" in links.show(found)


@pytest.mark.long
def test_two_hosts_are_measured(tmp_path, capsys):
    if why_not():
        pytest.skip(why_not())
    file = tmp_path / "out.json"
    assert links.main(["--rates", "0", "--rounds", "1", "--model", "layers=2,d=64,vocab=256", "--json", str(file)]) == 0
    [at] = json.loads(file.read_text())["rates"].values()
    variants = at["variants"]
    assert list(variants) == [*links.OPTIONS, *links.TORCH]
    for name in links.OPTIONS:
        assert variants[name]["loss"] == pytest.approx(variants["fsdp2"]["loss"], rel=0.02)
        assert variants[name]["cable"] > variants[name]["ledger"] > 0, "frames have heads"
    assert variants["shard-int4"]["ledger"] < variants["shard-int8"]["ledger"] < variants["shard"]["ledger"]
    assert variants["shard"]["ledger"] < variants["flat"]["ledger"]
    assert variants["flat"]["computed"] > variants["shard"]["computed"] == 0
    assert "loss" in capsys.readouterr().out
