"""Ways over slow links between hosts: which are priced, which is chosen, what a run is told and what is refused."""

from functools import lru_cache
from pathlib import Path

import pytest

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main, parse
from zero3d.tools.cli.planned_links import planned_links
from zero3d.tools.cli.train import read
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.links import crosses, fastest, ways
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim import model_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "two_slow_hosts.yaml"
MODEL = gpt(layers=4, hidden=256, heads=4, vocab=1024, length=64)
KNOWN = lru_cache(model_spec.open_spec)
P = ParallelPlan


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    monkeypatch.setattr(model_spec, "open_spec", KNOWN)


def hosts(tmp_path, bandwidth=12.5e6, latency=1e-4, memory=64e9):
    """Two hosts of two ranks each."""
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"per_node: 2\nnodes: 2\ngpu: {{name: cpu, memory: {memory:e}}}\n"
        f"across: {{bandwidth: {bandwidth:e}, latency: {latency:e}, half: 0}}\n"
    )
    return cluster("cpu", 4, 2, file)


def priced(found):
    return {way.name: way.estimate.seconds.mid for way in found}


def test_every_way_is_priced_and_sends_less_the_further_down(tmp_path):
    slow = hosts(tmp_path)
    found = ways(MODEL, P(dp=4, stage=3), slow, evaluate)
    seconds = priced(found)
    assert list(seconds) == [
        "flat", "8-bit gathers", "second shard", "second shard, 8-bit gathers",
        "shard 2", "shard 2, bf16 sums", "shard 2, int8 sums", "shard 2, int4 sums",
    ]  # fmt: skip
    assert seconds["flat"] > seconds["8-bit gathers"] > seconds["second shard, 8-bit gathers"]
    assert seconds["flat"] > seconds["second shard"]
    assert seconds["second shard"] == pytest.approx(seconds["shard 2"], rel=0.03), "as many bytes"
    sums = [seconds[f"shard 2{form}"] for form in ("", ", bf16 sums", ", int8 sums", ", int4 sums")]
    assert sums == sorted(sums, reverse=True)
    assert [way.rounds for way in found] == [False, True, False, True, False, True, True, True]


@pytest.mark.parametrize(("plan", "names"), [
    (P(dp=4, stage=2), ["flat", "shard 2", "shard 2, bf16 sums", "shard 2, int8 sums", "shard 2, int4 sums"]),
    (P(dp=4, stage=0), ["flat"]), (P(dp=2, tp=2, stage=3), ["flat"]), (P(dp=2, pp=2, stage=3, accumulate=2), ["flat"]),
    (P(dp=4, stage=3, exact=True), ["flat", "8-bit gathers", "second shard", "second shard, 8-bit gathers", "shard 2"]),
])  # fmt: skip
def test_ways_are_those_that_an_engine_takes_where_dp_has_several_ranks_on_several_hosts(tmp_path, plan, names):
    slow = hosts(tmp_path)
    assert list(priced(ways(MODEL, plan, slow, evaluate))) == names
    assert crosses(plan, slow) == (plan.dp == 4)


def test_other_stages_are_priced_where_a_way_needs_them(tmp_path):
    [second] = [
        way
        for way in ways(MODEL, P(dp=4, stage=1), hosts(tmp_path), evaluate, any_stage=True)
        if way.name == "second shard"
    ]
    assert dict(second.settings) == {"zero.stage": 3, "zero.second_shard": 2}


def test_a_second_shard_is_fastest_with_one_micro_batch_and_a_shard_with_more_whose_gradients_it_sends_once(tmp_path):
    slow = hosts(tmp_path)
    names = {
        n: fastest(ways(MODEL, P(dp=4, stage=3, accumulate=n), slow, evaluate), slow, 64e9, narrow=False).name
        for n in (1, 2, 8)
    }
    assert names == {1: "second shard", 2: "shard 2", 8: "shard 2"}


def test_the_fastest_that_fits_is_chosen_and_a_simpler_one_where_it_is_worth_too_little(tmp_path):
    slow, fast = hosts(tmp_path), hosts(tmp_path, 1e15, 0.0)
    found = ways(MODEL, P(dp=4, stage=3, accumulate=2), slow, evaluate)
    assert fastest(found, slow, 64e9, narrow=False).name == "shard 2"
    assert fastest(found, slow, 64e9, narrow=True).name == "shard 2, int4 sums"
    held = {way.name: way.estimate.memory.device for way in found}
    assert held["second shard"] < held["shard 2"]
    between = (held["second shard"] + held["shard 2"]) / 2
    assert fastest(found, slow, between, narrow=False).name == "second shard"
    assert fastest(found, slow, 0, narrow=True).name == "flat"
    at_once = ways(MODEL, P(dp=4, stage=3), fast, evaluate)
    assert fastest(at_once, fast, 64e9, narrow=True).name == "flat"
    seconds = priced(at_once)
    assert seconds["8-bit gathers"] > seconds["flat"], "blocks are decoded"


# --- as it is typed ---------------------------------------------------------------------------------


def test_a_plan_of_two_slow_hosts_prices_all_ways_and_says_which_is_fastest(capsys):
    words = ["--params", "1.5e9", "--gpu", "a100-80", "--seq", "1024", "--tokens-per-batch", "16384"]
    assert main(["plan", *words, "--cluster", str(EXAMPLE)]) == 0
    said = capsys.readouterr().out
    assert "Ways to send data-parallel traffic between nodes" in said
    assert "Fastest with numbers sent unchanged: " in said
    assert "Fastest with numbers sent unchanged or rounded: mesh.shard=8 zero.slow_wire=int4\n" in said


def config(tmp_path, *overrides):
    hosts(tmp_path)
    batch = ["model.path=demo", "model.init=random", "data.length=64", "train.batch=8", "train.micro_batch=1"]
    return load(None, [*batch, f"plan.cluster={tmp_path / 'cluster.yaml'}", *overrides])


@pytest.mark.parametrize(("links", "wanted"), [
    ("auto", ["mesh.shard=2"]), ("narrow", ["mesh.shard=2", "zero.slow_wire=int4"]),
])  # fmt: skip
def test_a_run_is_given_what_is_fastest_and_told_why(tmp_path, links, wanted):
    words, why = planned_links(config(tmp_path, f"plan.links={links}"), 4, None)
    assert words == ["plan.links=given", *wanted]
    assert why[-1] == f"plan.links={links}: shard 2{', int4 sums' * (links == 'narrow')}: {' '.join(wanted)}"
    assert any("8-bit gathers" in line for line in why)


def test_train_reads_it_into_its_configuration_once_and_workers_are_given_words(tmp_path, capsys):
    hosts(tmp_path)
    words = ["model.path=demo", "data.length=64", "train.batch=8", "train.micro_batch=1", "plan.links=auto"]
    arguments = parse(["train", *words, f"plan.cluster={tmp_path / 'cluster.yaml'}", "--ranks=4"])
    _, made = read(arguments, told=True)
    assert (made.mesh.shard, made.plan.links) == (2, "given")
    assert arguments.words[-2:] == ["plan.links=given", "mesh.shard=2"]
    assert "plan.links=auto: shard 2: mesh.shard=2\n" in capsys.readouterr().err
    assert read(arguments, told=True)[1] == made
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("overrides", "ranks", "local", "said"), [
    ((), 2, None, "on one host"), ((), 4, 4, "on one host"), ((), 4, 3, "unequal numbers"),
    (("mesh.tp=2",), 4, None, "no data-parallel axis has several ranks on several hosts"),
])  # fmt: skip
def test_nothing_is_changed_where_no_link_is_between(tmp_path, overrides, ranks, local, said):
    words, [why] = planned_links(config(tmp_path, "plan.links=auto", *overrides), ranks, local)
    assert words == ["plan.links=given"]
    assert said in why


@pytest.mark.parametrize(("overrides", "said"), [
    (("mesh.shard=2",), "plan.links=auto chooses mesh.shard, and the run has mesh.shard=2: give only one of them"),
    (("zero.gather_wire=int8",), "chooses zero.gather_wire"),
    (("plan.cluster=null",), "plan.cluster=FILE, as zero3d calibrate writes it"),
])  # fmt: skip
def test_what_is_given_twice_or_not_known_is_refused(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        planned_links(config(tmp_path, "plan.links=auto", *overrides), 4, None)
