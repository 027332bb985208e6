"""Mixers that tp ranks have parts of are saved, loaded and exported as whole ones, bit for bit, at any other degree."""

from pathlib import Path

import pytest
import torch
from models import adamw
from safetensors.torch import load_file
from tensors import tiny
from test_pipeline_checkpoint import states

import zero3d

ZAMBA = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 4}  # one block, twice
ROWS, LENGTH = 4, 8
ONE_GROUP = {"n_groups": 1}
FACTORS = {"mamba_rms_norm": True, "mamba_n_groups": 2, "num_key_value_heads": 4}
LATENT = {"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "moe_latent_size": 16, "n_group": 2,
          "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32}  # fmt: skip


def started(name, sizes, mesh, stage, weights=0.0):
    model = tiny(name, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(weights)
    return zero3d.Engine(
        model, optimizer=adamw, mesh=zero3d.Mesh(**mesh), clip_norm=None, stage=stage, precision="fp32"
    )


def rows(engine, step):
    ids = torch.randint(3, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    own = ids.chunk(engine.dp.size)[engine.dp.rank]
    return [{"input_ids": own, "labels": own, "use_cache": False}]


def results(engine, folder):
    """The checkpoint's folder, and a loss; the model is exported."""
    engine.export(folder / "hf")
    return Path(engine.save(folder / "saved")), float(engine.evaluate(rows(engine, 9)))


def trained(name, sizes, mesh, stage, folder):
    engine = started(name, sizes, mesh, stage)
    for step in range(2):
        engine.train_batch(rows(engine, step))
    return results(engine, folder)


def loaded(name, sizes, mesh, stage, source, folder):
    engine = started(name, sizes, mesh, stage, weights=1.0)
    engine.load(source)
    assert engine.steps == 2
    return results(engine, folder)


def exported(folder):
    return {name: t for file in (folder / "hf").glob("*.safetensors") for name, t in load_file(file).items()}


def world(mesh):
    return mesh.get("tp", 1) * mesh.get("dp", 1) * mesh.get("pp", 1)


ALONE, TWO, FOUR = ({}, 1), ({"tp": 2}, 1), ({"tp": 4}, 2)


@pytest.mark.parametrize(("name", "sizes", "before", "after"), [
    ("mamba2", ONE_GROUP, TWO, (ALONE,)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("mamba2", ONE_GROUP, FOUR, (TWO, ({"tp": 2, "dp": 2}, 3))), ("mamba2", {}, ALONE, (TWO, FOUR)),
        ("qwen3_5_text", {}, TWO, (ALONE, ({"dp": 2}, 3))), ("qwen3_5_text", {}, ALONE, (({"tp": 2, "pp": 2}, 1),)),
        ("kimi_linear", {}, TWO, (ALONE, ({"tp": 4}, 1))), ("falcon_h1", FACTORS, FOUR, (ALONE, TWO)),
        ("bamba", {}, TWO, (ALONE,)), ("granitemoehybrid", {}, TWO, (ALONE,)), ("falcon_mamba", {}, TWO, (ALONE,)),
        ("nemotron_h", LATENT, TWO, (ALONE, ({"dp": 2}, 3))), ("next", {}, TWO, (ALONE,)),
        ("zamba2", ZAMBA, TWO, (ALONE, ({"dp": 2}, 3))),
        ("olmo_hybrid", {}, ({"tp": 2, "dp": 2}, 3), (ALONE,)),
    )),
])  # fmt: skip
def test_what_one_degree_saved_another_goes_on_from(ranks, tmp_path, name, sizes, before, after):
    (source, loss), *_ = ranks(world(before[0]), trained, name, sizes, *before, tmp_path / "first")
    wanted, weights = states(source), exported(tmp_path / "first")
    assert {state for _, state in wanted} == {"master", "exp_avg", "exp_avg_sq"}
    for number, (mesh, stage) in enumerate(after):
        folder = tmp_path / str(number)
        everywhere = ranks(world(mesh), loaded, name, sizes, mesh, stage, source, folder)
        assert [found for _, found in everywhere] == pytest.approx([loss] * len(everywhere), rel=1e-5), mesh
        assert states(everywhere[0][0]) == wanted, mesh
        here = exported(folder)
        assert here.keys() == weights.keys()
        assert all(torch.equal(here[key], t) for key, t in weights.items()), mesh
