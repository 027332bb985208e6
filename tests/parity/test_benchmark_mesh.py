"""What benchmarks/mesh.py compares is the same training: losses agree, and the collectives are those of the plan."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SIZE = ["--model", "layers=2,d=128,vocab=512", "--seq", "64", "--micro-batches", "2", "--rounds", "3"]


def turns(options):
    sys.path.insert(0, BENCHMARKS)
    try:
        import mesh
    finally:
        sys.path.remove(BENCHMARKS)
    arguments = mesh.parse([*SIZE, *options])
    names = [mesh.peer_of(arguments), *(f"zero3d-{stage}" for stage in arguments.stages)]
    _, losses, collectives = mesh.take_turns(torch.device("cpu"), arguments, names)
    return losses, collectives


@pytest.mark.long
@pytest.mark.parametrize(("qkv", "torchs"), [("fused", 13), ("separate", 17)])
def test_tensor_parallel_alone_has_the_loss_of_torchs_plan_and_fewer_collectives(ranks, qkv, torchs):
    alone = ["--pp", "1", "--dp", "1", "--tp", "2", "--stages", "0", "--qkv", qkv]
    for losses, collectives in ranks(2, turns, alone):
        assert losses["zero3d-0"] == pytest.approx(losses["dtensor"], rel=1e-4)
        # of a micro-batch: embedding, 2 layers x 4, head, loss; torch takes 3 for the loss, and q, k and v apart
        assert collectives == {"zero3d-0": 2 * 11, "dtensor": 2 * torchs}


@pytest.mark.long
def test_on_all_three_axes_the_loss_is_that_of_torchs_own_parts(ranks):
    for losses, _ in ranks(8, turns, ["--stages", "2,3"]):
        assert losses["zero3d-2"] == losses["zero3d-3"] == pytest.approx(losses["fsdp2"], rel=1e-4)
