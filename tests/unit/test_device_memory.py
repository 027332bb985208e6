"""What a device holds and its allocator has reserved, in every report of an accelerator; the CPU's stay as they were."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero3d.engine.report import HeldRow
from zero3d.tools.advice.plan_check import check_line, checked_memory
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.train.device_memory import fullest, host_peak, memory_bytes, memory_peak, process_peak, reserved_bytes
from zero3d.train.measure import memory_rows
from zero3d.train.progress import amounts
from zero3d.train.report import summary

ALLOCATED, RESERVED = 61_900_000_000, 63_000_000_000
ESTIMATE = evaluate(gpt(8, 1024, 16, 50304, 1024), cluster("a100-80", 8, 1), ParallelPlan(dp=8))


class World:
    """Two ranks, of which the other has allocated a byte less and reserved one more."""

    def exchange(self, figures):
        assert figures.dtype == torch.float64
        return torch.stack([figures, figures + torch.tensor([-1.0, 1.0])[: len(figures)].double()])


@pytest.fixture
def engine(monkeypatch):
    """An engine on the accelerator "meta", whose module is a stand-in."""
    device = torch.device("meta")
    module = SimpleNamespace(
        max_memory_allocated=lambda of: ALLOCATED * (of == device), max_memory_reserved=lambda of: RESERVED * (of == device)
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    return SimpleNamespace(mesh=SimpleNamespace(device=device), world=World(), units=[])


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", None)
    return SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")), world=World())


def test_an_accelerator_has_two_figures(engine):
    assert (memory_bytes(engine), memory_peak(engine), checked_memory(engine)) == (ALLOCATED,) * 3
    assert reserved_bytes(engine) == RESERVED
    assert fullest(engine, ALLOCATED) == (ALLOCATED, RESERVED + 1)


def test_the_cpu_has_one(on_cpu):
    assert memory_bytes(on_cpu) > 1 << 20
    assert memory_peak(on_cpu) == process_peak() >= memory_bytes(on_cpu) // 2
    assert reserved_bytes(on_cpu) is None
    assert fullest(on_cpu, 1000) == (1000, None)


@pytest.mark.parametrize(("local_ranks", "most"), [((0, 1, 0, 1), 60), ((0, 1, 2, 3), 110), ((0, 0, 0, 1), 50)])
def test_a_hosts_peak_is_of_its_ranks_together(monkeypatch, local_ranks, most):
    flags = torch.tensor([[float(rank == 0)] for rank in local_ranks], dtype=torch.float64)
    peaks = torch.tensor([[10.0], [50.0], [20.0], [30.0]], dtype=torch.float64)
    given = []

    class Four:
        def exchange(self, figures):
            given.extend(figures.tolist())
            return torch.cat([peaks, flags], 1)

    monkeypatch.setattr("zero3d.train.device_memory.process_peak", lambda: 7)
    assert host_peak(SimpleNamespace(world=Four(), mesh=SimpleNamespace(local_rank=0))) == most
    assert given == [7.0, 1.0]


def test_the_plan_line_names_both():
    told = check_line(ESTIMATE, ALLOCATED, 1.0, RESERVED, "the data sheet")
    assert told.startswith("allocated memory: planned ")
    assert ", measured 61.9 GB (" in told
    assert " %), 63.0 GB reserved; a step: planned " in told
    assert " s by the data sheet, measured 1 s; largest planned part: " in told
    on_cpu = check_line(ESTIMATE, ALLOCATED, 1.0, None, None)
    assert on_cpu.startswith("model states: planned ")
    assert "reserved" not in on_cpu
    assert on_cpu.endswith("; a step: measured 1 s (a CPU's is planned with plan.cluster alone)")
    nothing = replace(ESTIMATE, memory=replace(ESTIMATE.memory, states=0.0))
    assert "model states: planned 0 B, measured 0 B; a step: " in check_line(nothing, 0, 1.0, None, None)


def test_a_step_names_both():
    record = {"memory_bytes": ALLOCATED, "traffic_bytes": 0, "skipped": 0}
    assert amounts(record) == "process 61.9 GB"
    assert amounts(record | {"reserved_bytes": RESERVED}) == "61.9 GB allocated  63.0 GB reserved"


@pytest.mark.parametrize(
    ("reserved", "most"), [(RESERVED, "61.9 GB allocated  63.0 GB reserved"), (None, "process 61.9 GB")]
)
def test_the_summary_names_both(reserved, most):
    result = SimpleNamespace(
        peak_memory=ALLOCATED, peak_reserved=reserved, steps=[{"step": 1, "tokens_per_s": 8.0}], seconds=1.0, held_out_loss=float("nan"), fingerprint="",
        reloaded_loss=float("nan"), history=[], exports=[], checkpoint=Path("c"), folder=SimpleNamespace(root="r", metrics="m"), averaged_loss=float("nan"), ranks=1,
        slowest=None, of_sources={}, values={}, expert_load={}, trace=None,
        config=SimpleNamespace(checkpoint=SimpleNamespace(export=False)),
    )  # fmt: skip
    said = f"trained 1 step in 1.0 s, median step 8 tokens/s; fullest rank at its peak: {most}"
    assert [line for line in summary(result) if "peak" in line] == [said]


def rows(engine):
    held = [HeldRow(category, "device", "fp32", 1, 1, None, 1, 1, 1, 1) for category in CATEGORIES]
    return {row.consumer: row.measured for row in memory_rows(SimpleNamespace(memory=held), {"fp32": 5}, engine)}


CATEGORIES = ("parameters", "gradients", "optimizer", "padding")


def test_the_table_of_an_accelerator_ends_with_both(engine):
    assert list(rows(engine).items())[-2:] == [("device: allocated", ALLOCATED), ("device: reserved", RESERVED)]


def test_the_table_of_the_cpu_ends_with_activations(on_cpu):
    assert list(rows(on_cpu).items())[-1] == ("activations", 5)
