"""Conversations with images as data: records, tokens, pixels, the order of steps, and what is wrong with them."""

import json
import os
import pickle
import re
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
import vision
from pictures import record, save_data, save_model, save_processor
from torch.utils.data import DataLoader

from zero3d.config import load
from zero3d.data import batches
from zero3d.data.batches import BatchStream
from zero3d.data.conversations import Malformed, from_llava, from_messages
from zero3d.data.dataset import open_data
from zero3d.data.image_files import BadImage, decode, size_of
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.images import Vision, open_processor
from zero3d.data.json_list import list_items
from zero3d.data.kept_images import ImageWriter, KeptImages, Pictures
from zero3d.data.mixture import Member, Mixture
from zero3d.data.modality import ModalityOrder, mixed
from zero3d.data.orders import MixedOrder, Order
from zero3d.data.processor_sizes import check_sizes
from zero3d.data.records import Pictured, record_of
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, DataError
from zero3d.models import image_trial
from zero3d.models.image_trial import TowerUse, check_blank_image, not_taken, tower_use
from zero3d.models.images import give_blank_image, note_taken, repeated, trial_image
from zero3d.models.open import open_model
from zero3d.nested import tensors_in
from zero3d.train.setup.vision import open_vision

TAKES = frozenset({"pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask", "token_type_ids",
                   "mm_token_type_ids"})  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaVA, images and data in its format."""
    folder = tmp_path_factory.mktemp("llava")
    save_model(folder / "model")
    save_data(folder, pictured=12, plain=8)
    return folder


def opened(folder, rows=None, **data):
    """The data of a run over these records, in a cache of their own."""
    file = folder / "data.json"
    if rows is not None:
        file = folder / "rows.json"
        file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    given = {"train": str(file), "images": str(folder / "images"), "length": 64, "packing": False,
             "cache": str(folder / f"cache-{abs(hash(str(rows)))}")}  # fmt: skip
    settings = load({"data": given | data}).data
    return open_data(settings, load_tokenizer(None, str(folder / "model")), vision=Vision(folder / "model", TAKES))


def families(*but):
    """Every family but these; LLaVA in the short tests."""
    rest = [name for name in vision.FAMILIES if name not in ("llava", *but)]
    return ["llava", *(pytest.param(name, marks=pytest.mark.long) for name in rest)]


def shown(folder, family):
    """A conversation with two images of different sizes, drawn in a folder of a tiny model."""
    from PIL import Image

    save_model(folder, family)
    for name, size in (("a.png", (40, 30)), ("b.png", (25, 90))):
        Image.new("RGB", size, "red").save(folder / name)
    asked = [{"type": "image"}, {"type": "text", "text": "what is it?"}, {"type": "image"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]}
    return [{"role": "user", "content": asked}, answer], ("a.png", "b.png")


@pytest.mark.parametrize("family", families("internvl", "qwen2_vl", "qwen2_5_vl", "paligemma"))
def test_tokens_and_pixels_are_those_of_transformers_processor(tmp_path, family):
    import transformers
    from PIL import Image

    messages, names = shown(tmp_path, family)
    ours = Vision(tmp_path, TAKES)
    (ids, _, _), _ = ImageTokens(load_tokenizer(None, str(tmp_path)), ours, tmp_path).encode(messages, names)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path, backend="pil")
    images = [Image.open(tmp_path / name).convert("RGB") for name in names]
    given = [dict(part) for part in messages[0]["content"]]
    for part, image in zip((given[0], given[2]), images, strict=True):
        part["image"] = image
    theirs = processor.apply_chat_template(
        [{"role": "user", "content": given}, messages[1]], tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    assert ids == theirs["input_ids"][0].tolist()
    made = ours.pixels([ours.outputs(images)])
    for name, values in made.items():
        assert values.reshape(theirs[name].shape).equal(theirs[name])
    kinds = ours.kinds(torch.tensor(ids), torch.full((len(ids),), -100))
    for name in kinds.keys() & theirs.keys():
        assert kinds[name].equal(theirs[name][0])


@pytest.mark.parametrize("family", families())
def test_a_model_takes_what_is_made_of_its_images(tmp_path, family):
    from PIL import Image

    messages, names = shown(tmp_path, family)
    ours = Vision(tmp_path, TAKES)
    tokens, pictures = ImageTokens(load_tokenizer(None, str(tmp_path)), ours, tmp_path).encode(messages, names)
    ids, targets, _ = tokens
    assert pictures.sizes == ((40, 30), (25, 90))
    assert not any(target for token, target in zip(ids, targets, strict=True) if token == ours.image)
    words = ours.tokenizer.convert_ids_to_tokens([token for token, target in zip(ids, targets, strict=True) if target])
    assert words == ["a", "red", "circle", "</s>"]
    model = vision.model(family)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.image_token_id = ours.image  # of this tokenizer, not of the tiny config
    rows = torch.tensor([ids])
    if family == "paligemma":  # whose processor adds a thousand tokens of places before that of images
        rows[rows == ours.image] = vision.IMAGE
        model.config.image_token_id = vision.IMAGE
    labels = torch.where(torch.tensor([targets]) == 1, rows, -100)
    kinds = {name: value[None] for name, value in ours.kinds(torch.tensor(ids), labels[0]).items()}
    made = ours.pixels([ours.outputs([Image.open(tmp_path / name).convert("RGB") for name in names])])
    assert model(input_ids=rows, labels=labels, **made, **kinds).loss.isfinite()


def test_images_and_texts_are_batches_whose_assistants_tokens_are_learnt(folder):
    data = opened(folder)
    assert len(data.train) == 20
    batch = data.train.stack([data.train[index] for index in (0, 1, 2)])
    image, words = Vision(folder / "model", TAKES).image, load_tokenizer(None, str(folder / "model")).inner
    pictures = data.train.pictured[:3].sum()
    assert batch["pixel_values"].shape == (pictures, 3, 28, 28)
    assert (batch["input_ids"] == image).sum() == 4 * pictures
    learnt = [words.decode(row[row >= 0]) for row in batch["labels"]]
    assert set(learnt) <= {"a red circle </s>", "a blue circle </s>", "a blue square </s>"}
    padding = data.train[len(data.train)]
    assert (padding["labels"] == -100).all()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_batches_are_the_same_with_workers(folder, monkeypatch, start):
    """Of a mixture of records in files with a data set of one's own: one start for both.

    A forked worker, which imports nothing, is given what pickling leaves of the data, as a spawned one is.
    """
    from zero3d.config import Batch

    monkeypatch.setattr(batches, "DataLoader", lambda *given, **how: DataLoader(
        *given, **how | ({"multiprocessing_context": start} if how["num_workers"] else {})
    ))  # fmt: skip

    own = opened(folder, train="own_data:pictured").train
    mixed = Mixture([Member("files", opened(folder).train), Member("own", own)])
    assert {index < 20 for index in mixed.order(0, True).samples(0, 12)} == {True, False}
    travelled = pickle.loads(pickle.dumps(mixed))
    streams = [BatchStream(data, Batch(4, 2, 2, 1), workers=n) for n, data in enumerate((mixed, travelled))]
    for _ in range(3):
        for one, other in zip(*map(next, streams), strict=True):
            assert one.keys() == other.keys()
            assert all(one[name].equal(other[name]) for name in one)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("dealt", [False, True])
def test_every_rank_knows_of_each_micro_batch_whether_any_ranks_has_an_image(folder, dealt):
    from zero3d.config import Batch

    data = Mixture([Member("files", opened(folder).train), Member("more", opened(folder).train)])
    streams = [BatchStream(data, Batch(8, 1, 4, 2), rank=rank, dealt=dealt) for rank in range(2)]
    again, found = BatchStream(data, Batch(8, 1, 4, 2), dealt=dealt), []
    for step in range(12):
        if step == 2:
            next(again)
            next(again._batches)  # of a step that is read ahead
            again.restore(streams[0].state())
        both = list(zip(*map(next, streams), strict=True))
        has = [any("pixel_values" in batch for batch in batches) for batches in both]
        assert streams[0].pictured == streams[1].pictured == has
        found += has
    for _ in range(10):
        next(again)
    assert again.pictured == has
    assert set(found) == {True, False}
    own = BatchStream(opened(folder, train="own_data:pictured").train, Batch(4, 2, 2, 1))
    next(own)
    assert own.pictured is None  # until an item is read nobody knows


@pytest.mark.parametrize("batch", [3, 4, 7])
def test_a_step_is_of_one_kind_but_the_last_ones_of_a_pass_and_a_pass_has_every_sample(batch):
    kinds = numpy.random.default_rng(0).random(50) < 0.6
    order = ModalityOrder(Order(50, seed=1, shuffle=True), kinds, batch, seed=1)
    places = order.samples(0, 150)
    for start in (0, 50, 100):
        assert sorted(places[start : start + 50]) == list(range(50))
    mixed = [at for at in range(0, 150 - batch, batch) if len(set(kinds[places[at : at + batch]])) == 2]
    assert len(mixed) <= 2 * 3, "the ends of three passes"
    assert order.samples(77, 81) == places[77:81]
    assert ModalityOrder(Order(50, seed=1, shuffle=True), kinds, batch, seed=1).samples(120, 130) == places[120:130]


def test_kinds_are_kept_apart_where_weights_draw_a_sample_more_than_once_a_pass():
    drawn = MixedOrder([10, 30], [Fraction(3), Fraction(1)], seed=0, shuffle=True)
    kinds = numpy.arange(40) < 10
    assert [mixed(some) for some in (kinds, kinds | True, kinds & False, None)] == [True, False, False, False]
    places = ModalityOrder(drawn, kinds, 4, seed=0).samples(0, 120)
    for start in (0, 40, 80):
        assert sorted(places[start : start + 40]) == sorted(drawn.samples(start, start + 40))


def test_a_file_that_is_one_list_is_read_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setattr("zero3d.data.json_list.PIECE", 7)
    items = [{"a": "x" * 30, "b": [1, {"c": "é]},["}]}, {}, 3, "t"]
    for text in (json.dumps(items), json.dumps(items, indent=2), "\n [ ] ", json.dumps([1])):
        (tmp_path / "list.json").write_text(text)
        assert list(list_items(tmp_path / "list.json")) == json.loads(text)
    for text, number in ((json.dumps(items)[:-3], 3), ('[{"a": 1} {"b": 2}]', 1), ('[{"a": 1}, {"b"', 1)):
        (tmp_path / "list.json").write_text(text)
        with pytest.raises(DataError, match=f"damaged behind record {number}"):
            list(list_items(tmp_path / "list.json"))


TURNS = record()["conversations"]


@pytest.mark.parametrize(("value", "why"), [
    ({"conversations": TURNS, "image": "a.png"}, "0 <image>s in its texts, and 1 image"),
    ({"conversations": record("a.png")["conversations"]}, "1 <image> in its texts, and 0 images"),
    ({"conversations": [TURNS[1], TURNS[0]]}, "a user's message comes first"),
    ({"conversations": [TURNS[0], TURNS[0], TURNS[1]]}, "are both the user's: they must take turns"),
    ({"conversations": TURNS[:1]}, "no message is the assistant's"),
    ({"conversations": [{"from": "bot", "value": ""}]}, "turn 0 is from 'bot'"),
    ({"conversations": [*TURNS, {"from": "system", "value": "be kind"}]}, "a system message is not the first"),
    ({"conversations": "hello"}, "is not a list of"),
    ({"conversations": TURNS, "image": 3}, "image is 3"),
])  # fmt: skip
def test_a_malformed_conversation_says_what_is_wrong(value, why):
    with pytest.raises(Malformed, match=why):
        from_llava(value)


def test_chats_have_images_as_parts():
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "what?"},
        {"type": "image", "path": "b.png"},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a circle"}]
    made, images = from_messages(messages)
    assert images == ("a.png", "b.png")
    assert [part["type"] for part in made[0]["content"]] == ["image", "text", "image"]
    with pytest.raises(Malformed, match="a part of message 0 is neither"):
        from_messages([{"role": "user", "content": [{"type": "video"}]}])


def test_a_column_of_images_is_for_parts_that_name_none():
    turns = [{"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image"}]},
             {"role": "user", "content": "b"}, {"role": "assistant", "content": "a circle"}]  # fmt: skip
    asked, answer = [turns[0], turns[2]], ("a.png",)
    assert from_messages(asked, ["a.png"])[1] == answer
    made, images = from_messages([turns[1], turns[2]], ["a.png", {"bytes": b"", "path": "b.png"}])
    assert images == ("a.png", {"bytes": b"", "path": "b.png"})
    assert [part["type"] for part in made[0]["content"]] == ["image", "image", "text"]  # none is named: all come first
    with pytest.raises(Malformed, match="2 images in images, and 1 of its parts name none: they must be as many"):
        from_messages(asked, ["a.png", "b.png"])
    with pytest.raises(Malformed, match="a part of message 0 is neither"):
        from_messages(asked, [])
    with pytest.raises(Malformed, match="images is 3"):
        from_messages(asked, 3)


def test_chats_with_images_keep_all_that_chats_of_texts_keep(tmp_path):
    from PIL import Image

    call = {"type": "function", "function": {"name": "weather", "arguments": {"of": "Rome"}}}
    save_processor(tmp_path, "llava")
    vision.config("llava").save_pretrained(tmp_path)
    Image.new("RGB", (28, 28), "red").save(tmp_path / "a.png")
    template = (
        "{% for t in tools or [] %}square {% endfor %}{% for m in messages %}{{ m.role }} : "
        "{% for c in m.content or [] %}{{ '\n<image>' if c.type == 'image' else c.text + ' ' }}{% endfor %}"
        "{% if m.reasoning_content %}circle {% endif %}{% for c in m.tool_calls or [] %}blue {% endfor %}; {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(None, str(tmp_path))
    images = ImageTokens(tokenizer, Vision(tmp_path, frozenset({"pixel_values"})), tmp_path)
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what", "cached": True}]}
    messages = [asked, {"role": "assistant", "content": None, "tool_calls": [call], "id": 1},
                {"role": "tool", "content": "red"}, {"role": "assistant", "content": "it", "reasoning_content": "a"}]  # fmt: skip
    record = {"messages": messages, "images": ["a.png"], "tools": [call], "source": "x"}
    made = record_of(record, "here")
    assert isinstance(made, Pictured)
    assert record_of(record | {"system": "circle"}, "here").messages == [
        {"role": "system", "content": [{"type": "text", "text": "circle"}]}, *made.messages
    ]  # fmt: skip
    assert made.unused == ("source", "messages[].content[].cached")
    (ids, targets, _), _ = images.encode(made.messages, made.images, made.options)
    words = tokenizer.inner.convert_ids_to_tokens(ids)
    text = " ".join(word for word in words if word not in ("<image>", "<s>", "\n"))
    assert text == "square user : what ; assistant : blue ; <unk> : red ; assistant : it circle ;"
    assert [word for word, on in zip(words, targets, strict=True) if on] == ["blue", ";", "it", "circle", ";"]
    assert list(images.unused(made.messages, made.options)) == ["messages[].id"]


def bytes_of(path):
    return {"bytes": path.read_bytes(), "path": path.name}


def written(folder, kind):
    """The records of `folder` about images, in the form of another kind of data; how they are given."""
    import pyarrow
    from pyarrow import parquet

    rows = [row for row in json.loads((folder / "data.json").read_text()) if "image" in row]
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        chats = [from_llava(row)[0] for row in rows]
        columns = {"messages": chats, "images": [[bytes_of(folder / "images" / row["image"])] for row in rows]}
        parquet.write_table(pyarrow.table(columns), folder / "rows.parquet", row_group_size=5)
    return f"{folder / 'rows'}.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_images_are_streamed_as_they_are_kept(folder, kind, tmp_path):
    given = {"train": written(folder, kind), "streaming": True, "cache": str(tmp_path)}
    kept, streamed = opened(folder).train, opened(folder, **given).train
    wanted = [kept[i] for i in range(len(kept)) if kept[i]["images"]]
    assert len(streamed) == len(wanted) == 12
    found = streamed.stack([streamed[i] for i in (0, 5, 11)])
    for name, values in kept.stack([wanted[i] for i in (0, 5, 11)]).items():
        assert found[name].equal(values), name
    assert not list(tmp_path.iterdir())
    assert "pixel_values" not in streamed.stack([streamed[len(streamed)]])  # padding
    with pytest.raises(DataError, match=r"has images' tokens up to number \d+, which data\.length=6 would cut"):
        opened(folder, **given | {"length": 6})


def test_images_inside_the_data_are_not_kept(folder):
    with pytest.raises(DataError, match=r"rows\.parquet:row 1: its images are in the data themselves.*streaming=true"):
        opened(folder, train=written(folder, "parquet"))


def test_a_dataset_of_ones_own_gives_images_of_pillow_and_so_does_its_copy_in_a_worker(folder):
    from zero3d.config import Batch

    data = opened(folder, train="own_data:pictured").train
    streams = [BatchStream(each, Batch(4, 2, 2, 1)) for each in (data, pickle.loads(pickle.dumps(data)))]
    for one, other in zip(*map(next, streams), strict=True):
        assert one["pixel_values"].shape == (2, 3, 28, 28)
        assert all(one[name].equal(other[name]) for name in one)
    assert (len(data), data.identity["processor"]) == (10, Vision(folder / "model", TAKES).fingerprint)


@pytest.mark.parametrize(("image", "why"), [
    ("none.png", "rows.json:record 1: the image .*none.* does not exist: set data.images"),
    ("text.png", "is not an image"),
    ("cut.png", "is damaged .*: copy it again"),
    ("huge.png", "has 9000 x 9000 = 81,000,000 pixels, more than 67,108,864"),
    ("long.webp", "has 2,147,483,648 bytes, more than 1,073,741,824: make it smaller"),
    ("pipe.png", "is not a regular file"),
])  # fmt: skip
def test_a_bad_image_is_told_with_file_record_and_remedy(folder, image, why):
    from PIL import Image

    images = folder / "images"
    (images / "text.png").write_text("no image")
    noise = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), numpy.uint8)
    Image.fromarray(noise).save(images / "whole.png")
    (images / "cut.png").write_bytes((images / "whole.png").read_bytes()[:4000])
    if image == "huge.png":
        Image.new("1", (9000, 9000)).save(images / image)
    if image == "long.webp":
        Image.new("RGB", (9, 9)).save(images / image)
        os.truncate(images / image, 1 << 31)
    if image == "pipe.png":
        os.mkfifo(images / image)
    rows = [record(image), record("0.png")]
    with pytest.raises(DataError, match=why):
        data = opened(folder, rows)
        data.train[0]
    if image == "cut.png":  # found when it is decoded: the other sample stands in, so that no mean is of nothing
        samples = opened(folder, rows, skip_bad_lines=True).train
        with pytest.warns(UserWarning, match=r"cut.png is damaged .* stands in for it \(damaged so far: 1\)"):
            sample = samples[0]
        assert sample["input_ids"].equal(samples[1]["input_ids"])
        assert (sample["labels"] >= 0).any()
    else:
        assert len(opened(folder, rows, skip_bad_lines=True).train) == 1
        with pytest.raises(BadImage):
            size_of(images, image)


def test_a_processor_that_raises_is_told_with_file_and_record_and_skipped_where_that_is_allowed(folder, monkeypatch):
    def fails_at(wrong):
        call = Vision._call

        def fails(vision, documents):
            raw = vision._processor._process_images
            vision._processor._process_images = lambda images, **options: (
                1 / 0 if any(wrong(image) for document in images for image in document) else raw(images, **options)
            )
            try:
                return call(vision, documents)
            finally:
                del vision._processor._process_images

        monkeypatch.setattr(Vision, "_call", fails)

    rows, why = [record("5.png"), record("0.png")], r"LlavaProcessor of .* raised ZeroDivisionError for an image of "
    with (
        monkeypatch.context(),
        pytest.raises(DataError, match=rf"rows.json:record 1: with 5.png: {why}49 x 20 pixels: div"),
    ):
        fails_at(lambda image: image.size == (49, 20))  # already when tokens are made
        opened(folder, rows)
    monkeypatch.undo()
    data, lenient = opened(folder, rows).train, opened(folder, rows, skip_bad_lines=True).train
    fails_at(lambda image: image.getpixel((0, 0)) == (0, 0, 255))  # of pixels: the blue one
    with pytest.raises(DataError, match=rf"rows.json:record 1, sequence 0, with 5.png: {why}.*; or leave such samples"):
        data[0]
    with pytest.warns(UserWarning, match=rf"with 5.png: {why}.*Another sample with images stands in for it"):
        assert lenient[0]["input_ids"].equal(data[1]["input_ids"])


@pytest.mark.parametrize("packing", [True, False])
def test_an_image_that_is_damaged_when_a_batch_is_made_is_told_with_the_record_of_its_document(folder, packing):
    """Behind records that are left out, empty ones, and chats of text; in a copy as workers have it."""
    from PIL import Image

    bad = folder / "images" / "later.png"
    Image.new("RGB", (30, 30)).save(bad)
    rows = [
        record("none.png"),
        record(),
        record("1.png"),
        {"text": ""},
        record(["2.png", "later.png"], question="<image>"),
    ]
    data = pickle.loads(pickle.dumps(opened(folder, rows, skip_bad_lines=True, packing=packing).train))
    strict = opened(folder, rows[2:], packing=packing).train
    bad.write_text("no image")
    place = r"rows\.json:record {}, sequence \d, with 2\.png, later\.png: the image .*later\.png is not an image"
    with pytest.warns(UserWarning, match="^" + r".*" + place.format(5)):
        [data[index] for index in range(len(data))]
    with pytest.raises(DataError, match=place.format(3)):
        [strict[index] for index in range(len(strict))]


def test_tokens_kept_without_places_are_the_same_and_an_error_has_no_record(folder):
    from PIL import Image

    rows, bad = [record("6.png"), record("gone.png")], folder / "images" / "gone.png"
    (folder / "kept.json").write_text(json.dumps(rows))
    Image.new("RGB", (30, 30)).save(bad)
    kept = opened(folder, train=str(folder / "kept.json")).train
    bad.unlink()
    with pytest.raises(DataError, match=r"kept\.json:record 2, sequence 1, with gone\.png: "):
        kept[1]
    Image.new("RGB", (30, 30)).save(bad)
    (kept._store.folder / "image_places").unlink()
    data = opened(folder, train=str(folder / "kept.json"))
    assert not any("damaged" in note for note in data.notes)
    assert (data.train._store.folder, data.train.identity) == (kept._store.folder, kept.identity)
    bad.unlink()
    with pytest.raises(DataError, match=r"^sequence 1, with gone\.png: "):
        data.train[1]


def test_a_message_names_the_first_of_many_images_in_one_line():
    assert Pictures(("a\nb.png", {"path": "c.png"}, "d.png", "e.png")).named == "with a b.png, c.png, d.png and 1 more"
    assert Pictures(({"bytes": b"x"},)).named == Pictures().named == ""


def test_a_token_of_images_in_a_text_is_told(tmp_path):
    messages, names = shown(tmp_path, "gemma3")  # whose mark in a text is another token
    tokens = ImageTokens(load_tokenizer(None, str(tmp_path)), Vision(tmp_path, TAKES), tmp_path)
    tokens.encode(messages, names)
    messages[0]["content"][1]["text"] = "what is <soft>?"
    with pytest.raises(ValueError, match="its text has 9 tokens <soft>, and its 2 images are 8 of them"):
        tokens.encode(messages, names)


def test_an_image_of_another_size_than_when_tokens_were_made_is_told(folder):
    from PIL import Image

    Image.new("RGB", (30, 30)).save(folder / "images" / "changed.png")
    data = opened(folder, [record("changed.png")])
    Image.new("RGB", (60, 30)).save(folder / "images" / "changed.png")
    with pytest.raises(DataError, match="is 60 x 30 and was 30 x 30 when its tokens were made"):
        data.train[0]
    assert decode(folder / "images", "changed.png").mode == "RGB"


def test_a_sample_whose_images_do_not_fit_into_a_sequence_is_dropped_and_counted(folder):
    three = record(["0.png", "1.png", "2.png"], question="<image><image>")
    data = opened(folder, [three, record()], length=12)
    assert len(data.train) == 1
    why = "1 with tokens of images behind data.length=12 (the shortest needs 17)"
    why += "; no sample with images is left: type data.length=17 at least"
    assert f"training: 1 example truncated to 12 tokens; 1 sample whose images do not fit dropped ({why})" in data.notes


def test_a_folder_without_a_processor_or_with_an_odd_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no processor .*processor\.save_pretrained"):
        Vision(tmp_path, TAKES)
    save_model(tmp_path)
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be used"):
        Vision(tmp_path, TAKES)


@pytest.mark.parametrize(("family", "settings", "why"), [
    ("qwen3_vl", {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}},
     "size.shortest_edge 1,000,000,000 the processor makes at least 1,000,000,000 pixels of an image, "
     "x 3 colours x 4 bytes = 12,000,000,000 bytes, and more than 67,108,864 pixels are refused"),
    ("qwen3_vl", {"size": None, "min_pixels": 10**9, "max_pixels": 10**9}, "min_pixels 1,000,000,000 the"),
    ("qwen3_vl", {"patch_size": 14000}, "patch_size 14,000 the processor makes patches of at least 28,000 x 28,000"),
    ("qwen3_vl", {"temporal_patch_size": 10**8}, "temporal_patch_size 100,000,000 the processor makes patches of at "
     "least 28 x 28 x 100,000,000 frames = 78,400,000,000 pixels of an image"),
    ("llava", {"size": {"shortest_edge": 33600}}, "size.shortest_edge 33,600 the processor makes 33,600 x 33,600 = 1,1"),
    ("llava", {"crop_size": {"height": 10**6, "width": 336}}, "crop_size.height 1,000,000 the processor makes"),
])  # fmt: skip
def test_a_processor_whose_sizes_are_a_typo_is_refused_before_it_is_called(
    tmp_path, monkeypatch, family, settings, why
):
    save_processor(tmp_path, family)
    vision.config(family).save_pretrained(tmp_path)
    file = tmp_path / ("preprocessor_config.json" if family == "qwen3_vl" else "processor_config.json")
    given = json.loads(file.read_text())
    part = given.get("image_processor", given)
    part |= settings
    file.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    monkeypatch.setattr(Vision, "_call", None)
    with pytest.raises(ConfigError, match="^" + re.escape(f"{file}: with {why}")):
        Vision(tmp_path, TAKES)


@pytest.mark.parametrize(("family", "settings"), [
    ("qwen3_vl", {"size": {"shortest_edge": 3136, "longest_edge": 10**9}}),
    ("llava", {"crop_size": {"height": 10**6, "width": 336}, "do_center_crop": False}),
])  # fmt: skip
def test_a_bound_or_a_size_that_makes_no_pixels_is_taken(tmp_path, family, settings):
    save_processor(tmp_path, family)
    vision.config(family).save_pretrained(tmp_path)
    processor = open_processor(tmp_path).image_processor
    for name, value in settings.items():
        setattr(processor, name, value)
    check_sizes(processor, tmp_path, ())


def vision_of(folder):
    """The processor that a run opens for the model of a folder with images."""
    config = load({"model": {"path": str(folder)}, "data": {"train": "x.json", "images": str(folder)}})
    opened = open_model(config.model)
    return open_vision(config, opened), opened.module


@pytest.mark.parametrize(("family", "file", "settings", "why"), [
    ("llava", "processor_config.json", {"patch_size": 7},
     r"\[1, 3, 28, 28\] and 16 tokens, and the model makes 4 features of it.* patch_size 7, .*config.json has .*patch_size 14"),
    ("llava", "config.json", {"vision_feature_select_strategy": "full"},
     r"and 4 tokens, and the model makes 5 features of it.*strategy default; config.json has .*strategy full"),
    ("qwen3_vl", "preprocessor_config.json", {"patch_size": 28},
     r"\[4, 4704\] and 1 token, and the model raises .*patch_size 28, .*config.json has patch_size 14"),
    ("qwen3_vl", "preprocessor_config.json", {"merge_size": 1},
     r"and 4 tokens, and the model makes 1 feature of it.*merge_size 1, .*config.json has .*spatial_merge_size 2"),
])  # fmt: skip
def test_a_processor_of_another_model_is_refused_at_the_start_with_the_numbers_of_both(
    tmp_path, family, file, settings, why
):
    model = Path(save_model(tmp_path, family))
    vision_of(model)
    given = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(given | settings))
    start = f"^the processor of {model} is not that of its model: of an image of 1 x 1 pixels it makes .*"
    with pytest.raises(ConfigError, match=start + why):
        vision_of(model)


@pytest.mark.parametrize(("family", "settings", "why"), [
    ("llava_next", {"image_grid_pinpoints": [[28, 28]]},
     r"\[1, 3, 3, 28, 28\] and 14 tokens, and the model makes 10 features of it.*\[\[28, 56\], .*config.json has .*\[\[28, 28\]\]"),
])  # fmt: skip
def test_a_processor_that_is_its_models_on_the_smallest_image_alone_is_refused_by_a_wide_one(
    tmp_path, family, settings, why
):
    model = Path(save_model(tmp_path, family))
    vision_of(model)
    given = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(given | settings))
    start = f"^the processor of {model} is not that of its model: of an image of 1000 x 600 pixels it makes .*"
    with pytest.raises(ConfigError, match=start + why):
        vision_of(model)


@pytest.mark.parametrize("family", ["llava_next", pytest.param("qwen2_5_vl", marks=pytest.mark.long), "qwen3_vl"])
def test_a_large_tower_that_reads_whole_numbers_alone_is_tried_by_shapes(monkeypatch, family):
    """Two images of it, whose sizes, grids and windows it reads."""
    model = vision.model(family)
    inputs = repeated(trial_image(model), 2)
    by_values = image_trial._tried(model, inputs, ["model"])
    monkeypatch.setattr(image_trial, "SMALL", 0)
    by_shapes = image_trial._tried(model, inputs, ["model"], quick=True)
    made = [[t.shape for t in tensors_in(tried.features.pooler_output)] for tried in (by_values, by_shapes)]
    assert made[0] == made[1]


def test_a_large_tower_that_reads_pixels_is_not_tried_on_a_wide_image(tmp_path, monkeypatch):
    monkeypatch.setattr(image_trial, "SMALL", 0)
    model = vision.model("idefics3")
    assert not_taken(model, trial_image(model), 3, vision.IMAGE, quick=True) is None
    assert "makes 4 features of it" in not_taken(model, trial_image(model), 3, vision.IMAGE)


def test_a_module_that_runs_twice_has_the_place_of_its_first_run():
    model = vision.model("llava")
    first, second = (f"model.vision_tower.encoder.layers.{number}" for number in (0, 1))
    read = {name for name, _ in model.named_parameters()}
    order = image_trial._order_of_use(model, image_trial._Tried(None, (first, second, first), read))
    assert order[f"{first}.layer_norm1.weight"] < order[f"{second}.layer_norm1.weight"]


def test_a_tower_that_fails_on_two_images_is_an_error_where_each_rank_must_run_it_alike():
    """Also where one has been tried: what nobody knows is how often the modules run."""
    model = vision.model("llava")
    give_blank_image(model, {"pixel_values": torch.ones(1, 3, 5, 5)})
    note_taken(model)
    assert tower_use(model) == TowerUse()
    with pytest.raises(ValueError, match=r"5\*5"):
        tower_use(model, strict=True)


def test_a_processor_with_the_models_numbers_is_tried_once(tmp_path, monkeypatch):
    _, model = vision_of(save_model(tmp_path))
    monkeypatch.setattr("zero3d.models.image_trial._tried", None)
    check_blank_image(model)


def test_a_model_with_more_features_than_tokens_is_asked_itself(tmp_path, monkeypatch):
    folder = save_model(tmp_path)
    raw = image_trial._tried
    monkeypatch.setattr("zero3d.models.image_trial._tried", lambda *given, **named: more(raw(*given, **named)))
    vision_of(folder)


def more(tried):
    tried.features.pooler_output = torch.zeros(1, 9, 16)
    return tried


def test_a_model_without_a_tower_is_refused_where_the_data_have_images(tmp_path):
    config = json.loads((Path(save_model(tmp_path / "model")) / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"the data have images, and LlamaForCausalLM of model\.path=.* takes none"):
        vision_of(tmp_path / "model")


def test_a_model_whose_config_has_no_tower_is_refused_where_the_data_have_images(tmp_path):
    """Its forward takes images all the same."""
    vision.model("gemma4", vision_config=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the data have images, and Gemma4ForConditionalGeneration of .* takes none"):
        vision_of(tmp_path)


def test_a_place_of_several_lines_is_kept_in_one(tmp_path):
    """As where a file's name has an end of line: the records behind it keep their places."""
    files = ExitStack()
    with files:
        writer = ImageWriter(lambda name: files.enter_context((tmp_path / name).open("wb")))
        for place in ("a\nb.json, record 1", "c.json, record 2"):
            writer.add(Pictures(("x.png",), ((8, 8),), 4, 1, place))
    kept = KeptImages(tmp_path)
    assert [kept.place(0), kept.place(1)] == ["a b.json, record 1", "c.json, record 2"]


NAMES = [
    ("/etc/passwd", "is not named within"), ("../other.png", "is not named within"), ("a/../../x.png", "is not named within"),
    ("a\0b.png", r"the image a\\x00b\.png is not named within"), ("x" * 5000, r"the image .*xxx\.\.\. does not exist"),
    ("y/" * 2000, "does not exist"), ("pipe", "is not a regular file"), (".", "is not a regular file"), ("out.png", r"out\.png is a link to .*, out of"),
    ("a\nb", "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "why"), NAMES)
@pytest.mark.parametrize("form", [str, lambda name: {"path": name}, lambda name: {"bytes": None, "path": name}])
def test_names_that_leave_the_folder_are_refused(tmp_path, name, why, form):
    from PIL import Image

    images, other = tmp_path / "images", tmp_path / "other"
    images.mkdir()
    other.mkdir()
    Image.new("RGB", (4, 3)).save(other / "0.png")
    Image.new("RGB", (4, 3)).save(tmp_path / "other.png")
    os.mkfifo(images / "pipe")
    (images / "out.png").symlink_to(other / "0.png")
    (images / "folder").symlink_to(other)
    for read in (size_of, decode):
        with pytest.raises(BadImage, match=why) as told:
            read(images, form(name))
        assert str(told.value).isprintable()
        assert len(str(told.value)) < 600


def test_links_within_the_folder_and_a_folder_that_is_a_link_are_followed(tmp_path):
    from PIL import Image

    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 3)).save(tmp_path / "images" / "0.png")
    (tmp_path / "images" / "1.png").symlink_to("0.png")
    (tmp_path / "linked").symlink_to("images")
    assert size_of(tmp_path / "linked", "1.png") == (4, 3)


def test_only_formats_of_pixels_are_opened(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin, Image

    def run(*given, **named):
        raise AssertionError("another program was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.eps")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.eps").read_bytes())
    Image.new("RGB", (8, 8), "red").save(tmp_path / "c.pdf")
    for image in ("a.eps", "b.png", "c.pdf", {"bytes": (tmp_path / "a.eps").read_bytes()}):
        for read in (size_of, decode):
            with pytest.raises(BadImage, match="is not an image in PNG, JPEG, WEBP"):
                read(tmp_path, image)
    for kind in ("png", "jpg", "webp", "gif", "bmp", "tiff", "ppm"):
        Image.new("RGB", (5, 4), "red").save(tmp_path / f"x.{kind}")
        assert decode(tmp_path, f"x.{kind}").size == size_of(tmp_path, f"x.{kind}") == (5, 4)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_as_their_exif_data_say_and_so_are_sizes(tmp_path, kind, orientation):
    from PIL import Image, ImageOps

    noise = numpy.random.default_rng(0).integers(0, 255, (6, 9, 3), numpy.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(noise).save(tmp_path / f"a.{kind}", exif=exif)
    with Image.open(tmp_path / f"a.{kind}") as image:
        wanted = ImageOps.exif_transpose(image).convert("RGB")
    for given in (f"a.{kind}", {"bytes": (tmp_path / f"a.{kind}").read_bytes()}):
        found = decode(tmp_path, given)
        assert found.size == size_of(tmp_path, given) == wanted.size
        assert numpy.array_equal(numpy.asarray(found), numpy.asarray(wanted))
    assert (wanted.size == (6, 9)) == (orientation in (5, 6, 7, 8))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_data_that_are_damaged_turn_nothing(tmp_path):
    from PIL import Image

    Image.new("RGB", (9, 6)).save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 40)
    assert decode(tmp_path, "a.jpg").size == size_of(tmp_path, "a.jpg") == (9, 6)


@pytest.mark.parametrize("value", [
    {"bytes": "abc"}, {"bytes": "abc", "path": "a.png"}, {"bytes": [1, 2]}, {"bytes": 3}, {"path": 3}, {"path": b"a.png"},
    {"bytes": None}, {"bytes": b"", "path": ""}, {}, "",
])  # fmt: skip
def test_what_is_no_image_is_told_by_its_record(value):
    with pytest.raises(Malformed, match="image is "):
        from_llava({"conversations": record("a.png")["conversations"], "image": value})
    asked = [{"role": "user", "content": [{"type": "image", "image": value}]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(Malformed, match="a part of message 0 is neither"):
        from_messages(asked)
