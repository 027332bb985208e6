"""examples/72b_128gpu.yaml on a fake group of 128 ranks under FakeTensorMode: no data, every byte on the account.

Nothing arrives on a fake group and no tensor has values: the numbers that decide about the step are assumed.

    Qwen2.5 72B  hidden 8,192, inner 29,568, vocabulary 152,064, 64 heads of 128 and 8 of keys and values, 80 blocks
    PP 8 x TP 8 x DP 2: 10, 11, 5 x 10 and 9 blocks by stage (the head costs one), 1/8 of every matrix per tp rank, optimizer states cut over 2
"""

from math import prod
from pathlib import Path
from shlex import quote

import pytest
import torch
import torch.distributed as dist
from models import planned_bytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero3d.account.states import engine_bytes
from zero3d.config import load
from zero3d.memory.arena import STATES
from zero3d.models.open import Opened, open_model
from zero3d.tools.cli.main import main
from zero3d.train.setup.build import build_engine
from zero3d.train.setup.inputs import open_mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "72b_128gpu.yaml"
TP, DP, MICRO_BATCHES = 8, 2, 8
HIDDEN, INNER, VOCAB, KV = 8192, 29568, 152064, 8 * 128
MATRICES = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER  # q, o; k, v; gate, up, down
CUT = MATRICES + HIDDEN + 2 * KV  # with the biases of q, k and v
BLOCK = CUT // TP + 2 * HIDDEN  # 109,724,928 on a tp rank: norms are whole on all
EMBEDDING = HEAD = VOCAB * HIDDEN // TP
ELEMENTS = {0: EMBEDDING + 10 * BLOCK, 1: 11 * BLOCK, 7: 9 * BLOCK + HIDDEN + HEAD}  # by stage
MODEL = 80 * (CUT + 2 * HIDDEN) + HIDDEN + 2 * VOCAB * HIDDEN  # 72,706,203,648


def built(pp, dp, tp):
    """The engine that `zero3d train` would build on this rank; weights are not made, but for their shapes."""
    config = load(EXAMPLE)
    dist.init_process_group("fake", rank=(pp * DP + dp) * TP + tp, world_size=128, store=FakeStore())
    module = open_model(config.model).module

    def weights(name, box):
        return torch.zeros([stop - start for start, stop in box], dtype=torch.bfloat16)

    return build_engine(config, Opened(module, weights), open_mesh(config), MICRO_BATCHES, steps=10)


def check(engine, pp):
    """All bytes equal engine_bytes of this rank's elements, and the arena's account of them."""
    wanted = engine_bytes(1, DP, "bf16").times(ELEMENTS[pp])
    if pp == 7 and engine.dp.rank == 1:  # its half of the last norm's unit is padding, without m and v
        wanted = wanted._replace(optimizer=wanted.optimizer - 8 * HIDDEN // DP)
    held = [engine.arena.held(category) for category in STATES[:3]]
    place = engine.mesh.place
    print(f"pp {place.pp} dp {place.dp} tp {place.tp}: {ELEMENTS[pp]:,} elements,", *map(int, held), "bytes")
    assert list(planned_bytes(engine)) == list(wanted) == held
    assert sum(map(prod, engine.full_model.shapes.values())) == MODEL == 72_706_203_648


def one_rank(pp, dp, tp):
    """Build and step on one rank."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        engine = built(pp, dp, tp)
        check(engine, pp)
        ids = torch.zeros(1, 16, dtype=torch.int64)
        engine.train_batch([{"input_ids": ids, "labels": ids}] * MICRO_BATCHES)
        check(engine, pp)
    assert (engine.steps, engine.mesh.pp, engine.mesh.dp, engine.mesh.tp) == (1, 8, DP, TP)
    assert [action.kind for action in engine.pipeline.recorded].count("B") == MICRO_BATCHES


@pytest.mark.long
@pytest.mark.parametrize(("pp", "dp", "tp"), [(0, 1, 7), (1, 0, 5), (7, 1, 0)])
def test_a_rank_of_128_builds_and_steps_with_the_bytes_of_the_formula(alone, pp, dp, tp):
    """In a process of its own: a second build after such a step crashed torch 2.13 in one process."""
    alone(one_rank, pp, dp, tp)


@pytest.mark.parametrize("target", ["slurm", "torchrun", "k8s"])
def test_launch_prints_what_starts_it_on_16_nodes_of_8(capsys, target):
    assert main(["launch", target, str(EXAMPLE), "--nodes", "16"]) == 0
    text = capsys.readouterr().out
    for word in {
        "slurm": ["--nodes=16", "--ntasks-per-node=8", "--gpus-per-node=8", f"zero3d train {quote(str(EXAMPLE))}"],
        "torchrun": ["--nnodes=16", "--nproc-per-node=8", "HEAD_NODE", "--resume auto"],
        "k8s": ["completions: 16", "parallelism: 16", "nvidia.com/gpu: 8", "--nnodes=16", "name: zero3d-72b-128gpu"],
    }[target]:
        assert word in text


def test_launch_refuses_it_on_fewer_nodes(capsys):
    assert main(["launch", "slurm", str(EXAMPLE), "--nodes", "8"]) == 2
    assert "8 x 8 = 64 processes: 64 ranks cannot form pp=8 x dp=2 x tp=8" in capsys.readouterr().err
