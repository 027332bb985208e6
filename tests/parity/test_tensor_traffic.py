"""What tp ranks and replicas send equals the formulas, module by module and element by element."""

import pytest
import torch
from tensors import tiny

import zero3d
from zero3d.account.traffic import Moved, Sent
from zero3d.activations.recomputation import recompute
from zero3d.engine.traffic_formulas import SessionCounts, planned_model_group, planned_pipeline, planned_tensor
from zero3d.train.traffic import TrainingTraffic, by_operation

M, STEPS, ROWS, LENGTH = 2, 2, 2, 8
AXES = ("tp", "pp", "replica")


def traffic(name, options):
    """What `options` describes: see `measured_and_planned`."""
    return measured_and_planned(name, **options)


def measured_and_planned(
    name, mesh=None, sequence=False, policy="none", lora=False, dropout=0.0, precision="fp32", parts=False
):
    """What a few steps sent from this rank over the axes of a replica, by (operation, module), and the formula."""
    model = tiny(name, lora=lora, dropout=dropout)
    if policy != "none":
        recompute(model, policy)
    torch.manual_seed(3)
    engine = zero3d.Engine(
        model, stage=1, mesh=zero3d.Mesh(**(mesh or {"tp": 2})), precision=precision, sequence_parallel=sequence,
        accumulate=M, partition_activations=parts,
    )  # fmt: skip
    counted = TrainingTraffic(engine)
    for _ in range(STEPS):
        ids = torch.randint(3, 60, (ROWS, LENGTH))
        engine.train_batch([{"input_ids": ids, "labels": ids, "use_cache": False}] * M)
    with counted.excluded():
        engine.evaluate([{"input_ids": ids, "labels": ids}] * M)
    done = SessionCounts(STEPS, 0, M, STEPS * M * ROWS * LENGTH)
    parts = engine._parts
    planned = [*planned_pipeline(parts, done), *planned_tensor(parts, done), *planned_model_group(parts, STEPS)]
    return by_operation(e for e in counted.entries() if e.axis in AXES and any(e.moved)), by_operation(planned)


OFTEN = [
    ("gpt2", {"sequence": True, "policy": "full"}), ("moe", {"policy": "full"}), ("llama", {"lora": True}),
    ("llama", {"policy": "full", "parts": True}),
]  # fmt: skip
SELDOM = [
    ("llama", {}), ("llama", {"sequence": True}), ("gpt2", {}), ("next", {}), ("llama4", {}),
    ("llama", {"precision": "bf16"}), ("gpt2", {"dropout": 0.1, "policy": "full"}), ("qwen3", {}), ("moe", {}),
    ("gemma2", {"policy": "full"}),
    ("llama", {"policy": "every:2"}), ("llama", {"policy": "every:2", "sequence": True}),
    ("llama", {"policy": "selective"}), ("llama", {"policy": "full", "sequence": True}),
    ("gpt2", {"lora": True, "sequence": True}), ("mla", {"policy": "full"}), ("gpt_oss", {}), ("opt", {"sequence": True}),
    ("llama", {"policy": "every:2", "parts": True}), ("gpt2", {"policy": "selective", "parts": True, "precision": "bf16"}),
    ("llama", {"policy": "full", "parts": True, "lora": True}),
    *((name, {"policy": "full", "parts": True}) for name in ("gemma3n_text", "moe", "gpt_oss", "mla")),
    ("bloom", {"policy": "selective"}), ("gemma3n_text", {}), ("falcon_h1", {}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in SELDOM)]
)
def test_tp_ranks_send_what_the_plan_says(ranks, name, options):
    for measured, planned in ranks(2, traffic, name, options):
        assert measured == planned


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [
    ("llama", {"mesh": {"tp": 2, "pp": 2}, "sequence": True}), ("gpt2", {"mesh": {"tp": 4}}),
    ("llama", {"mesh": {"tp": 2, "dp": 2}}), ("llama", {"mesh": {"tp": 2, "pp": 2}, "policy": "full", "parts": True}),
])  # fmt: skip
def test_and_on_other_meshes(ranks, name, options):
    for measured, planned in ranks(4, traffic, name, options):
        assert measured == planned


def test_levels_of_the_data_axis_are_rows_of_their_own():
    """Sums between copies of shards are all-reduces; gathers from a second shard stay among neighbours."""
    rows = [Sent(axis, op, "a", Moved(1, 2, 4)) for axis, op in (
        ("shard", "all_gather"), ("node", "all_gather"), ("shard", "reduce_scatter"), ("replicate", "all_reduce")
    )]  # fmt: skip
    assert list(by_operation(rows)) == ["all_gather", "all_gather (node)", "reduce_scatter", "all_reduce"]
