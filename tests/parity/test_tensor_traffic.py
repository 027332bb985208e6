"""What tp ranks and replicas send equals the formulas, module by module and element by element."""

import pytest
import torch
from tensors import tiny

import zero3d
from zero3d.activations import recompute
from zero3d.train.sent import Done, Traffic, planned_pipeline, planned_replica, planned_tensor

M, STEPS, ROWS, LENGTH = 2, 2, 2, 8
AXES = ("tp", "pp", "replica")


def traffic(name, mesh=None, sequence=False, policy="none", lora=False, dropout=0.0, precision="fp32"):
    """(measured, formula) of a few steps on this rank, by (operation, module), and the names of its passages."""
    model = tiny(name, lora=lora, dropout=dropout)
    if policy != "none":
        recompute(model, policy)
    torch.manual_seed(3)
    engine = zero3d.Engine(
        model, stage=1, mesh=zero3d.Mesh(**(mesh or {"tp": 2})), precision=precision, sequence_parallel=sequence,
        accumulate=M,
    )  # fmt: skip
    counted = Traffic(engine)
    for _ in range(STEPS):
        ids = torch.randint(3, 60, (ROWS, LENGTH))
        engine.train_batch([{"input_ids": ids, "labels": ids, "use_cache": False}] * M)
    with counted.apart():
        engine.evaluate([{"input_ids": ids, "labels": ids}] * M)
    done = Done(STEPS, 0, M, STEPS * M * ROWS * LENGTH)
    planned = planned_pipeline(engine, done) | planned_tensor(engine, done) | planned_replica(engine, STEPS)
    measured = {(f"{e.op} ({e.axis})", e.unit): e.moved for e in counted.entries() if e.axis in AXES and any(e.moved)}
    return measured, planned, engine.passages


@pytest.mark.parametrize(("name", "options"), [
    ("llama", {}), ("llama", {"sequence": True}), ("llama", {"precision": "bf16"}), ("gpt2", {}),
    ("gpt2", {"sequence": True, "policy": "full"}), ("gpt2", {"dropout": 0.1, "policy": "full"}), ("qwen3", {}),
    ("moe", {}), ("moe", {"policy": "full"}), ("llama", {"policy": "every:2", "sequence": True}),
    ("llama", {"policy": "every:2"}), ("llama", {"policy": "selective"}), ("llama", {"policy": "full", "sequence": True}),
    ("llama", {"lora": True}), ("gpt2", {"lora": True, "sequence": True}),
])  # fmt: skip
def test_tp_ranks_send_what_the_plan_says(ranks, name, options):
    for measured, planned, _ in ranks(2, traffic, name, None, *options_of(options)):
        assert measured == planned


def options_of(options):
    return [
        options.get(key, other)
        for key, other in {
            "sequence": False,
            "policy": "none",
            "lora": False,
            "dropout": 0.0,
            "precision": "fp32",
        }.items()
    ]


@pytest.mark.parametrize(
    ("mesh", "sequence"), [({"tp": 2, "pp": 2}, True), ({"tp": 4}, False), ({"tp": 2, "dp": 2}, False)]
)
def test_and_on_other_meshes(ranks, mesh, sequence):
    for measured, planned, _ in ranks(4, traffic, "llama" if mesh != {"tp": 4} else "gpt2", mesh, sequence):
        assert measured == planned
