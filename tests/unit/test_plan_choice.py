"""Which plan is recommended and how that is said: the simplest of equals, what a fine-tune's step is, 120 columns."""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import pytest

from zero3d.config import load
from zero3d.spec.offload import Offload
from zero3d.tools.cli import plan as verb
from zero3d.tools.cli.main import main
from zero3d.tools.cli.plan import TOKENS, TUNED, is_tuned, sequences_of, tuning_batch
from zero3d.tools.page import plan_text
from zero3d.tools.page.explain_text import instant_lines
from zero3d.tools.page.plan_text import (
    WIDTH,
    Answer,
    as_text,
    faster_line,
    folded,
    heading,
    headline,
    short,
    shown,
    stage_of,
)
from zero3d.tools.plan.choice import EQUAL, choose, complexity
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.ladder import ladder
from zero3d.tools.plan.search import Row, SearchResult, Target, search
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.what_if import faster, what_if
from zero3d.tools.sim import model_spec

KNOWN = lru_cache(model_spec.open_spec)
MODEL, PLACE = gpt(8, 1024, 16, 50304, 512), cluster("a6000", 4)
ROOM = PLACE.gpu.memory
ASKED = Target(64, ROOM)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    monkeypatch.setattr(model_spec, "open_spec", KNOWN)


def row(seconds, lacks=0.0, **plan):
    estimate = SimpleNamespace(seconds=SimpleNamespace(mid=seconds), memory=SimpleNamespace(allocated=0))
    return Row(ParallelPlan(**plan), estimate, lacks=lacks)


@lru_cache
def answer(target=ASKED, model=MODEL, place=PLACE):
    result = search(model, place, target, evaluate)
    best = choose(result.rows).row
    rungs = ladder(model, place, target, evaluate)
    return Answer(model, place, target, result, rungs, what_if(best, model, place, evaluate))


def test_axes_are_less_simple_in_their_order_and_states_off_the_device_than_any():
    order = [
        {"dp": 8, "stage": 0}, {"dp": 8, "stage": 0, "shard": 4}, {"dp": 8, "stage": 1}, {"dp": 8, "stage": 1, "shard": 4},
        {"dp": 8, "stage": 2}, {"dp": 8, "stage": 3}, {"dp": 8, "stage": 3, "second_shard": 4}, {"dp": 4, "tp": 2},
        {"dp": 2, "tp": 4}, {"dp": 8, "stage": 0, "sp": 2}, {"dp": 8, "stage": 0, "ep": 2}, {"dp": 4, "stage": 3, "pp": 2},
        {"dp": 2, "pp": 4}, {"dp": 2, "pp": 4, "schedule": "interleaved"}, {"dp": 2, "pp": 4, "schedule": "zero-bubble"}, {"dp": 8, "stage": 3, "offload": "host"},
    ]  # fmt: skip
    found = [complexity(ParallelPlan(**plan)) for plan in order]
    assert all(one < after for one, after in pairwise(found))
    away = ParallelPlan(activations="full", offload=Offload(activations="host"))
    assert complexity(away) > complexity(ParallelPlan(pp=8))
    assert complexity(ParallelPlan(pp=2, stage=3)) == complexity(ParallelPlan(pp=2, stage=0))  # over one rank


def test_the_simplest_of_plans_as_fast_as_the_fastest_is_recommended():
    times = [10 * (1 + share * EQUAL) for share in (0, 0.5, 1, 1.1)]
    rows = [row(times[0], pp=4), row(times[1], dp=2, tp=2), row(times[2], dp=4, stage=1), row(times[3], dp=4, stage=0)]
    found = choose(rows)
    assert (found.row, found.fastest, found.equal) == (rows[2], rows[0], 3)
    assert choose(rows[3:]) == (rows[3], rows[3], 1)
    same = [row(10.0, dp=4, stage=1), row(10.1, dp=4, stage=1, activations="full")]
    assert choose(same).row is same[0]


def test_only_what_is_as_good_for_the_goal_and_has_its_margin_is_equal():
    few = [row(20.0, pp=2), row(5.0, dp=4)]
    assert choose(few, "fewest-gpus").row is few[0]
    large = [row(20.0, pp=2, micro_batch=8), row(20.0, dp=1, micro_batch=4)]
    assert choose(large, "largest-batch").row is large[0]
    spread = [row(20.0, dp=2, pp=2, micro_batch=8), row(20.0, micro_batch=8)]
    assert choose(spread, "largest-batch").row is spread[0]
    tight = [row(10.0, pp=2), row(9.0, lacks=1.0, dp=2)]
    assert choose(tight).row is tight[0]
    none = [row(10.0, lacks=2.0, pp=2), row(10.1, lacks=1.0, dp=2), row(10.0, lacks=3.0)]
    assert choose(none).row is none[1]


def test_plans_that_round_more_are_rows_of_their_own():
    rows = [row(1.0, dp=2), row(1.0, dp=2, reduce_dtype="bf16"), row(1.0, dp=2, quantize="nf4-double")]
    assert plan_text.distinct([*rows, row(2.0, dp=2)]) == rows


@pytest.mark.parametrize(("adapters", "code"), [({}, 0), ({"rank": 8}, 2)])
def test_a_fine_tune_of_all_weights_may_multiply_in_fp8(tmp_path, monkeypatch, adapters, code):
    monkeypatch.setattr(verb, "has_weights", lambda path: True)
    file = tmp_path / "run.yaml"
    run = {"model": {"path": "demo", "init": "weights", "linear": "fp8"}, "data": {"length": 128}, "lora": adapters}
    file.write_text(json.dumps(run))
    assert main(["plan", str(file), "--gpus", "2", "--gpu", "h100", "--json"]) == code


def test_what_is_recommended_is_said_written_and_marked(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    words = ["plan", "demo", "--gpus", "4", "--gpu", "a6000", "--seq", "128", "--tokens-per-batch", "4096"]
    assert main([*words, "--emit", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best, first = told["recommended"]["plan"], told["plans"][0]["plan"]
    assert (best["dp"], best["tp"], best["pp"], best["stage"]) == (4, 1, 1, 0)
    assert told["equal"] > 1
    assert first != best
    assert load(file).zero.stage == best["stage"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].startswith("Recommended: pp 1 x dp 4 x tp 1, stage 0")
    assert lines[5] == (
        f"   the simplest of {told['equal']} plans within {100 * EQUAL:g} % of the fastest "
        f"({plan_text.figure(told['plans'][0]['seconds']['mid'])} s a step), which predictions do not tell apart"
    )
    assert sum(line.lstrip().startswith("*") for line in lines) == 2  # the row, and what it means
    assert max(map(len, lines)) <= WIDTH


def test_a_recommended_plan_is_shown_however_short_the_table():
    found = answer()
    fit = shown(found, 1)[0]
    assert (fit[0][0], fit[-1][1]) == (1, found.best)
    text = as_text(found, 1)
    assert f"*{fit[-1][0]}  {plan_text.axes(found.best.plan)}" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_plans_without_their_margin_have_a_table_of_their_own():
    found = answer(Target(64, 14e9, margin=0.15))
    few = [row for row in found.result.rows if row.lacks]
    assert 0 < len(few) < len(found.result.rows)
    _, narrow = shown(found, 10)
    assert narrow[0] == (1, few[0])
    above, below = as_text(found, 10).split("with less beyond them than the margin (~):")
    assert "lacks" not in above
    assert f"lacks {plan_text.binary(few[0].lacks)} of the margin" in below
    lacking = found._replace(result=found.result._replace(rows=few))
    assert shown(lacking, 2)[0] == []
    assert "Plans that fit" in as_text(lacking, 2)


def test_a_stage_over_one_rank_is_named_for_what_it_lets_leave_the_device():
    assert stage_of(ParallelPlan(dp=2, stage=3)) == "3"
    assert stage_of(ParallelPlan(dp=4, stage=3, shard=1)) == stage_of(ParallelPlan(stage=3)) == "-"
    offloaded = ParallelPlan(stage=3, offload="host")
    assert stage_of(offloaded) == "3 (to offload)"
    assert "stage 3 (to offload), micro-batch 1" in short(offloaded)
    assert "stage" not in short(ParallelPlan(stage=3))
    alone = answer(place=cluster("a6000", 1))
    names = [name for name, _ in plan_text.rungs(alone)]
    assert sorted(names) == ["2 (to offload)", "3 (to offload)", "any stage"]
    assert "the rule of thumb" not in as_text(alone, 1)


def test_rungs_have_the_margin_of_their_own_kind_of_run_and_name_their_micro_batch():
    here = {rung.name: rung for rung in answer().ladder}
    assert [here[name].margin.kind for name in ("1", "2", "3")] == ["full"] * 3
    assert [here[f"{name} + offload"].margin.kind for name in (2, 3)] == ["offload"] * 2
    away = here["3 + offload"]
    need, narrow, wide = away.estimate.memory.device, here["3"].margin.share, away.margin.share
    assert narrow < wide
    for room, fits in ((need * (1 + wide), True), (need * (1 + narrow), False), (0.9 * need, False)):
        found = next(r for r in ladder(MODEL, PLACE, Target(64, room), evaluate) if r.name == away.name)
        assert (found.fits, found.lacks) == (fits, pytest.approx(need * (1 + wide) - room))
        said = plan_text.rung_verdict(found, room, PLACE)
        assert said.startswith("does not fit" if room < need else "~ lacks " * (not fits))
    text = as_text(answer(), 1)
    assert "with N = 4 data-parallel ranks, full recomputation and a micro-batch of 1:" in " ".join(text.split())
    assert plan_text.around(need, wide) in text


@pytest.mark.parametrize(("compiled", "said"), [(False, False), (True, True), (None, True)])
def test_rungs_are_compiled_as_plans_are(compiled, said):
    counts = {"launches": (10.0, 20.0), "passed": (2e6, 2e6)}
    parts = tuple(replace(part, operations=replace(part.operations, **counts)) for part in MODEL.parts)
    counted, place = replace(MODEL, name="counted", parts=parts), cluster("h100", 4)
    rungs = ladder(counted, place, ASKED._replace(compile=compiled), evaluate)
    assert {rung.plan.compile for rung in rungs} == {said}
    title = plan_text.ladder_title(answer()._replace(ladder=rungs))
    assert title.endswith("of 1, compiled") == said


def test_single_changes_that_are_faster_and_fit_are_told_with_their_seconds():
    plan = ParallelPlan(dp=4, stage=3, micro_batch=1, accumulate=16, activations="full")
    slow = Row(plan, evaluate(MODEL, PLACE, plan))
    knobs = what_if(slow, MODEL, PLACE, evaluate)
    found = faster(knobs, slow, lambda _: ROOM, PLACE)
    assert found == sorted(found, key=lambda knob: knob.seconds)
    assert all(knob.seconds < 0 and knob.estimate.memory.device <= ROOM for knob in found)
    assert "zero.stage: 2" in [knob.change for knob in found]
    least = min(knob.estimate.memory.device for knob in found)
    fewer = faster(knobs, slow, lambda _: least, PLACE)
    assert 0 < len(fewer) < len(found)
    said = faster_line(found)
    assert f"{found[0].change} ({plan_text.figure(found[0].estimate.seconds.mid)} s a step," in said
    assert all(("rounds numbers" in faster_line([knob])) is knob.rounds for knob in knobs)
    assert faster_line([]) == "Faster with the memory left: no single change"
    anew = {knob.change for knob in knobs if "anew for each shape of a batch" in faster_line([knob])}
    assert anew == {"train.compile: true"}


def test_instants_are_named_by_their_block_alone():
    whole = "model.language_model.layers.17"
    named = [("backward of the embedding", "backward of the embedding"), ("logits and loss", "logits and loss")]
    named += [
        (f"backward of {whole}/frozen-bf16 after its recomputation", "backward of layers.17 after its recomputation")
    ]
    lines = [line.strip() for line in instant_lines([(name, {"parameters": 1e9}) for name, _ in named])]
    assert [line.rpartition("  ")[0].strip().rpartition("  ")[0].strip() for line in lines[2:]] == [
        said for _, said in named
    ]


def test_explain_says_what_is_faster(tmp_path, capsys):
    words = [
        "model.path=demo",
        "data.length=128",
        "train.batch=16",
        "train.micro_batch=1",
        "mesh.dp=2",
        "activations=full",
    ]
    assert main(["plan", "explain", *words, "--gpu", "h100"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Faster with the memory left: " in text
    assert "activations: none (" in text
    assert main(["plan", "explain", *words, "--gpu", "h100", "--json"]) == 0
    assert "activations: none" in [knob["change"] for knob in json.loads(capsys.readouterr().out)["faster"]]


@pytest.mark.parametrize(("length", "gpus", "each"), [
    (2048, 1, 32), (2048, 4, 8), (1000, 1, 66), (1000, 64, 2), (2048, 128, 1), (48000, 1, 2), (70000, 1, 1), (200000, 2, 1),
])  # fmt: skip
def test_a_fine_tunes_step_has_64k_to_128k_tokens(length, gpus, each):
    model = gpt(2, 64, 4, 100, length)
    found = tuning_batch(model, cluster("a6000", gpus, 1))
    assert found == each * gpus
    assert each == 1 or TUNED[0] <= found * length <= TUNED[1]


def test_the_first_lines_say_who_decides_the_step():
    model, place = gpt(2, 64, 4, 100, 256), cluster("a6000", 2)

    def said(asked=None, batch=None, tuned=False):
        file = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(batch=batch)))
        return list(
            heading(model, place, *sequences_of(SimpleNamespace(tokens_per_batch=asked), model, place, file, tuned))
        )[2]

    default = (
        f"{TOKENS // 256:,} sequences = {TOKENS:,} tokens a step: pretraining's default, about 4 M (--tokens-per-batch)"
    )
    assert said() == default
    assert said(tuned=True) == (
        "256 sequences = 65,536 tokens a step: a fine-tune's default, 64k to 128k (--tokens-per-batch)"
    )
    assert said("1024", batch=8, tuned=True) == "4 sequences = 1,024 tokens a step"
    assert said(batch=8, tuned=True) == "8 sequences = 2,048 tokens a step: train.batch of the file"


def test_a_run_is_a_fine_tune_where_it_adapts_or_starts_from_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    for words, tuned in (
        ([], False), (["lora.rank=4"], True), ([f"model.path={tmp_path}"], True),
        ([f"model.path={tmp_path}", "model.init=random"], False),
    ):  # fmt: skip
        assert is_tuned(load(None, words)) is tuned, words


def test_of_adapters_the_first_lines_say_how_much_of_what_is_reserved_lives():
    frozen = replace(
        MODEL,
        name="adapted",
        parts=tuple(replace(part, units=tuple(map(frozen_unit, part.units))) for part in MODEL.parts),
    )
    for model, said in ((frozen, True), (MODEL, False)):
        plan = ParallelPlan(dp=4, stage=1)
        found = Row(plan, evaluate(model, PLACE, plan))
        lines = list(headline(Answer(model, PLACE, Target(4, ROOM), SearchResult([found], [], 1), [], [])))
        live = plan_text.binary(found.estimate.memory.allocated)
        assert (f"   that is what the card reserves: {live} of it are live tensors" in lines) is said


def frozen_unit(unit):
    return replace(unit, weights=tuple(replace(weight, trainable=False) for weight in unit.weights))


def test_what_no_published_run_was_compared_with_is_said(capsys):
    words = ["plan", "explain", "model.path=demo", "data.length=128", "train.micro_batch=1", "mesh.dp=1"]
    for card, missing in (("a100", []), ("l4", ["l4"])):
        assert main([*words, "--gpu", card]) == 0
        said = "no published run of l4 was compared with its plan" in capsys.readouterr().out
        assert main([*words, "--gpu", card, "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["not_judged"], said) == (missing, bool(missing))
    assert list(plan_text.judged_lines(MODEL, cluster("t4", 1), ParallelPlan())) == [
        "no published run of t4 was compared with its plan"
    ]
    assert not list(plan_text.judged_lines(MODEL, PLACE, ParallelPlan()))


def test_lines_are_folded_below_themselves_and_short_ones_stay():
    lines = ["   a  b", "", "   " + "word " * 40]
    found = list(folded(lines))
    assert found[:2] == lines[:2]
    assert all(len(line) <= WIDTH for line in found)
    assert all(line.startswith("      word") for line in found[3:])
    assert " ".join(found[2:]).split() == ["word"] * 40
