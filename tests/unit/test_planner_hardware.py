"""The GPU catalogue, cluster files, and planner data as JSON."""

import json
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
import yaml

from zero3d.errors import ConfigError
from zero3d.tools.page.plan_text import Answer, head, heading, without_bf16
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import CATALOGUE, cluster, named
from zero3d.tools.plan.ladder import ladder
from zero3d.tools.plan.network import REACHED, Group, exchange_seconds, gather_seconds, reduce_seconds, send_seconds
from zero3d.tools.plan.search import Row, SearchResult, Target, _roundings, resized, search
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan
from zero3d.tools.plan.spec_json import from_json, to_json


def test_every_card_makes_a_cluster_of_its_usual_nodes():
    for name, card in CATALOGUE.items():
        found = cluster(name, 2 * card.per_node)
        assert (found.nodes, found.per_node) == (2, card.per_node)
        assert found.hosts == 2 * (1 if card.per_host is None else card.per_node // card.per_host)
        assert found.gpu.memory == card.memory * 2**30
        assert {name for name, source in found.provenance.items() if source != "datasheet"} == {
            "disk",
            "host_bandwidth",
            "step",
            "communicator",
        }


@pytest.mark.parametrize("name", ["A100-80", "a100", "A100_80", "a100 80"])
def test_a_name_may_be_written_in_several_ways(name):
    assert cluster(name, 8).gpu.name == "a100-80"


def test_an_unknown_card_is_refused_with_the_list_and_the_nearest():
    with pytest.raises(ConfigError, match=r"v100-32, a100-40.*Did you mean h100\?"):
        cluster("h1000", 8)


def test_gpus_that_do_not_fill_nodes_are_refused_with_a_number_that_does():
    with pytest.raises(ConfigError, match="--gpus 16"):
        cluster("a100", 9)
    with pytest.raises(ConfigError, match="multiple of --nodes"):
        cluster("a100", 9, nodes=2)
    assert cluster("a100", 9, nodes=3).per_node == 3


def test_a_file_overrides_fields_and_says_who_knows_them(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: {memory: 79.1e9}\nacross: {bandwidth: 12.5e9}\nprovenance: {across.bandwidth: measured}\n")
    found = cluster("a100", 16, file=file)
    assert (found.gpu.memory, found.across.bandwidth) == (79.1e9, 12.5e9)
    assert found.gpu.flops == 312e12
    assert found.provenance["gpu.memory"] == "user"
    assert found.provenance["across.bandwidth"] == "measured"
    assert found.provenance["inside"] == "datasheet"


@pytest.mark.parametrize(
    ("text", "said"),
    [("gpu: {memry: 1}", "Did you mean 'memory'"), ("- 1", "expected fields"), ("nodes: many", "a whole number"),
     ("{", "cluster file"), ("step: {fixed: 0.01, hide_dp: 1.5}", r"step\.hide_dp is 1\.5: it is a share, at most 1")],
)  # fmt: skip
def test_a_misfit_file_is_refused(tmp_path, text, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        cluster("a100", 8, file=file)


@pytest.mark.parametrize(("gpu", "watts"), [
    ("{name: my-card, memory: 48e9, flops: 100e12, bandwidth: 900e9}", None), ("{name: my-card, power: 250}", 250),
    ("{memory: 79.1e9}", 400), ("{name: A100, memory: 79.1e9}", 400),
])  # fmt: skip
def test_a_card_of_one_s_own_has_the_watts_that_its_file_says(tmp_path, gpu, watts):
    file = tmp_path / "cluster.yaml"
    file.write_text(f"gpu: {gpu}")
    assert cluster("a100", 8, file=file).gpu.power == watts


def test_planner_data_survives_json():
    for value in (gpt(2, 64, 4, 100, 32), cluster("h100", 16), ParallelPlan(dp=2, tp=4)):
        assert from_json(type(value), json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    ("cls", "tree", "said"),
    [
        (ParallelPlan, {"acumulate": 2}, "ParallelPlan: 'acumulate' is unknown.*Did you mean 'accumulate'"),
        (ParallelPlan, {"dp": "2"}, "ParallelPlan.dp='2': expected a whole number"),
        (ParallelPlan, {"dp": True}, "expected a whole number"),
        (ParallelPlan, [], "expected an object"),
        (ClusterSpec, {"nodes": 1}, "missing"),
        (ModelSpec, {"parts": {}}, "ModelSpec.parts.*a list"),
    ],
)
def test_misfit_trees_are_refused_with_their_path(cls, tree, said):
    with pytest.raises(ConfigError, match=said):
        from_json(cls, tree)


SHEETS = yaml.safe_load((Path(__file__).parents[1] / "data" / "cards.yaml").read_text())


def test_every_card_is_what_its_data_sheet_prints():
    assert SHEETS.keys() == CATALOGUE.keys() - {"cpu"}
    for name, sheet in SHEETS.items():
        card = CATALOGUE[name]
        assert card.memory == sheet["memory"] * (15 / 16 if sheet.get("ecc") else 1), name
        assert isclose(card.tflops, sheet.get("dense") or sheet["sparse"] / 2, rel_tol=2e-3), name
        assert isclose(card.bandwidth, sheet["bandwidth"], rel_tol=1e-3), name
        assert (card.watts, card.per_node) == (sheet["watts"], sheet.get("gpus", 8)), name
        assert card.partners == sheet.get("partners", 0), name
        if "links" in sheet:
            assert card.inside == sheet["links"] / 2, name
        else:  # what a copy reaches of one way of the bus, at most; through the host's memory less
            assert 0.3 * sheet["pcie"] / 2 < card.inside < 0.9 * sheet["pcie"] / 2, name


def test_a_run_counts_the_peak_that_plans_count():
    flops = pytest.importorskip("zero3d.train.flops")  # with torch
    for name, peak in flops.PEAKS.items():
        if name != "H100 PCIe":  # no card of the catalogue
            device = {"A100": "A100 SXM4 80GB", "H100": "H100 80GB HBM3", "V100": "V100 SXM2 32GB"}.get(name, name)
            assert CATALOGUE[named(device)].tflops * 1e12 == peak == flops.peak_flops(device, "bf16"), name
    assert flops.peak_flops("NVIDIA L40", "bf16") is None  # neither an L4 nor an L40S


def test_links_to_partners_carry_what_goes_among_a_groups_own_members():
    spec, link = cluster("mi300x", 16), 64e9 * REACHED
    for local in (2, 4, 8):  # each of which has links to local - 1 others
        took = gather_seconds(8e9, Group(local, local), spec) - (local - 1) * spec.inside.latency
        half = spec.inside.half / ((local - 1) * link)
        assert took - half == pytest.approx(8e9 / local / link)
    assert gather_seconds(8e9, Group(2, 2), spec) > 2 * gather_seconds(8e9, Group(8, 8), spec)
    switched = cluster("h100", 16)
    assert gather_seconds(8e9, Group(2, 2), switched) < gather_seconds(8e9, Group(8, 8), switched)
    assert send_seconds(8e9, spec.inside) == pytest.approx(8e9 / link, rel=1e-3)
    assert exchange_seconds(8e9, Group(4, 4), spec) == gather_seconds(8e9, Group(4, 4), spec)
    plain = replace(spec, inside=replace(spec.inside, partners=0))
    for size in (1e3, 1e6, 8e9):  # of all GPUs of a node all links are used, by trees and rings
        assert reduce_seconds(size, Group(8, 8), spec) == reduce_seconds(size, Group(8, 8), plain)
    assert spec.inside.to(9) == spec.inside.bandwidth
    assert reduce_seconds(8e9, Group(2, 2), spec) == pytest.approx(2 * gather_seconds(8e9, Group(2, 2), spec))


def test_a_rack_is_a_node_of_machines_with_memory_each():
    rack = cluster("gb200", 64)
    assert cluster("gb200", 64, nodes=16) == rack
    assert (rack.nodes, rack.per_node, rack.hosts, rack.on_host) == (1, 64, 16, 4)
    assert cluster("gb200", 144, nodes=2).per_node == 72
    assert [cluster("gb200", 128).nodes, cluster("gb200", 128, nodes=32).nodes] == [2, 2]
    machine = resized(rack, 4)
    assert (machine.nodes, machine.per_node, machine.hosts) == (1, 4, 1)
    assert (rack.host_memory, rack.disk) == (16 * machine.host_memory, 16 * machine.disk)
    assert resized(rack, 2).host_memory == machine.host_memory
    assert "1 node of 64 in 16 machines;" in "\n".join(heading(gpt(2, 64, 4, 100, 32), rack, 64))


def test_a_file_says_the_memory_of_a_machine_of_a_rack(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("host_memory: 1e12")
    assert cluster("gb200", 64, file=file).host_memory == 16e12
    measured = tmp_path / "cluster.json"
    measured.write_text(json.dumps(to_json(cluster("gb200", 64))))  # which says how many GPUs its node has
    for gpus in (8, 64, 128):
        assert cluster("gb200", gpus, file=measured).host_memory == cluster("gb200", gpus).host_memory


def test_a_card_without_bf16_is_planned_in_fp16():
    model = gpt(2, 64, 4, 100, 32)
    for name, precision in (("t4", "fp16"), ("v100", "fp16"), ("a100", "bf16")):
        here = cluster(name, 2)
        rows = search(model, here, Target(8, here.gpu.memory), evaluate).rows
        assert {row.plan.precision for row in rows} == {precision}
        assert {rung.plan.precision for rung in ladder(model, here, Target(8, 1e12), evaluate)} == {precision}
    (said,) = without_bf16(ParallelPlan(precision="fp16"), cluster("t4", 1))
    assert said == "t4 does not multiply in bf16: planned in fp16, whose loss is scaled (precision: fp16)"
    (said,) = without_bf16(ParallelPlan(), cluster("t4", 1))
    assert "bf16 is slower" in said
    assert not list(without_bf16(ParallelPlan(), cluster("a100", 1)))


def test_a_card_without_bf16_is_offered_no_sums_in_it():
    offered = [any("reduce_dtype" in each for each in _roundings(Target(1, 1.0), False, of)) for of in ("bf16", "fp16")]
    assert offered == [True, False]


def test_a_launcher_is_told_the_machines_of_a_rack():
    model, rack = gpt(2, 64, 4, 100, 32), cluster("gb200", 64)
    row = Row(ParallelPlan(dp=64), evaluate(model, rack, ParallelPlan(dp=64)))
    text = head(Answer(model, rack, Target(64, 1e12), SearchResult([row], [], 1), [], []), asks=False)
    assert "--nodes 16 --gpus-per-node 4" in text
