"""Processors of all image-text types: what their outputs belong to, by trial, and the tokens that stand for an image."""

import json
from fractions import Fraction
from importlib.util import find_spec

import pytest
import torch
from processors import save_folder

from zero3d.data.image_rules import DOCUMENT, IMAGE, PART, Rule, Rules, find_rules
from zero3d.data.images import FILES, Vision, _patches
from zero3d.errors import ConfigError
from zero3d.models.images import give_blank_image, image_inputs

SHORT = {"llava_next": IMAGE, "internvl": PART, "qwen3_vl": PART, "idefics3": DOCUMENT}  # one of each kind of rule
PIXELS = SHORT | {
    **dict.fromkeys(
        ("aya_vision", "cohere_compass", "cosmos3_edge", "dots3_note", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v",
         "glm4v_moe", "glm5_next", "hunyuan_vl", "hyperclovax_vision_v2", "lfm3_vl", "minicpmv4_6", "minicpmv4_7",
         "paddleocr_vl", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "qwen4_exp",
         "video_llama_3"), PART),
    **dict.fromkeys(
        ("aria", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "gemma3", "gemma4", "granite4_vision", "janus",
         "lighton_ocr", "llava", "llava_next_video", "llava_onevision", "ovis2", "paligemma", "vipllava"), IMAGE),
    "granite_docling": DOCUMENT,
}  # fmt: skip
SIZES = [[(60, 40)], [(45, 130), (500, 300)], [(64, 64)]]  # of the images of three documents
AROUND = {"hunyuan_vl": "<is>{}<ie>"}  # of a mark in a text, without which a processor refuses it
OWN_LAYOUT = {"paligemma": "puts a start of text and a line end into a text, which a chat template has itself"}


def drawn(size, seed=0):
    from PIL import Image

    generator = torch.Generator().manual_seed(seed + size[0])
    pixels = torch.randint(0, 255, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@pytest.fixture
def vision(tmp_path, request):
    return Vision(tmp_path, save_folder(tmp_path, request.param))


@pytest.mark.parametrize(
    "vision", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in PIXELS], indirect=True
)
def test_outputs_of_documents_are_joined_and_cut_and_tokens_are_the_processors_own(vision, request):
    name = request.node.callspec.params["vision"]
    assert vision.rules.of["pixel_values"].of == PIXELS[name]
    documents = [[drawn(size) for size in sizes] for sizes in SIZES]
    outputs = [vision.outputs(images) for images in documents]

    joined, at_once = vision.rules.concatenate(outputs), vision._call(documents)[0]
    for key, value in joined.items():
        assert value.equal(at_once[key]), key
    assert set(vision.pixels(outputs)) <= vision.takes
    for made, cut in zip(outputs, vision.rules.split(joined, [[1], [0, 2], [1]]), strict=True):
        assert set(made) == {key for key in cut if len(cut[key])}
        for key, value in made.items():
            assert cut[key][tuple(map(slice, value.shape))].equal(value), key

    for images, sizes in zip(documents, SIZES, strict=True):
        text = "what " + " is ".join([AROUND.get(name, "{}").format(vision.mark_text)] * len(images)) + " it"
        ours = vision.tokenizer(vision.expand(text, [], sizes)[0])["input_ids"]
        assert ours.count(vision.image) == vision.tokens(sizes) > 0
        if name in OWN_LAYOUT:
            continue
        theirs = vision._processor(text=[text], images=[images], return_tensors="pt")
        assert ours == theirs["input_ids"][0].tolist()
        for key, value in vision.kinds(torch.tensor(ours), torch.tensor(ours)).items():
            assert value.tolist() == theirs.get(key, value[None])[0].tolist()


def made_by(rows):
    """A processor as a function: `rows` of an image's size are the rows of its pixels."""

    def process(documents):
        images = [image for images in documents for image in images]
        return {"pixel_values": torch.cat([torch.full((rows(*image.size), 2), 1.0) for image in images])}

    return process


def test_rows_that_nothing_counts_are_joined_and_not_cut():
    rules = find_rules(made_by(lambda width, height: width // 50), ["pixel_values"])
    outputs = [{"pixel_values": torch.ones(rows, 2)} for rows in (1, 3)]
    assert rules.concatenate(outputs)["pixel_values"].shape == (4, 2)
    with pytest.raises(ValueError, match="nothing tells how many rows of pixel_values an image has"):
        rules.split(rules.concatenate(outputs), [[1], [1]])
    of_documents = find_rules(lambda documents: {"pixel_values": torch.ones(3 * len(documents), 2)}, ["pixel_values"])
    with pytest.raises(ValueError, match="nothing tells how many rows of pixel_values an image has"):
        of_documents.split({"pixel_values": torch.ones(6, 2)}, [[2], [1]])


def test_what_counts_rows_may_be_counted_itself():
    def process(documents):
        large = [image.width > 200 for images in documents for image in images]
        tiles = torch.tensor([1 + each for each in large])
        sizes = torch.tensor([[2, 3 + 2 * each] for each in large]).repeat_interleave(tiles, 0)
        return {"pixel_values": torch.ones(int(sizes.prod(1).sum()), 4), "sizes": sizes, "tiles": tiles}

    rules = find_rules(process, ["pixel_values"])
    assert {name: rule.counts for name, rule in rules.of.items()} == {
        "pixel_values": "sizes", "sizes": "tiles", "tiles": None,
    }  # fmt: skip


def test_what_a_document_has_one_row_of_counts_none():
    """The largest grid of its images tells how many patches a document of one image has, and not one of several."""
    grids = {112: [2, 3], 1000: [2, 5], 450: [2, 4]}

    def process(documents):
        of = [torch.tensor([grids[image.width] for image in images]) for images in documents]
        rows = sum(int(each.prod(1).sum()) for each in of)
        return {"pixel_values": torch.ones(rows, 4), "largest": torch.stack([each.amax(0) for each in of])}

    rules = find_rules(process, ["pixel_values", "largest"])
    assert rules.of == {"largest": Rule(DOCUMENT), "pixel_values": Rule(PART, per=Fraction(0))}


def test_what_is_in_proportion_to_the_rows_of_two_images_by_chance_counts_none():
    """A number of colours is twice the tiles of the small image and of the large one, and not of a third."""
    rows = {112: 2, 1000: 6, 450: 3}

    def process(documents):
        images = [image for images in documents for image in images]
        colours = {112: 1, 1000: 3, 450: 2}
        return {
            "pixel_values": torch.ones(sum(rows[image.width] for image in images), 2),
            "colours": torch.tensor([[colours[image.width]] for image in images]),
            "tiles": torch.tensor([[rows[image.width], 1] for image in images]),
        }

    rules = find_rules(process, ["pixel_values"])
    assert rules.of["pixel_values"] == Rule(PART, counts="tiles", per=Fraction(1))
    for_all = dict.fromkeys(rows, 2) | {450: 3}
    constant = find_rules(made_by(lambda width, height: for_all[width]), ["pixel_values"])
    with pytest.raises(ValueError, match="nothing tells how many rows of pixel_values an image has"):
        constant.split({"pixel_values": torch.ones(4, 2)}, [[1], [1]])


@pytest.mark.parametrize(("shape", "rule", "patches"), [
    ((12, 5), Rule(PART, counts="grid", per=Fraction(3)), 4),
    ((1, 7, 3, 28, 28), Rule(DOCUMENT), 7),
    ((1, 3, 28, 28), Rule(IMAGE), 1),
    ((1, 1024, 588), Rule(IMAGE), 1024),
])  # fmt: skip
def test_patches_are_as_many_as_counted_or_those_of_all_tiles(shape, rule, patches):
    assert _patches(shape, rule) == patches


def test_rows_of_which_every_image_has_as_many_are_cut():
    rules = find_rules(made_by(lambda width, height: 3), ["pixel_values", "image_sizes"])
    assert rules == Rules({"pixel_values": Rule(PART, per=Fraction(3))})
    parts = rules.split({"pixel_values": torch.ones(9, 2)}, [[1], [0], [1, 1]])
    assert [len(part.get("pixel_values", ())) for part in parts] == [3, 0, 6]
    with pytest.raises(ValueError, match="pixel_values has 9 rows, and these documents have 6"):
        rules.split({"pixel_values": torch.ones(9, 2)}, [[1], [1]])


def test_what_stands_behind_a_smaller_tensor_is_found():
    def process(documents):
        rows = [torch.arange(float(image.width)) for images in documents for image in images]
        return {"places": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.0)}

    rules = find_rules(process, ["places"])
    assert rules == Rules({"places": Rule(IMAGE, fill=-1.0)})
    joined = rules.concatenate([{"places": torch.ones(1, 3)}, {"places": torch.ones(2, 2)}])
    assert joined["places"].tolist() == [[1, 1, 1], [1, 1, -1], [1, 1, -1]]


@pytest.mark.parametrize(("process", "why"), [
    (lambda documents: {"pixel_values": torch.ones(4, 2)}, r"is \[4, 2\], \[4, 2\], \[4, 2\], \[4, 2\]: the last is not"),
    (lambda documents: {"pixel_values": torch.rand(len(documents), 2)}, "the last is not the first with the second"),
    (lambda documents: {"pixel_values": [torch.ones(1)]}, "pixel_values of images of two sizes is not one tensor"),
])  # fmt: skip
def test_what_does_not_divide_into_images_is_refused(process, why):
    with pytest.raises(ValueError, match=why):
        find_rules(process, ["pixel_values"])


@pytest.mark.parametrize(("name", "why"), [
    pytest.param("smolvlm", r"num2words.*\(type pip install num2words\)",
                 marks=pytest.mark.skipif(find_spec("num2words") is not None, reason="num2words is installed")),
    pytest.param("mistral3", r"No module named 'torchvision' \(type pip install torchvision\)",
                 marks=pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")),
    ("blip", "BlipProcessor has no token that stands for an image"),
    ("idefics2", "Idefics2Processor does not say which tokens stand for an image"),
])  # fmt: skip
def test_a_processor_that_cannot_be_used_is_refused_with_the_reason_and_the_package(tmp_path, name, why):
    takes = save_folder(tmp_path, name)
    with pytest.raises(ConfigError, match=f"the processor of {tmp_path} cannot be used: .*{why}"):
        Vision(tmp_path, takes)


@pytest.mark.parametrize("vision", ["got_ocr2"], indirect=True)
def test_a_conversation_of_more_images_than_a_processor_takes_is_told(vision):
    assert vision.tokens([(64, 64)]) > 0
    with pytest.raises(ValueError, match="GotOcr2Processor takes one image a conversation, not 2"):
        vision.tokens([(64, 64), (40, 60)])


@pytest.mark.parametrize("vision", ["paligemma"], indirect=True)
def test_what_is_asked_behind_an_answer_sees_only_what_comes_before(vision):
    labels = torch.tensor([-100, -100, 5, -100, 7, -100])
    assert vision.kinds(torch.arange(6), labels)["token_type_ids"].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("vision", ["llava_next"], indirect=True)
def test_a_processor_with_other_settings_has_another_fingerprint(vision):
    before = vision.fingerprint
    assert vision.fingerprint == before
    file = next(vision.folder / name for name in FILES if (vision.folder / name).is_file())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rescale_factor": 0.5}))
    assert vision.fingerprint != before


@pytest.mark.parametrize("vision", ["qwen3_vl"], indirect=True)
def test_a_blank_image_is_the_smallest_that_the_processor_takes_and_the_model_is_given_it(vision):
    import vision as tiny

    model = tiny.model("qwen3_vl")
    of_config = image_inputs(model, smallest=True)
    blank, size = vision.blank()
    assert size == (1, 1)
    give_blank_image(model, blank | {"labels": torch.ones(1)})
    given = image_inputs(model, smallest=True)
    assert set(given) == set(of_config) == {"pixel_values", "image_grid_thw"}
    assert all(given[name].equal(blank[name]) for name in given)
    assert given["pixel_values"].abs().min() > 0  # some models take an image of zeros for none
    assert not image_inputs(model)["image_grid_thw"].equal(given["image_grid_thw"])


@pytest.mark.parametrize("vision", ["lighton_ocr"], indirect=True)
def test_a_blank_image_is_large_enough_for_a_token(vision):
    assert not vision.tokens([(1, 1)])
    _, size = vision.blank()
    assert size == (28, 28)
