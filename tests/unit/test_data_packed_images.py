"""Conversations with images in packed rows: tokens, positions, pixels, a budget of patches, and damaged images."""

import copy
import json
import pickle
import re
import warnings
from itertools import pairwise

import numpy
import pytest
import torch
import vision
from pictures import record, save_data, save_model

import zero3d
from zero3d.config import load
from zero3d.data.dataset import open_data
from zero3d.data.images import Vision
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, DataError
from zero3d.models.document_positions import DocumentPositions
from zero3d.models.open import Opened
from zero3d.train.setup import inputs

TAKES = frozenset({"pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "token_type_ids",
                   "mm_token_type_ids"})  # fmt: skip
SHORT = ("gemma3", "llava", "qwen2_5_vl")
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaVA, images, and records of them and of texts alone."""
    folder = tmp_path_factory.mktemp("packed")
    save_model(folder / "model")
    save_data(folder, pictured=12, plain=8)
    return folder


def opened(folder, rows=None, model=None, micro_batch=1, **data):
    """The data of a run over these records, packed."""
    file = folder / "data.json"
    if rows is not None:
        file = folder / "rows.json"
        file.write_text(json.dumps(rows))
    given = {"train": str(file), "images": str(folder / "images"), "length": LENGTH, "cache": str(folder / "cache")}
    settings = load({"data": given | data}).data
    positions = None if model is None else DocumentPositions.of(model)
    processor = Vision(folder / "model", TAKES, positions)
    tokenizer = load_tokenizer(None, str(folder / "model"))
    return open_data(settings, tokenizer, vision=processor, micro_batch=micro_batch).train


def documents_of(sample):
    """Where the documents of a row begin and end, its padding among them."""
    positions = sample["position_ids"]
    text = positions[0] if positions.dim() == 2 else positions
    begins = [0, *((text.diff() != 1).nonzero().flatten() + 1).tolist(), len(text)]
    return list(pairwise(begins))


@pytest.mark.parametrize(
    "family",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
        for name in vision.FAMILIES
        if name != "paligemma"  # whose processor adds a thousand tokens of places
    ],
)
def test_a_step_of_packed_conversations_has_the_loss_of_the_conversations_apart(tmp_path, family):
    import transformers

    save_model(tmp_path / "model", family)
    save_data(tmp_path, pictured=6, plain=2)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float64)
    losses = []
    for packing in (True, False):
        data = opened(tmp_path, model=model, packing=packing, group_by_modality=False)
        data = pickle.loads(pickle.dumps(data))  # as a worker has it
        batch = data.stack([data[index] for index in range(len(data))])
        assert ("position_ids" in batch) is packing
        engine = zero3d.Engine(copy.deepcopy(model).train(), stage=2, precision="fp64")
        losses.append(float(engine.train_batch([batch])))
        rows = len(batch["input_ids"])
        assert rows < 8 if packing else rows == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # computed in fp32 of logits in fp64


def test_rows_are_of_conversations_with_images_or_without_and_have_the_pixels_of_their_documents(folder):
    data = opened(folder)
    image = Vision(folder / "model", TAKES).image
    assert data.pictured.any()
    assert not data.pictured.all()
    for index, pictured in enumerate(data.pictured):
        sample = data[index]
        documents = [sample["input_ids"][start:stop] for start, stop in documents_of(sample)]
        with_images = [bool((ids == image).any()) for ids in documents]
        assert len(sample["images"]) == sum(with_images)
        assert set(with_images[: len(with_images) - 1]) == {bool(pictured)}, "the last is padding"
        assert len(sample["input_ids"]) == LENGTH
    two = [record(), record("0.png")]
    apart, mixed = opened(folder, two), opened(folder, two, group_by_modality=False)
    assert (len(apart), len(mixed)) == (2, 1)
    assert mixed.pictured.tolist() == [True]
    assert (apart.identity["apart"], mixed.identity["apart"]) == (1, 0)
    batch = data.stack([data[index] for index in numpy.flatnonzero(data.pictured)])
    assert batch["pixel_values"].shape == (12, 3, 28, 28)


@pytest.mark.parametrize("packing", [True, False])
def test_a_micro_batch_has_no_more_patches_than_its_budget(folder, packing):
    two = record(["0.png", "1.png"], question="<image>what")
    rows = [*[record(f"{i}.png") for i in range(4)], two, record()]
    data = opened(folder, rows, packing=packing, micro_batch=2, patches=3, group_by_modality=False)
    counts = [sum(len(each["pixel_values"]) for each in data[index]["images"]) for index in range(len(data))]
    assert sorted(counts) == [0] * (not packing) + [1] * 4
    assert data.unfit == 1
    assert data.identity["patches"] == 1
    assert max(len(documents_of(data[index])) for index in range(len(data))) > 2 if packing else True
    with pytest.raises(ConfigError, match=r"data\.patches=1 / train\.micro_batch=2 leaves a sequence no patch"):
        opened(folder, rows, micro_batch=2, patches=1)


def test_images_that_do_not_fit_are_told_with_the_limit_and_what_to_type_where_all_are_dropped(folder):
    two, limits = record(["0.png", "1.png"], question="<image>what"), {"micro_batch": 3, "patches": 5}
    why = "1 with more patches than data.patches / train.micro_batch = 1 (the smallest has 2)"
    remedy = "; no sample with images is left: type data.patches=6 (= 2 x 3) at least"
    assert opened(folder, [two, record("0.png")], **limits).limits == why
    assert opened(folder, [two, record()], **limits).limits == why + remedy
    with pytest.raises(DataError, match=re.escape(f"; images of 1 more do not fit: {why}{remedy})")):
        opened(folder, [two], **limits)


def test_nothing_is_learnt_of_a_packed_document_whose_image_is_damaged(folder):
    from PIL import Image

    images = folder / "images"
    noise = numpy.random.default_rng(0).integers(0, 255, (28, 28, 3), numpy.uint8)
    Image.fromarray(noise).save(images / "cut.png")
    (images / "cut.png").write_bytes((images / "cut.png").read_bytes()[:1000])
    rows = [record("cut.png"), record("1.png", "a blue circle"), record("2.png")]
    data = opened(folder, rows, skip_bad_lines=True)
    assert len(data) == 1
    with pytest.warns(UserWarning, match=r"cut\.png .* Nothing of its document is learnt \(damaged so far: 1\)"):
        sample = data[0]
    learnt = [bool((sample["labels"][start:stop] >= 0).any()) for start, stop in documents_of(sample)]
    assert sorted(learnt[:3]) == [False, True, True]
    assert len(sample["images"]) == 3, "a blank one in its place"
    rest = opened(folder, [record("cut.png"), *rows], skip_bad_lines=True, length=20)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        samples = [rest[index] for index in range(len(rest))]
    assert any("Another sample with images stands in for it" in str(each.message) for each in told)
    assert all((each["labels"] >= 0).any() for each in samples)


def test_a_text_that_is_cut_has_none_of_the_images_of_the_document_behind_it(folder):
    data = opened(folder, [{"text": "what is it ? " * 30}, record("0.png")])
    assert len(data) == 3
    assert sorted(len(data[index]["images"]) for index in range(3)) == [0, 0, 1]
    assert data.pictured.tolist() == [bool(data[index]["images"]) for index in range(3)]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_rows_with_images_are_as_long_as_all_others(folder, left):
    whole = opened(folder, [record("0.png")])
    start, stop = documents_of(whole[0])[0]
    data = opened(folder, [record("0.png")], length=stop - start + left)
    assert {len(values) for name, values in data[0].items() if name != "images"} == {stop - start + left}


def test_a_blank_image_is_as_large_as_the_damaged_one_and_no_text_stands_in_for_it(tmp_path, folder):
    from PIL import Image

    save_model(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "images").mkdir()
    for name, side in (("small", 28), ("large", 56)):
        noise = numpy.random.default_rng(0).integers(0, 255, (side, side, 3), numpy.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / f"{name}.png")
    file = tmp_path / "images" / "large.png"
    file.write_bytes(file.read_bytes()[:1000])
    two = record(["small.png", "large.png"], question="<image>what")
    data = opened(tmp_path, [record("small.png"), two, record()], skip_bad_lines=True)
    with pytest.warns(UserWarning, match=r"large\.png"):
        batch = data.stack([data[0]])
    image = Vision(tmp_path / "model", TAKES).image
    assert int((batch["input_ids"] == image).sum()) == int(batch["image_grid_thw"].prod(1).sum()) // 4
    alone = opened(tmp_path, [record("small.png"), two, record()], skip_bad_lines=True, packing=False)
    damaged = next(index for index in range(3) if len(alone._kept[index].names) == 2)
    with pytest.warns(UserWarning, match="Another sample with images stands in for it"):
        assert alone[damaged]["images"]


def test_what_gives_items_one_by_one_has_no_budget_of_patches(folder):
    with pytest.raises(ConfigError, match="how many patches an image has is not known before"):
        opened(folder, train="own_data:pictured", packing=False, patches=4)


def test_documents_that_cannot_be_packed_with_images_are_sequences_and_a_note_says_why(monkeypatch):
    monkeypatch.setattr(inputs, "image_packing", lambda model: "Model lets documents see each other")
    config = load({"data": {"train": ["none"]}})
    made, noted = inputs._packed(config, Opened(torch.nn.Linear(1, 1), None, None), True, torch.device("cpu"))
    assert made.data.packing is False
    assert noted.notes[-1] == "data.packing: each document is a sequence, since Model lets documents see each other"
