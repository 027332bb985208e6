"""What `zero.weights=auto` becomes: by casts and products of a plan, kept where nothing can be cast, said with both."""

import re

import pytest

from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.memory import instants
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.weights import Casts, casts_of, weights_note, with_weights

MODEL = gpt(layers=4, hidden=512, heads=8, vocab=2048, length=512)


def plan(gpus=8, **settings):
    """A plan whose weights are left open, and its cluster."""
    settings = {"dp": gpus, "stage": 3, "weights": "auto"} | settings
    return ParallelPlan(**settings), cluster("h100", gpus, 1)


def test_more_casts_are_worth_a_hundredth_of_the_products():
    casts = Casts(times=1, nbytes=18e9, seconds=0.00999, products=1.0)
    assert casts.choice == "cast"
    assert casts._replace(seconds=0.01).choice == "kept"


def test_a_step_casts_once_for_every_gather_but_the_updates():
    small, hardware = plan(accumulate=1)
    one, four = (casts_of(MODEL, small.replace(accumulate=count), hardware) for count in (1, 4))
    assert (one.times, four.times) == (1, 7)
    assert one.nbytes == four.nbytes == 18 * MODEL.trainable / 8
    assert four.products == pytest.approx(4 * one.products)
    assert casts_of(MODEL, small.replace(precision="fp16"), hardware).nbytes == one.nbytes / 3
    assert casts_of(MODEL, small.replace(second_shard=2), hardware).times == 0
    assert casts_of(MODEL, small.replace(second_shard="node"), hardware).times == 1  # one host: all of dp is its node
    assert casts_of(MODEL, small.replace(second_shard=2, ep=2), hardware).times == 1  # experts have no second shard
    assert casts_of(MODEL, small.replace(shard=4), hardware).nbytes == 2 * one.nbytes


@pytest.mark.parametrize(("micro_batch", "chosen"), [(1, "kept"), (256, "cast")])
def test_a_plan_has_the_bytes_and_seconds_of_what_auto_becomes(micro_batch, chosen):
    left_open, hardware = plan(micro_batch=micro_batch)
    settled = with_weights(MODEL, left_open, hardware)
    assert settled.zero.weights == chosen
    assert policy_of(settled).from_masters == (chosen == "cast")
    found, wanted = evaluate(MODEL, hardware, left_open), evaluate(MODEL, hardware, left_open.replace(weights=chosen))
    assert (found.memory, found.seconds) == (wanted.memory, wanted.seconds)
    share = {"kept": "a hundredth or more", "cast": "less than a hundredth"}[chosen]
    said = (
        rf"zero\.weights=auto: {chosen}: 1 more cast takes \S+ s of a step by the plan's rates \(\S+ GB each\), {share}"
    )
    assert re.match(said, weights_note(MODEL, left_open, hardware))


def test_cast_weights_take_less_memory_and_more_time():
    left_open, hardware = plan(micro_batch=1)
    kept, cast = (evaluate(MODEL, hardware, left_open.replace(weights=name)) for name in ("kept", "cast"))
    assert kept.memory.parts["parameters"] > 0 == cast.memory.parts.get("parameters", 0)
    assert cast.seconds.parts["optimizer"] < kept.seconds.parts["optimizer"]
    more = cast.seconds.parts["dp"] + cast.seconds.parts["optimizer"]
    assert more > kept.seconds.parts["dp"] + kept.seconds.parts["optimizer"]


def test_an_update_takes_no_scratch_for_weights_that_are_cast_in_gathers():
    left_open, _ = plan()
    kept, cast = (dict(instants(MODEL, left_open.replace(weights=name)))["optimizer step"] for name in ("kept", "cast"))
    assert kept["wire"] > cast["wire"] == 0


WHOLE = "weights stay whole for a step"


@pytest.mark.parametrize(("settings", "reason"), [
    ({"stage": 2}, WHOLE), ({"release": "every_step"}, WHOLE), ({"pp": 2, "dp": 4, "accumulate": 2}, WHOLE),
    ({"dp": 1}, "one rank has all weights"), ({"precision": "fp32"}, "zero.weights"), ({"master": "split"}, "zero.weights"),
    ({"offload": "host"}, "zero.weights"), ({"params": "host"}, "zero.weights"),
], ids=str)  # fmt: skip
def test_weights_that_cannot_be_cast_in_gathers_are_kept(settings, reason):
    left_open, hardware = plan(settings.get("dp", 8) * settings.get("pp", 1), micro_batch=512, **settings)
    assert with_weights(MODEL, left_open, hardware).zero.weights == "kept"
    assert weights_note(MODEL, left_open, hardware).startswith(f"zero.weights=auto: kept: {reason}")


def test_plans_of_what_is_not_left_open_stay_as_they_are():
    for weights in ("kept", "cast"):
        given, hardware = plan(weights=weights)
        assert with_weights(MODEL, given, hardware) is given
