"""What a run prints at its end: tables that cut no figure, and no more than its session has to tell."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from zero3d.account.traffic import Moved
from zero3d.config import load
from zero3d.train.report import memory_table, show, steps_of, traffic_table
from zero3d.train.tables import MemoryRow, TrafficRow

LARGE = 31_182_848_123


def result_of(steps, before=0):
    """A run of which this session made some steps, after those that were there."""
    moved = Moved(LARGE, LARGE, LARGE)
    return SimpleNamespace(
        config=load(None),
        ranks=2,
        history=[{"step": step, "loss": 1.0} for step in range(1, before + steps + 1)],
        steps=[{"step": before + 1 + number} for number in range(steps)],
        seconds=1.0,
        memory=[MemoryRow("communication buffers", "bf16 + fp32 + int64", LARGE, True, LARGE, True)],
        traffic=[TrafficRow("send_backward (pp)", moved, moved, True)],
        peak_memory=500_000_000,
        peak_held=77,
        peak_reserved=None,
        held_out_loss=2.0,
        averaged_loss=float("nan"),
        reloaded_loss=float("nan"),
        of_sources={},
        values={},
        expert_load={},
        exports=["runs/mine/hf"],
        exported_loss=2.0,
        fingerprint="",
        sample="",
        checkpoint="runs/mine/checkpoints/step-5",
        folder=SimpleNamespace(metrics="runs/mine/metrics.jsonl", curves="run.png"),
    )


def printed(item, width):
    out = StringIO()
    console = Console(file=out, width=width)
    console.print(item)
    return out.getvalue()


@pytest.mark.parametrize(("table", "figures", "width"), [(memory_table, 2, 60), (traffic_table, 4, 80)])
def test_a_narrow_table_wraps_its_words_and_cuts_no_figure(table, figures, width):
    text = printed(table(result_of(2)), width)
    assert text.count(f"{LARGE:,}") == figures
    assert all(len(line) <= width for line in text.splitlines())


def test_what_is_held_at_one_time_stands_below_the_peaks_of_several():
    text = " ".join(printed(memory_table(result_of(2)), 80).split())
    assert "states and buffers together: 77 at the fullest" in text


def shown(result, monkeypatch):
    monkeypatch.setattr("zero3d.train.report.write_png", lambda _: "curves: run.png")
    monkeypatch.setattr("zero3d.train.report.shown_path", str)
    out = StringIO()
    console = Console(file=out, width=80)
    monkeypatch.setattr(type(console), "encoding", "utf-8")
    show(result, console)
    return out.getvalue()


def test_a_session_without_a_step_says_where_its_runs_results_are_and_nothing_else(monkeypatch):
    text = shown(result_of(0, before=40), monkeypatch)
    assert text.startswith("held-out loss: 2.0")
    assert "exported: runs/mine/hf" in text
    assert len(text.splitlines()) == 3


def test_a_curve_is_drawn_of_a_run_that_is_long_enough_for_one(monkeypatch):
    title = "loss (nats per token)"
    assert title not in shown(result_of(2), monkeypatch)
    assert title in shown(result_of(2, before=8), monkeypatch)


def test_one_step_is_no_steps():
    assert [steps_of(result_of(count)) for count in (1, 1200)] == ["1 step", "1,200 steps"]
