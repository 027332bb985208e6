"""DeepSpeed's schedules: rates and betas that DeepSpeed 0.19.6 itself has given, options, momenta, what is refused."""

import json
from pathlib import Path

import pytest
import torch

from zero3d.config import Schedule, load
from zero3d.errors import ConfigError
from zero3d.train.setup.deepspeed_schedules import deepspeed_betas
from zero3d.train.setup.schedule import group_settings, rate, reset_settings, scheduler

PEAK, STEPS = 5e-4, 40
CASES = json.loads((Path(__file__).parents[1] / "data" / "deepspeed_rates.json").read_text())


def made(case, lr=PEAK):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    choice = Schedule(name=case["name"], options=case["options"] or None)
    return optimizer, choice, scheduler(choice, STEPS, lr)(optimizer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rates_and_betas_are_those_of_deepspeed(case):
    optimizer, _, schedule = made(case)
    group, found, betas = optimizer.param_groups[0], [], []
    for _ in range(STEPS):
        found.append(group["lr"])
        betas.append(list(group["betas"]))
        if "betas" in case:  # at first the cycle's are the highest, and groups begin with the lowest
            highest = [(case["options"] or {}).get("cycle_max_mom", 0.9), betas[-1][1]]
            assert list(schedule.get_mom()[0]) == (betas[-1] if schedule.last_epoch else highest)
        optimizer.step()
        schedule.step()
    assert [found[step] for step in case["steps"]] == pytest.approx(case["rates"], rel=1e-12)
    assert [betas[step] for step in case["steps"]] == case.get("betas", [[0.9, 0.999]] * len(case["steps"]))


@pytest.mark.parametrize("case", [CASES[3], CASES[7]], ids=["rates", "betas"])
def test_a_run_that_goes_on_is_where_it_was(case):
    optimizer, choice, schedule = made(case)
    for _ in range(9):
        optimizer.step()
        schedule.step()
    saved, wanted = json.loads(json.dumps(schedule.state_dict())), group_settings(optimizer)
    again, _, other = made(case)
    settings = group_settings(again)
    other.load_state_dict(saved)
    reset_settings(again, other, settings, rate(choice, STEPS, PEAK))
    assert group_settings(again)[0]["lr"] == pytest.approx(wanted[0]["lr"])
    assert group_settings(again)[0]["betas"] == wanted[0]["betas"]
    assert (deepspeed_betas(choice.name, choice.options) is None) == (case["name"] != "OneCycle")


def test_what_is_null_is_taken_from_the_run():
    options = {"total_num_steps": None, "warmup_num_steps": None, "warmup_max_lr": None}
    given = load({"schedule": {"name": "WarmupDecayLR", "warmup": 0.25, "options": options}}).schedule
    explicit = Schedule(
        name="WarmupDecayLR", options={"total_num_steps": 40, "warmup_num_steps": 10, "warmup_max_lr": PEAK}
    )
    found, wanted = rate(given, STEPS, PEAK), rate(explicit, STEPS, PEAK)
    assert [found(step) for step in range(STEPS)] == [wanted(step) for step in range(STEPS)]


@pytest.mark.parametrize(("section", "why"), [
    ({"name": "WarmupLR", "options": {"warmup_steps": 1}}, "has no option warmup_steps. Did you mean warmup_num_steps"),
    ({"name": "WarmupLR", "options": {"warmup_num_steps": 0}}, "warmup_num_steps is a number above 0; found 0"),
    ({"name": "WarmupLR", "options": {"warmup_type": "cosine"}}, "warmup_type is log or linear; found 'cosine'"),
    ({"name": "WarmupLR", "options": {"warmup_min_lr": None}}, "warmup_min_lr is a number; found null"),
    ({"name": "OneCycle"}, "OneCycle needs cycle_min_lr"),
    ({"name": "LRRangeTest", "options": {"lr_range_test_staircase": 1}}, "is true or false"),
    ({"name": "cosine", "options": {"total_num_steps": 1}}, "schedule.options are for DeepSpeed's schedules"),
    ({"name": "WarmupLR", "options": {}}, "schedule.options takes"),
])  # fmt: skip
def test_wrong_options_are_refused(section, why):
    with pytest.raises(ConfigError, match=why):
        load({"schedule": section})
