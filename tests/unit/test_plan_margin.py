"""The margin of a plan's memory: what fits with it, what would end a plan, and how both are told."""

import json
import re

import pytest

from zero3d.errors import ConfigError
from zero3d.spec.text import binary
from zero3d.tools.cli.main import main
from zero3d.tools.cli.plan_explain import Explained, _first_that_fits, _verdict
from zero3d.tools.cli.plan_options import margin_of
from zero3d.tools.page.plan_text import would_end
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.margin import MARGIN, Ends, Margin, Range, ends, margin_for, usable
from zero3d.tools.plan.search import Row, Target
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan

MODEL = gpt(8, 1024, 16, 50304, 2048)
PLACE = cluster("rtx-3090", 1, 1)
WORDS = ["plan", "--params", "1e8", "--gpus", "1", "--gpu", "rtx-3090", "--seq", "512", "--tokens-per-batch", "8192"]


def test_a_share_and_a_percentage_are_margins():
    assert (margin_of("10%"), margin_of("0.1"), margin_of("0"), margin_of(None)) == (0.1, 0.1, 0.0, None)


@pytest.mark.parametrize("text", ["lots", "-1%", "1", "100%", "nan"])
def test_what_is_no_margin_is_refused(text):
    with pytest.raises(ConfigError, match=r"is no share of memory below 1: type 10% or 0\.1"):
        margin_of(text)


def test_a_margin_says_who_wants_it():
    assert margin_for(0.25, MODEL, ParallelPlan()) == (0.25, "full", "as --margin says")
    assert margin_for(None, MODEL, ParallelPlan()).origin.startswith("9 of 10 published measurements")


@pytest.mark.parametrize(
    ("times", "said"), [(1.2, "Fits "), (1.05, "~ Fits {room}, and lacks "), (0.9, "Does not fit ")]
)
def test_a_plan_inside_the_margin_fits_and_lacks_some_of_it(times, said):
    estimate = evaluate(MODEL, PLACE, ParallelPlan())
    room = times * estimate.memory.device
    row, margin, target = Row(ParallelPlan(), estimate), Margin(0.1, "full", "said"), Target(1, room, margin=0.1)
    explained = Explained(MODEL, PLACE, row, room, margin, None, None, target, evaluate, None, "")
    told = _verdict(explained)
    assert told.startswith(said.partition("{")[0])
    assert explained.fits == (times > 1.1)
    assert ("lacks" in told) == (1 < times < 1.1)


def test_states_leave_the_device_where_they_do_not_fit_with_the_margin():
    plans = [ParallelPlan(), ParallelPlan(offload="host")]
    need = evaluate(MODEL, PLACE, plans[0]).memory.device
    found = [
        _first_that_fits(plans, MODEL, PLACE, Target(1, times * need, margin=0.1), evaluate) for times in (1.2, 1.05)
    ]
    assert [row.plan.offload.optimizer for row in found] == ["none", "host"]


def test_what_may_be_planned_has_the_margin_beyond_it():
    assert Range.of(usable(80.0, 0.25), 0.25) == (48.0, 64.0, 80.0)
    assert usable(80.0, 0.0) == 80.0


@pytest.mark.parametrize("activations", ["none", "full"])
def test_the_next_longer_sequence_and_the_next_larger_micro_batch_do_not_fit(activations):
    plan, limit = ParallelPlan(micro_batch=2, activations=activations), usable(PLACE.gpu.memory)

    def device(length, micro_batch):
        longer = gpt(8, 1024, 16, 50304, length)
        return evaluate(longer, PLACE, plan.replace(micro_batch=micro_batch)).memory.device

    found = ends(MODEL, PLACE, plan, limit, evaluate)
    assert found.length > 2048
    assert found.micro_batch > 2
    # positions of the closed form grow with the length, so one is compared a little further away
    assert device(found.length - 256, 2) <= limit < device(found.length + 512, 2)
    assert device(2048, found.micro_batch) <= limit < device(2048, found.micro_batch + 1)


def test_a_step_of_several_micro_batches_ends_sooner_for_its_gradients_are_there_beside_logits():
    plans = [ParallelPlan(stage=2, accumulate=count, activations="full") for count in (1, 2)]
    needs = [evaluate(MODEL, PLACE, plan).memory for plan in plans]
    assert needs[1].instant == "logits and loss"
    found = [ends(MODEL, PLACE, plan, needs[1].device, evaluate) for plan in plans]
    assert found[0].length > found[1].length == MODEL.length


@pytest.mark.parametrize("part", [0.9, 1.5, 2.5])
def test_ends_are_those_with_the_loss_in_tiles_where_a_run_may_have_them(part):
    """Logits of 4 GB begin at a micro-batch of 8: from there on a plan takes less memory than just below."""
    words, place = gpt(2, 256, 4, 70_000, 512), cluster("a100-80", 1, 1)

    def device(micro_batch, tiled):
        plan = ParallelPlan(activations="full", micro_batch=micro_batch, tiled_loss=tiled)
        return evaluate(words, place, plan).memory.device

    assert device(8, "auto") == device(8, True) < device(7, "auto") == device(7, False)
    limit = device(1, False) + part * (device(2, False) - device(1, False))
    found = ends(words, place, ParallelPlan(activations="full", tiled_loss="auto"), limit, evaluate)
    most = max(each for each in range(1, 65) if min(device(each, True), device(each, False)) <= limit)
    assert found.micro_batch == (most if most < 64 else None)


def test_no_end_is_told_where_none_is_near_nor_a_length_where_scores_are_kept():
    assert ends(MODEL, PLACE, ParallelPlan(), 1e18, evaluate) == (None, None)
    eager = gpt(8, 1024, 16, 50304, 512, flash=False)
    found = ends(eager, PLACE, ParallelPlan(), usable(PLACE.gpu.memory), evaluate)
    assert found.length is None
    assert found.micro_batch > 1


@pytest.mark.parametrize(("plan", "fits", "said"), [
    ({"micro_batch": 4, "accumulate": 2}, 4, "a micro-batch of 8 would not fit"),
    ({"micro_batch": 4, "accumulate": 2}, 5, "a micro-batch of 8 would not fit"),  # 5, 6 and 7 do not divide 8
    ({"micro_batch": 4, "accumulate": 6}, 4, "a micro-batch of 6 would not fit"),
    ({"micro_batch": 4, "accumulate": 1}, 4, ""),  # all of a rank's sequences
    ({"micro_batch": 4, "accumulate": 2}, 11, ""),
    ({"micro_batch": 2, "accumulate": 4, "pp": 2}, 2, "a micro-batch of 4 would not fit"),
    ({"micro_batch": 4, "accumulate": 2, "pp": 2}, 4, ""),  # 1f1b needs a micro-batch for each stage
])  # fmt: skip
def test_the_next_micro_batch_is_one_that_a_step_can_have(plan, fits, said):
    found = would_end(Ends(None, fits), ParallelPlan(**plan))
    assert found == (f": {said}" if said else "")
    both = would_end(Ends(512, fits), ParallelPlan(**plan))
    assert both == ": a sequence of more than 512 tokens " + (f"or {said}" if said else "would not fit")


def test_the_headline_names_range_and_ends_and_a_wider_margin_leaves_fewer_plans(capsys):
    def told(*words):
        assert main([*WORDS, *words]) == 0
        return capsys.readouterr().out

    text, found = told(), json.loads(told("--json"))
    assert re.search(
        r"needs [\d.]+ GiB \([\d.]+-[\d.]+\) of 24 GiB, [\d.]+ GiB left: a sequence of more than [\d,]+ tokens"
        r"( or a micro-batch of \d+)? would not fit",
        " ".join(text.split()),
    )
    assert f"margin {100 * MARGIN:g} %: 9 of 10 published measurements" in text
    best = found["recommended"]["memory"]["device"]
    assert found["device_range_bytes"] == Range.of(best, MARGIN)._asdict()
    room = 24 * 2**30
    for row in found["plans"]:
        need = row["memory"]["device"]
        assert need <= room
        assert row["lacks_bytes"] == max(0.0, need * (1 + MARGIN) - room)
    assert 0 < found["mfu"] < 1
    wide = json.loads(told("--json", "--margin", "90%"))
    assert wide["margin"] == 0.9
    whole = [row for row in wide["plans"] if not row["lacks_bytes"]]
    assert max(row["memory"]["device"] for row in whole) * 1.9 <= room
    assert len(whole) <= len(found["plans"])


def test_bytes_of_a_card_are_binary():
    assert [binary(size) for size in (80 * 2**30, 1.5 * 2**30, 2**29, 3 * 2**20)] == [
        "80 GiB",
        "1.5 GiB",
        "0.5 GiB",
        "3 MiB",
    ]
