"""The search of `zero3d plan`: what it tries, keeps, ranks and rejects, under a made-up price list."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, isclose, sqrt

import pytest

from zero3d.account.states import engine_bytes
from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.sequence.shares import Sharing
from zero3d.spec.offload import Offload
from zero3d.tools.page.plan_text import rounded, settings
from zero3d.tools.plan.emit import deepspeed_config, plan_of, train_config
from zero3d.tools.plan.estimate import BOUNDS, evaluate
from zero3d.tools.plan.goodput import GPU_HOURS_BETWEEN_FAILURES, goodput
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.ladder import RULE, differs, ladder
from zero3d.tools.plan.search import (
    ACTIVATIONS,
    LONG,
    PIPELINES,
    SEGMENTS,
    Row,
    Target,
    divisors,
    resized,
    search,
    sequence_ways,
    shares,
    tp_refused,
)
from zero3d.tools.plan.shapes import gpt, llama
from zero3d.tools.plan.spec import Estimate, Memory, ParallelPlan, Seconds, Weight
from zero3d.tools.plan.time import faster_reduction
from zero3d.tools.plan.what_if import Moved, what_if

MODEL = gpt(8, 1024, 16, 50304, 1024)
A100 = cluster("a100-80", 16, 2)


def price(model, place, plan):
    """States by formula over tp and pp, a byte of activations per token; time grows with every axis but dp."""
    share = model.params / plan.tp / plan.pp
    states = float(engine_bytes(plan.zero.stage, plan.dp).total) * share
    on_host = 0.0
    if plan.offload.optimizer == "host":
        on_host = 12 * share / plan.dp
        states -= on_host
    keep = {"none": 1e5, "selective": 5e4}.get(plan.activations, 1e4)
    used = states + keep * plan.micro_batch * model.length / plan.tp
    seconds = (
        1
        + 0.1 * plan.tp
        + 0.2 * plan.pp
        + 0.05 * plan.zero.stage
        + {"none": 0, "selective": 0.1}.get(plan.activations, 0.3)
    )
    seconds += 1 / plan.micro_batch + plan.world / 1e4 - 0.001 * place.gpus
    return Estimate(
        Memory(states, used, used, used, on_host * place.per_node),
        Seconds(seconds * 0.9, seconds, seconds * 1.1, {"compute": seconds}),
        {},
        plan.micro_batch * plan.accumulate * plan.dp * model.length,
        1e15,
    )


def found(limit=80e9, goal="fastest", sequences=64, place=A100, model=MODEL, offload="none", margin=0.0):
    return search(model, place, Target(sequences, limit, goal, offload, margin=margin), price)


def test_every_plan_found_uses_all_gpus_and_the_whole_batch_and_fits():
    rows = found(limit=4e9).rows
    assert len(rows) > 1000
    for row in rows:
        plan = row.plan
        assert plan.world == 16
        assert plan.micro_batch * plan.accumulate * plan.dp == 64
        assert row.estimate.memory.device <= 4e9
        assert MODEL.heads % plan.tp == 0
        assert plan.tp <= 8
        assert plan.pp <= 8
        assert plan.zero.stage == 0 or plan.dp > 1
        assert not plan.mesh.sequence_parallel or plan.tp > 1


def test_the_ranking_follows_the_goal_and_says_why():
    rows = found().rows
    assert [row.estimate.seconds.mid for row in rows] == sorted(row.estimate.seconds.mid for row in rows)
    assert all(row.reason for row in rows)
    widest = found(goal="largest-batch").rows[0].plan
    assert widest.micro_batch * widest.dp == max(r.plan.micro_batch * r.plan.dp for r in rows)


def test_nothing_is_lost_between_tried_fitting_and_rejected():
    little, *more = (found(limit) for limit in (1e8, 2e9, 80e9))
    for all_of_it in (little, *more):
        assert all_of_it.tried == len(all_of_it.rows) + sum(each.plans for each in all_of_it.rejected)
    assert little.rows == []
    nearest = next(each for each in little.rejected if each.nearest)
    assert isclose(nearest.excess, price(MODEL, A100, nearest.nearest).memory.device - 1e8)


@pytest.mark.parametrize("goal", ["fastest", "largest-batch"])
def test_plans_inside_the_margin_are_rows_behind_all_that_have_it_whole_and_no_rejections(goal):
    all_, with_margin, whole = (
        found(limit, goal, margin=margin) for limit, margin in ((3e9, 0), (3e9, 0.2), (2.5e9, 0))
    )
    assert [row[:2] for row in with_margin.rows if not row.lacks] == [row[:2] for row in whole.rows]
    few = [row for row in with_margin.rows if row.lacks]
    assert few == with_margin.rows[-len(few) :]
    assert all(isclose(row.lacks, 1.2 * row.estimate.memory.device - 3e9) for row in few)
    assert {row.plan for row in with_margin.rows} == {row.plan for row in all_.rows}
    assert (with_margin.tried, with_margin.rejected) == (all_.tried, all_.rejected)
    assert all(row.reason for row in few)


def test_plans_inside_the_margin_decide_only_where_no_place_of_states_leaves_it_whole():
    few = partial(found, sequences=4, place=resized(A100, 4))
    least = min(row.estimate.memory.device for row in few().rows)
    away = min(row.estimate.memory.device for row in few(offload="host").rows)
    assert 1.1 * away < 1.05 * least
    result = few(1.05 * least, offload="auto", margin=0.1)
    whole = [row for row in result.rows if not row.lacks]
    assert whole
    assert all(row.plan.offload.optimizer == "host" for row in whole)
    assert any(row.plan.offload == Offload() for row in result.rows[len(whole) :])
    assert result.rows[0] == whole[0]
    none = few(1.05 * away, offload="auto", margin=0.1)
    assert none.rows
    assert all(row.lacks for row in none.rows)
    assert [row.estimate.seconds.mid for row in none.rows] == sorted(row.estimate.seconds.mid for row in none.rows)


MOMENTS = gpt(4, 1024, 8, 50304, 256)


def states_alone(model, place, plan):
    """Bytes that a parameter takes, of codes for moments where the optimizer has them, and of bf16 for reductions."""
    moments = 2 if plan.optimizer == "adamw8bit" else 8
    reduced = 2 if plan.zero.reduce_dtype == "bf16" else 4
    base = {None: 0, "nf4": 2, "nf4-double": 1}[plan.quantize]
    away = 8 if plan.offload.optimizer == "host" else 0
    used = 1e6 * (10 + moments + reduced + base - away)
    memory = Memory(used, used, used, used, 0.0)
    return replace(price(model, place, plan), memory=memory)


@pytest.mark.parametrize(("millions", "quantize", "kinds"), [
    (24, "nf4", {("adamw", "fp32", "nf4", "none")}),
    (23, "nf4", {("adamw", "fp32", "nf4-double", "none")}),
    (22, None, {("adamw", "fp32", None, "none")}),
    (20, None, {("adamw", "bf16", None, "none")}),
    (16, None, {("adamw8bit", "fp32", None, "none")}),
    (15, "nf4", {("adamw8bit", "bf16", "nf4-double", "none")}),
])  # fmt: skip
def test_what_rounds_more_is_tried_before_states_leave_and_only_where_nothing_fits_without(millions, quantize, kinds):
    place, seen = cluster("a100-80", 2), []

    def packed(wanted):
        seen.append(wanted)
        return replace(MOMENTS, name=f"in {wanted}")

    target = Target(2, 1e6 * millions, quantize=quantize, margin=0.0)
    result = search(MOMENTS, place, target, states_alone, packed=packed)
    found = {
        (p.optimizer, p.zero.reduce_dtype, p.quantize, p.offload.optimizer) for p in (row.plan for row in result.rows)
    }
    assert found == kinds
    assert seen == ["nf4-double"] * any(kind[2] == "nf4-double" for kind in kinds)
    assert result.models[result.rows[0].plan.quantize].name == ("in nf4-double" if seen else MOMENTS.name)
    exactly = search(MOMENTS, place, target._replace(rounds=False), states_alone, packed=packed)
    wide = {(row.plan.optimizer, row.plan.zero.reduce_dtype, row.plan.quantize) for row in exactly.rows}
    assert wide <= {("adamw", "fp32", quantize)}


def test_a_rank_alone_is_offered_no_other_reductions():
    result = search(MOMENTS, cluster("a100-80", 1), Target(2, 20e6, margin=0.0), states_alone)
    assert {row.plan.optimizer for row in result.rows} == {"adamw8bit"}
    assert {row.plan.zero.reduce_dtype for row in result.rows} == {"fp32"}


def test_a_plan_that_rounds_more_says_so_and_why():
    model, place = gpt(8, 1024, 16, 50304, 512), cluster("a100-80", 2)
    plan = ParallelPlan(dp=2, stage=1, optimizer="adamw8bit", reduce_dtype="bf16")
    notes = evaluate(model, place, plan).notes
    assert any("without optimizer.name=adamw8bit: moments are rounded differently" in note for note in notes)
    assert any("without zero.reduce_dtype=bf16: gradients are rounded differently" in note for note in notes)
    assert "moments in 8 bits, reductions in bf16" in settings(plan)
    assert rounded(plan, Target(2, 1e9)) == "moments in 8 bits, reductions in bf16"
    assert rounded(plan.replace(reduce_dtype="fp32"), Target(2, 1e9, optimizer="adamw8bit")) == ""
    assert train_config(model, plan, "demo", None)["optimizer"] == {"name": "adamw8bit"}
    assert train_config(model, plan, "demo", None)["zero"]["reduce_dtype"] == "bf16"


def test_the_fewest_gpus_are_those_that_leave_the_margin():
    few, more = (found(limit=0.9e9, goal="fewest-gpus", margin=margin).rows for margin in (0.0, 0.5))
    assert few[0].plan.world == 4
    assert more[0].plan.world > 4
    assert not more[0].lacks
    assert {row.plan.world for row in more if row.lacks} >= {4}


def test_a_brute_search_finds_nothing_better():
    best = found(limit=3e9).rows[0].estimate.seconds.mid
    for plan in (ParallelPlan(dp=dp, tp=tp, pp=16 // dp // tp, stage=stage, micro_batch=micro,
                              accumulate=64 // dp // micro, activations=activations)
                 for tp in (1, 2, 4, 8) for dp in divisors(16 // tp) for stage in ((0, 1, 2, 3) if dp > 1 else (0,))
                 for micro in (1, 2, 4, 8, 16, 32, 64) if 64 // dp % micro == 0
                 for activations in ("none", "selective", "full")
                 if 16 // dp // tp <= 8 and (16 // dp // tp == 1 or 64 // dp // micro >= 16 // dp // tp)):  # fmt: skip
        estimate = price(MODEL, A100, plan)
        assert estimate.memory.device > 3e9 or estimate.seconds.mid >= best


def test_fewest_gpus_stops_at_the_first_number_that_fits():
    small = found(limit=0.9e9, goal="fewest-gpus")
    assert {row.plan.world for row in small.rows} == {4}
    for gpus in (1, 2):
        assert found(limit=0.9e9, place=resized(A100, gpus)).rows == []


def test_gradients_leave_at_the_stages_that_shard_them_and_only_where_states_do():
    tried = {
        (plan.zero.stage, plan.offload)
        for plan in (row.plan for row in found(offload="disk", place=resized(A100, 2)).rows)
    }
    on_host = {(stage, away.optimizer, away.params) for stage, away in tried if away.gradients == "host"}
    assert on_host == {(2, "host", "none"), (3, "host", "none"), (3, "host", "host")} | {
        (2, "disk", "none"), *((3, "disk", params) for params in ("none", "host", "disk")),
    }  # fmt: skip
    alone = {row.plan.zero.stage for row in found(place=resized(A100, 1), offload="host", limit=1e12).rows}
    assert alone == {0, 2, 3}


def test_degrees_that_do_not_divide_are_counted_with_the_reason():
    odd = llama(4, 768, 12, 4, 2048, 32000, 512)
    counts = {each.reason: each.plans for each in found(model=odd).rejected}
    assert counts["tp does not divide 12 heads"] == 2  # tp 8 with pp 1 and 2
    assert counts["tp beyond the 8 GPUs of a node"] == 1  # tp 16
    assert counts["more pipeline stages than 4 blocks"] == 3  # 8 and 16 with tp 1, 8 with tp 2
    assert "tp does not divide 4 key-value heads" not in counts
    assert tp_refused(odd, 2, 8) is tp_refused(odd, 4, 8) is None
    assert tp_refused(odd, 3, 8) == "tp does not divide 4 key-value heads"
    assert tp_refused(odd, 8, 8) == "tp does not divide 12 heads"
    assert tp_refused(odd, 8, 4) == "tp beyond the 4 GPUs of a node"
    bare = replace(odd, parts=tuple(
        replace(p, units=tuple(replace(u, weights=tuple(replace(w, cut=None) for w in u.weights)) for u in p.units))
        for p in odd.parts
    ))  # fmt: skip
    assert tp_refused(bare, 2, 8) == "the model has no tensor-parallel plan"


LONGER = gpt(8, 1024, 16, 50304, 16384)


def test_short_sequences_are_whole_and_long_ones_are_tried_over_sp():
    assert {row.plan.sp for row in found().rows} == {1}
    rows = found(sequences=16, model=LONGER, limit=1e12).rows
    assert {row.plan.sp for row in rows} == {1, 2, 4, 8, 16}
    for plan in (row.plan for row in rows):
        assert plan.micro_batch * plan.accumulate * plan.dp == 16 * plan.sp
        assert plan.tp * plan.sp <= 16
        assert not (plan.sp > 1 and plan.mesh.sequence_parallel)
        assert plan.tiled_loss


def test_fewer_long_sequences_than_ranks_fit_where_these_share_them():
    rows = found(sequences=2, model=LONGER, limit=1e12).rows
    assert rows
    assert {row.plan.rows for row in rows} == {1, 2}


def test_inputs_of_long_sequences_leave_the_device_where_nothing_fits_otherwise():
    def needs_room(model, place, plan):
        made = price(model, place, plan)
        here = 1e9 if plan.offload.activations == "host" else 9e10
        return replace(made, memory=replace(made.memory, device=here))

    for offload in ("none", "auto"):
        result = search(LONGER, A100, Target(16, 80e9, offload=offload, margin=0.0), needs_room)
        assert {(row.plan.offload.activations, row.plan.activations) for row in result.rows} == {("host", "full")}
        assert {row.plan.offload.optimizer for row in result.rows} == {"none"}


def test_queries_by_rows_are_not_tried_where_their_mask_is_too_large():
    few = llama(2, 1024, 16, 1, 2048, 512, 1 << 15)
    assert shares(few, 16, 1) == [1, 2, 4, 8, 16]
    longer = replace(few, length=1 << 20)
    gathered = [sp for sp in (2, 4, 8, 16) if not Sharing(sp, "auto", False, 0).by_heads(16, 1)]
    assert gathered
    assert shares(longer, 16, 1) == [sp for sp in (1, 2, 4, 8, 16) if sp not in gathered]


def test_what_if_varies_sp_and_keeps_the_sequences_of_a_step():
    rows = found(sequences=16, model=LONGER, limit=1e12).rows
    row = next(row for row in rows if (row.plan.dp, row.plan.sp, row.plan.micro_batch) == (16, 4, 1))
    turned = {knob.change: knob.plan for knob in what_if(row, LONGER, A100, price)}
    for sp in (2, 8):
        plan = turned[f"mesh.sp: {sp}"]
        assert plan.micro_batch * plan.accumulate * plan.rows == 16


def test_the_best_plan_of_each_way_to_have_a_long_sequence_on_ranks():
    rows = found(sequences=16, model=LONGER, limit=1e12).rows
    ways = dict(sequence_ways(rows))
    assert {(row.plan.sp > 1, row.plan.tp > 1) for row in ways.values()} == {
        (False, False), (True, False), (False, True), (True, True)
    }  # fmt: skip
    assert rows[0] in ways.values()


def test_an_emitted_file_has_the_sequence_axis(tmp_path):
    plan = ParallelPlan(dp=4, sp=2, stage=3, micro_batch=1, accumulate=2, activations="full", tiled_loss=True)
    tree = train_config(LONGER, plan, "demo", "bytes")
    assert tree["mesh"]["sp"] == 2
    assert tree["train"] == {"batch": 4, "micro_batch": 1, "accumulate": 2, "tiled_loss": True}
    assert tree["data"]["packing"] is False
    assert plan_of(load(tree), 4) == plan


def test_states_are_tried_over_the_ranks_of_a_node_where_there_are_several():
    assert {row.plan.shard for row in found(place=cluster("a100-80", 8, 1)).rows if row.plan.tp == 1} <= {1, 2, 4, 8}
    plans = [row.plan for row in found().rows if row.plan.shard < row.plan.dp]
    assert {(plan.tp, plan.shard) for plan in plans} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert min(plan.zero.stage for plan in plans) == 1
    slow = replace(A100, across=replace(A100.across, bandwidth=A100.across.bandwidth / 50))
    over = [ParallelPlan(dp=16, stage=3, shard=shard) for shard in (None, 8)]
    seconds = [[evaluate(MODEL, place, plan).seconds.mid for plan in over] for place in (A100, slow)]
    assert [whole < cut for whole, cut in seconds] == [True, False], "which is faster depends on the links"


def test_what_if_cuts_states_over_a_node_and_over_all_of_dp():
    row = next(row for row in found().rows if row.plan.shard == 8 and row.plan.dp == 16)
    knob = next(knob for knob in what_if(row, MODEL, A100, price) if knob.change == "mesh.shard: null")
    assert knob.plan == row.plan.replace(shard=None)
    back = what_if(row._replace(plan=knob.plan), MODEL, A100, price)
    assert next(knob.plan for knob in back if knob.change == "mesh.shard: 8") == row.plan


def test_an_unknown_goal_is_refused_by_name():
    with pytest.raises(ConfigError, match="--goal 'cheapest' is unknown: pass one of fastest, fewest-gpus"):
        found(goal="cheapest")


def test_what_if_turns_one_knob_at_a_time():
    row = next(row for row in found().rows if row.plan.tp == 2 and row.plan.dp == 4 and row.plan.zero.stage == 1)
    knobs = what_if(row, MODEL, A100, price)
    assert {"zero.stage: 2", "activations: full", "train.micro_batch: 8"} <= {knob.change for knob in knobs}
    for knob in knobs:
        changed = [name for name, value in knob.plan.as_dict().items() if value != row.plan.as_dict()[name]]
        if knob.change.startswith("zero.stage"):  # in a pipeline a stage comes with its policies
            changed = [name for name in changed if name not in ("release", "reduce")]
        words = {"offload.optimizer": "offload", "offload.activations": "offload_activations"}
        key = knob.change.partition(":")[0]
        name = words.get(key, key).rpartition(".")[2]
        assert changed in ([name], ["micro_batch", "accumulate"])
        assert isclose(knob.memory, price(MODEL, A100, knob.plan).memory.allocated - row.estimate.memory.allocated)


def test_what_if_says_which_category_moves_the_peak_and_when_that_is():
    plan = ParallelPlan(dp=8, stage=2, accumulate=2, micro_batch=2, activations="full")
    before = evaluate(MODEL, A100, plan)
    moved = {knob.change: knob.moved for knob in what_if(Row(plan, before), MODEL, A100, evaluate)}
    assert moved["zero.master: split"].category == "optimizer"
    assert moved["zero.master: split"].instant == before.memory.instant
    assert moved["zero.stage: 3"].category == "parameters"
    assert moved["activations: none"].category == "activations"
    larger = evaluate(MODEL, A100, plan.replace(micro_batch=4, accumulate=1)).memory
    assert moved["train.micro_batch: 4"][:2] == (larger.instant, "activations")
    assert None in moved.values()


@pytest.mark.parametrize(("before", "now", "told"), [
    ({"a": 10.0, "gradients": 30.0}, {"a": 60.0}, ("then", "a", 50.0)),
    ({"a": 60.0}, {"a": 10.0, "gradients": 30.0}, ("then", "a", -50.0)),
    ({"a": 10.0, "b": 5.0}, {"a": 5.0, "b": 10.0}, None),
])  # fmt: skip
def test_what_has_moved_is_what_changed_most_in_the_direction_of_the_whole(before, now, told):
    memories = [
        Memory(0.0, sum(parts.values()), 0.0, 0.0, 0.0, parts, instant)
        for parts, instant in ((before, "at first"), (now, "then"))
    ]
    assert Moved.of(*memories) == told


DECLARED = {  # keys whose declarations say what is tried
    "zero.gather_wire": "int8", "zero.slow_wire": "int8", "offload.moments": "bf16", "offload.gradient_dtype": "bf16",
}  # fmt: skip


def turned(**settings):
    """What is tried of these keys in such a plan."""
    plan = ParallelPlan(dp=16, **settings)
    knobs = what_if(Row(plan, price(MODEL, A100, plan)), MODEL, A100, price)
    changes = dict(knob.change.split(": ") for knob in knobs)
    return {key: value for key, value in changes.items() if key in DECLARED}


def test_what_if_tries_of_a_key_what_its_declaration_says_and_the_way_back_where_that_may_change_anything():
    away = {"offload": "host", "gradients": "host", "shard": 8}
    usual = {
        "zero.gather_wire": "same",
        "zero.slow_wire": "same",
        "offload.moments": "fp32",
        "offload.gradient_dtype": "fp32",
    }
    assert turned(stage=3, **away) == DECLARED
    assert turned(stage=3, gather_wire="int8", slow_wire="int4", moments="bf16", gradient_dtype="bf16", **away) == usual
    assert turned(stage=2, shard=8) == {"zero.slow_wire": "int8"}
    assert turned(stage=3, offload="host", release="every_step") == {"offload.moments": "bf16"}


@pytest.mark.parametrize(("dp", "holds"), [(2, False), (4, False), (8, True), (64, True)])
def test_the_ladder_is_in_the_order_of_bytes_and_says_where_the_rule_of_thumb_fails(dp, holds):
    place = cluster("a100-80", dp, 1)
    rungs = ladder(MODEL, place, Target(2 * dp, 80e9, margin=0.0), price)
    held = [rung.estimate.memory.states for rung in rungs]
    assert held == sorted(held, reverse=True)
    assert (differs(rungs) is None) == holds
    assert ([rung.name for rung in rungs] == list(RULE)) == holds


def test_the_checkpoint_interval_is_youngs():
    good = goodput(MODEL, A100)
    assert good.mtbf == GPU_HOURS_BETWEEN_FAILURES * 3600 / 16
    assert good.save == 12 * MODEL.params / (2 * A100.disk)
    assert good.every == sqrt(2 * good.save * good.mtbf)
    assert isclose(1 - good.share, 2 * good.save / good.every)  # at the best interval both losses are equal


def test_an_emitted_file_means_the_plan_it_was_made_of(tmp_path):
    for plan in (
        ParallelPlan(dp=2, tp=2, pp=4, stage=1, micro_batch=2, accumulate=8, activations="full", sequence_parallel=True,
                     schedule="interleaved", virtual=2),
        ParallelPlan(dp=4, stage=3, micro_batch=4, accumulate=1), ParallelPlan(dp=4, shard=2), ParallelPlan(dp=4, shard=1),
        ParallelPlan(dp=2, pp=2, stage=3, accumulate=2, release="every_use", reduce="every_micro_batch"),
        ParallelPlan(dp=64, reduce_scatter="native"), ParallelPlan(dp=64, reduce_scatter="all-to-all"),
        ParallelPlan(dp=8, stage=2, offload="host", gradients="host"), ParallelPlan(stage=3, params="disk", accumulate=2),
        ParallelPlan(dp=4, stage=3, offload="disk", params="host", fraction=0.5, moments="bf16", master="split",
                     executor="host"),
    ):  # fmt: skip
        config = load(train_config(MODEL, plan, "gpt2", "bytes"))
        assert plan_of(config, None) == plan
        assert config.data.length == MODEL.length


def test_what_a_file_cannot_say_is_refused():
    with pytest.raises(ConfigError, match="DeepSpeed's JSON cannot say shard=2 of dp=4"):
        deepspeed_config(ParallelPlan(dp=4, shard=2))
    with pytest.raises(ConfigError, match="DeepSpeed's JSON cannot say pp=2"):
        deepspeed_config(ParallelPlan(pp=2))
    tree = deepspeed_config(ParallelPlan(dp=8, tp=2, stage=2, micro_batch=4, accumulate=2, offload="host"))
    assert json.loads(json.dumps(tree))["train_batch_size"] == 64
    assert tree["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert tree["tensor_parallel"] == {"autotp_size": 2}


@pytest.mark.parametrize("name", ["dense", "experts", "long", "short"])
def test_no_plan_needs_less_or_more_than_its_bounds_say(name):
    models = {
        "dense": gpt(4, 1024, 8, 50304, 1024),
        "experts": mixture(4, 4),
        "long": gpt(8, 256, 4, 1000, LONG),
        "short": gpt(4, 2048, 8, 1000, 512),  # in which gradients of weights are more than activations
    }
    model, place = models[name], cluster("a100-80", 4)
    kinds = set()

    def bounded(model, place, plan):
        memory = evaluate(model, place, plan).memory
        settled = BOUNDS.settled(model, place, plan)
        least, most = BOUNDS.at_least(model, place, settled, inf), BOUNDS.at_most(model, place, settled)
        assert 0 < BOUNDS.at_least(model, place, settled, 0.0) <= least <= memory.device <= most
        kinds.add((plan.schedule, plan.activations, plan.accumulate > 1, least > 0.8 * memory.device, most < inf))
        return evaluate(model, place, plan)

    result = search(model, place, Target(8, 80e9, margin=0.0), bounded)
    assert result.rows
    assert {kind[:2] for kind in kinds} == {*product(PIPELINES, ACTIVATIONS)}
    assert all(known for *_, known in kinds)
    assert {kind[0] for kind in kinds if kind[3]} == {*PIPELINES}


def mixture(blocks, experts):
    """Llama's blocks, each with a layer of experts beside its MLP."""
    dense = llama(blocks, 256, 4, 4, 512, 1000, 256)

    def with_experts(part):
        [unit] = part.units
        shapes = {"up": ((experts, 512, 256), 1), "down": ((experts, 256, 512), 2)}
        stacks = [
            Weight(f"{unit.name}.experts.{n}", shape, cut=cut, stacked=True) for n, (shape, cut) in shapes.items()
        ]
        units = (replace(unit, weights=(*unit.weights, *stacks)),)
        return replace(part, units=units, active=part.numel + 2 * 2 * 256 * 512, dispatched=part.operations)

    parts = tuple(with_experts(part) if part.kind == "block" else part for part in dense.parts)
    return replace(dense, parts=parts, experts=experts, chosen=2)


def every_plan(model, place, sequences, tiers, recomputed):
    """All plans of the search's table, by its words: whatever is not said there, an engine refuses."""
    world, long = place.gpus, model.length >= LONG
    for (pp, tp), stage, away, schedule, activations, sliced in product(
        product(divisors(world), repeat=2), range(4), tiers, PIPELINES, recomputed, (False, True)
    ):
        dp = world // pp // tp
        least = 3 if away.params != "none" else 2 if away.gradients == "host" else 0
        if (
            pp * dp * tp != world or tp > place.per_node or (pp == 1 and schedule != "1f1b")
            or stage < least or (dp == 1 and stage > least) or (sliced and tp == 1)
            or (away.activations != "none" and activations != "full")
        ):  # fmt: skip
            continue
        moments = {"reduce": "every_micro_batch"} if pp > 1 and stage > 1 else {}
        moments |= {"release": "every_use"} if pp > 1 and stage == 3 else {}
        of_all = {"dp": dp, "tp": tp, "pp": pp, "stage": stage, "schedule": schedule, "activations": activations,
                  "sequence_parallel": sliced, "tiled_loss": long or "auto", **moments}  # fmt: skip
        virtual = 1 if schedule == "1f1b" else 2
        inside = place.per_node // tp
        for ep, sp, shard, micro in product(divisors(dp), divisors(dp), (None, inside), (1, 2, 4, 8, 16)):
            own = sequences * sp // dp
            few = own * dp != sequences * sp or own % micro
            if few or (sp > 1 and not long) or (shard is not None and (stage == 0 or shard >= dp)):
                continue
            sizes = {"micro_batch": micro, "accumulate": own // micro, "virtual": virtual}
            yield ParallelPlan(**of_all, **sizes, ep=ep, sp=sp, shard=shard).replace(offload=away)


NODES = cluster("a100-80", 4, 2)
HOST = (Offload(), *(Offload("host", params, to) for to in ("auto", "host") for params in ("none", "host")))
NEAR, INPUTS = (Offload(),), (Offload(activations="host"),)
FIRST, SECOND = (NEAR, ACTIVATIONS), (NEAR, SEGMENTS)
GRIDS = {  # the last: what may leave the device, and what is recomputed, in turn, each where nothing fits before
    "dense": (gpt(4, 256, 4, 1000, 256), NODES, 8, "none", [FIRST]),
    "experts": (mixture(2, 4), cluster("a100-80", 4), 4, "none", [FIRST]),
    "words": (gpt(2, 256, 4, 400_000, 1024), cluster("a100-80", 4, 2), 16, "none", [FIRST]),  # logits of 5.7 GB, more
    "long": (gpt(8, 256, 4, 1000, LONG), NODES, 2, "none", [FIRST, SECOND, (INPUTS, ACTIVATIONS)]),
    "offload": (gpt(2, 256, 4, 1000, 256), cluster("a100-80", 2), 2, "host", [(HOST, ACTIVATIONS)]),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "long")) for name in GRIDS])
def test_a_search_finds_what_pricing_every_plan_of_its_table_does(name):
    model, place, sequences, offload, rounds = GRIDS[name]
    place = replace(place, communicator=0.0)  # of models so small they would take more than all else
    turns = [{} for _ in rounds]
    for priced, (tiers, activations) in zip(turns, rounds, strict=True):
        for plan in every_plan(model, place, sequences, tiers, activations):
            with suppress(ConfigError):  # what an engine refuses
                plan = faster_reduction(model, plan, place) if plan.shard > 1 else plan
                priced[plan] = evaluate(model, place, plan)
    for limit in limits_of(turns):
        fitting = next(filter(None, ({
            plan: (estimate.seconds.mid, estimate.memory.allocated)
            for plan, estimate in priced.items()
            if estimate.memory.device <= limit and not estimate.memory.lacks(place)
        } for priced in turns)))  # fmt: skip
        result = search(model, place, Target(sequences, limit, offload=offload, margin=0.0), evaluate, BOUNDS)
        assert {row.plan: (row.estimate.seconds.mid, row.estimate.memory.allocated) for row in result.rows} == fitting
        assert [fitting[row.plan] for row in result.rows] == sorted(fitting.values())
        assert result.rejected
        assert result == search(model, place, Target(sequences, limit, offload=offload, margin=0.0), evaluate)


def limits_of(turns):
    """Bytes that some plans fit: for each turn that needs less than those before its least, and half of the first's."""
    sizes = [sorted(estimate.memory.device for estimate in priced.values()) for priced in turns]
    least = [each[0] for each in sizes]
    assert len(turns) == 1 or min(least) < least[0]
    return [sizes[0][len(sizes[0]) // 2], *(each for at, each in enumerate(least) if each == min(least[: at + 1]))]


DEEP = gpt(128, 256, 4, 1000, 4096)


def test_blocks_are_recomputed_in_segments_where_nothing_fits_otherwise():
    place = cluster("h100", 1)
    least = min(
        evaluate(DEEP, place, ParallelPlan(activations=activations, accumulate=4)).memory.device
        for activations in ("full", *SEGMENTS)
    )
    whole = evaluate(DEEP, place, ParallelPlan(activations="full", accumulate=4)).memory.device
    assert least < whole
    for room, kinds in ((1.01 * whole, {"full"}), ((least + whole) / 2, {*SEGMENTS})):
        rows = search(DEEP, place, Target(4, room, margin=0.0), evaluate, BOUNDS).rows
        assert {row.plan.activations for row in rows} <= kinds
        assert {row.plan.optimizer for row in rows} == {"adamw"}


# --- model.linear -------------------------------------------------------------------------------


WIDE = llama(8, 4096, 32, 8, 14336, 32000, 4096)
H100 = cluster("h100", 8)


def test_linear_layers_in_fp8_are_priced_by_their_products_scales_and_copies():
    plans = [ParallelPlan(dp=8, stage=3, linear=linear) for linear in (None, "fp8")]
    wide, narrow = (evaluate(WIDE, H100, plan) for plan in plans)
    matrices = [each.seconds.parts["matrices"] for each in (wide, narrow)]
    assert 1 / 2 < matrices[1] / matrices[0] < 0.9  # twice as fast, but for scales, and the head
    same = {
        name for name, value in narrow.seconds.parts.items() if isclose(value, wide.seconds.parts[name], abs_tol=1e-9)
    }
    assert narrow.seconds.parts.keys() - same == {"matrices"}
    copies = 14336 * 4096 + 4096 * 14336  # of the largest weight, and of a micro-batch's tokens beside it
    assert isclose(narrow.memory.allocated - wide.memory.allocated, copies)
    assert any("model.linear=fp8: linear layers of blocks" in note for note in narrow.notes)


def test_blocks_are_compiled_where_that_is_faster_unless_a_caller_says():
    """Which changes no plan's memory, so that as many fit."""
    two, target = cluster("h100", 2), Target(2, 80e9, margin=0.0)
    counts = {"launches": (10.0, 20.0), "passed": (2e6, 2e6)}
    parts = (replace(part, operations=replace(part.operations, **counts)) for part in WIDE.parts)
    counted = replace(WIDE, name="counted", parts=tuple(parts))
    either, never, always = (
        search(counted, two, target._replace(compile=said), evaluate, BOUNDS) for said in (None, False, True)
    )
    assert {row.plan.compile for row in either.rows} == {row.plan.compile for row in always.rows} == {True}
    assert [row.estimate for row in either.rows] == [row.estimate for row in always.rows]
    assert {row.plan.compile for row in never.rows} == {False}
    assert either.rows[0].estimate.seconds.mid < never.rows[0].estimate.seconds.mid
    assert (either.tried, len(either.rows)) == (never.tried, len(never.rows))
    assert "compiled" in settings(either.rows[0].plan)
    assert any("without train.compile=true: fused kernels" in note for note in either.rows[0].estimate.notes)
    assert {row.plan.compile for row in search(WIDE, two, target._replace(compile=None), evaluate).rows} == {False}


def test_layers_whose_sizes_16_does_not_divide_and_the_head_stay_in_16_bits():
    odd = llama(8, 4088, 28, 7, 14328, 32000, 4096)
    assert (
        evaluate(odd, H100, ParallelPlan(dp=8, linear="fp8")).seconds == evaluate(odd, H100, ParallelPlan(dp=8)).seconds
    )
    few = llama(1, 256, 4, 4, 512, 256_000, 4096)
    seconds = [evaluate(few, H100, ParallelPlan(linear=linear)).seconds.parts["matrices"] for linear in (None, "fp8")]
    assert seconds[1] / seconds[0] > 0.9


def test_fp8_is_searched_only_where_it_is_asked_for_without_tp_and_refused_on_cards_without_it():
    rows, asked = (
        search(WIDE, H100, Target(16, 80e9, margin=0.0, linear=linear, compile=linear is not None), evaluate, BOUNDS)
        for linear in (None, "fp8")
    )
    assert {row.plan.linear for row in rows.rows} == {None}
    assert {(row.plan.linear, row.plan.tp, row.plan.compile) for row in asked.rows} == {("fp8", 1, True)}
    assert any(each.reason == "model.linear=fp8 does not work with tp yet" for each in asked.rejected)
    assert asked.rows[0].estimate.seconds.mid < rows.rows[0].estimate.seconds.mid
    written = train_config(WIDE, asked.rows[0].plan, "demo", None)
    assert (written["model"]["linear"], written["train"]["compile"]) == ("fp8", True)
    with pytest.raises(ConfigError, match=r"model.linear=fp8 multiplies in fp8, which a100-80 cannot"):
        evaluate(WIDE, cluster("a100-80", 8), ParallelPlan(dp=8, linear="fp8"))


def test_nothing_bounds_a_plan_whose_host_may_have_too_little():
    model, place, plan = gpt(8, 1024, 16, 50304, 512), cluster("a6000", 4), ParallelPlan(dp=4)
    assert evaluate(model, place, plan).memory.device <= BOUNDS.at_most(model, place, plan) < inf
    small = replace(place, host_memory=0.99 * evaluate(model, place, plan).memory.host)
    assert evaluate(model, small, plan).memory.lacks(small)
    assert BOUNDS.at_most(model, small, plan) == inf
