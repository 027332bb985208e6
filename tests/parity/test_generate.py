"""`zero3d generate` from what every mesh leaves: the text of its checkpoint is that of its export, by transformers' own hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pictures import save_data, save_model as save_vision
from training import save_model, train, tree

from zero3d.data.tokenizers import ByteTokenizer, load_tokenizer

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
    assert typed(zero3d_in_fork, tmp_path, output, TEXT, *DRAWN) == (expected, None)
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
    assert step == (2 if name == "lora" else None)
    drawn = [typed(zero3d_in_fork, tmp_path, output, TEXT, *DRAWN, "--ranks", n)[0] for n in ("1", "2")]
    assert drawn[0] == drawn[1] != expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_an_image_is_given_as_training_gives_it(zero3d_in_fork, tmp_path, family):
    from transformers import AutoModelForImageTextToText

    from zero3d.config import load
    from zero3d.data.dataset import open_data
    from zero3d.models.open import open_model
    from zero3d.train.setup.vision import open_vision

    folder = save_vision(tmp_path / family, family, positions=96)
    data, images = save_data(tmp_path, pictured=1)
    config = load({
        "model": {"path": folder},
        "data": {"train": data, "images": images, "length": 64, "packing": False, "cache": str(tmp_path / "cache")},
    })  # fmt: skip
    tokenizer = load_tokenizer(None, folder)
    opened = open_data(config.data, tokenizer, vision=open_vision(config, open_model(config.model)))
    batch = opened.train.stack([opened.train[0]])
    answer = int((batch["labels"][0] != -100).nonzero()[0])
    given = {name: batch[name][:, :answer] for name in ("input_ids", "mm_token_type_ids") if name in batch}
    pixels = {name: value for name, value in batch.items() if name not in ("labels", "position_ids", *given)}
    model = AutoModelForImageTextToText.from_pretrained(folder)
    out = model.generate(**given, **pixels, max_new_tokens=int(TOKENS), do_sample=False)[0, answer:].tolist()
    found, _ = typed(zero3d_in_fork, tmp_path, folder, "what is it?", "--image", Path(images) / "0.png")
    assert found.split() == tokenizer.decode(out).split()
    without, _ = typed(zero3d_in_fork, tmp_path, folder, "what is it?", "--chat")
    assert without != found
