"""Plans with experts on an axis of their own, and with other optimizers, against the dry run: states, traffic, the peak."""

import json
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from math import ceil

import pytest

from zero3d.config import load, to_dict
from zero3d.models.presets import PRESETS
from zero3d.spec.tiers import DEVICE, HOST
from zero3d.tools.plan.emit import train_config
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.links import ways
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.spec import Link, ParallelPlan as P
from zero3d.tools.plan.states import states
from zero3d.tools.plan.traffic import rank_traffic
from zero3d.tools.sim.model_spec import open_spec

LENGTH = 128
long = pytest.mark.long


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(path, spec) of the preset's model by its number of blocks, made when asked for."""

    @cache
    def get(layers):
        path = tmp_path_factory.mktemp("model") / "config.json"
        path.write_text(json.dumps(PRESETS["demo-moe"] | {"num_hidden_layers": layers}))
        return str(path), open_spec(str(path), LENGTH)

    return get


def config_of(model, plan, path):
    tree = train_config(model, plan, path, "bytes")
    tree["model"]["init"] = "random"
    tree["data"]["packing"] = False
    tree["offload"] = asdict(plan.offload)
    return to_dict(load(tree))


def dry(tree, world):
    from zero3d.tools.sim.rank import dry_run

    return dry_run(load(tree), 0, world, whole=True)


@pytest.mark.parametrize(("plan", "layers"), [
    (P(dp=4, stage=3, ep=2, micro_batch=2, optimizer="muon"), 2),
    pytest.param(
        P(dp=4, stage=2, ep=4, accumulate=2, experts="fast", activations="full", optimizer="adamw8bit"), 2, marks=long
    ),
    *(pytest.param(plan, 3, marks=long) for plan in (
        P(dp=4, stage=3, ep=4),
        P(dp=4, stage=3, ep=2, micro_batch=2),
        P(dp=4, stage=2, ep=4, accumulate=2, experts="fast", activations="full"),
        P(dp=4, stage=0, accumulate=2, optimizer="muon"),
        P(dp=3, stage=3, optimizer="adamw8bit", master="split"),
        P(dp=4, tp=2, stage=0, ep=2, optimizer="adamw8bit", accumulate=2),
        P(dp=4, tp=2, stage=1, ep=2, micro_batch=4, optimizer="muon"),
        P(dp=4, stage=3, ep=4, micro_batch=4, offload="host", executor="device", optimizer="muon"),
        P(dp=4, stage=3, exact=True),
        P(dp=4, stage=3, ep=4, exact=True),
        P(dp=4, stage=1, ep=2, exact=True),
        P(dp=4, stage=1, ep=4, exact=True, accumulate=2),
        P(dp=4, stage=0, ep=2, accumulate=2),
        P(dp=4, stage=1, ep=2, accumulate=2),
        P(dp=4, stage=3, ep=4, accumulate=2, activations="full", micro_batch=4),
        P(dp=4, tp=2, stage=3, ep=2, micro_batch=4),
        P(dp=4, stage=3, ep=2, offload="host", executor="device"),
        P(dp=4, stage=3, ep=2, second_shard=2),
        P(dp=8, stage=3, ep=2, second_shard=4, gather_wire="int8", accumulate=2),
    )),
    pytest.param(
        P(dp=4, stage=3, ep=4, offload="host", params="host", executor="device", activations="full"), 3,
        marks=long,
    ),
])  # fmt: skip
def test_states_traffic_and_peak_are_the_simulated_ones(alone, models, plan, layers):
    path, spec = models(layers)
    rank, planned = alone(dry, config_of(spec, plan, path), plan.world), memory(spec, plan)
    by_place = states(spec, plan)
    for place, held in ((DEVICE, by_place.device), (HOST, by_place.at(HOST))):
        found = {state.category: state.held for state in (*rank.states, *rank.away) if state.place == place}
        said = {name: ceil(nbytes) for name, nbytes in held.by_category.items()}
        assert {k: v for k, v in found.items() if v} == {k: v for k, v in said.items() if v}, place
    sent = Counter()
    for entry in rank.traffic:
        sent[f"{entry.op} {entry.axis}"] += entry.nbytes
    agreed = ("exchange dp", "exchange tp")  # a few numbers, which formulas of plans leave out
    traffic = rank_traffic(spec, plan, 0)
    assert {k: v for k, v in sent.items() if k not in agreed} == {k: v for k, v in traffic.items() if k not in agreed}
    assert 0.97 <= planned.allocated / rank.peak.nbytes <= 1.05


def test_shared_experts_keep_no_second_shard_and_cross_hosts_as_often_as_without(models):
    _, spec = models(2)
    plain, second = (P(dp=4, stage=3, ep=2, second_shard=ranks) for ranks in (None, 2))
    sent = [rank_traffic(spec, plan, 0) for plan in (plain, second)]
    assert sent[0]["all_gather edp"] == sent[1]["all_gather edp"] > 0
    assert sent[0]["all_gather dp"] > sent[1]["all_gather dp"]
    slow = replace(cluster("cpu", 4, 2), across=Link(12.5e6, 1e-4, 0.0))
    seconds = {way.name: way.estimate.seconds.mid for way in ways(spec, plain, slow, evaluate)}
    assert seconds["second shard"] < seconds["flat"]
