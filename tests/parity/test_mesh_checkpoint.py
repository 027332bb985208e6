"""What was trained on all three axes goes on anywhere: the same states, and the same exported model, bit for bit."""

from pathlib import Path

import pytest
import torch
from meshes import engine_of, mesh_of, micro_batches, model_of, own, step, world_of
from models import adamw
from test_pipeline_checkpoint import states

from zero3d.checkpoint.difference import compare
from zero3d.checkpoint.model_card import CARD
from zero3d.checkpoint.offline_export import export_stored
from zero3d.checkpoint.stored_states import StoredStates

BEFORE = (2, 2, 2), 3
FEW = (1, 2, 2), 3
AFTER_FEW = (((2, 2, 1), 1), ((1, 1, 1), 0))
AFTER = (((4, 1, 1), 1), ((1, 1, 1), 0), ((1, 2, 4), 3))
WIDE = (((8, 1, 1), 1),)


def started(family, shape, stage, weights=0.0):
    """An engine of four blocks on any mesh; `weights` are added to those that all begin with."""
    model = model_of(family, BEFORE[0])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(weights)
    return engine_of(model, mesh_of(shape), stage=stage, precision="fp32", optimizer=adamw)


def results(engine, folder):
    """The checkpoint's folder and the loss; the model is exported."""
    engine.export(folder / "hf")
    place, dp = engine.mesh.place.dp, engine.mesh.dp
    given = own(micro_batches(9, 8), place, dp)
    return Path(engine.save(folder / "again")), float(engine.evaluate(given))


def trained(family, before, folder):
    engine = started(family, *before)
    step(engine, 0)
    return results(engine, folder)


def loaded(family, shape, stage, source, folder):
    engine = started(family, shape, stage, weights=1.0)
    engine.load(source)
    assert engine.steps == 1
    return results(engine, folder)


def exported(folder):
    """Tensors as from_pretrained loads them, and the text of the other files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf", local_files_only=True)
    texts = {path.name: path.read_text() for path in (folder / "hf").glob("*config.json")}
    return dict(model.named_parameters()), texts


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CARD}  # which names the mesh


@pytest.mark.parametrize(("family", "before", "after"), [
    ("qwen3", FEW, AFTER_FEW), pytest.param("qwen3", BEFORE, AFTER, marks=pytest.mark.long),
    *(pytest.param(name, BEFORE, AFTER + WIDE, marks=pytest.mark.long) for name in ("llama", "gpt2", "moe")),
])  # fmt: skip
def test_what_three_axes_trained_is_the_same_on_every_mesh(ranks, tmp_path, family, before, after):
    (source, loss), *_ = ranks(world_of(before[0]), trained, family, before, tmp_path / "first")
    expected, (weights, texts) = states(source), exported(tmp_path / "first")
    export_stored(StoredStates(Path(source)), tmp_path / "offline" / "hf", model_of(family, BEFORE[0]))
    without, said = exported(tmp_path / "offline")
    assert said == texts
    assert without.keys() == weights.keys()
    assert all(torch.equal(without[name], p) for name, p in weights.items())
    assert {state for _, state in expected} == {"master", "exp_avg", "exp_avg_sq"}
    assert any(not torch.equal(weights[name], p) for name, p in model_of(family, BEFORE[0]).named_parameters())
    for shape, stage in after:
        folder = tmp_path / str(shape)
        everywhere = ranks(world_of(shape), loaded, family, shape, stage, source, folder)
        assert [found for _, found in everywhere] == pytest.approx([loss] * len(everywhere), rel=1e-6), shape
        assert states(everywhere[0][0]) == expected, shape
        here, said = exported(folder)
        assert here.keys() == weights.keys()
        assert said == texts
        if shape[2] == 1:  # in one file, as without ranks
            assert files_of(folder / "hf") == files_of(tmp_path / "offline" / "hf"), shape
        alike = compare(StoredStates(Path(source)), StoredStates(Path(everywhere[0][0])))
        assert alike.equal, shape
        assert alike.hashes[0] == alike.hashes[1]
        assert alike.facts["mesh.dp" if shape[0] != before[0][0] else "mesh.pp"], shape
        assert all(torch.equal(here[name], p) for name, p in weights.items()), shape
