"""`engine.report()`: what an engine says of itself, as values, in a terminal and in a notebook."""

import json
from dataclasses import replace

import pytest
import torch
from models import adamw, batch, build, loss_of

import zero3d
from zero3d.engine.report import Report
from zero3d.engine.report_view import as_html, as_text, memory, settings
from zero3d.zero.step_parts import PartTime


def engine_after(steps=1, **options):
    engine = zero3d.Engine(build("net"), **{"stage": 2, "accumulate": 2, "optimizer": adamw} | options)
    for k in range(2 * steps):
        engine.backward(loss_of(engine, batch(k)))
        engine.step()
    return engine


@pytest.fixture(scope="module")
def engine():
    return engine_after()


@pytest.fixture(scope="module")
def report(engine):
    return engine.report()


def setting(report, name):
    (found,) = (row for row in report.settings if row.name == name)
    return found


def test_memory_is_that_of_the_engine_and_at_rest_as_the_arena_has_it(engine, report):
    assert [(row.category, row.place, row.planned, *row[6:]) for row in report.memory] == [
        tuple(e) for e in engine.memory
    ]
    at_rest = {row.category: (row.at_rest, row.now) for row in report.memory if row.planned is not None}
    assert at_rest.keys() == {"parameters", "gradients", "optimizer", "padding"}
    assert [by_formula for by_formula, _ in at_rest.values()] == [now for _, now in at_rest.values()]
    assert at_rest["gradients"] == (0, 0)
    assert {row.dtype for row in report.memory if row.category in ("gathered", "bucket", "wire")} == {"-"}  # one rank
    assert all(row.peak <= row.bound for row in report.memory if row.bound is not None)


def test_what_is_off_the_device_is_at_rest_as_its_arena_has_it():
    memory = engine_after(1, offload={"optimizer": "host"}).report().memory
    away = [row for row in memory if row.place != "device" and row.planned is not None]
    assert away
    assert [row.at_rest for row in away] == [row.now for row in away]


def test_settings_are_all_keywords_with_what_was_not_given(report):
    assert setting(report, "precision")[1:3] == ("bf16", "bf16")
    assert setting(report, "clip_norm")[1:] == (1.0, 1.0, None)
    assert setting(report, "stage")[1:3] == (2, 3)
    assert setting(report, "reduce").became == "every_micro_batch"
    assert setting(report, "optimizer").became.startswith("AdamW(lr=0.01, ")
    assert len({row.name for row in report.settings}) == len(report.settings)


def test_settings_say_what_was_asked_of_offload_and_what_it_became():
    found = setting(engine_after(0, offload={"optimizer": "auto"}).report(), "offload.optimizer")
    assert found == ("offload.optimizer", "auto", "none", "none")


def test_a_clip_norm_that_was_changed_is_said():
    engine = engine_after(0)
    engine.clip_norm = 0.5
    assert setting(engine.report(), "clip_norm") == ("clip_norm", 1.0, 1.0, 0.5)


def test_a_report_sends_nothing_and_changes_nothing(engine):
    before = list(engine.traffic), engine.memory, engine.gathers.events
    assert engine.report() == engine.report()
    assert (list(engine.traffic), engine.memory, engine.gathers.events) == before


def test_versions_and_axes_are_those_of_this_process(report):
    assert report.versions["torch"] == torch.__version__
    assert report.versions["zero3d"] == zero3d.__version__
    assert report.versions["device"].startswith("cpu, kernels for ")
    assert report.axes["dp"] == 1


def test_json_has_plain_values_of_everything(report):
    tree = report.as_json()
    assert json.loads(json.dumps(tree)) == tree
    assert tree["memory"][0]["category"] == "parameters"
    assert tree["step_traffic"] == []


def test_a_table_that_a_narrow_terminal_cannot_hold_is_wider_and_has_all_of_its_words_and_units(report):
    rows = [line.split() for line in as_text(report.as_json(), 40).splitlines()]
    wide = [line.split() for line in as_text(report.as_json(), 120).splitlines()]
    (kind,) = (row for row in wide if row[:2] == ["parameters", "bf16"])
    assert kind in rows


def test_what_comes_and_goes_is_planned_by_its_bound_and_what_auto_has_become_has_a_row():
    comes = {"category": "wire", "place": "device", "dtype": "bf16", "planned": None, "bound": 2000, "measured": 1000}
    assert memory({"memory": [comes]}).rows == [["wire", "bf16", "", "2.00 kB", "1.00 kB", "", ""]]
    rows = [{"name": name, "value": "auto", "default": "auto"} for name in ("reduce", "release")]
    assert settings({"settings": [rows[0] | {"became": "every_step"}, rows[1]]}).rows == [
        ["reduce", "auto", "the default", "every_step"]
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_text_fits_its_width_and_cuts_no_figure(report, width):
    text = as_text(report.as_json(), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    assert "at their defaults: reduce_dtype fp32" in text
    for figure in ("40.70 kB", "122.11 kB", "1.59 MB"):
        assert figure in text


def test_print_shows_the_same_text(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert str(report) == as_text(report.as_json(), 100)


def test_times_have_the_least_the_mean_and_the_largest_over_ranks(report):
    timed = replace(report, times=[PartTime("forward", 0.25, 0.2, 0.25, 0.3), PartTime("data", 1e-3, None, None, None)])
    lines = as_text(timed.as_json(), 100).splitlines()
    assert [line.split() for line in lines if line.strip().startswith(("forward", "data"))] == [
        ["forward", "0.25", "0.2", "0.25", "0.3"], ["data", "0.001"],
    ]  # fmt: skip


def test_a_notebook_has_tables_whose_text_is_escaped(report):
    assert report._repr_html_().count("<table>") == 4
    assert "<td>reduce_dtype</td><td>fp32</td><td>the default</td>" in report._repr_html_()
    tree = report.as_json() | {"notes": ["<script>alert(1)</script>"]}
    assert "<script>" not in as_html(tree)
    assert "&lt;script&gt;" in as_html(tree)


@pytest.mark.parametrize("tree", [
    {}, {"memory": 3, "traffic": [4, None], "settings": [{}], "versions": [], "notes": {}},
    {"memory": [{"category": ["x"], "planned": 10**400, "measured": -1, "peak": True}], "axes": {"dp": "\x1b[31m" * 400}},
])  # fmt: skip
def test_a_tree_of_other_types_still_prints(tree):
    text = as_text(tree, 80)
    assert "\x1b" not in text


def sent(stage, accumulate, reduce):
    """On a rank: what a ledger of two steps has, twice what a step sends by formula; then what an evaluation spoils."""
    engine = zero3d.Engine(build("net"), stage=stage, optimizer=adamw, accumulate=accumulate, reduce=reduce)
    rank = engine.mesh.rank
    assert stage == 1 or engine.report().step_traffic is None  # no step has said how often units are gathered
    for k in range(2 * accumulate):
        engine.backward(loss_of(engine, batch(k, rank)))
        engine.step()
    report = engine.report()
    with torch.no_grad():
        loss_of(engine, batch(9, rank))
    return report, engine.report().step_traffic


def test_a_step_sends_by_formula_what_the_ledger_has_of_each(ranks):
    cases = (1, 1, "auto"), (3, 2, "every_step"), (3, 2, "every_micro_batch")
    for report, after in (found for case in cases for found in ranks(2, sent, *case)):
        assert isinstance(report, Report)
        assert report.step_traffic
        twice = {row.operation: tuple(2 * figure for figure in row[2:]) for row in report.step_traffic}
        assert twice == {row.operation: row[2:] for row in report.traffic if row.operation in twice}
        assert (after is None) == (report.settings[0].value == 3)
