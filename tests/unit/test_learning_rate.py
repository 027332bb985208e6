"""The learning rate over a run: each shape against its formula, and what a longer run changes of it."""

import math

import pytest

from zero3d.config import Schedule, load
from zero3d.errors import ConfigError
from zero3d.train.setup.schedule import rate

STEPS = 100


def factors(steps=STEPS, **choice):
    factor = rate(Schedule(**choice), steps, 1.0)
    return [factor(step) for step in range(steps)]


def test_wsd_warms_up_stays_and_falls_by_one_minus_the_root():
    found = factors(name="wsd", warmup=10, decay=20, final=0.1)
    assert found[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert found[10:80] == [1.0] * 70
    expected = [0.1 + 0.9 * (1 - math.sqrt(done / 20)) for done in range(1, 21)]
    assert found[80:] == pytest.approx(expected)
    assert found[-1] == 0.1


@pytest.mark.parametrize(("decay", "falling"), [(0.1, 10), (0.25, 25), (7, 7), (1, 1), (0.001, 1), (500, 95)])
def test_the_decay_of_wsd_is_a_fraction_or_steps_and_begins_after_the_warm_up(decay, falling):
    found = factors(name="wsd", warmup=5, decay=decay, final=0.0)
    assert sum(factor < 1.0 for factor in found[5:]) == falling
    assert found[-1] == 0.0


def test_a_longer_run_has_the_same_rates_until_the_decay_of_the_shorter_one():
    for choice, same in (
        ({"name": "wsd", "decay": 20}, 80),
        ({"name": "inverse_sqrt"}, 100),
        ({"name": "constant"}, 100),
    ):
        short, long = factors(100, warmup=10, **choice), factors(150, warmup=10, **choice)
        assert long[:same] == short[:same]


def test_the_inverse_root_is_one_at_the_end_of_warm_up_and_halves_at_four_times_as_many_steps():
    found = factors(name="inverse_sqrt", warmup=10)
    assert found[9] == 1.0
    assert found[39] == 0.5
    assert found[10:] == pytest.approx([math.sqrt(10 / step) for step in range(11, 101)])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_final_rate(name):
    for steps in (1, 2, 3, 17):
        assert factors(steps, name=name, final=0.25)[-1] == 0.25
    assert factors(5, name=name, warmup=9)[-1] == pytest.approx(5 / 9)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"name": "inverse_sqrt"}, "schedule.warmup is 0: type schedule.warmup=0.01"),
        (
            {"name": "wsd", "warmup": 0.5, "decay": 0.6},
            "0.5 + schedule.decay 0.6 of all steps are more than 1: type schedule.decay=0.5",
        ),
        ({"name": "wsd", "decay": 0}, "schedule.decay takes a number above 0; found 0"),
        ({"name": "wsd", "decay_steps": 3}, "Did you mean schedule.decay?"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(choice, said):
    with pytest.raises(ConfigError) as caught:
        load({"schedule": choice})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
