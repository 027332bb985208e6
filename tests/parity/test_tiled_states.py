"""What was trained in tiles is saved, loaded and exported as whole weights, whatever the tiles and the mesh."""

from pathlib import Path

import pytest
import torch
from meshes import engine_of, mesh_of, micro_batches, model_of, own, step, world_of
from models import adamw, bits
from safetensors.torch import load_file
from tensors import tiny
from test_pipeline_checkpoint import states

WHOLE, NARROW, WIDE = None, 2048, 3000  # bytes: of 32 numbers in fp32 sixteen rows, and twenty-three
FIRST = ((2, 1, 1), 3, NARROW)


def started(shape, stage, budget, weights=0.0):
    model = model_of("llama", (1, 1, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(weights)
    return engine_of(
        model, mesh_of(shape), stage=stage, precision="fp32", optimizer=adamw, gather_budget=budget,
        tiled_loss=budget is not None,
    )  # fmt: skip


def results(engine, folder):
    """The checkpoint's folder and the loss; the model is exported."""
    engine.export(folder / "hf")
    given = own(micro_batches(9, 4), engine.mesh.place.dp, engine.mesh.dp)
    return Path(engine.save(folder / "again")), float(engine.evaluate(given))


def trained(folder, resumed):
    """Two steps, then two more; or two more from a checkpoint after two."""
    engine = started(*FIRST, weights=1.0 if resumed else 0.0)
    if resumed:
        engine.load(resumed)
        assert engine.resumed.startswith("bitwise")
    else:
        for number in range(2):
            step(engine, number)
        found = results(engine, folder)
    after = [step(engine, number) for number in (2, 3)], engine.fingerprint()
    return after if resumed else (*found, after)


def loaded(shape, stage, budget, source, folder):
    engine = started(shape, stage, budget, weights=1.0)
    engine.load(source)
    if budget != NARROW and shape == FIRST[0]:
        assert f"gather_budget {NARROW} -> {budget}" in engine.resumed
    return results(engine, folder)


def exported(folder):
    return {name: p for file in (folder / "hf").glob("*.safetensors") for name, p in load_file(file).items()}


SHORT = (((1, 2, 1), 3, WIDE),)
LONG = (((2, 1, 1), 1, WHOLE), ((1, 1, 2), 3, NARROW), ((2, 1, 1), 3, WIDE))


@pytest.mark.parametrize("places", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=["short", "long"])
def test_checkpoints_and_exports_of_tiles_are_those_of_whole_weights(ranks, tmp_path, places):
    (source, loss, after), *_ = ranks(2, trained, tmp_path / "first", None)
    expected, weights = states(source), exported(tmp_path / "first")
    names = {name for name, _ in model_of("llama", (1, 1, 1)).named_parameters()}
    assert {name for name, _ in expected} == set(weights) == names
    for place, (shape, stage, budget) in enumerate(places):
        folder = tmp_path / str(place)
        everywhere = ranks(world_of(shape), loaded, shape, stage, budget, source, folder)
        assert [found for _, found in everywhere] == pytest.approx([loss] * len(everywhere), rel=1e-6)
        assert states(everywhere[0][0]) == expected
        here = exported(folder)
        assert here.keys() == weights.keys()
        assert all(torch.equal(here[name], p) for name, p in weights.items())
    assert all(found == after for found in ranks(2, trained, tmp_path, source.parent))


def whole(name, options):
    """The state dict inside full_params() before and after it was loaded with other values, and the next loss."""
    model = tiny(name, **options)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    engine = engine_of(model, mesh_of((1, 1, 1)), stage=3, precision="fp32", gather_budget=NARROW)
    with engine.full_params():
        before = engine.module.state_dict()
        engine.module.load_state_dict({key: value + 0.5 for key, value in plain.items()})
    with engine.full_params():
        after = engine.module.state_dict()
    names = [name for name, _ in engine.module.named_parameters()]
    frozen = {unit.name: unit.grads is None for unit in engine.units if "tiles" in unit.name}
    steps = [step(engine, 0, 1)]
    return plain, before, after, names, frozen, steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"lora": True}),
        pytest.param("llama", {}, marks=pytest.mark.long),
        pytest.param("qwen3", {}, marks=pytest.mark.long),
    ],
)
def test_a_state_dict_has_whole_weights_and_takes_them(ranks, name, options):
    ((plain, before, after, names, frozen, steps),) = ranks(1, whole, name, options)
    assert before.keys() == after.keys() == plain.keys()
    assert all(torch.equal(before[key], value) for key, value in plain.items())
    assert all(torch.equal(after[key], value + 0.5) for key, value in plain.items())
    assert any(".tiles.0." in each for each in names)
    assert set(frozen.values()) == {bool(options)}  # of adapters the matrices, which are frozen, have tiles
    assert torch.isfinite(torch.tensor(steps)).all()


def from_source():
    """Weights that come from a source by boxes, on a mesh that cuts them twice, and those of a whole model."""
    from zero3d.models.build import RandomWeights, parameters_on_meta

    with parameters_on_meta():
        model = model_of("llama", (1, 2, 1))
    weights = RandomWeights(model, seed=3)
    engines = [
        engine_of(made, mesh_of((2, 2, 1)), stage=3, precision="fp32", gather_budget=budget, weights=weights)
        for budget, made in ((NARROW, model), (None, meta_again()))
    ]
    found = []
    for engine in engines:
        with engine.full_params():
            found.append(bits(value for _, value in sorted(engine.module.state_dict().items())))
    return found


def meta_again():
    from zero3d.models.build import parameters_on_meta

    with parameters_on_meta():
        return model_of("llama", (1, 2, 1))


def test_tiles_are_read_from_a_source_as_rows_of_its_whole_weights(ranks):
    for tiled, plain in ranks(4, from_source):
        assert tiled == plain
