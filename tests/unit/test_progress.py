"""What people look at while a run goes on: a live bar on a terminal, plain lines elsewhere; and the MFU in it."""

from io import StringIO

import pytest
from models import hf
from rich.console import Console

from zero3d.train.flops import flops_per_token, peak_flops
from zero3d.train.progress import Progress, duration

RECORD = {
    "loss": 2.5, "grad_norm": 1.25, "lr": 1e-4, "tokens_per_s": 12345.0, "mfu": 0.412,
    "memory_bytes": 566_000_000, "traffic_bytes": 5_800_000, "skipped": 2,
}  # fmt: skip


def shown(terminal, width=80, every=None):
    out = StringIO()
    progress = Progress(Console(file=out, force_terminal=terminal, width=width), every)
    for step in progress.track(1, 40):
        progress.show({**RECORD, "step": step})
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_both_forms_tell_everything_in_80_columns(terminal):
    text = shown(terminal)
    wanted = ["2.5", "1.25", "12,345 tok", "41.2%", "process 566.0 MB", "5.8 MB sent", "2 skipped"]
    assert [part for part in wanted if part not in text] == []
    assert ("1.0e-04" if terminal else "1.00e-04") in text
    assert ("\x1b[" in text) == terminal
    assert not terminal or all(
        len(line) <= 80 for line in shown(True).replace("\r", "\n").split("\n") if "\x1b" not in line
    )


def test_lines_are_few_where_there_is_no_terminal():
    assert len(shown(False).splitlines()) == 21  # of 40 steps: every second one, and the first


def test_a_terminal_keeps_a_line_above_its_bar_where_log_every_asks_for_lines():
    assert " grad norm " not in shown(True)
    assert shown(True, width=200, every=10).count(" grad norm ") == 5  # steps 1, 10, 20, 30 and 40


def test_a_plain_line_says_how_long_the_rest_takes():
    out, now = StringIO(), iter(range(0, 10**9, 90))
    progress = Progress(Console(file=out, width=200), every=1, clock=lambda: next(now))
    for step in progress.track(11, 14):  # a session that goes on after step 10; 90 s a step
        progress.show({**RECORD, "step": step})
    ends = [line.rpartition("  ")[2] for line in out.getvalue().splitlines()]
    assert ends == ["4:30 left", "3:00 left", "1:30 left", "2 skipped"]
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3600, 86400 * 2 + 10800)] == [
        "0:00", "1:00", "59:59", "01:00:00", "2 d 03:00:00",
    ]  # fmt: skip


def test_the_time_left_forgets_the_first_step_and_is_in_lines_of_evaluations_too():
    out, now = StringIO(), iter([0, 0, 600, 660, 670, 720])  # made, begun, step 1, evaluation and step 2, step 3
    progress = Progress(Console(file=out, width=200), every=1, clock=lambda: next(now))
    for step in progress.track(1, 5):
        if step == 2:
            progress.show_evaluation(step, {"validation_loss": 2.5, "perplexity": 12.18, "accuracy": 0.75})
        progress.show({**RECORD, "skipped": 0, "step": step})
        if step == 3:
            break
    lines = out.getvalue().splitlines()
    assert lines[1] == "step 2: held-out loss 2.500000, perplexity 12.180, accuracy 0.75  3:00 left"
    assert [line.rpartition("  ")[2] for line in lines] == ["40:00 left", "3:00 left", "3:30 left", "2:00 left"]


def test_only_the_experts_that_a_token_meets_count():
    model = hf("qwen3_moe")
    everything = flops_per_token(model, 16)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    model.config.num_experts_per_tok = model.config.num_experts
    assert flops_per_token(model, 16) - everything == pytest.approx(6 * stacked / 2)


def test_the_peak_is_known_for_half_precision_only():
    assert peak_flops("NVIDIA H200", "bf16") == peak_flops("NVIDIA H200", "fp16") == 989e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("some other card", "bf16") is None
