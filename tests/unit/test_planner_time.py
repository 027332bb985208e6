"""Collectives, kernels and a step's seconds: limits that must hold whatever the constants are."""

from dataclasses import replace

import pytest

from zero3d.config import load
from zero3d.distributed.choice import REDUCTIONS
from zero3d.errors import ConfigError
from zero3d.optim.matrices import Form
from zero3d.tools.plan import Estimate, ParallelPlan, evaluate
from zero3d.tools.plan.emit import plan_of, train_config
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.kernels import IMBALANCE, CardRates, Kernels, digest, faster_blocks, part_work
from zero3d.tools.plan.network import (
    REACHED,
    Group,
    Groups,
    exchange_seconds,
    gather_seconds,
    neighbours_seconds,
    reduce_seconds,
    send_seconds,
)
from zero3d.tools.plan.profiles import SYSTEMS, profile
from zero3d.tools.plan.shapes import gpt, llama, of_params
from zero3d.tools.plan.spec import ClusterSpec, Gpu, Link, MeasuredStep, ModelSpec, Operations, Part, Unit, Weight
from zero3d.tools.plan.states import with_algorithm
from zero3d.tools.plan.time import SLOW, SLOWER, Cut, Pace, faster_reduction, part_indices, step_seconds

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
        return faster_reduction(MODEL, ParallelPlan(**plan), cluster("h100", 64)).zero.reduce_scatter

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
    assert found.zero.reduce_scatter == "all-to-all"
    assert with_algorithm(ParallelPlan(dp=6), slow).zero.reduce_scatter == "native"
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
    narrow = part_work(digest(MODEL).shapes[1], MODEL, plan.replace(precision="fp8"), A100)
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


@pytest.mark.parametrize(
    ("cut", "blocks"),
    [
        (Cut(), [6, 7, 6, 7]),
        (Cut(filled=True), [7, 7, 7, 5]),
        (Cut(1, 1, filled=True), [6, 7, 7, 6]),  # embedding and head are blocks of the first and the last seven
        (Cut(head=None), [8, 9, 8, 1]),  # a head of eight blocks' products
    ],
)
def test_pipelines_are_cut_as_each_system_cuts_them(cut, blocks):
    model = gpt(26, 64, 4, 8 * 12 * 64, 64)
    chunks = part_indices(model, 4, 1, cut)
    assert [sum(model.parts[i].kind == "block" for i in chunk) for chunk in chunks] == blocks
    assert [i for chunk in chunks for i in chunk] == list(range(len(model.parts)))


def test_a_split_master_costs_every_optimizer_the_same_bytes_more():
    def more(optimizer):
        whole, split = (ParallelPlan(dp=8, optimizer=optimizer, master=master) for master in ("fp32", "split"))
        return seconds(split).parts["optimizer"] - seconds(whole).parts["optimizer"]

    assert more("adamw") > 34 * MODEL.params / 8 / A100.gpu.bandwidth  # which no kernel reaches
    assert more("muon") == pytest.approx(more("adamw"))


def test_offloading_moves_the_optimizer_to_the_slower_host():
    plan = ParallelPlan(dp=8, stage=2)
    on, off = seconds(plan).parts, seconds(plan.replace(offload="host")).parts
    assert MODEL.params == 8 * 164_477_440
    assert off["optimizer"] == pytest.approx(0.394746)  # 30 bytes of each at 100 / 8 GB/s
    assert off["offload"] == pytest.approx(0.0411194)  # 6 bytes of each at 24 GB/s
    assert {name: off[name] for name in on if name != "optimizer"} == {
        name: value for name, value in on.items() if name != "optimizer"
    }


def test_zero3ds_parts_per_rank_follow_from_the_schedule():
    """For each of three others a stage waits for a micro-batch: all of it, one of two parts, a third of that, nothing."""
    plan, at_once = ParallelPlan(pp=4, stage=1, accumulate=8), Link(1e30, latency=0.0)
    steps = {
        name: evaluate(layers(8), replace(HOST, inside=at_once), plan.replace(schedule=name)).seconds.parts
        for name in ("1f1b", "interleaved", "zero-bubble", "zbv")
    }
    micro_batch = sum(steps["1f1b"][name] for name in ("matrices", "attention", "rest")) / 8
    waits = {name: parts["bubble"] / micro_batch for name, parts in steps.items()}
    assert waits == pytest.approx({"1f1b": 3, "interleaved": 1.5, "zero-bubble": 0.5, "zbv": 0}, abs=1e-9)


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
        (ParallelPlan(dp=0), "dp=0: must be at least 1"),
        (ParallelPlan(dp=8, shard=3), "shard=3 cannot be: shard does not divide dp 8"),
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
        found = seconds(plain.replace(replay=every))
        work = sum(seconds(plain).parts[name] for name in ("matrices", "attention", "rest", "recompute"))
        assert 1 < found.parts["replay"] * 8 * every / work < 1.1  # and hashes
        assert found.mid == pytest.approx(seconds(plain).mid + found.parts["replay"])
    assert "replay" not in seconds(plain).parts


def test_a_replay_gathers_what_is_not_held():
    spec, how = replace(A100, inside=Link(5e9)), {"dp": 8, "micro_batch": 1, "replay": 1, "accumulate": 8}
    held, gathered = (
        seconds(ParallelPlan(stage=stage, release=release, **how), spec=spec).parts["replay"]
        for stage, release in ((3, "every_step"), (3, "every_use"))
    )
    assert MODEL.params == 1_315_819_520  # twice 7/8 of 2 bytes of them, and half a rate's megabyte, at 4 GB/s; 7 hops
    assert gathered - held == pytest.approx(2 * (2_303_684_160 / 4e9 + 7 * 5e-6))


def test_a_run_s_file_has_the_replays_that_its_plan_prices():
    written = train_config(MODEL, plan := ParallelPlan(dp=2, replay=50), "model", None)
    assert written["health"] == {"replay": 50}
    assert plan_of(load(written), 2) == plan
    assert "health" not in train_config(MODEL, ParallelPlan(dp=2), "model", None)


# --- every term of a step, by hand ------------------------------------------------------------------

# A card with 1 TFLOP/s in products (half of its peak), 0.5 TFLOP/s in attention and 1 GB/s of memory, 1 ms a kernel;
# links of 1 GB/s and 1 ms inside a host, 0.5 GB/s and 10 ms between hosts.
CARD = Gpu("card", memory=1e9, flops=2e12, bandwidth=1e9, matrix=0.5, flash=0.25)
PLAIN = Kernels(
    eager_passes=1,
    rest_passes=2,
    flash_backward=2.5,
    launch=1e-3,
    dispatch=1e-5,
    decoded=22,
    decoded_nf4=5,
    fp8=2,
    odd_head=4,
    hopper=2,
    cards={},
)
INSIDE, ACROSS = (Link(rate / REACHED, latency, half=0.0) for rate, latency in ((1e9, 1e-3), (0.5e9, 10e-3)))
HOST = ClusterSpec(CARD, 1, 8, INSIDE, ACROSS, host_memory=1e12, host_link=1e8, host_bandwidth=8e9)

FAST = replace(HOST, inside=Link(1e30, 0.0, 0.0))

# Of 1000 tokens of 1000 elements: a hidden state is 2 MB, and a block of one matrix of 1000 x 1000 takes
#   product     2e9 FLOP = 2 ms, reads and writes 3 x 2 MB = 6 ms, launch 1 ms              9 ms, back 18 ms
#   attention   1e9 FLOP                                                                    2 ms, back  5 ms
#   rest        2 passes over the 5 kB - 1 kB + 2 kB that a token keeps beside attention   12 ms, back 12 ms
#   all                                                                                    23 ms, back 35 ms
WORK = Operations(2e6, scores=1e6, kept_cut=5000, kept_whole=2000, attention=1000, again=1e6)
EXPERTS = Weight("experts", (4, 1000, 250), stacked=True)  # 1e6; a token meets 2 of the 4


def layers(count=2, trainable=1, stack=(), ends=()):
    """A model of blocks: of `trainable` of two halves of a matrix, if that is less than all."""
    weights = (Weight("w", (1000, 1000), cut=0, form=Form()),)
    if trainable < 1:
        weights = (Weight("a", (500, 1000), cut=0), Weight("b", (500, 1000), cut=0, trainable=False))
    work = replace(WORK, matrices=3e6) if stack else WORK
    parts = [Part("block", (Unit(f"blocks.{i}", (*weights, *stack)),), work) for i in range(count)]
    first, last = (
        [Part(kind, (Unit(kind, (Weight(kind, (500, 1000)),)),), Operations(1e6))] * (kind in ends)
        for kind in ("embedding", "head")
    )
    return ModelSpec("layers", (*first, *parts, *last), 1000, 1000, 500, 4, 4, 4 * bool(stack), 2 * bool(stack))


def milliseconds(model=None, spec=HOST, pace=None, **plan):
    """Return the terms of a step of three micro-batches, unless another number is said."""
    how = Pace({}, kernels=PLAIN, **(pace or {}))
    found = step_seconds(model or layers(), ParallelPlan(**{"accumulate": 3, "stage": 1} | plan), spec, how)
    return {name: 1e3 * value for name, value in found.parts.items()} | {"mid": 1e3 * found.mid}


def test_compute_is_of_all_micro_batches_of_the_rank_that_works_most():
    found = milliseconds()
    assert found["matrices"] == pytest.approx(3 * 2 * (9 + 18))
    assert found["attention"] == pytest.approx(3 * 2 * (2 + 5))
    assert found["rest"] == pytest.approx(3 * 2 * (12 + 12))
    longer = milliseconds(layers(3), pp=2)  # one block on a stage, two on the other
    assert [longer[name] for name in ("matrices", "attention", "rest")] == pytest.approx([3 * 2 * 27, 42, 144])
    cut = milliseconds(
        tp=2
    )  # 500 columns: 1 ms, 4 MB = 4 ms, 1 ms; 4 kB a token that tp cuts and 2 kB that it does not
    assert [cut[name] for name in ("matrices", "attention", "rest")] == pytest.approx(
        [3 * 2 * (6 + 12), 21, 3 * 2 * 16]
    )
    sliced = milliseconds(tp=2, sequence_parallel=True)
    assert sliced["rest"] == pytest.approx(3 * 2 * (6 + 6))  # 2 kB + 1 kB


def test_recomputation_runs_forwards_of_blocks_or_of_attention_again():
    again = {name: milliseconds(activations=name)["recompute"] for name in ("none", "full", "every:2", "selective")}
    assert again == pytest.approx({
        "none": 0, "full": 3 * 2 * 23, "every:2": 3 * 2 * 23, "selective": 3 * 2 * (2 + 9 / 2),  # half of the product
    })  # fmt: skip
    assert milliseconds(activations="selective", pace={"again": 0.5})["recompute"] == pytest.approx(3 * 2 * 23 / 2)


def test_rows_go_to_their_experts_and_come_back_three_times_where_they_are_recomputed():
    """Of 1000 tokens twice 2 kB, and more for the busiest; a half of it leaves the rank. Before it 4 x 2 counts of 8 bytes."""
    rows = 1 + 64 / 2 / 1e9 * 1e3 + 2 * (1 + IMBALANCE * 4e6 / 2 / 1e9 * 1e3)
    assert rows == pytest.approx(3 + 4 * IMBALANCE, rel=1e-4)
    model, found = layers(stack=(EXPERTS,)), {}
    for activations in ("none", "full", "every:2", "selective"):
        found[activations] = milliseconds(model, dp=2, ep=2, activations=activations)["experts"]
    kept, repeated = 3 * 2 * 2 * rows, 3 * 2 * 3 * rows
    assert found == pytest.approx({"none": kept, "full": repeated, "every:2": repeated, "selective": kept})
    assert milliseconds(model, dp=2)["experts"] == milliseconds(dp=2)["experts"] == 0
    hidden = milliseconds(model, pace={"hide_ep": 0.25}, dp=2, ep=2)["experts"]
    assert hidden == pytest.approx(kept - 0.25 * 3 * 2 * 2 * (rows - 1), rel=1e-3)


def test_an_attention_exchanges_queries_keys_values_and_output_there_and_back():
    """Of 500 tokens 2 kB of each, in 4 exchanges; a half of it leaves the rank. Of a loss 4 bytes for each token."""
    once, found = 4 * (1 + 1e6 / 2 / 1e9 * 1e3), {}
    for activations in ("none", "full", "every:2", "selective"):
        found[activations] = milliseconds(layers(), dp=2, sp=2, activations=activations)["sp"]
    repeated = pytest.approx(3 * 2 * 3 * once)
    assert found == {
        "none": pytest.approx(3 * 2 * 2 * once),
        **dict.fromkeys(("full", "every:2", "selective"), repeated),
    }
    with_loss = milliseconds(layers(ends=("head",)), dp=2, sp=2)["sp"]
    assert with_loss == pytest.approx(3 * (2 * 2 * once + 1 + 4e3 / 2 / 1e9 * 1e3))
    assert milliseconds(dp=2)["sp"] == 0


def test_products_of_experts_take_as_long_as_the_busiest_rank_and_a_launch_for_each_source():
    """1e9 FLOP, and more for the busiest; 1e6 weights of a half of the experts for each of 2 sources; 3 kernels for each."""
    found = milliseconds(layers(stack=(EXPERTS,)), dp=2, ep=2)["matrices"]
    assert found == pytest.approx(3 * 2 * 3 * (9 + IMBALANCE * 1 + 2 + 3 * 2))


def test_all_reduces_of_tp_are_four_of_a_block_and_two_of_an_end():
    """A hidden state around a ring of two: twice 1 MB and a hop, 4 ms."""
    assert milliseconds(tp=2)["tp"] == pytest.approx(3 * 2 * 4 * 4)
    assert milliseconds(layers(ends=("embedding", "head")), tp=2)["tp"] == pytest.approx(3 * (2 * 4 + 2 * 2) * 4)
    assert milliseconds(tp=2, pace={"hide_tp": 0.25})["tp"] == pytest.approx(3 * 2 * 4 * 3)
    again = {"tp": 2, "activations": "full"}
    assert milliseconds(**again)["tp"] == pytest.approx(3 * 2 * 6 * 4)
    assert milliseconds(**again, pace={"as_zero3d": True})["tp"] == pytest.approx(3 * 2 * 5 * 4)  # but a block's last
    parts = milliseconds(**again, partition_activations=True)["tp"]
    assert parts == pytest.approx(3 * 2 * (6 * 4 + 2))  # and an input is gathered
    experts = {"exact": True, "tp": 2}  # they are whole on every rank
    assert milliseconds(layers(stack=(EXPERTS,)), **experts)["tp"] == pytest.approx(3 * 2 * 2 * 4)


def test_inputs_on_their_way_to_the_host_are_seen_beyond_a_forward_and_a_backward():
    """Forwards of both blocks take 46 ms, backwards with these again 2 x (35 + 23) = 116; an input of 2 MB 50 or 200."""
    inputs, usual, slow = {"offload_activations": "host"}, *(replace(HOST, host_link=rate) for rate in (4e7, 1e7))
    assert milliseconds(activations="full", spec=usual, **inputs)["inputs"] == pytest.approx(3 * (100 - 46))
    assert milliseconds(activations="every:2", spec=usual, **inputs)["inputs"] == pytest.approx(3 * (50 - 46))
    both = milliseconds(activations="full", spec=slow, **inputs)["inputs"]
    assert both == pytest.approx(3 * (400 - 46 + 400 - 116))
    assert milliseconds(activations="full", spec=slow)["inputs"] == 0
    assert milliseconds(spec=slow, **inputs)["inputs"] == 0


def test_a_pipeline_s_bubble_is_a_micro_batch_of_the_other_stage_and_the_hops():
    """Three micro-batches under 1F1B on two stages: four forwards, backwards and hops one after the other."""
    assert milliseconds(pp=2)["bubble"] == pytest.approx(23 + 35 + 4 * (1 + 2))
    assert milliseconds(pp=2, pace={"blocking": True})["bubble"] == pytest.approx(23 + 35 + 4 * 2 * (1 + 2))
    hosts = replace(HOST, nodes=2, per_node=1)
    assert milliseconds(pp=2, spec=hosts)["bubble"] == pytest.approx(23 + 35 + 4 * (10 + 4))
    cut = {"pp": 2, "tp": 2}  # a block then takes 6 + 1 + 8 + 8 and 12 + 2.5 + 8 + 8
    assert milliseconds(**cut)["bubble"] == pytest.approx(23 + 30.5 + 4 * (1 + 1))
    assert milliseconds(**cut, pace={"as_zero3d": True})["bubble"] == pytest.approx(23 + 30.5 + 4 * (1 + 2))
    again = milliseconds(**cut, activations="full")["bubble"]  # the forward's 15 ms and its two all-reduces once more
    assert again == pytest.approx(23 + 30.5 + 15 + 8 + 4 * (1 + 1))
    assert milliseconds()["bubble"] == pytest.approx(0, abs=1e-9)


def test_gradients_and_parameters_of_each_block_travel_over_dp():
    """Of a block 4 MB of gradients and 2 MB of weights, a half of which leaves each of two ranks: 1 + 2 and 1 + 1 ms.

    At stage 0 sums of gradients come back, not weights.
    """
    found = {stage: milliseconds(dp=2, stage=stage)["dp"] for stage in range(4)}
    gathers = 2 * 3  # in forward and backward of each micro-batch
    assert found == pytest.approx({
        0: 2 * 3 + 2 * 3, 1: 2 * 3 + 2 * 2, 2: 3 * 2 * 3 + 2 * 2,
        3: 3 * 2 * 3 + gathers * 2 * 2 + 2,  # and one block's, which nothing runs beside
    })  # fmt: skip
    assert milliseconds(dp=2, stage=3, release="every_step")["dp"] == pytest.approx(3 * 2 * 3 + 2 * 2 + 2)
    assert milliseconds(layers(trainable=0.5), dp=2)["dp"] == pytest.approx(2 * (1 + 1) + 2 * (1 + 0.5))
    assert milliseconds(dp=2, pp=2, stage=2)["dp"] == pytest.approx(3 * 3 + 2)
    longer = milliseconds(layers(3), dp=2, pp=2)["dp"]  # two blocks on a stage, in as many messages as the mean's 1.5
    assert longer == pytest.approx(2 * 2 + 1.5 + 2 * 1 + 1.5)
    everywhere = {"all_sum": True}  # summed on both ranks, and weights of half of them gathered
    assert milliseconds(dp=2, pace=everywhere)["dp"] == pytest.approx(2 * (3 + 3) + 2 * 2)
    assert milliseconds(dp=2, stage=0, pace=everywhere)["dp"] == pytest.approx(2 * 3 + 2 * 3)
    zero3d = {"as_zero3d": True}  # sums of micro-batches travel in fp32, gradients of a single one in bf16
    assert milliseconds(dp=2, pace=zero3d)["dp"] == pytest.approx(2 * 3 + 2 * 2)
    assert milliseconds(dp=2, accumulate=1, pace=zero3d)["dp"] == pytest.approx(2 * 2 + 2 * 2)
    chunks = {"pp": 2, "virtual": 2, "schedule": "interleaved", "accumulate": 2, "stage": 2}
    often = milliseconds(layers(4), dp=2, **chunks, reduce="every_micro_batch", pace=zero3d)["dp"]
    assert often == pytest.approx(2 * 2 * (2 * 2) + 2 * 2)  # each chunk's backward reduces both blocks of its rank


def test_rows_for_neighbours_go_to_their_node_once_and_on_from_there():
    """8 ranks on 2 nodes of 4: half of the rows leave, 3 of 4 of two copies of each go on inside."""
    place = ClusterSpec(HOST.gpu, 2, 4, Link(1e9 / REACHED, 0.0, 0.0), Link(1e9 / REACHED, 0.0, 0.0), 1e12)
    group = Group(8, 4)
    assert neighbours_seconds(1e9, 2, group, place) == pytest.approx(2 * 3 / 4)
    assert neighbours_seconds(1e9, 1, group, replace(place, inside=replace(place.inside, bandwidth=1e15))) == (
        pytest.approx(1 / 2)
    )
    assert neighbours_seconds(1e9, 1, Group(1, 1), place) == neighbours_seconds(0.0, 1, group, place) == 0


def test_what_hides_of_dp_and_what_adds_to_it():
    hosts = replace(HOST, nodes=2, per_node=1)  # 10 + 4 and 10 + 2 ms
    assert milliseconds(dp=2, spec=hosts)["dp"] == pytest.approx(2 * 14 + 2 * 12)
    assert milliseconds(dp=2, spec=hosts, pace={"unit_hops": 3})["dp"] == pytest.approx(2 * 14 + 2 * 12)
    gathers = {"dp": 2, "stage": 3, "accumulate": 1, "spec": hosts}  # two units, there twice, each in three pieces
    alone, whole = (milliseconds(**gathers, pace={"unit_hops": pieces})["dp"] for pieces in (3, 1))
    assert alone - whole == pytest.approx(2 * 2 * 2 * 10)
    buckets = milliseconds(dp=2, spec=hosts, pace={"bucket": 2.5e5})["dp"]  # four of a block of a million
    assert buckets == pytest.approx(2 * (14 + 3 * 10) + 2 * 12)
    assert milliseconds(dp=2, pace={"hide_dp": 1})["dp"] == 0
    assert milliseconds(dp=2, stage=3, pace={"hide_dp": 1})["dp"] == pytest.approx(2)  # but for one gather
    links = replace(HOST, inside=Link(5e7 / REACHED, 20e-3, half=0.0))  # 120 and 80 ms, behind 70 and 35
    slow = milliseconds(dp=2, spec=links, pace={"hide_dp": 0.5})["dp"]
    assert slow == pytest.approx(60 + 40 + (40 - 35))


def test_copies_of_shards_are_summed_between_hosts_once_a_step_and_the_last_backward_hides_all_but_the_last():
    """Inside a host as over dp 2; of 1e6 elements on each rank 2 MB leave it in fp32, and come back: 4 + 10 ms each."""
    hosts, zero3d = replace(HOST, nodes=2, per_node=2), {"as_zero3d": True}
    inside, across = 2 * 3 + 2 * 2, 2 * 14
    assert milliseconds(dp=4, shard=2, spec=hosts)["dp"] == pytest.approx(inside + across)
    assert milliseconds(dp=4, shard=2, spec=hosts, pace=zero3d)["dp"] == pytest.approx(inside + across)
    often = milliseconds(dp=4, shard=2, stage=2, spec=hosts, pace=zero3d)["dp"]
    assert often == pytest.approx(3 * 2 * 2 + 2 * 2 + across), "single gradients travel in bf16, sums do not"
    assert milliseconds(dp=4, shard=2, spec=hosts, pace=zero3d | {"hide_dp": 1})["dp"] == pytest.approx(across), (
        "two units are the last"
    )
    hiding = zero3d | {"hide_dp": 1}
    deep = milliseconds(layers(8), dp=4, shard=2, spec=hosts, pace=hiding)["dp"]
    assert deep == pytest.approx(2 * (16 + 10) * 2 / 8), "behind 280"
    slow = replace(hosts, across=replace(hosts.across, bandwidth=hosts.across.bandwidth / 100))
    longer = milliseconds(layers(8), dp=4, shard=2, spec=slow, pace=hiding)["dp"]
    assert longer == pytest.approx(2 * (1600 + 10) - 280)
    behind = milliseconds(layers(8), dp=4, shard=2, pp=2, spec=replace(hosts, nodes=4), pace=hiding)["dp"]
    assert behind == pytest.approx(2 * (8 + 10)), "of a pipeline behind all backwards"
    narrow = milliseconds(dp=4, shard=2, reduce_dtype="bf16", spec=hosts, pace=zero3d)["dp"]
    assert narrow == pytest.approx(2 * 2 + 2 * 2 + (10 + 2) + (10 + 4))
    asked = milliseconds(dp=4, shard=2, reduce_dtype="fp64", spec=hosts, pace=zero3d)["dp"]
    assert asked == pytest.approx(inside + (10 + 8) + (10 + 4)), "sums are sent as wide as asked"
    assert milliseconds(dp=4, shard=1, spec=hosts, pace=zero3d)["dp"] == pytest.approx(2 * (1 + 10 + 4))
    blocks = milliseconds(dp=4, shard=2, slow_wire="int8", spec=hosts, pace=zero3d)["dp"]
    coding = 16  # of 1e6 elements, once: passes over memory
    assert blocks == pytest.approx(inside + 10 + 2 * 260 / 256 + 3 * coding), "one message to the other host"
    many = replace(HOST, nodes=12, per_node=2)  # each sums a part of 1e6 elements, and sends it on in fp32
    wide = milliseconds(dp=24, shard=2, slow_wire="int8", spec=many, pace=zero3d)["dp"]
    assert wide == pytest.approx(inside + 2 * 110 + 11 / 12 * 2 * (260 / 256 + 4) + 2 * coding)


def test_gradients_of_experts_travel_among_ranks_that_have_the_same_ones():
    """Four ranks have a block's matrix, two the same half of its experts: 3/4 of 4 MB and 3 hops, a half of 2 MB and one."""
    found = milliseconds(layers(stack=(EXPERTS,)), dp=4, ep=2)["dp"]
    assert found == pytest.approx(2 * ((3 + 3) + (1 + 1)) + 2 * ((3 + 1.5) + (1 + 0.5)))


def test_the_optimizer_reads_and_writes_30_bytes_of_what_a_rank_updates():
    """Of 2e6 parameters; a hundred kernels of 1 ms besides."""
    assert milliseconds(dp=2, stage=0)["optimizer"] == pytest.approx(60 + 100)
    assert milliseconds(dp=2)["optimizer"] == pytest.approx(30 + 100)
    assert milliseconds(dp=2, ema=0.9)["optimizer"] == pytest.approx(30 + 32 + 100)
    assert milliseconds(layers(trainable=0.5), dp=2)["optimizer"] == pytest.approx(15 + 100)
    assert milliseconds(layers(stack=(EXPERTS,)), dp=4, ep=2)["optimizer"] == pytest.approx(30 * (0.5 + 0.5) + 100)
    buckets = 10 * 1e6 / 2**24  # kernels of records
    assert milliseconds(dp=2, master="split")["optimizer"] == pytest.approx(64 + 100 + buckets)
    assert milliseconds(dp=2, optimizer="adamw8bit")["optimizer"] == pytest.approx(130 + 100 + buckets)


def test_muon_multiplies_each_matrix_with_itself_or_sends_it():
    """Five steps of three products of 2e9 FLOP for each of two matrices, 42 bytes of 2e6 parameters."""
    assert milliseconds(optimizer="muon")["optimizer"] == pytest.approx(84 + 100 + 2 * 5 * 3 * 2)


def test_states_that_leave_the_device_are_seen_beyond_a_forward():
    """12 bytes of 1e6 parameters there and back, or 28 in the host's memory and 6 on the link; a forward is 46 ms."""
    away, zero3d = {"dp": 2, "offload": "host"}, {"as_zero3d": True}
    moved = milliseconds(**away, executor="device", pace=zero3d)
    assert moved["offload"] == pytest.approx(240 - 46)
    assert moved["optimizer"] == pytest.approx(30 + 100 + 10 * 1e6 / 2**24)
    half = milliseconds(**away, executor="device", fraction=0.5, pace=zero3d)
    assert half["offload"] == pytest.approx(120 - 46)
    updated = milliseconds(**away, executor="host", pace=zero3d)
    assert updated["offload"] == pytest.approx(28 + 60 - 46)
    assert updated["optimizer"] == pytest.approx(100)
    others = milliseconds(**away)  # whose update is on the host
    assert (others["optimizer"], others["offload"]) == pytest.approx((30, 60))
    assert "offload" not in milliseconds(dp=2, pace=zero3d)


def test_weights_and_gradients_that_leave_the_device_are_seen_beyond_all_computation():
    """A rank's 2 MB of weights is read in 100 ms for each gather, and 4 MB of gradients takes 200, and there and back
    where a micro-batch adds to it. Computation takes 3 x 116 ms, and a forward 46.
    """
    slow, zero3d = replace(HOST, host_link=2e7), {"as_zero3d": True}
    away = {"dp": 2, "stage": 3, "offload": "host", "params": "host", "executor": "device", "pace": zero3d}
    weights = milliseconds(**away, spec=slow)["offload"]
    assert weights == pytest.approx(6 * 100 - 3 * 116 + (2 * 12 + 2 * 2) * 50 - 46)
    both = milliseconds(**away, spec=slow, gradients="host")["offload"]
    assert both == pytest.approx(6 * 100 + 5 * 200 - 3 * 116 + (2 * 12 + 2 * 2 + 4) * 50 - 46)


def test_a_replay_is_a_micro_batch_through_all_stages_its_gathers_and_both_hashes():
    """116 ms of computation; each of two gradients of 4 MB read twice, 16 ms; in every fourth step."""
    assert milliseconds(dp=2, replay=4)["replay"] == pytest.approx((116 + 16) / 4)
    frozen = milliseconds(layers(trainable=0.5), replay=1)["replay"]  # products of 6 ms, twice that back for one of two
    assert frozen == pytest.approx(2 * (6 + 6 + 2 + 12 + 12 + 6 + 5 + 12) + 8)
    gathered = {"dp": 2, "stage": 3, "replay": 4}  # all 4 MB twice: 2 x (1 + 2) ms
    assert milliseconds(**gathered)["replay"] == pytest.approx((116 + 16 + 6) / 4)
    assert milliseconds(**gathered, release="every_step")["replay"] == pytest.approx((116 + 16) / 4)
    assert milliseconds(**gathered, pace={"hide_dp": 1})["replay"] == pytest.approx((116 + 16) / 4)
    assert milliseconds(pp=2, replay=1)["replay"] == pytest.approx(116 + 2 * 3 + 8)


def test_fixed_seconds_are_of_a_step_and_those_of_the_host_of_a_block():
    found = milliseconds(pace={"fixed": 0.25, "block": 2e-3})
    assert found["fixed"] == pytest.approx(250)
    assert found["host"] == pytest.approx(3 * 2 * 2)
    assert found["mid"] == pytest.approx(162 + 42 + 144 + 12 + (60 + 100) + 250)


def test_eager_attention_passes_over_its_scores_and_may_miss_the_tensor_cores():
    """Scores at the rate of products are 1 ms twice, of 1 kB a token one pass 1 ms: 3 ms, and twice that back."""
    eager = replace(WORK, eager=True)
    model = layers()
    block = replace(model.parts[0], operations=eager)
    even = replace(model, parts=(block, block), heads=125)  # heads of 8 elements
    assert milliseconds(even)["attention"] == pytest.approx(3 * 2 * 3 * (2 + 1))
    odd = replace(even, name="odd", heads=100)  # of 10: products take four times as long
    assert milliseconds(odd)["attention"] == pytest.approx(3 * 2 * 3 * (4 * 2 + 1))


def test_products_in_8_bits_take_half_as_long_but_for_their_bytes_and_attention_may_be_written_for_the_card():
    assert milliseconds(precision="fp8")["matrices"] == pytest.approx(3 * 2 * 3 * (1 + 6 + 1))
    rates = replace(
        PLAIN, cards={name: CardRates(0.5, 0.25, 1.0) for name in ("h100-96", "h100", "h200", "a100", "other cards")}
    )
    for name, times in (("h100-96", 2), ("h200", 2), ("a100-80", 1)):
        spec = replace(HOST, gpu=Gpu(name, memory=1e9, flops=2e12, bandwidth=1e9))
        both = [
            step_seconds(layers(), ParallelPlan(), spec, Pace({}, kernels=of)) for of in (rates, rates.for_hopper())
        ]
        plain, written = (found.parts["attention"] for found in both)
        assert plain == pytest.approx(times * written)
        assert plain == pytest.approx(2 * 7e-3)


def test_packed_weights_are_decoded_before_every_product():
    """Of 1e6 weights of 4 bits: 22 bytes each in the forward and in the backward, whose other product they do not need."""
    weight = Weight("w", (500_000,), cut=None, trainable=False, matrix=(1000, 1000))
    model = layers()
    block = replace(model.parts[0], units=(Unit("blocks", (weight,)),))
    found = milliseconds(replace(model, name="packed", parts=(block, block)))["matrices"]
    assert found == pytest.approx(3 * 2 * 2 * (9 + 22))
    half = replace(block, units=(Unit("blocks", (replace(weight, cut=0),)),))
    found = milliseconds(replace(model, name="packed, cut", parts=(half, half)), tp=2)["matrices"]
    assert found == pytest.approx(3 * 2 * 2 * (1 + 4 + 1 + 11))


def test_nf4_is_decoded_by_a_kernel_on_a_card_alone():
    """5 bytes in the place of 22; of other formats, and on a CPU, torch's operators decode."""
    weight = Weight("w", (500_000,), cut=None, trainable=False, matrix=(1000, 1000))
    model = layers()
    block = replace(model.parts[0], units=(Unit("blocks", (weight,)),))
    packed = replace(model, name="packed", parts=(block, block))
    on_cpu = replace(HOST, gpu=replace(CARD, name="cpu"))
    for quantize, spec, nbytes in (("nf4", HOST, 5), ("nf4", on_cpu, 22), ("int8", HOST, 22)):
        plan = ParallelPlan(quantize=quantize, accumulate=3)
        found = step_seconds(packed, plan, spec, Pace({}, kernels=PLAIN)).parts["matrices"]
        assert 1e3 * found == pytest.approx(3 * 2 * 2 * (9 + nbytes))


# Kernels between products that pass over 30 and 40 kB a token: 30 and 40 ms of 1000 tokens, where compiled blocks take 12.
COUNTED = replace(WORK, launches=(10.0, 20.0), passed=(30_000.0, 40_000.0))


def counted(model, **operations):
    block = replace(model.parts[0], operations=replace(COUNTED, **operations))
    return replace(model, name=str(operations), parts=(block, block))


def test_kernels_between_products_pass_over_what_a_trace_has_counted_unless_blocks_are_compiled():
    eager, compiled = (milliseconds(counted(layers()), compile=compiled)["rest"] for compiled in (False, True))
    assert (eager, compiled) == (pytest.approx(3 * 2 * (30 + 40)), pytest.approx(3 * 2 * (12 + 12)))
    measured = replace(HOST, step=MeasuredStep(rest_passes=3.0))
    found = step_seconds(
        counted(layers()), ParallelPlan(accumulate=3), measured, Pace({}, kernels=PLAIN, as_zero3d=True)
    )
    assert 1e3 * found.parts["rest"] == pytest.approx(3 * 2 * (18 + 18))  # steps of this machine say how many passes


def test_blocks_are_compiled_where_that_saves_more_than_predictions_tell_apart():
    """A token's forward and backward pass over 60 kB, or 26, where compiled blocks' pass over 24 beside the products."""
    place, plan = cluster("h100", 8), ParallelPlan(dp=8, micro_batch=2)
    slow, near = (counted(layers(), launches=(1e-3, 1e-3), passed=(each, each)) for each in (30_000.0, 12_250.0))
    assert faster_blocks(slow, plan, place) == plan.replace(compile=True)
    same = "2 % are not told apart", near, place
    uncounted = "nobody counted kernels", layers(), place
    on_cpu = "a CPU", slow, replace(place, gpu=replace(place.gpu, name="cpu"))
    measured = "steps were measured", slow, replace(place, step=MeasuredStep(rest_passes=3.0))
    for why, model, here in (same, uncounted, on_cpu, measured):
        assert faster_blocks(model, plan, here) is plan, why


def test_compiled_blocks_decode_nf4_by_operators_of_torch():
    weight = Weight("w", (500_000,), cut=None, trainable=False, matrix=(1000, 1000))
    block = replace(layers().parts[0], units=(Unit("blocks", (weight,)),))
    packed = replace(layers(), name="packed", parts=(block, block))
    eager, compiled = (
        step_seconds(packed, ParallelPlan(quantize="nf4", compile=compiled), HOST, Pace({}, kernels=PLAIN)).parts
        for compiled in (False, True)
    )
    assert compiled["matrices"] - eager["matrices"] == pytest.approx(1e-3 * 2 * 2 * (22 - 5))


def test_tp_and_slices_of_sequences_divide_what_kernels_pass_over():
    """7 kB are kept beside scores and in all: 5 that tp divides, 2 that slices do."""
    divided, sliced = (
        milliseconds(counted(layers()), tp=2, sequence_parallel=slices)["rest"] for slices in (False, True)
    )
    assert divided == pytest.approx(3 * 2 * 70 * (5 / 2 + 2) / 7)
    assert sliced == pytest.approx(3 * 2 * 70 / 2)


def test_a_device_that_is_faster_than_its_host_waits_for_launches():
    """A forward of 9 + 2 + 30 ms, and a backward of 18 + 5 + 40: of 5000 and 7000 kernels the host needs 50 and 70."""
    found = milliseconds(counted(layers(), launches=(5000.0, 7000.0)))
    assert found["host"] == pytest.approx(3 * 2 * ((50 - 41) + (70 - 63)))
    again = milliseconds(counted(layers(), launches=(5000.0, 7000.0)), activations="full")
    assert again["recompute"] == pytest.approx(3 * 2 * 50)
    assert milliseconds(counted(layers(), launches=(5000.0, 7000.0)), compile=True)["host"] == 0
    assert milliseconds(counted(layers()))["host"] == 0


def test_the_range_of_what_a_rank_computes_narrows_where_steps_were_measured():
    """Communication, which no smaller run has had, stays as uncertain as it was."""
    for plan in (ParallelPlan(), ParallelPlan(dp=4, stage=3)):
        usual, narrowed = (
            step_seconds(layers(), plan, replace(HOST, spread=spread), Pace({}, kernels=PLAIN))
            for spread in (None, 0.1)
        )
        sent = usual.parts.get("dp", 0.0)
        assert (sent > 0) == (plan.dp > 1)
        assert (usual.low, usual.high) == (pytest.approx(0.85 * usual.mid), pytest.approx(1.2 * usual.mid))
        own = usual.mid - sent
        assert narrowed.low == pytest.approx(0.9 * own + 0.85 * sent)
        assert narrowed.high == pytest.approx(1.1 * own + 1.2 * sent)


def test_a_loss_in_tiles_makes_its_logits_again():
    """A head of 500 x 1000: 1 ms, 1 MB of weights and 3 MB of tokens, a launch."""
    model = layers(ends=("head",))
    extra = milliseconds(model, tiled_loss=True)["recompute"] - milliseconds(model)["recompute"]
    assert extra == pytest.approx(3 * (1 + 4 + 1))


def test_gathers_in_blocks_of_8_bits_send_less_and_are_decoded():
    """Of 1e6 elements of a block 260 bytes for 256, a half of which leaves; 16 bytes are moved for each that is decoded."""
    found = milliseconds(dp=2, stage=3, gather_wire="int8", accumulate=1, pace={"as_zero3d": True})["dp"]
    gather = 1 + 1.015625 / 2
    decoded = 2 * 2 * 16
    assert found == pytest.approx(2 * 2 + 2 * 2 * gather + decoded)


def test_masters_are_cast_in_gathers_and_not_in_the_update():
    """Of 1e6 elements of a rank 18 bytes in each gather; with second shards in a step's first, but of experts, a half."""

    def more(model=None, **how):
        how = {"stage": 3, "accumulate": 1, "pace": {"as_zero3d": True}} | how
        cast, kept = (milliseconds(model, weights=weights, **how) for weights in ("cast", "kept"))
        return [cast[name] - kept[name] for name in ("dp", "optimizer")]

    assert more(dp=2) == pytest.approx([2 * 18, -18])
    assert more(layers(trainable=0.5), dp=2) == pytest.approx([18, -9])
    assert more(dp=4, second_shard=2) == pytest.approx([9, -9])
    experts = layers(stack=(EXPERTS,))
    assert more(experts, dp=4, ep=2) == pytest.approx([2 * 18, -18])
    assert more(experts, dp=4, ep=2, second_shard=2) == pytest.approx([9 + 2 * 9, -18])


def test_second_shards_are_gathered_within_a_host_but_for_the_first_time():
    """Of a block's 2 MB 1 MB leaves a rank inside and half of one its host: 1 + 1 + 10 ms. Among two of a host 1 + 1.

    Gradients are exchanged: a message to each other rank, and 1 MB to the other host.
    """
    hosts = replace(HOST, nodes=2, per_node=2)
    how = {"dp": 4, "stage": 3, "accumulate": 1, "spec": hosts, "pace": {"as_zero3d": True}}
    reduced = 2 * (2 + 1 + 2 * 10)
    assert milliseconds(**how)["dp"] == pytest.approx(reduced + 2 * 2 * 12)
    assert milliseconds(**how, second_shard="node")["dp"] == pytest.approx(reduced + 2 * 12 + 2 * 2)


def test_chunks_of_an_interleaved_pipeline_halve_its_bubble():
    """Four blocks on two stages, two micro-batches: a stage waits for one chunk there and back, and its hops."""
    one = milliseconds(layers(4), pp=2, accumulate=2, spec=FAST)["bubble"]
    two = milliseconds(layers(4), pp=2, accumulate=2, schedule="interleaved", virtual=2, spec=FAST)["bubble"]
    assert (one, two) == pytest.approx((2 * (23 + 35), 23 + 35))


def test_a_model_without_attention_has_no_heads_and_is_timed():
    assert evaluate(replace(gpt(2, 64, 4, 100, 32), heads=0, kv_heads=0), HOST, ParallelPlan()).seconds.mid > 0


def test_a_step_waits_for_the_slowest_of_many_nodes():
    one, many = milliseconds(), milliseconds(dp=4, spec=replace(HOST, nodes=4, per_node=1))
    assert "stragglers" not in one
    slow = SLOWER * (1 - (1 - SLOW) ** 3)
    assert many["stragglers"] == pytest.approx(slow / (1 + slow) * many["mid"])
