"""The demo of Qwen3-VL: what it prepares and asks, what it shows, and what it fails for."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from demos import modules_of
from PIL import Image
from training import field, train

from zero3d.config import Data, load
from zero3d.data.dataset import open_data
from zero3d.data.images import Vision, open_processor
from zero3d.data.tokenizers import load_tokenizer


@pytest.fixture
def demo():
    with modules_of("vlm_demo", "llava_demo") as found:
        yield found


@pytest.fixture
def folder(demo, monkeypatch, tmp_path):
    small = {name: (kinds, 24, seed) for name, (kinds, _, seed) in demo.prepare.DRAWN.items()}
    monkeypatch.setattr(demo.prepare, "DRAWN", small)
    place = tmp_path / "demo"
    files = [Path(demo.demo.HERE) / file for file in demo.demo.FILES]
    assert demo.prepare.lay_out(place, files, demo.tiny_qwen3_vl.SIZES) == 96
    demo.tiny_qwen3_vl.save(place / "tiny-qwen3-vl")
    return place


def test_its_files_pack_what_it_lays_out(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for run in ("whole", "adapters"):
        config = load(f"{run}.yaml")
        named = [part if isinstance(part, str) else part.path for part in config.data.train]
        assert all(Path(name).is_file() for name in (*named, *config.data.validation))
        assert config.data.packing
        assert config.train.batch == 2 * config.train.micro_batch
        assert config.precision == "fp32"


def test_images_have_several_sizes_and_the_tower_feeds_two_blocks(demo, folder):
    sizes = {Image.open(path).size for path in (folder / "images" / "first").iterdir()}
    assert sizes == set(demo.tiny_qwen3_vl.SIZES)
    config = json.loads((folder / "tiny-qwen3-vl" / "config.json").read_text())
    assert config["vision_config"]["deepstack_visual_indexes"] == [0, 1]


def first_losses(folder, setting):
    """The losses of the first steps of the demo's file with one more setting."""
    os.chdir(folder)
    made = yaml.safe_load(Path("whole.yaml").read_text())
    section, key, value = re.split("[.=]", setting)
    made |= {section: {key: int(value)}, "output": setting, "checkpoint": {"export": False}}
    made["data"]["validation"] = 0.0
    made["train"] = {"steps": 2, "batch": 4, "micro_batch": 2}
    return field(train(made), "loss")


@pytest.mark.long
@pytest.mark.parametrize("setting", ["mesh.pp=2", "zero.stage=3", "mesh.sp=2"])
def test_packed_losses_are_the_same_however_a_run_is_split(ranks, folder, setting):
    wanted = ranks(1, first_losses, folder, "zero.stage=2")[0]
    assert len(wanted) == 2
    assert ranks(2, first_losses, folder, setting)[0] == pytest.approx(wanted, abs=1e-5)


def test_the_model_is_asked_as_it_was_trained_and_images_of_other_sizes_beside_it_change_nothing(
    demo, folder, tmp_path
):
    model = folder / "tiny-qwen3-vl"
    vision = Vision(model, frozenset({"pixel_values", "image_grid_thw", "mm_token_type_ids"}))
    data = Data(train=(str(folder / "first.json"),), validation=0.0, length=96, packing=False,
                images=str(folder / "images"), cache=str(tmp_path / "cache"))  # fmt: skip
    opened = open_data(data, load_tokenizer(None, str(model)), vision=vision)
    learnt = opened.train.stack([opened.train[0]])
    asked = {}

    class Spy:
        def generate(self, **given):
            asked.update(given)
            return torch.cat([given["input_ids"], learnt["input_ids"][:, -4:].expand(len(given["input_ids"]), 4)], 1)

    told = next(demo.look.answers((Spy(), open_processor(model)), folder, "first", batch=4))
    ids = asked["input_ids"][0][asked["attention_mask"][0] == 1]
    assert asked["attention_mask"].shape == asked["input_ids"].shape
    assert not asked["attention_mask"].all()
    assert ids.tolist() == learnt["input_ids"][0, : len(ids)].tolist()
    assert len(ids) == learnt["input_ids"].shape[1] - 4
    assert asked["pixel_values"][: len(learnt["pixel_values"])].equal(learnt["pixel_values"])
    assert told[1:] == (json.loads((folder / "first.json").read_text())[0]["conversations"][1]["value"],) * 2


@pytest.mark.parametrize(("off", "right", "code"), [
    (9e-6, 10, 0), (2e-5, 10, 1), (9e-6, 8, 1),
], ids=["all well", "losses apart", "answers wrong"])  # fmt: skip
def test_it_fails_where_losses_differ_or_too_few_answers_are_right(
    demo, monkeypatch, tmp_path, capsys, off, right, code
):
    truths = ["a red star", "a blue cross"] * 5
    answers = [(Image.new("RGB", (32, 32)), true, true if i < right else "a") for i, true in enumerate(truths)]
    curves = {name: [3.0, 2.0 + off * (i == 2)] for i, name in enumerate(demo.demo.SPLITS)}
    monkeypatch.setattr(demo.demo, "lay_out", lambda folder, files, sizes: folder.mkdir() or 1)
    monkeypatch.setattr(demo.demo.tiny_qwen3_vl, "save", lambda folder: 1)
    monkeypatch.setattr(demo.demo, "losses", lambda folder: curves)
    monkeypatch.setattr(demo.demo, "train", lambda *words, **options: None)
    told = {kinds: dict.fromkeys(demo.demo.MODELS, answers) for kinds in ("first", "new")}
    monkeypatch.setattr(demo.demo, "ask", lambda folder: told)
    assert demo.demo.main([str(tmp_path / "d")]) == code
    assert f"at most {off:.1e}" in capsys.readouterr().out
    with Image.open(tmp_path / "d" / "learnt.png") as picture:
        assert picture.size == (1200, 960)
    assert demo.demo.main([str(tmp_path / "d")]) == 2
    assert "remove it, or name another folder" in capsys.readouterr().err
