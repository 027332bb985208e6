"""A cluster fitted on steps of several runs: what made their seconds is found again, so other plans have theirs, too."""

import json
from dataclasses import replace

import pytest

from zero3d.tools.plan.calibrate import fit_products
from zero3d.tools.plan.corrected import SPREAD, Timed, farthest, fitted, profile
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.shapes import llama
from zero3d.tools.plan.spec import Gpu, Link, MeasuredStep, ParallelPlan

MEASURED = replace(
    cluster("cpu", 2, 1),
    gpu=Gpu("cpu", 16e9, 2e11, 2e10, matrix=1.0, flash=0.4, half=20.0),
    inside=Link(1e9, 50e-6, 0.0),
)


def model(layers=2, hidden=256, length=128, vocab=1024):
    return llama(layers, hidden, hidden // 64, hidden // 64, 2 * hidden, vocab, length)


def plan(**changes):
    return ParallelPlan(**{"dp": 2, "stage": 0, "micro_batch": 4} | changes)


RUNS = [
    (model(), plan()),
    (model(layers=6), plan()),
    (model(), plan(accumulate=3)),
    (model(hidden=512), plan()),
    (model(length=512), plan(micro_batch=1)),
    (model(vocab=8192), plan()),
    (model(), plan(stage=3)),
]
OTHERS = [(model(8, 384, 256, 4096), plan(stage=3)), (model(3, 768, 64), plan(accumulate=2)), (model(5), plan(stage=2))]
ALONE = [(each, how.replace(dp=1)) for each, how in RUNS[:6]]


def timed(place, runs):
    return [Timed(each, how, evaluate(each, place, how).seconds.mid) for each, how in runs]


def fit(truth, runs=RUNS):
    return fitted(MEASURED, timed(truth, runs), "by hand")


@pytest.mark.parametrize("step", [
    MeasuredStep(0.01, block=2e-3, rest_passes=12.0, update=1.0, hide_dp=0.0),
    MeasuredStep(0.0, block=0.0, rest_passes=2.0, update=1.2, hide_dp=0.25),
    MeasuredStep(0.03, block=5e-3, rest_passes=0.5, update=0.8, hide_dp=0.0),
], ids=["eager", "nothing beside", "of the host"])  # fmt: skip
def test_other_plans_of_a_fitted_machine_take_what_they_take_there(step):
    truth = replace(MEASURED, step=step)
    found = fit(truth)
    assert found.step.block == pytest.approx(step.block, abs=3e-4)
    for each, how in OTHERS:
        assert evaluate(each, found, how).seconds.mid == pytest.approx(evaluate(each, truth, how).seconds.mid, rel=0.03)
    assert found.provenance["step"] == "by hand"
    runs = timed(truth, RUNS)
    runs[2] = runs[2]._replace(seconds=runs[2].seconds / 1.1)
    assert farthest(truth, runs) == pytest.approx(0.1)


def test_rates_that_microbenchmarks_got_wrong_are_corrected_by_steps():
    step = MeasuredStep(0.01, block=2e-3, rest_passes=12.0, hide_dp=0.0)
    slow = replace(MEASURED.gpu, matrix=0.85, flash=0.3)
    truth = replace(MEASURED, gpu=slow, inside=Link(5e8, 1e-4, 0.0), step=step)
    found = fit(truth)
    assert found.gpu.matrix < 0.95
    assert found.inside.bandwidth < 0.8e9
    assert found.step.hide_dp == 0.0
    for each, how in OTHERS:
        assert evaluate(each, found, how).seconds.mid == pytest.approx(evaluate(each, truth, how).seconds.mid, rel=0.05)


def test_nothing_is_negative_and_a_rank_alone_says_nothing_of_links():
    truth = replace(MEASURED, step=MeasuredStep(fixed=0.0, block=0.0, rest_passes=0.0))
    runs = [run._replace(seconds=run.seconds - 1e-3) for run in timed(truth, ALONE)]  # as if a step took less than 0
    found = fitted(MEASURED, runs, "by hand")
    doubtful = [*runs, *(run._replace(seconds=1.6 * run.seconds) for run in runs)]
    wide = fitted(MEASURED, doubtful, "by hand")
    assert wide.spread == farthest(wide, doubtful) > SPREAD == found.spread
    assert min(found.step.fixed, found.step.block, found.step.rest_passes, found.step.update) >= 0
    assert found.inside == MEASURED.inside
    assert found.step.hide_dp == MeasuredStep().hide_dp


def test_a_file_of_a_fitted_machine_is_read_as_it_was_written(tmp_path):
    found = fit(replace(MEASURED, step=MeasuredStep(0.01, block=2e-3, rest_passes=12.0)))
    file = tmp_path / "profile.json"
    each, how = OTHERS[0]
    planned = evaluate(each, found, how).seconds.mid
    file.write_text(profile(each, found, how, planned + 0.004))
    read = cluster("cpu", 2, 1, file)
    assert read.step.fixed == pytest.approx(found.step.fixed + 0.004)  # the rest is the machine's
    assert replace(read, step=None, provenance={}) == replace(found, step=None, provenance={})
    assert read.provenance["step.fixed"].startswith("fitted on ")
    assert read.provenance["step.block"] == "by hand"
    file.write_text(profile(each, read, how, planned + 0.004))  # and once more
    assert cluster("cpu", 2, 1, file).step == pytest.approx(read.step)


def test_a_run_that_is_faster_than_its_machine_s_fixed_seconds_explain_has_faster_products(tmp_path):
    place = replace(MEASURED, step=MeasuredStep(0.001, block=1e-3, rest_passes=4.0))
    each, how = OTHERS[0]
    seconds = 0.9 * evaluate(each, place, how).seconds.mid
    tree = json.loads(profile(each, place, how, seconds))
    assert tree["step"]["fixed"] == 0.001
    assert tree["gpu"]["matrix"] > place.gpu.matrix


def test_products_that_get_faster_with_their_side_give_the_side_of_half_the_rate():
    assert fit_products({side: 2e11 / (1 + 100 / side) for side in (256, 512, 4096)}) == pytest.approx((2e11, 100))
    assert fit_products({256: 3e11, 512: 2e11}) == (3e11, 0.0)  # these get slower


def test_a_profile_of_many_nodes_is_planned_as_long_as_its_step_took(tmp_path):
    place, how = replace(MEASURED, nodes=64, per_node=1, step=MeasuredStep(fixed=0.01)), plan(dp=64)
    seconds, file = evaluate(model(), place, how).seconds.mid + 1.0, tmp_path / "profile.json"
    file.write_text(profile(model(), place, how, seconds))
    assert evaluate(model(), cluster("cpu", 64, 64, file), how).seconds.mid == pytest.approx(seconds)
