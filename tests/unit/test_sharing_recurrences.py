"""Which way ranks share recurrences: bytes and scans worked by hand, what runs choose, and what plans say of it."""

from dataclasses import replace

import pytest
from hybrids import hybrid

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.models.bases import decoder_of
from zero3d.sequence.choice import Weighed, delta_products, mamba2_products, weigh
from zero3d.sequence.group import check_sequence
from zero3d.sequence.shares import Cut, Halo, Scanned, States
from zero3d.sequence.trial import try_rows
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.sequence import mixers_of, scanned_again, sp_refused, traffic
from zero3d.tools.plan.shapes import llama
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.spec_json import from_json, to_json
from zero3d.tools.plan.time import faster_mixers
from zero3d.train.setup.recurrences import choose_mixers

NARROW = Cut(4, 3, 2, True)
DELTA = Scanned(1, 8, 4, (NARROW, Cut(2, 2, 2, True), Cut(2, 2, 2, True)), NARROW, 4, 6, 500)


class OnRanks:
    """A mesh, as far as a choice reads it."""

    def __init__(self, sp, tp=1):
        self.sp, self.dp, self.tp = sp, sp, tp


def test_ways_are_weighed_by_bytes_and_scans():
    """Worked by hand: 8 tokens on 2 ranks; 4 value heads of 3 and 2 key heads of 2; states of 6 numbers by matrices of 4."""
    weighed = weigh([DELTA], 2)
    by_heads = 2 * (2 * 4 * 3 + 2 * 4 * 2 + 2 * 4 * 3)  # both ways: half of the rows' values, keys and queries, output
    assert weighed == Weighed(2 * by_heads, 4 * (4 + 6) * 4, 2 * 500 * 4 * 4 / 100, 3)
    assert weighed.kind == "heads"
    assert weigh([replace(DELTA, operations=0)], 2).kind == "prefix"
    longer = replace(DELTA, length=8000)
    assert weigh([longer], 2).states == weighed.states
    assert weigh([longer], 2).kind == "prefix"
    assert weigh([replace(longer, operations=20_000)], 2).kind == "heads"  # scans more take longer than the link
    assert weigh([replace(longer, operations=20_000)], 2, balance=1e6).kind == "prefix"  # a slow link
    assert weigh([replace(DELTA, factor=0, state=0)], 2) is None
    assert weigh([DELTA], 5).kind == "prefix"  # more ranks than heads
    assert (replace(DELTA, factor=1).scans, DELTA.scans, replace(DELTA, factor=0, state=0).scans) == (2, 3, 1)


def test_a_reason_is_said_in_words():
    assert str(weigh([DELTA], 2)) == (
        "heads send 256 B of a sequence in one scan; states send 160 B and scan 3 times, and scans more take as long as "
        "160 B on the link"
    )
    assert str(weigh([DELTA], 5)).startswith("there are more ranks than heads; states send ")


def test_tp_leaves_a_rank_some_heads_and_channels():
    divided = replace(DELTA, divided=True)
    assert divided.over(2) == replace(divided, heads=2, made=replace(NARROW, heads=2), given=(
        replace(NARROW, heads=2), Cut(1, 2, 2, True), Cut(1, 2, 2, True)
    ))  # fmt: skip
    assert divided.over(4).given[1].heads == 1  # two ranks share a head of keys
    assert DELTA.over(2) == DELTA
    halo = Halo(1, 8, 64 + 2 * 2 * 8, 3, 2, True, divided=True, groups=2, grouped=2 * 2 * 8)
    assert [halo.over(tp).channels for tp in (1, 2, 4)] == [96, 32 + 16, 16 + 16]


@pytest.mark.parametrize(("name", "heads", "factor", "state", "operations"), [
    ("qwen3_5_text", 4, 64, 64, sum(delta_products(64, 8, 8)) // 64),
    ("kimi_linear", 4, 64, 64, sum(delta_products(64, 8, 8, True)) // 64),
    ("mamba2", 8, 1, 64, sum(mamba2_products(8, 8, 8)) // 8),
    ("jamba", 64, 0, 0, 0),
])  # fmt: skip
def test_a_trial_tells_what_a_model_scans(name, heads, factor, state, operations):
    found = try_rows(decoder_of(hybrid(name))).scans
    assert {(scan.heads, scan.factor, scan.state, scan.operations) for scan in found} == {
        (heads, factor, state, operations)
    }


def chosen(name, length, sp, **mesh):
    config = load({
        "model": {"path": "m"}, "data": {"train": "d", "length": length}, "train": {"steps": 1, "batch": 1},
        "mesh": {"sp": sp, **mesh},
    })  # fmt: skip
    return choose_mixers(config, hybrid(name, num_attention_heads=8), OnRanks(sp, mesh.get("tp", 1)))


def test_a_run_chooses_by_its_model_and_its_length():
    assert chosen("mamba2", 8, 2).kind == "heads"
    kind, why = chosen("mamba2", 4096, 2)
    assert kind == "prefix"
    sent = (
        2 * 2048 * 2 * (4 * 8 + 4 + 8 + 8 + 4 * 8)
    )  # both ways, in 2 bytes: 4 heads, their steps, a group of B and C, outputs
    assert why.startswith(f"mesh.sp_mixers=auto: prefix: heads send {sent / 1e3:.2f} kB ")
    assert chosen("qwen3_5_text", 4096, 2).kind == "heads"  # whose scans more take longer
    assert chosen("qwen3_5_text", 16, 8).why.startswith("mesh.sp_mixers=auto: prefix: there are more ranks than heads")
    assert chosen("qwen3_5_text", 16, 4).kind == "heads"
    assert chosen("qwen3_5_text", 16, 4, tp=2).kind == "prefix"  # which leaves 2 heads of 4
    assert chosen("mamba2", 4096, 2, sp_mixers="heads") == ("heads", "")
    assert chosen("mamba2", 4096, 1) == chosen("lfm2", 4096, 2) == ("auto", "")


def test_only_scans_by_heads_need_heads():
    model = hybrid("qwen3_5_text", num_attention_heads=8)
    check_sequence(model, 8, 1, "auto", "prefix")
    with pytest.raises(ConfigError, match=r"the 4 heads .* mesh\.sp=4 or less, or mesh\.sp_mixers=prefix\."):
        check_sequence(model, 8, 1, "auto", "auto")  # an engine, which is told no length


# --- plans ------------------------------------------------------------------------------------------------------------


OUT = Cut(8, 64, 2, True)
MAMBA2 = Scanned(1, 64, 8, (OUT, Cut(8, 1, 2, True), Cut(1, 16, 2, True), Cut(1, 16, 2, True)), OUT, 1, 1024, 20_000)


@pytest.fixture(scope="module")
def spec():
    """A model of two blocks, the first of which scans in the place of attention."""
    made = llama(2, 1024, 64, 64, 1024, 1000, 64)
    first, block, *rest = made.parts
    return replace(made, parts=(first, replace(block, attends=False, scans=(MAMBA2,)), *rest))


def test_plans_have_bytes_of_states_and_count_scans(spec):
    heads, prefix = (ParallelPlan(dp=2, sp=2, stage=1, sp_mixers=kind) for kind in ("heads", "prefix"))
    by_kind = [traffic(spec, plan, 0)["pass_rows sp"].bytes for plan in (heads, prefix)]
    both = MAMBA2.sent(0, 2, backward=False).bytes + MAMBA2.sent(0, 2, backward=True).bytes
    states = States(1, 8, 1 + 1024, 4, True)
    assert by_kind[0] - by_kind[1] == both - states.sent(0, 2, backward=False).bytes
    assert scanned_again(spec, prefix, [MAMBA2]) == 20_000 * 8 * 32
    assert scanned_again(spec, heads, [MAMBA2]) == 0
    machine = cluster("h100", 8)
    seconds = [evaluate(spec, machine, plan).seconds.parts["sp"] for plan in (heads, prefix)]
    assert seconds[0] != seconds[1]


def test_a_plan_left_open_is_what_a_run_chooses(spec):
    plan = ParallelPlan(dp=2, sp=2, stage=1)
    assert plan.mesh.sp_mixers == "auto"
    for length, kind in ((2, "heads"), (4096, "prefix")):
        assert mixers_of(replace(spec, length=length), plan) == kind == weigh([replace(MAMBA2, length=length)], 2).kind
        said = [
            note
            for note in evaluate(replace(spec, length=length), cluster("h100", 8), plan).notes
            if "sp_mixers" in note
        ]
        assert said == [f"mesh.sp_mixers=auto: recurrences by {kind}"]
    assert mixers_of(spec, plan.replace(sp=1)) == "heads"
    assert from_json(ParallelPlan, to_json(plan.replace(sp_mixers="prefix"))).mesh.sp_mixers == "prefix"


def test_planners_choose_by_links(spec):
    longer, plan = replace(spec, length=4096), ParallelPlan(dp=2, sp=2, stage=1)
    machine = cluster("h100", 8)
    fast = replace(machine, inside=replace(machine.inside, bandwidth=1e15))
    assert faster_mixers(longer, plan, fast).mesh.sp_mixers == "heads"
    slow = replace(machine, inside=replace(machine.inside, bandwidth=1e9))
    assert faster_mixers(longer, plan, slow) == plan  # auto is prefix, too


def test_more_ranks_than_heads_are_planned_by_states(spec):
    assert sp_refused(spec, 16, 1, 16, mixers="heads") == "sp is more than the 8 heads of recurrences, which they share"
    assert sp_refused(spec, 16, 1, 16) is None
    wide = ParallelPlan(dp=8, sp=8, tp=2, stage=1)
    parts = (replace(part, scans=tuple(replace(scan, divided=True) for scan in part.scans)) for part in spec.parts)
    short = replace(spec, length=64, parts=tuple(parts))
    assert mixers_of(short, wide.replace(tp=1)) == "heads"
    assert mixers_of(short, wide) == "prefix"  # tp leaves 4 heads
