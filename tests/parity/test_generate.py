"""`zero3d generate` from what every mesh leaves: the text of its checkpoint is that of its export, by transformers' own hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pictures import save_data, save_model as save_vision
from training import save_model, train, tree

from zero3d.data.tokenizers import ByteTokenizer, load_tokenizer
from zero3d.tools.cli.generate_source import Source
from zero3d.tools.cli.generate_text import Choices, prompts_of

TEXT, TOKENS = "some words", "12"
DRAWN = ("--temperature", "1")
LORA = {"rank": 2, "alpha": 8}
MESHES = {
    "stage-0": (2, {"zero": {"stage": 0}}),
    "stage-1": (2, {"zero": {"stage": 1}}),
    "stage-2": (2, {"zero": {"stage": 2}, "offload": {"optimizer": "host"}}),
    "stage-3": (2, {"zero": {"stage": 3}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "averages": (2, {"train": {"steps": 2, "batch": 4, "accumulate": 2, "ema": 0.5}}),
    "lora": (2, {"lora": LORA}),
    "lora, merged": (2, {"lora": LORA, "checkpoint": {"export": "merged"}}),
    "nf4": (1, {"lora": LORA, "model": {"quantize": "nf4"}}),
    "experts": (2, {"mesh": {"ep": 2}}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models over bytes, and a text."""
    folder = tmp_path_factory.mktemp("generate")
    for name, family in (("model", "llama"), ("moe", "qwen3_moe")):
        ByteTokenizer().save(save_model(folder / name, family, vocab=256))
    (folder / "text.txt").write_text("some words and more of them " * 40)
    return folder


def trained(place, ranks, name, output=None):
    """A run's output on this mesh."""
    count, sections = MESHES[name]
    made = tree(
        place,
        output or name,
        "moe" if name == "experts" else "model",
        checkpoint={"export": True, "verify": False},
        train={"steps": 2},
        optimizer={"lr": 0.1},
    )
    made["data"] |= {"train": str(place / "text.txt"), "tokenizer": "bytes"}
    for section, values in sections.items():
        made[section] = {**made.get(section, {}), **values}
    ranks(count, train, made)
    return place / (output or name)


def by_hand(output, base):
    """What transformers, or PEFT on the base, continues the text with: tokens are drawn, of which few weights give the same."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = (output / "hf").is_dir()
    model = AutoModelForCausalLM.from_pretrained(output / "hf" if merged else base, dtype=torch.float32)
    model = model if merged else PeftModel.from_pretrained(model, output / "adapter")
    ids = torch.tensor([list(TEXT.encode())])
    torch.manual_seed(0)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    made = model.generate(input_ids=ids, max_new_tokens=int(TOKENS), **drawn)[0, ids.shape[1] :]
    return ByteTokenizer().decode(made.tolist())


def typed(zero3d_in_fork, folder, *words):
    """What `zero3d generate` finds, of one text."""
    done = zero3d_in_fork(folder, "generate", *map(str, words), "--max-tokens", TOKENS, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["texts"][0]["continuation"], found["step"]


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_the_checkpoint_of_any_mesh_goes_on_as_its_export_does(zero3d_in_fork, ranks, place, tmp_path, name):
    output = trained(place, ranks, name)
    expected = by_hand(output, place / "model")
    assert typed(zero3d_in_fork, tmp_path, output, TEXT, *DRAWN) == (expected, 2)
    checkpoint = output / "checkpoints" / "step-2"
    assert typed(zero3d_in_fork, tmp_path, checkpoint, TEXT, *DRAWN) == (expected, 2)
    untrained = typed(zero3d_in_fork, tmp_path, place / ("moe" if name == "experts" else "model"), TEXT, *DRAWN)
    assert untrained[0] != expected
    if name == "lora":
        moved = shutil.move(place / "model", place / "moved")
        try:
            refused = zero3d_in_fork(tmp_path, "generate", str(output), TEXT)
            assert refused.returncode == 2
            assert "type --base FOLDER" in refused.stderr
            for given in (output, checkpoint):
                found, _ = typed(zero3d_in_fork, tmp_path, given, TEXT, *DRAWN, "--base", place / "moved")
                assert found == expected
        finally:
            shutil.move(moved, place / "model")


@pytest.mark.long
@pytest.mark.parametrize("name", ["stage-3", "lora"])
def test_several_ranks_say_what_one_says(zero3d_in_fork, ranks, place, tmp_path, name):
    output = trained(place, ranks, name, f"{name} on ranks")
    expected, _ = typed(zero3d_in_fork, tmp_path, output, TEXT)
    found, step = typed(zero3d_in_fork, tmp_path, output, TEXT, "--ranks", "2")
    assert found == expected
    assert step == 2
    drawn = [typed(zero3d_in_fork, tmp_path, output, TEXT, *DRAWN, "--ranks", n)[0] for n in ("1", "2")]
    assert drawn[0] == drawn[1] != expected


def given_in_training(folder, data, images, cache):
    """What a model is given of the first conversation in training, up to the answer."""
    from zero3d.config import load
    from zero3d.data.dataset import open_data
    from zero3d.models.open import open_model
    from zero3d.train.setup.vision import open_vision

    config = load({
        "model": {"path": folder},
        "data": {"train": data, "images": images, "length": 64, "packing": False, "cache": str(cache)},
    })  # fmt: skip
    vision = open_vision(config, open_model(config.model))
    samples = open_data(config.data, load_tokenizer(None, folder), vision=vision).train
    batch = samples.stack([samples[0]])
    answer = int((batch["labels"][0] != -100).nonzero()[0])
    of_tokens = {name: batch[name][:, :answer] for name in ("input_ids", "mm_token_type_ids") if name in batch}
    return of_tokens | {name: value for name, value in batch.items() if name.startswith(("pixel", "image_"))}


def save_lively(folder, family):
    """A tiny model of a family with such weights that other inputs and other weights give other words."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(save_vision(folder, family, positions=96))
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0 if p.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return str(folder)


def words_of(model, given, folder):
    """What a model says of an image, by transformers' own hand."""
    torch.manual_seed(0)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    out = model.generate(**given, max_new_tokens=int(TOKENS), **drawn)[0, given["input_ids"].shape[1] :]
    return load_tokenizer(None, folder).decode(out.tolist()).split()


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_an_image_is_given_as_training_gives_it(zero3d_in_fork, tmp_path, family):
    from transformers import AutoModelForImageTextToText

    folder = save_lively(tmp_path / family, family)
    data, images = save_data(tmp_path, pictured=1)
    given, image = given_in_training(folder, data, images, tmp_path / "cache"), str(Path(images) / "0.png")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    made = Choices(1, images=(image,)), model, load_tokenizer(None, folder), Source(Path(folder), "")
    ((ids, beside),) = prompts_of(["what is it?"], *made)
    assert {"input_ids", *beside} == given.keys()
    assert all(torch.equal(beside.get(name, ids), value) for name, value in given.items())
    expected = words_of(model, given, folder)
    found, _ = typed(zero3d_in_fork, tmp_path, folder, "what is it?", "--image", image, *DRAWN)
    assert found.split() == expected != []


@pytest.mark.long
def test_an_adapter_with_its_projector_sees_the_image_too(zero3d_in_fork, ranks, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    folder = save_lively(tmp_path / "model", "llava")
    data, images = save_data(tmp_path, pictured=8)
    made = tree(
        tmp_path, lora=LORA | {"train_also": ["multi_modal_projector"]}, optimizer={"lr": 0.1}, train={"steps": 2},
        checkpoint={"export": True, "verify": False},
    )  # fmt: skip
    made["data"] |= {"train": data, "images": images, "length": 48, "packing": False}
    ranks(2, train, made)
    given = given_in_training(folder, data, images, tmp_path / "cache-too")
    base = AutoModelForImageTextToText.from_pretrained(folder)
    untrained = words_of(base, given, folder)
    expected = words_of(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"), given, folder)
    assert [] != untrained != expected != []
    for output in (tmp_path / "out", tmp_path / "out" / "checkpoints" / "step-2"):
        found, _ = typed(zero3d_in_fork, tmp_path, output, "what is it?", "--image", Path(images) / "0.png", *DRAWN)
        assert found.split() == expected
