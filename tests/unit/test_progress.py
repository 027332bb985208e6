"""What people look at while a run goes on: a live bar on a terminal, plain lines elsewhere; and the MFU in it."""

from io import StringIO

import pytest
from models import hf
from rich.console import Console

from zero3d.train.flops import flops_per_token, peak_flops
from zero3d.train.progress import Progress

RECORD = {
    "loss": 2.5, "grad_norm": 1.25, "lr": 1e-4, "tokens_per_s": 12345.0, "mfu": 0.412,
    "memory_bytes": 566_000_000, "traffic_bytes": 5_800_000, "skipped": 2,
}  # fmt: skip


def shown(terminal, width=80):
    out = StringIO()
    progress = Progress(Console(file=out, force_terminal=terminal, width=width))
    for step in progress.track(1, 40):
        progress.show({**RECORD, "step": step})
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_both_forms_tell_everything_in_80_columns(terminal):
    text = shown(terminal)
    wanted = ["2.5", "1.25", "12,345 tok", "41.2%", "566.0 MB held", "5.8 MB sent", "2 skipped"]
    assert [part for part in wanted if part not in text] == []
    assert ("1.0e-04" if terminal else "1.00e-04") in text
    assert ("\x1b[" in text) == terminal
    assert not terminal or all(
        len(line) <= 80 for line in shown(True).replace("\r", "\n").split("\n") if "\x1b" not in line
    )


def test_lines_are_few_where_there_is_no_terminal():
    assert len(shown(False).splitlines()) == 21  # of 40 steps: every second one, and the first


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
