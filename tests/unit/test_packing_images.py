"""Documents with images in one row are what they are in rows of their own, or packing them is refused."""

import pytest
import torch
import transformers
import vision

from zero3d.models import packing_images
from zero3d.models.document_masks import DocumentMasks
from zero3d.models.document_positions import DocumentPositions
from zero3d.models.fp64 import StaysInFp64
from zero3d.models.packing import as_row, check_packing, given_in_training
from zero3d.models.packing_images import image_packing
from zero3d.pipeline.split import chain_of

PACKED = [name for name in vision.EVERY if name != "qwen3_5"]
SHORT = ("gemma3", "internvl", "qwen3_vl")
KINDS = ("token_type_ids", "mm_token_type_ids")


def some(names):
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in names]


def document(name, before, after, seed, images=1):
    """A document in a row of its own, with an image between so many tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    made = vision.micro_batch(name, generator, 1)
    ids = made.pop("input_ids")
    image = (ids == vision.IMAGE).nonzero()[:, 1]
    text = torch.randint(3, 59, (1, before + after), generator=generator)
    taken = [text[:, :before], *[ids[:, image]] * images, text[:, before:]]
    made = {"input_ids": torch.cat(taken, 1)} | {key: made[key] for key in made if images and key != "labels"}
    return made | {key: (made["input_ids"] == vision.IMAGE).long() for key in KINDS if key in made}


def row_of(model, documents):
    """The documents in one row, with the positions that a data worker makes."""
    positions = DocumentPositions.of(model)
    places = []
    for each in documents:
        ids = each["input_ids"][0]
        kinds = {key: each[key][0] for key in KINDS if key in each}
        images = {key: value for key, value in each.items() if key not in (*KINDS, "input_ids")}
        places.append(torch.arange(len(ids)) if positions is None else positions(ids, kinds, images))
    row = {"position_ids": torch.cat(places, -1).unsqueeze(-2)}
    for key in documents[0]:
        by_token = key in (*KINDS, "input_ids")
        row[key] = torch.cat([each[key] for each in documents if key in each], 1 if by_token else 0)
    return row


@pytest.mark.parametrize("name", some(PACKED))
def test_packed_documents_with_images_are_what_they_are_alone(name):
    model = vision.model(name).double().eval()
    assert image_packing(model) is None
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():  # such as Gemma 3's projector
                p.normal_(std=0.3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the usual one has no fp64
    give = given_in_training(model, False, 1)
    documents = [document(name, 9, 0, 1), document(name, 0, 5, 2), document(name, 3, 4, 3)]

    def logits(row):
        given = {key: value.double() if value.is_floating_point() else value for key, value in row.items()}
        with torch.no_grad(), StaysInFp64():  # Llama 4 rotates in fp32, and all compute angles so
            return model(**give(given)).logits[0]

    lengths = [each["input_ids"].shape[1] for each in documents]
    packed = logits(row_of(model, documents)).split(lengths)
    for made, each in zip(packed, documents, strict=True):
        wanted = logits(each)
        assert (made - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    other = documents[0] | {"pixel_values": document(name, 9, 0, 4)["pixel_values"]}
    moved = logits(row_of(model, [other, *documents[1:]])).split(lengths)
    assert [made.equal(before) for made, before in zip(moved, packed, strict=True)] == [False, True, True]


def test_a_micro_batch_for_kernels_without_masks_is_one_row_of_tokens_and_leaves_images_as_they_are():
    positions = torch.tensor([[[0, 1, 2, 0], [0, 1, 0, 1]]] + [[[0, 1, 1, 0], [0, 0, 0, 0]]] * 3)
    images = {"pixel_values": torch.randn(3, 3, 4, 4), "image_grid_thw": torch.tensor([[1, 2, 2]] * 3)}
    kinds = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    row = as_row(
        {"input_ids": kinds, "mm_token_type_ids": kinds, "position_ids": positions} | images, {"max_length_q": 4}
    )
    assert row["position_ids"].shape == (4, 1, 8)
    assert row["mm_token_type_ids"].equal(kinds.reshape(1, 8))
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert all(row[name].equal(value) for name, value in images.items())


@pytest.mark.parametrize("made", [
    None, torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), torch.full((1, 1, 6, 6), torch.finfo(torch.float).min).triu(1),
])  # fmt: skip
def test_masks_end_with_documents_in_whatever_form_the_model_makes_them(made):
    masks = DocumentMasks(lambda *_, **__: made, ("token_type_ids",), False, None, torch.float)
    text, time = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 1, 1, 1, 0, 1])
    row = {"input_ids": torch.ones(1, 6).long(), "token_type_ids": torch.tensor([[0, 1, 1, 1, 0, 0]])}
    mask = masks.of_documents(row | {"position_ids": torch.stack([text, time, time, time])[:, None]})["attention_mask"]
    seen = mask if mask.dtype == torch.bool else mask == 0
    assert seen[0, 0].equal(torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).bool().tril())


@pytest.mark.parametrize("name", ["gemma3", pytest.param("paligemma", marks=pytest.mark.long)])
def test_blocks_of_images_that_transformers_looks_up_in_another_document_are_found(monkeypatch, name):
    monkeypatch.setattr(packing_images, "_found", {})
    monkeypatch.setattr(DocumentMasks, "of", lambda model: None)
    assert "lets documents with images see each other (of three, the" in image_packing(vision.model(name))


def test_a_model_in_which_images_change_nothing_counts_as_not_tried():
    model = vision.model("llava")
    model.model.multi_modal_projector.forward = lambda features: features * 0
    assert "could not be tried (another image changes nothing in its own document)" in image_packing(model)


def test_a_vocabulary_may_have_fewer_tokens_than_trials_usually_take():
    words, special = 16, {"image_token_id": 15, "video_token_id": 14, "vision_start_token_id": 13}
    config = vision.config("qwen3_vl", **special)
    config.text_config.vocab_size = words
    model = transformers.Qwen3VLForConditionalGeneration(config)
    assert image_packing(model) is None
    assert check_packing(model) is None
    chain, _ = chain_of(model, None)
    assert chain.blocks == "model.language_model.layers"


def test_attention_without_our_masks_is_named():
    model = vision.model("gemma3")
    model.config.text_config._attn_implementation = "flex_attention"
    assert "made for eager and sdpa attention" in image_packing(model)


def test_masks_are_made_for_the_attention_that_the_model_had():
    """Sequence parallelism sets another one in the model's own config."""
    model = vision.model("gemma3")
    masks, row = DocumentMasks.of(model), row_of(model, [document("gemma3", 2, 0, 1), document("gemma3", 0, 3, 2)])
    made = masks.of_documents(row)["attention_mask"]
    model.config.text_config._attn_implementation = "flex_attention"
    again = masks.of_documents(row)["attention_mask"]
    assert made.keys() == again.keys()
    assert all(again[kind].equal(mask) for kind, mask in made.items())
