"""Experts in the plan search: which degrees are priced, the best of each way, and the file that starts one."""

import pytest

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.page.plan_json import as_json, row_json
from zero3d.tools.page.plan_page import plan_page
from zero3d.tools.page.plan_text import Answer, as_text
from zero3d.tools.plan.emit import deepspeed_config, plan_of, train_config
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.ladder import ladder
from zero3d.tools.plan.search import Target, ep_refused, search, ways
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.what_if import what_if
from zero3d.tools.sim.model_spec import open_spec


@pytest.fixture(scope="module")
def spec():
    return open_spec("demo-moe", 128)


@pytest.fixture(scope="module")
def found(spec):
    """What a search over four GPUs finds, and these."""
    place = cluster("h100", 4)
    return search(spec, place, Target(16, 80e9, margin=0.0), evaluate), place


def test_every_ep_that_divides_dp_and_the_experts_is_priced(found):
    result, _ = found
    plans = {(row.plan.dp, row.plan.ep) for row in result.rows}
    assert plans == {(dp, ep) for dp in (1, 2, 4) for ep in (1, 2, 4) if dp % ep == 0}
    assert not any(row.plan.mesh.sequence_parallel for row in result.rows if row.plan.ep > 1)
    assert not any(row.plan.schedule == "zero-bubble" for row in result.rows if row.plan.ep > 1)


def test_the_best_of_each_way_is_the_first_of_its_kind(found):
    result, _ = found
    best = dict(ways(result.rows))
    assert list(best) == ["on all of dp", "over ep", "cut by tp"]
    assert best["over ep"].plan.ep > 1
    assert best["over ep"].reason
    assert best["on all of dp"].plan.ep == best["on all of dp"].plan.tp == 1
    assert best["cut by tp"].plan.tp > 1
    assert ways([])[1] == ("over ep", None)


def test_terminal_page_and_json_compare_the_ways(spec, found):
    result, place = found
    rungs = ladder(spec, place, Target(16, 80e9, margin=0.0), evaluate)
    answer = Answer(spec, place, Target(16, 80e9, margin=0.0), result, rungs, [])
    row = dict(ways(result.rows))["over ep"]
    title = "Where the 16 experts of a layer are, the fastest plan of each way"
    for text in (as_text(answer, 3), plan_page(answer, 3)):
        assert title in text
        assert row.reason in " ".join(text.split())
    told = as_json(answer)
    assert told["experts"]["over ep"] == row_json(row)
    assert told["long_sequences"] is None


def test_a_plan_with_ep_is_a_file_that_says_it(spec):
    plan = ParallelPlan(dp=4, stage=3, micro_batch=2, accumulate=2, ep=2, experts="fast")
    config = load(train_config(spec, plan, "demo-moe", "bytes"))
    assert (config.mesh.ep, config.mesh.experts) == (2, "fast")
    assert plan_of(config, None) == plan
    with pytest.raises(ConfigError, match="cannot say ep=2"):
        deepspeed_config(plan)


@pytest.mark.parametrize(("dp", "ep", "why"), [
    (4, 3, "does not divide dp 4"), (64, 32, "does not divide 16 experts"), (4, 4, None),
])  # fmt: skip
def test_degrees_that_cannot_be_have_a_reason(spec, dp, ep, why):
    said = ep_refused(spec, dp, ep)
    assert (said is None) if why is None else (why in said)


def test_ep_sends_rows_and_gathers_no_experts_that_no_other_rank_has(spec):
    plain, shared = (evaluate(spec, cluster("h100", 4), ParallelPlan(dp=4, ep=ep)) for ep in (1, 4))
    assert shared.seconds.parts["experts"] > 0 == plain.seconds.parts["experts"]
    assert shared.traffic["all_gather dp"] < plain.traffic["all_gather dp"]
    assert "all_gather edp" not in shared.traffic
    assert any("x the mean on the busiest ep rank" in note for note in shared.notes)
    assert not any("busiest ep rank" in note for note in plain.notes)


def test_a_knob_turns_ep(spec, found):
    result, place = found
    row = result.rows[0]
    row = row._replace(plan=ParallelPlan(dp=4, ep=2, accumulate=4))
    changes = {knob.change for knob in what_if(row, spec, place, evaluate)}
    assert {"mesh.ep: 1", "mesh.ep: 4", "mesh.experts: fast"} <= changes


@pytest.mark.parametrize(("preset", "params", "experts", "chosen"), [
    ("mixtral-8x7b", 46.70e9, 8, 2), ("qwen3-30b-a3b", 30.53e9, 128, 8),
    pytest.param("deepseek-v3", 671.03e9, 256, 8, marks=pytest.mark.long),
])  # fmt: skip
def test_presets_have_the_published_shapes(preset, params, experts, chosen):
    from zero3d.config import Config, Model
    from zero3d.models.trained import open_trained
    from zero3d.tools.sim.model_spec import outline

    model = outline(open_trained(Config(model=Model(path=preset, init="random"))).module, 128)
    assert model.params == pytest.approx(params, rel=1e-3)
    assert (model.experts, model.chosen) == (experts, chosen)
