"""A post-mortem as text and JSON, of given figures; where an error was raised; which errors say that memory is gone."""

import json

import pytest
import torch

from zero3d.errors import CheckpointError, MemoryExhaustedError, OutOfBudget, Zero3dError
from zero3d.train.callstack import doing, frames_of
from zero3d.train.memory_report import (
    Advice,
    Live,
    LiveTensor,
    MemoryReport,
    RankProcess,
    Remedy,
    Shortage,
    as_json,
    as_text,
)
from zero3d.train.post_mortem import find_exhaustion

GB = 10**9
RELIEFS = (Remedy(("activations=selective",), 3e9, 0.031, True), Remedy(("zero.stage=3",), 4e8, -0.004, False))
REPORT = MemoryReport(
    rank=1, ranks=4, host="box", time="2026-01-01T00:00:00+0000", step=3,
    doing="backward of model.layers.2.mlp (modeling_llama.py:180)",
    shortage=Shortage("device", "cuda:0, NVIDIA H100", 85 * GB, 9 * GB // 10, 3 * GB // 2, 6 * GB // 10, 79 * GB, 81 * GB),
    live=(Live("device", "parameters", 10 * GB), Live("device", "wire", 0), Live("host", "optimizer", 12 * GB)),
    tensors=(LiveTensor("logits in forward (model.py:7)", (8, 4096, 32000), "float32", 42 * GB // 10),),
    advice=Advice(RELIEFS, 6 * GB // 10, 86 * GB, "zero3d train out/config.yaml activations=selective --resume auto"),
)  # fmt: skip


def test_the_text_says_who_where_how_much_what_and_what_to_change():
    assert as_text(REPORT).splitlines() == [
        "rank 1 of 4 (host box) ran out of memory: cuda:0, NVIDIA H100, 85.0 GB",
        "step 3, backward of model.layers.2.mlp (modeling_llama.py:180): asked for 1.5 GB where 900.0 MB were free; "
        "79.0 GB in tensors, 81.0 GB reserved by the allocator for them",
        "",
        "live on rank 1, by category and place:",
        "   device  parameters  10.0 GB",
        "   host    optimizer   12.0 GB",
        "",
        "largest tensors (autograd holds others that have no name):",
        "   4.2 GB  [8, 4096, 32000]  float32  logits in forward (model.py:7)",
        "",
        "cheapest settings to change, as zero3d plan predicts for a rank's device (at least 600.0 MB too much; the plan of "
        "this run has a peak of 86.0 GB):",
        "   activations=selective    -3.0 GB  +3.1 % time  enough",
        "   zero.stage=3           -400.0 MB  -0.4 % time  not enough alone",
        "for example: zero3d train out/config.yaml activations=selective --resume auto",
    ]


def test_a_host_has_its_ranks_and_no_advice_says_why():
    low = Shortage("host", "cgroup /sys/fs/cgroup/a", 2 * GB, 50_000_000, None, GB // 10, falling=4e8)
    processes = (RankProcess(0, 41, 900_000_000), RankProcess(1, 42, 1_000_000_000))
    advice = Advice(why_none="no plan to compare this run with: it cannot be traced")
    report = MemoryReport(1, 2, "box", "now", None, "", low, processes=processes, advice=advice)
    text = as_text(report)
    assert text.startswith(
        "rank 1 of 2 (host box) ran out of memory: cgroup /sys/fs/cgroup/a, 2.0 GB\nbefore the first step: 50.0 MB are "
        "left and it falls by 400.0 MB a second; ended before the kernel kills a process\n\n"
    )
    assert "   nothing allocated by the engine yet" in text
    assert "   rank 0  process 41  900.0 MB\n   rank 1  process 42    1.0 GB\n" in text
    assert text.endswith("no setting to advise: no plan to compare this run with: it cannot be traced")


def test_the_same_as_data():
    tree = json.loads(json.dumps(as_json(REPORT)))
    assert (tree["version"], tree["kind"], tree["rank"], tree["step"]) == (1, "out-of-memory", 1, 3)
    assert tree["shortage"]["asked"] == 3 * GB // 2
    assert tree["live"][0] == {"place": "device", "category": "parameters", "nbytes": 10 * GB}
    assert tree["tensors"][0]["shape"] == [8, 4096, 32000]
    assert tree["advice"]["reliefs"][0] == {
        "settings": ["activations=selective"], "saved_bytes": 3e9, "slower": 0.031, "enough": True,
    }  # fmt: skip


def caused(error, cause):
    """An error that another one is the cause of."""
    try:
        raise error from cause
    except Exception as raised:
        return raised


def told_by(rank):
    error = Zero3dError("rank 3 failed")
    error.from_rank = rank
    return error


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize(("error", "found"), [
    (OOM, True),
    (caused(Zero3dError("model chunk 1 of 2 failed"), OOM), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (MemoryError(), True),
    (OutOfBudget("a rank's states on the host take 9 GB"), False),
    (MemoryExhaustedError("said already"), False),
    (caused(told_by(3), OOM), False),
    (CheckpointError("out of memory is what its name says"), False),
    (ValueError("x"), False),
])  # fmt: skip
def test_what_says_that_memory_is_exhausted(error, found):
    assert (find_exhaustion(error) is not None) is found


class Doubling(torch.nn.Module):
    def forward(self, x):
        raise OOM


def test_the_callstack_says_phase_module_and_line():
    outer = torch.nn.Sequential(torch.nn.Identity(), Doubling())
    try:
        outer(torch.zeros(1))
    except torch.OutOfMemoryError as error:
        frames = frames_of(error)

    class Engine:
        module = outer

    line = frames[-1].f_lineno
    assert doing(frames, Engine) == f"1 (test_memory_report.py:{line})"
    assert doing(frames, None) == f"(test_memory_report.py:{line})"
    assert doing([], None) == ""
