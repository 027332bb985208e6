"""What an engine gives to people prints as they read it: results of steps, bytes held, traffic."""

import pytest
import torch

from zero3d import StepResult
from zero3d.distributed.ledger import Ledger
from zero3d.engine.accounting import MemoryEntry


def result(reason="applied", scale=1.0, norm=1.23456):
    numbers = torch.tensor(norm), torch.tensor(scale), torch.tensor(3e-4, dtype=torch.float64)
    return StepResult(torch.tensor(reason == "applied"), *numbers, reason)


@pytest.mark.parametrize(("given", "said"), [
    (result(), "step applied, gradient norm 1.23, lr 0.0003"),
    (result("overflow", 32768.0, float("inf")), "step skipped (overflow), gradient norm inf, lr 0.0003, loss scale 32768"),
    (result("no targets"), "step skipped (no targets), gradient norm 1.23, lr 0.0003"),
    (result("not due", norm=float("nan")), "no step: not due"),
])  # fmt: skip
def test_a_step_result_prints_what_the_step_did(given, said):
    assert str(given) == said
    assert f"{[given]}" == f"[StepResult({said})]"


def test_a_step_that_is_not_due_prints_without_reading_the_device():
    unread = torch.empty((), device="meta")
    assert str(StepResult(unread, unread, unread, unread, "not due")) == "no step: not due"


def test_a_memory_entry_prints_decimal_bytes():
    entry = MemoryEntry("parameters", "device", 1_250_000_000, 1_250_000_000, 3_000, 999, 0)
    said = "parameters on the device: planned 1.25 GB, measured 1.25 GB, peak 3.00 kB, at the fullest instant 999 B, now 0 B"
    assert (str(entry), repr([entry])) == (said, f"[MemoryEntry({said})]")
    assert "planned" not in str(entry._replace(planned=None))


def test_a_ledger_prints_a_table_by_axis_and_operation():
    ledger = Ledger()
    assert str(ledger) == "nothing was sent"
    for unit in ("a", "b"):
        ledger.record("all_gather", "dp", unit, 1000, 2)
        ledger.record("exchange", "tp", unit, 5, 8)
    ledger.record("reduce_scatter", "dp", "a", 1_000_000, 4)
    assert str(ledger).splitlines() == [
        "axis  operation       calls   elements     sent",
        "dp    all_gather          2      2,000  4.00 kB",
        "dp    reduce_scatter      1  1,000,000  4.00 MB",
        "tp    exchange            2         10     80 B",
    ]
