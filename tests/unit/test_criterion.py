"""Which evaluation is the best, how long a run waits for a better one, and what a checkpoint keeps of both."""

from dataclasses import asdict
from math import inf, nan

import pytest

from zero3d.config import load
from zero3d.errors import CheckpointError, ConfigError
from zero3d.train.criterion import Criterion, Waiting
from zero3d.train.loop_state import LoopState, check_loop_state


def waited(criterion, values):
    waiting, over = None, []
    for value in values:
        waiting = criterion.wait(waiting, {criterion.name: value})
        over.append(criterion.is_over(waiting))
    return waiting, over


def test_a_run_is_over_after_so_many_evaluations_in_a_row_without_a_better_one():
    criterion = Criterion(patience=2)
    assert waited(criterion, [3.0, 2.0, 2.5, 1.0, 1.0, 1.5]) == (Waiting(1.0, 2), [False] * 5 + [True])
    assert waited(Criterion("quality", highest=True, patience=2), [3.0, 2.0, 2.5])[1] == [False, False, True]
    assert not any(waited(Criterion(), [1.0, 2.0, 3.0])[1]), "without patience it never is"


@pytest.mark.parametrize("value", [nan, inf, -inf, None])
@pytest.mark.parametrize("highest", [True, False])
def test_what_is_not_finite_is_never_the_best(value, highest):
    criterion = Criterion(highest=highest, patience=2)
    assert not criterion.improves(criterion.value({"validation_loss": value}), None)
    waiting, over = waited(criterion, [value, value])
    assert (waiting, over) == (Waiting(None, 2), [False, True])
    assert criterion.why_over(waiting) == ("validation_loss has not been finite in 2 evaluations (evaluate.patience)")


def test_a_checkpoint_keeps_for_how_long_a_run_has_waited():
    state = LoopState(step=3, best=(2, 0.5), waiting=Waiting(0.5, 1), chosen_by="highest quality")
    assert LoopState.of(asdict(state)) == state
    older = {name: value for name, value in asdict(state).items() if name not in ("waiting", "chosen_by")}
    assert LoopState.of(older).waiting is None
    assert LoopState.of(older).chosen_by == "lowest validation_loss"


def test_by_another_criterion_there_is_no_best_yet():
    state = LoopState(best=(2, 0.5), waiting=Waiting(0.5, 1))
    assert state.by(Criterion()) is state
    other = state.by(Criterion(highest=True))
    assert (other.best, other.waiting, other.chosen_by) == (None, None, "highest validation_loss")


@pytest.mark.parametrize("waiting", [3, {"since": 1}, {"best": 1.0, "since": -1}, {"best": "low", "since": 0}])
def test_a_waiting_that_no_run_has_written_is_refused_by_name(tmp_path, waiting):
    position = {"epoch": 0, "index": 0, "sequences": 1}
    saved = asdict(LoopState(position=position)) | {"waiting": waiting}
    with pytest.raises(CheckpointError, match="waiting"):
        check_loop_state(tmp_path, saved, 0)


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        ({"best": "accuracy"}, "evaluate.best=accuracy would be a value of evaluate.function, which is not set"),
        ({"patience": 3}, "with evaluate.every=0 there is only one: type evaluate.every=STEPS"),
        (
            {"best": "ema_validation_loss"},
            "evaluate.best=ema_validation_loss is a value of averaged weights: type train.ema",
        ),
        ({"patience": 3, "every": 2}, "nothing is held out: type data.validation=0.05"),
    ],
)
def test_settings_that_contradict_each_other_are_told(evaluate, said):
    with pytest.raises(ConfigError) as caught:
        load({"evaluate": evaluate})
    assert said in str(caught.value)


def test_a_best_that_no_evaluation_has_is_told_with_those_that_it_has():
    with pytest.raises(
        ConfigError, match=r"none of what an evaluation gives: accuracy, f1\. Type evaluate\.best=accuracy\."
    ):
        Criterion("acuracy").check({"accuracy": 1.0, "f1": 0.5})
    Criterion().check({"accuracy": 1.0})  # nothing is held out, and there is no best
