"""Grafana's dashboard and the alerts of the docs name metrics that a run has, and nothing else."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parsed
from training import save_model, save_rows, train, tree

from zero3d.train.endpoints import metric_of
from zero3d.train.stragglers import FIELDS, KINDS
from zero3d.zero.step_parts import PARTS

DOCS = Path(__file__).parents[2] / "docs"
SELDOM = {  # fields that a record has at times
    "of accelerators": ("mfu", "reserved_bytes"),
    "parts that take any time": tuple(f"{part}_s" for part in PARTS),
    "while a rank is slower than its peers": (*FIELDS, *(f"slowest_{kind}_s" for kind in KINDS)),
}
OF_PROMETHEUS = {"up"}  # which it makes of each target itself
FUNCTIONS = {"time", "rate", "increase"}
WORDS = re.compile(r"[a-zA-Z_]\w*(?:\[\w+\])?")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Names of samples in the file of a run that evaluates and saves."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "model")
    save_rows(folder / "rows.npy")
    made = tree(folder, log={"to": "prometheus", "every": 1}, data={"validation": 0.2}, checkpoint={"every": 2})
    train(made)
    text = (folder / "out" / "metrics.prom").read_text()
    return {sample.name for family in parsed(text) for sample in family.samples}


def of_dashboard():
    board = json.loads((DOCS / "grafana" / "zero3d.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]], board


def of_docs():
    blocks = re.findall(r"^```yaml\n(groups:\n.*?)^```", (DOCS / "watching.md").read_text(), re.M | re.S)
    return [rule["expr"] for block in blocks for group in yaml.safe_load(block)["groups"] for rule in group["rules"]]


def words(expression):
    """Its names, with ranges, and without labels and numbers."""
    return WORDS.findall(re.sub(r"\{[^}]*\}", "", expression))


def test_every_metric_that_is_shown_or_alerted_on_is_one_of_a_run(metrics):
    shown, _ = of_dashboard()
    known = metrics | OF_PROMETHEUS | {metric_of(field).name for fields in SELDOM.values() for field in fields}
    expressions = [*shown, *of_docs()]
    assert len(expressions) > len(shown) > 30
    for expression in expressions:
        named = [word for word in words(re.sub(r"\[\w+\]", "", expression)) if word not in (*FUNCTIONS, "and")]
        assert named, expression
        assert {*named} <= known, expression
        assert expression.count("(") == expression.count(")")


def test_runs_are_missed_in_a_file_that_stays_and_at_a_port_that_goes():
    """Prometheus drops the values of a port that no longer answers, so that no rule on them can tell."""
    silent, gone, *_ = of_docs()
    assert {*words(silent)} == {"time", "zero3d_last_record_timestamp_seconds", "and", "zero3d_running"}
    assert {*words(gone)} == OF_PROMETHEUS


def test_a_share_is_drawn_in_percent_and_by_itself():
    for panel in of_dashboard()[1]["panels"]:
        shares = [re.search(r"zero3d_(mfu|slowest_over)\{", target["expr"]) is not None for target in panel["targets"]]
        assert all(shares) == any(shares), panel["title"]
        assert all(shares) == (panel["fieldConfig"]["defaults"]["unit"] == "percentunit"), panel["title"]


def test_rates_are_of_counters_and_counters_are_shown_as_rates_alone():
    for expression in (*of_dashboard()[0], *of_docs()):
        rated = re.findall(r"(?:rate|increase)\((\w+)", expression)
        assert rated == [word for word in words(re.sub(r"\[\w+\]", "", expression)) if word.endswith("_total")]


def test_panels_are_of_the_runs_that_are_chosen_and_stand_beside_each_other():
    shown, board = of_dashboard()
    for expression in shown:
        assert len(re.findall(r"zero3d_\w+", expression)) == expression.count('{run=~"$run"}')
    runs = next(each for each in board["templating"]["list"] if each["name"] == "run")
    assert runs["query"]["query"] == "label_values(zero3d_step, run)"
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) < 24
