"""The demo of LLaVA: what it draws, and that it asks a trained model what the model was trained on."""

import json
from pathlib import Path

import pytest
import torch
from demos import modules_of
from PIL import Image

from zero3d.config import Data, load
from zero3d.data.dataset import open_data
from zero3d.data.images import Vision
from zero3d.data.tokenizers import load_tokenizer


@pytest.fixture
def demo():
    with modules_of("llava_demo") as found:
        yield found


@pytest.fixture
def folder(demo, monkeypatch, tmp_path):
    small = {name: (kinds, 12, seed) for name, (kinds, _, seed) in demo.prepare.DRAWN.items()}
    monkeypatch.setattr(demo.prepare, "DRAWN", small)
    place = tmp_path / "demo"
    assert "48 images" in demo.prepare.prepare(place)
    return place


def test_the_same_seed_draws_the_same_images_and_no_held_out_one_is_trained_on(demo, folder, tmp_path):
    demo.shapes.save(tmp_path, "first", *demo.prepare.DRAWN["first"])
    drawn = [Image.open(place / "images" / "first" / "3.png").tobytes() for place in (folder, tmp_path)]
    assert drawn[0] == drawn[1]
    seen = {path.read_bytes() for name in ("first", "new") for path in (folder / "images" / name).iterdir()}
    held_out = [path for name in ("first", "new") for path in (folder / "images" / f"{name}_held_out").iterdir()]
    assert len(held_out) == 24
    assert not any(path.read_bytes() in seen for path in held_out)


@pytest.mark.parametrize("run", ["whole", "adapters"])
def test_its_files_are_configurations_of_what_it_prepares(demo, folder, monkeypatch, run):
    monkeypatch.chdir(folder)
    config = load(f"{run}.yaml")
    named = [part if isinstance(part, str) else part.path for part in config.data.train]
    assert all(Path(name).is_file() for name in (*named, *config.data.validation))
    assert config.train.batch == 2 * config.train.micro_batch


def test_the_model_is_asked_as_it_was_trained(demo, folder, monkeypatch, tmp_path):
    model = folder / "tiny-llava"
    vision = Vision(model, frozenset({"pixel_values"}))
    data = Data(train=(str(folder / "first.json"),), validation=0.0, length=48, packing=False,
                images=str(folder / "images"), cache=str(tmp_path / "cache"))  # fmt: skip
    opened = open_data(data, load_tokenizer(None, str(model)), vision=vision)
    learnt = opened.train.stack([opened.train[0]])
    record = json.loads((folder / "first.json").read_text())[0]
    asked = {}

    class Spy:
        def generate(self, **given):
            asked.update(given)
            return torch.cat([given["input_ids"], learnt["input_ids"][:, -4:].expand(len(given["input_ids"]), 4)], 1)

    _, processor = demo.look.load(model)
    told = next(demo.look.answers((Spy(), processor), folder, "first", batch=1))
    length = asked["input_ids"].shape[1]
    assert asked["input_ids"].tolist() == learnt["input_ids"][:, :length].tolist()
    assert asked["pixel_values"].equal(learnt["pixel_values"])
    assert told[1:] == (record["conversations"][1]["value"],) * 2
    assert demo.look.accuracy([told, (None, "a red star", "a red cross")]) == (1.0, 0.5)


def test_a_folder_that_exists_is_left_alone(demo, folder, capsys):
    before = sorted(folder.iterdir())
    assert demo.demo.main([str(folder)]) == 2
    assert "remove it, or name another folder" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before
