"""run.png: which panels there are, what is in them, and what is marked at which step."""

import math

import numpy
import pytest
from run_records import records, resume, skip, slow

from zero3d.train.curve import smooth
from zero3d.train.run_plot import RESUMED, SAVED, SKIPPED, SLOW, draw_run, figure
from zero3d.train.series import Series

pytest.importorskip("matplotlib")
LOSS, RATE, NORM, SPEED = "loss (nats per token)", "learning rate", "gradient norm", "tokens per second"


def panels(found):
    """Axes by what stands beside them, from the top."""
    return {axes.get_ylabel(): axes for axes in figure(Series.of(found), "a run").axes}


def line(axes, label):
    """The points of the line with this label."""
    (found,) = (each for each in axes.lines if each.get_label().startswith(label))
    return [float(x) for x in found.get_xdata()], [float(y) for y in found.get_ydata()]


def test_four_panels_over_one_axis_of_steps_have_the_records_values():
    found = records(40)
    axes = panels(found)
    assert list(axes) == [LOSS, RATE, NORM, SPEED]
    steps = [*range(1, 41)]
    for name, key, label in (
        (LOSS, "loss", "each"),
        (RATE, "lr", "each"),
        (NORM, "grad_norm", "each"),
        (SPEED, "tokens_per_s", "each"),
    ):
        assert line(axes[name], label) == (steps, [record[key] for record in found])
    losses = [record["loss"] for record in found]
    assert line(axes[LOSS], "average") == (steps, smooth(losses))
    held = [(record["step"], record["validation_loss"]) for record in found if "validation_loss" in record]
    assert line(axes[LOSS], "held out") == ([step for step, _ in held], [value for _, value in held])
    assert len(held) == 10
    assert f"held out, at the end {held[-1][1]:.3f}" in [each.get_label() for each in axes[LOSS].lines]
    assert len({axes.get_xlim() for axes in axes.values()}) == 1
    assert "average" not in [each.get_label() for each in axes[RATE].lines]


def test_saves_skipped_steps_and_resumes_are_marked_in_every_panel_at_their_steps():
    found = slow(resume(skip(records(40), 1, 30), 16, 32), 20, 25)
    axes = panels(found)
    for each in axes.values():
        assert line(each, SAVED)[0] == [*range(4, 40, 4)]  # the record behind a save has its seconds
        assert line(each, SKIPPED)[0] == [1, 30]
        assert line(each, SLOW) == ([20, 25], [1.0, 1.0])
        (resumes,) = (lines for lines in each.collections if lines.get_label().startswith(RESUMED))
        assert [float(segment[0][0]) for segment in resumes.get_segments()] == [16.5, 32.5]
        assert set(line(each, SAVED)[1]) == {0.0}
        assert set(line(each, SKIPPED)[1]) == {1.0}


def test_one_legend_names_the_marks_that_there_are_with_their_number():
    drawn = figure(Series.of(resume(records(40), 16)), "a run")
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"{SAVED} (9)", f"{RESUMED} (1)"]
    assert not figure(Series.of(records(1)), "a run").legends


@pytest.mark.parametrize(("found", "expected"), [
    (records(30, norms=False), [LOSS, RATE, SPEED]),
    (records(30, held_out=False), [LOSS, RATE, NORM, SPEED]),
    (skip(records(12, held_out=False, norms=False), *range(1, 13)), [LOSS, RATE, SPEED]),
    ([], [LOSS]),
    ([{"step": 3}], [LOSS]),
], ids=["no norm", "nothing held out", "no finite loss", "no step", "another program's"])  # fmt: skip
def test_panels_without_a_value_are_left_out_and_the_loss_is_always_there(found, expected):
    axes = panels(found)
    assert list(axes) == expected
    assert ("no finite value" in [text.get_text() for text in axes[LOSS].texts]) == all(
        record.get("loss") is None for record in found
    )


def test_a_loss_far_above_all_others_is_said_and_does_not_flatten_them():
    found = records(2000)
    found[900]["loss"] = 1e5
    axes = panels(found)[LOSS]
    assert axes.get_ylim()[1] < 8
    assert axes.get_title(loc="right") == "up to 100,000, above the panel"
    assert not panels(records(2000))[LOSS].get_title(loc="right")


def test_a_single_value_is_a_dot_and_held_out_losses_and_resumes_are_inside_the_panel():
    assert panels([{"step": 1, "loss": 2.0}])[LOSS].lines[0].get_marker() == "o"
    found = resume(records(40), 16)[16:]
    found[3]["validation_loss"] = 12.0
    axes = panels(found)[LOSS]
    assert axes.get_ylim()[1] > 12
    assert axes.get_xlim()[0] <= 16


def test_a_picture_is_written(tmp_path):
    draw_run(Series.of(records(3)), "a run", tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_s_name_is_no_formula(tmp_path):
    draw_run(Series.of(records(3)), "runs/$a_b_c$: stage 2", tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


def test_of_values_that_no_run_writes_none_is_drawn():
    series = Series.of([{"step": 1, "loss": math.inf, "lr": None, "resumed_from": 0.5, "applied": 1}])
    assert numpy.isnan([*series.loss, *series.rate]).all()
    assert (series.resumed, series.skipped) == ([], [])


def test_saves_without_a_record_behind_them_are_known_by_the_session_and_by_who_went_on_from_them():
    records = [{"step": step, "loss": 1.0} for step in range(1, 13)]
    records[4] |= {"save_seconds": 1.0}
    records[8] |= {"resumed_from": 8}
    assert Series.of(records, [10, 12]).saves == [4, 8, 10, 12]
    assert Series.of(records, [4, 99, "x", None, 0]).saves == [4, 8]
    for odd in (None, "10", {"10": 1}, 10):
        assert Series.of(records, odd).saves == [4, 8]
