"""The GPU catalogue, cluster files, and planner data as JSON."""

import json

import pytest

from zero3d.errors import ConfigError
from zero3d.tools.plan.hardware import CATALOGUE, cluster
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan
from zero3d.tools.plan.spec_json import from_json, to_json


def test_every_card_makes_a_cluster_of_its_usual_nodes():
    for name, card in CATALOGUE.items():
        found = cluster(name, 2 * card.per_node)
        assert (found.nodes, found.per_node) == (2, card.per_node)
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
