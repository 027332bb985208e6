"""What a run prints at its end: tables that cut no figure, and no more than its session has to tell."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from zero3d.account.traffic import Moved
from zero3d.config import load
from zero3d.train.report import memory_table, show, steps_of, traffic_table
from zero3d.train.tables import MemoryRow, TrafficRow, memory_verdict, traffic_verdict

LARGE = 31_182_848_123


def result_of(steps, before=0):
    """A run of which this session made some steps, after those that were there."""
    moved = Moved(LARGE, LARGE, LARGE)
    return SimpleNamespace(
        config=load(None),
        ranks=2,
        history=[{"step": step, "loss": 1.0} for step in range(1, before + steps + 1)],
        steps=[{"step": before + 1 + number, "tokens_per_s": 1000.0} for number in range(steps)],
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
        slowest=None,
        trace=None,
        folder=SimpleNamespace(root="runs/mine", metrics="runs/mine/metrics.jsonl", curves="run.png"),
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
    assert text.startswith("results: runs/mine\nloss: 1.000000")
    assert "held-out loss: 2.0" in text
    assert "exported: runs/mine/hf" in text
    assert len(text.splitlines()) == 5


def test_a_curve_is_drawn_of_a_run_that_is_long_enough_for_one(monkeypatch):
    title = "loss (nats per token)"
    assert title not in shown(result_of(2), monkeypatch)
    assert title in shown(result_of(2, before=8), monkeypatch)


def test_one_step_is_no_steps():
    assert [steps_of(result_of(count)) for count in (1, 1200)] == ["1 step", "1,200 steps"]


def moved(op, formula, measured):
    return TrafficRow(op, Moved(1, 2, formula), Moved(1, 2, measured), formula == measured)


def test_last_lines_begin_with_the_results_and_say_in_a_line_each_whether_the_tables_are_equal(monkeypatch):
    result = result_of(2)
    result.steps[0]["tokens_per_s"] = 1.0  # of the first step, which allocates
    result.slowest = "slowest rank 1 (b): +8 % over the median in 40 of 50 steps: data"
    result.traffic = [moved("all_gather", 3_000_000, 3_000_000), moved("exchange", 1_000_000, 1_000_000)]
    begun = [line.split(":")[0].rstrip() for line in shown(result, monkeypatch).splitlines() if line.strip()]
    assert begun[:3] == ["results", "loss", "held-out loss"]
    text = " ".join(shown(result, monkeypatch).split())
    assert (
        "trained 2 steps in 1.0 s, median step 1,000 tokens/s (500 a rank); fullest rank at its peak: process 500.0 MB"
        in text
    )
    assert text.index("fullest rank") < text.index(result.slowest) < text.index("memory of rank 0: all 1 rows equal")
    assert (
        "memory of rank 0: all 1 rows equal to their formulas (buffers: at most): communication buffers 31.2 GB; 77 B"
        in text
    )
    assert "traffic of rank 0: all 2 rows equal to their formulas: 4 MB sent, 2 MB a step" in text
    assert f"{LARGE:,}" not in text
    assert "to the byte: zero3d report runs/mine, or log.report=full" in text
    result.config = load(None, ["log.report=full"])
    full = shown(result, monkeypatch)
    assert f"{LARGE:,}" in full
    assert "to the byte" not in full


def test_the_last_loss_is_no_average_and_a_prompt_of_one_s_own_is_named(monkeypatch):
    result = result_of(2, before=38)
    result.history[-1]["loss"], result.sample = 9.0, "once more"
    result.config = load(None, ["evaluate.prompt=once"])
    text = shown(result, monkeypatch)
    assert "loss: 9.000000 in the last step, 1.0000 on the average of the last 21" in text
    assert "a sample that starts with 'once':\n    once more" in text


def row(consumer, measured, formula=None, agrees=True, place="device"):
    return MemoryRow(consumer, "fp32", measured if formula is None else formula, False, measured, agrees, place)


def test_rows_that_differ_are_named_with_both_figures():
    rows = [
        row("parameters", 1_000_000),
        row("gradients", 5, 4, agrees=False),
        row("activations", 7, None, agrees=None),
    ]
    head, wrong = memory_verdict(rows, 9)
    assert head.startswith("memory of rank 0: 1 of 2 rows NOT equal to their formulas: parameters 1 MB")
    assert wrong == "  gradients: 5 bytes measured, 4 by formula"
    said = traffic_verdict([moved("all_gather", 1, 1), moved("exchange", 2, 3)], 2)
    assert said == "traffic of rank 0: 1 of 2 rows NOT equal to their formulas (exchange): 4 B sent, 2 B a step"
    assert traffic_verdict([], 2) == "traffic of rank 0: one rank sends nothing"


@pytest.mark.parametrize(("padding", "explained"), [(300, False), (301, True)])
def test_padding_is_explained_where_it_is_more_than_a_tenth_of_the_states(padding, explained):
    rows = [row(name, 1000) for name in ("parameters", "gradients", "optimizer states")]
    rows += [row("activations", 10_000), row("padding", padding), row("optimizer states", 9_000, place="host")]
    lines = list(memory_verdict(rows, 9))
    assert [line for line in lines if "shards" in line] == lines[1:]
    assert len(lines) == 1 + explained


def test_padding_of_a_device_that_holds_no_states_is_no_share_of_them():
    assert len(list(memory_verdict([row("padding", 300), row("parameters", 1000, place="host")], 9))) == 1
