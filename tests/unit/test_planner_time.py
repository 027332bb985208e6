"""Collectives, kernels and a step's seconds: limits that must hold whatever the constants are."""

from dataclasses import replace

import pytest

from zero3d.config import load
from zero3d.distributed.choice import REDUCTIONS
from zero3d.errors import ConfigError
from zero3d.plan import Estimate, ParallelPlan, evaluate
from zero3d.plan.emit import plan_of, train_config
from zero3d.plan.hardware import cluster
from zero3d.plan.kernels import digest, part_work
from zero3d.plan.network import REACHED, Group, Groups, exchange_seconds, gather_seconds, reduce_seconds, send_seconds
from zero3d.plan.profiles import SYSTEMS, profile
from zero3d.plan.shapes import gpt, llama, of_params
from zero3d.plan.spec import Link
from zero3d.plan.states import settled
from zero3d.plan.time import Pace, faster_reduction, part_indices, step_seconds

A100 = cluster("a100", 64)
MODEL = gpt(24, 2048, 16, 50304, 2048)


def seconds(plan, pace=None, model=MODEL, spec=A100):
    return step_seconds(model, plan, spec, pace or Pace({}))


def test_parts_add_up_to_mid_between_low_and_high():
    for plan in (
        ParallelPlan(dp=8),
        ParallelPlan(dp=2, tp=4, pp=4, stage=1, accumulate=8),
        ParallelPlan(offload="host"),
    ):
        found = seconds(plan)
        assert sum(found.parts.values()) == pytest.approx(found.mid)
        assert found.low < found.mid < found.high
        assert min(found.parts.values()) > -1e-9


def test_half_the_bandwidth_at_half_bytes():
    link = Link(bandwidth=10e9, latency=0.0, half=1e6)
    assert 1e6 / send_seconds(1e6, link) == pytest.approx(REACHED * 10e9 / 2)
    assert 1e12 / send_seconds(1e12, link) == pytest.approx(REACHED * 10e9, rel=1e-5)


def test_a_ring_moves_n_minus_1_over_n_and_the_slower_level_decides():
    spec = replace(A100, inside=Link(100e9, 0.0, 0.0), across=Link(10e9, 0.0, 0.0))
    assert gather_seconds(8e9, Group(8, 8), spec) == pytest.approx(7e9 / (REACHED * 100e9))
    assert gather_seconds(8e9, Group(16, 8), spec) == pytest.approx(7e9 / (REACHED * 100e9))
    assert gather_seconds(8e9, Group(16, 2), spec) == pytest.approx(8e9 * 7 / 8 / 2 / (REACHED * 10e9))
    assert gather_seconds(8e9, Group(4, 1), spec) == pytest.approx(6e9 / (REACHED * 10e9))
    assert gather_seconds(8e9, Group(1, 1), spec) == reduce_seconds(0, Group(8, 8), spec) == 0.0


def test_an_all_to_all_takes_as_long_as_a_ring_but_for_what_leaves_a_host():
    spec = replace(A100, inside=Link(100e9, 0.0, 0.0), across=Link(10e9, 0.0, 0.0))
    for group in (Group(8, 8), Group(4, 1)):
        assert exchange_seconds(8e9, group, spec) == gather_seconds(8e9, group, spec)
    assert exchange_seconds(8e9, Group(16, 2), spec) == pytest.approx(2 * gather_seconds(8e9, Group(16, 2), spec))
    assert exchange_seconds(8e9, Group(16, 8), spec) == pytest.approx(8e9 * 8 / 16 / (REACHED * 10e9))
    assert exchange_seconds(8e9, Group(1, 1), spec) == exchange_seconds(0, Group(8, 8), spec) == 0.0


def test_16_bit_terms_are_sent_unless_many_ranks_of_a_host_reduce_across_hosts():
    def chosen(**plan):
        return faster_reduction(MODEL, ParallelPlan(**plan), cluster("h100", 64)).reduce_scatter

    assert chosen(dp=8) == "auto"  # one host: half the bytes
    assert chosen(dp=8, tp=8) == "auto"  # one rank of each host: half the bytes
    assert chosen(dp=64) == "auto"  # 8 ranks of each: four times as many bytes would leave it, and the rule knows
    assert chosen(dp=64, stage=1, accumulate=2) == "auto"  # wide ones are the backend's in any case
    assert chosen(dp=64, precision="fp32") == "auto"


@pytest.mark.parametrize(("plan", "faster"), [({"dp": 8}, "all-to-all"), ({"dp": 64}, "native")])
def test_both_ways_of_reducing_are_priced(plan, faster):
    system, spec = profile("zero3d").pace, cluster("h100", 64)
    by_way = {way: seconds(ParallelPlan(reduce_scatter=way, **plan), system, spec=spec) for way in REDUCTIONS}
    assert min(("all-to-all", "native"), key=lambda way: by_way[way].parts["dp"]) == faster
    assert by_way["auto"] == by_way[faster]
    other = {way: seconds(ParallelPlan(reduce_scatter=way, **plan), spec=spec) for way in by_way}
    assert other["auto"] == other["native"] == other["all-to-all"]  # of other systems it is no setting


def test_what_is_faster_than_the_rule_says_is_asked_for():
    """Three ranks on each of two hosts, with slow links inside: half the bytes there are worth half as many more between."""
    slow = replace(cluster("h100", 6, 2), inside=Link(1e9, 0.0, 0.0), across=Link(100e9, 0.0, 0.0))
    found = faster_reduction(MODEL, ParallelPlan(dp=6), slow)
    assert found.reduce_scatter == "all-to-all"
    assert settled(ParallelPlan(dp=6), slow).reduce_scatter == "native"
    assert train_config(MODEL, found, "gpt2", None)["zero"]["reduce_scatter"] == "all-to-all"


def test_trees_win_where_latency_counts_and_rings_where_bytes_do():
    group = Group(512, 8)
    ring = 2 * gather_seconds(1e3, group, A100)
    assert reduce_seconds(1e3, group, A100) < ring / 2
    assert reduce_seconds(1e9, Group(8, 8), A100) == 2 * gather_seconds(1e9, Group(8, 8), A100)


def test_groups_lie_as_ranks_are_numbered():
    found = Groups.of(ParallelPlan(dp=4, tp=4, pp=4), A100)
    assert (found.tp, found.dp, found.hop_inside) == (Group(4, 4), Group(4, 2), False)
    assert Groups.of(ParallelPlan(dp=1, tp=2, pp=4), A100).hop_inside


def test_twice_the_tokens_take_less_than_twice_as_long_and_tp_divides_less_than_evenly():
    shape = digest(MODEL).shapes[1]
    one, two = (part_work(shape, MODEL, ParallelPlan(micro_batch=b), A100).forward for b in (1, 2))
    assert one < two < 2 * one
    cut = part_work(shape, MODEL, ParallelPlan(tp=4), A100).forward
    assert one / 4 < cut < one


def test_frozen_weights_save_their_gradients_time_and_fp8_halves_nearly_only_products():
    block = MODEL.blocks[0]
    frozen = replace(block.units[0], weights=tuple(replace(w, trainable=False) for w in block.units[0].weights))
    lora = replace(MODEL, parts=tuple(replace(p, units=(frozen,)) if p.kind == "block" else p for p in MODEL.parts))
    plan = ParallelPlan()
    full, less = (part_work(digest(m).shapes[1], m, plan, A100) for m in (MODEL, lora))
    assert less.matrices.backward == pytest.approx(full.matrices.backward / 2)
    narrow = part_work(digest(MODEL).shapes[1], MODEL, replace(plan, precision="fp8"), A100)
    assert narrow.matrices.forward < full.matrices.forward
    assert narrow.attention == full.attention


def test_recomputation_costs_the_forwards_of_the_blocks():
    kept, again = (seconds(ParallelPlan(activations=name)).parts for name in ("none", "full"))
    shape = digest(MODEL).shapes[1]
    forward = part_work(shape, MODEL, ParallelPlan(), A100).forward
    assert kept["recompute"] == 0
    assert again["recompute"] == pytest.approx(24 * forward)


def test_communication_hides_only_behind_as_much_computation():
    plan = ParallelPlan(dp=64, stage=3)
    slow = replace(A100, across=Link(1e6))
    bare, hidden = seconds(plan, Pace({}, hide_dp=0.0)).parts["dp"], seconds(plan, Pace({}, hide_dp=1.0)).parts["dp"]
    assert hidden < bare
    swamped = [seconds(plan, Pace({}, hide_dp=h), spec=slow).parts["dp"] for h in (0.0, 1.0)]
    assert swamped[1] == pytest.approx(swamped[0], rel=0.01)


def test_every_part_of_a_model_lies_on_one_rank():
    for ranks, virtual in ((1, 1), (4, 1), (3, 2)):
        cut = part_indices(MODEL, ranks, virtual)
        assert [i for part in cut for i in part] == list(range(len(MODEL.parts)))
        assert len(cut) == ranks * virtual


def test_offloading_moves_the_optimizer_to_the_slower_host():
    plan = ParallelPlan(dp=8, stage=2)
    on, off = seconds(plan).parts, seconds(replace(plan, offload="host")).parts
    assert off["optimizer"] > on["optimizer"]
    assert off["offload"] > 0 == on.get("offload", 0)


def test_zero3ds_parts_per_rank_follow_from_the_schedule():
    plan = ParallelPlan(pp=4, stage=1, accumulate=8)
    ends = {
        name: evaluate(MODEL, A100, replace(plan, schedule=name)).seconds.parts["bubble"] for name in ("1f1b", "zbv")
    }
    ends["interleaved"] = evaluate(MODEL, A100, replace(plan, schedule="interleaved")).seconds.parts["bubble"]
    assert ends["1f1b"] > ends["interleaved"] > ends["zbv"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_estimates_every_stage(system):
    for stage in range(4):
        found = evaluate(MODEL, A100, ParallelPlan(dp=64, stage=stage), system)
        assert isinstance(found, Estimate)
        memory = found.memory
        assert 0 < memory.states <= memory.allocated <= memory.reserved <= memory.device
        assert sum(memory.parts.values()) == pytest.approx(memory.allocated)
        assert found.tokens == 64 * 2048


def test_profiles_have_the_published_bytes_per_parameter():
    for d in (1, 12):
        plan = ParallelPlan(dp=d, stage=1)
        assert sum(profile("megatron").rates(plan)) == pytest.approx(6 + 12 / d)
    assert sum(profile("torchtitan").rates(ParallelPlan(dp=8, stage=3))) == 2
    assert sum(profile("deepspeed").rates(ParallelPlan(dp=1, stage=3, reduce_dtype="fp16"))) == 20


def test_less_memory_per_stage_and_more_traffic_at_stage_3():
    model = llama(32, 4096, 32, 32, 11008, 32000, 2048)
    found = [evaluate(model, A100, ParallelPlan(dp=64, stage=s, activations="full")) for s in range(4)]
    states = [estimate.memory.states for estimate in found]
    assert states == sorted(states, reverse=True)
    gathers = [estimate.traffic["all_gather dp"] for estimate in found]
    assert 1.9 * gathers[2] < gathers[3] < 2 * gathers[2]  # head and embedding once


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ParallelPlan(dp=128), "do not fit 64 GPUs: pass dp=64"),
        (ParallelPlan(tp=3), "does not divide 16 heads"),
        (ParallelPlan(pp=32), "24 blocks"),
        (ParallelPlan(micro_batch=0), "at least 1"),
    ],
)
def test_degrees_that_cannot_be_are_refused(plan, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(MODEL, A100, plan)


def test_an_unknown_system_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'megatron'"):
        evaluate(MODEL, A100, ParallelPlan(), "megatorn")


def test_an_assumed_shape_and_eager_attention_are_told():
    notes = evaluate(of_params(10**9, 2048), A100, ParallelPlan()).notes
    assert any("assumed" in note for note in notes)
    eager = gpt(2, 64, 4, 100, 32, flash=False)
    assert any("flash" in note for note in evaluate(eager, A100, ParallelPlan()).notes)
    small = gpt(2, 64, 2, 100, 64)
    assert any("padding: " in note for note in evaluate(small, cluster("a100", 1000, 125), ParallelPlan(dp=1000)).notes)
    assert not any("padding: " in note for note in evaluate(small, A100, ParallelPlan(dp=64)).notes)


def test_a_replay_costs_one_micro_batch_in_every_so_many_steps():
    plain = ParallelPlan(dp=8, stage=1, accumulate=8)
    for every in (1, 4):
        found = seconds(replace(plain, replay=every))
        work = sum(seconds(plain).parts[name] for name in ("matrices", "attention", "rest", "recompute"))
        assert 1 < found.parts["replay"] * 8 * every / work < 1.1  # and hashes
        assert found.mid == pytest.approx(seconds(plain).mid + found.parts["replay"])
    assert "replay" not in seconds(plain).parts


def test_a_replay_gathers_what_is_not_held_and_goes_through_all_stages():
    spec, how = replace(A100, inside=Link(5e9)), {"dp": 8, "micro_batch": 1, "replay": 1, "accumulate": 8}
    held, gathered = (
        seconds(ParallelPlan(stage=stage, release=release, **how), spec=spec).parts["replay"]
        for stage, release in ((3, "every_step"), (3, "every_use"))
    )
    moved = 2 * gather_seconds(2 * MODEL.params, Group(8, 8), spec)
    assert gathered - held == pytest.approx(moved, rel=0.1)
    alone = seconds(ParallelPlan(dp=8, stage=1, replay=1, accumulate=8)).parts["replay"]
    piped = seconds(ParallelPlan(dp=8, pp=4, stage=1, replay=1, accumulate=8)).parts["replay"]
    assert piped == pytest.approx(alone, rel=0.1)  # each stage waits for the others


def test_a_run_s_file_has_the_replays_that_its_plan_prices():
    written = train_config(MODEL, plan := ParallelPlan(dp=2, replay=50), "model", None)
    assert written["health"] == {"replay": 50}
    assert plan_of(load(written), 2) == plan
    assert "health" not in train_config(MODEL, ParallelPlan(dp=2), "model", None)
