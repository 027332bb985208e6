"""The sample at the end of a run: it begins as the data do, is the same on every mesh, and changes nothing of the training."""

from unittest import mock

import pytest
import torch
from corpora import save_tokenizer, write_lines
from test_resume_guards import sampled
from training import contents, metrics, save_model, steady, train, tree

from zero3d.data.dataset import DataSet
from zero3d.data.images import PIXELS
from zero3d.data.tokenizers import ByteTokenizer
from zero3d.train.sample import LONGEST, UNASKED, WORDS, beginning, prompt_of

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} <end> {% else %}"
    "<assistant> {{ m['content'] }} <end> {% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ON = {"evaluate": {"prompt": True}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model over bytes, and a text."""
    folder = tmp_path_factory.mktemp("sample")
    ByteTokenizer().save(save_model(folder / "model", vocab=256))
    (folder / "text.txt").write_text("some words and more of them " * 40)
    return folder


def of_text(place, output, **sections):
    made = tree(place, output, train={"steps": 2}, **sections)
    made["data"] |= {"train": str(place / "text.txt"), "tokenizer": "bytes", "validation": 0.2}
    return made


def labelled(*labels):
    """A sample of data with these labels; a dash is a token that is not learnt."""
    values = torch.tensor([-100 if label == "-" else 7 for label in "".join(labels)])
    return {"input_ids": torch.arange(len(values)), "labels": values}


@pytest.mark.parametrize(("found", "tokens"), [
    (labelled("-", "x" * 40), WORDS),
    (labelled("-xxx", "-", "x" * 40), 4),  # the first document's end
    (labelled("-xx", "---"), 3),  # padding
    (labelled("-" * 20, "xxxx"), 20),  # a prompt, up to its answer
    (labelled("-" * LONGEST, "x"), LONGEST),
    (labelled("-" * LONGEST, "-", "x"), 0),
    (labelled("-" * (LONGEST + 5)), 0),  # nothing is learnt
])  # fmt: skip
def test_a_sample_begins_with_first_words_or_all_before_an_answer(found, tokens):
    assert prompt_of(found).tolist() == list(range(tokens))


def test_held_out_data_come_first_a_long_prompt_is_passed_over_and_images_have_none():
    short, long = labelled("-" * 5, "x"), labelled("-" * (LONGEST + 1), "x")
    assert beginning(DataSet([short], [long, labelled("-" * 3, "x")], None, [])).tolist() == [[0, 1, 2]]
    assert beginning(DataSet([short], None, None, [])).shape == (1, 5)
    assert beginning(DataSet([long] * 20, None, None, [])) is None
    assert beginning(DataSet([short | {PIXELS: []}], None, None, [])) is None


def test_a_run_ends_with_a_sample_unless_it_asks_for_none(ranks, place):
    text, said = ranks(1, sampled, of_text(place, "on", **ON))[0]
    held_out = ("some words and more of them " * 40).encode()[-224:]
    assert len(text) > WORDS
    assert text[:WORDS] in held_out.decode()
    assert "no sample" not in said
    assert ranks(1, sampled, of_text(place, "off", evaluate={"prompt": False}))[0] == ("", mock.ANY)


@pytest.mark.long
def test_every_mesh_ends_with_the_same_sample(ranks, place):
    meshes = [
        (1, {}), (2, {}), (2, {"zero": {"stage": 0}}), (2, {"mesh": {"pp": 2}}), (2, {"mesh": {"tp": 2}}),
        (2, {"mesh": {"sp": 2}}),
    ]  # fmt: skip
    found = {
        text for n, (count, sections) in enumerate(meshes)
        for text, _ in ranks(count, sampled, of_text(place, f"mesh-{n}", **ON, **sections))
    }  # fmt: skip
    assert len(found) == 1
    assert len(found.pop().encode()) >= WORDS + UNASKED


@pytest.mark.long
@pytest.mark.parametrize("sections", [{}, {"zero": {"stage": 2}}, {"mesh": {"tp": 2}}, {"train": {"ema": 0.5}}])
def test_no_bit_of_a_run_changes_with_its_sample(ranks, place, tmp_path, sections):
    found = []
    for prompt in (True, False):
        made = of_text(tmp_path, f"{prompt}", evaluate={"prompt": prompt}, checkpoint={"export": True})
        made |= {"model": {"path": str(place / "model")}}
        made["data"]["train"] = str(place / "text.txt")
        for name, values in sections.items():
            made[name] = {**made.get(name, {}), **values}
        ranks(2, train, made)
        output = tmp_path / f"{prompt}"
        parts = [contents(output / folder) for folder in ("checkpoints", "hf")]
        files = {path.relative_to(output): data for part in parts for path, data in part.items()}
        found.append((files, [steady(record) for record in metrics(made)]))
    (with_it, records), (without, others) = found
    assert records == others
    told = [path for path in with_it if path.suffix in (".json", ".sha256") and "step-" in str(path)]  # name the run
    assert with_it.keys() == without.keys()
    assert [path for path in with_it if with_it[path] != without[path] and path not in told] == []


@pytest.mark.long
def test_a_chat_is_gone_on_with_by_an_answer(ranks, tmp_path):
    save_tokenizer(save_model(tmp_path / "chat"), CHAT)
    turns = [{"role": "user", "content": "what is one"}, {"role": "assistant", "content": "I think four"}]
    write_lines(tmp_path / "chats.jsonl", [{"messages": turns}] * 16)
    made = tree(tmp_path, saved="chat", train={"steps": 1}, **ON)
    made["data"] |= {"train": str(tmp_path / "chats.jsonl")}
    text, said = ranks(1, sampled, made)[0]
    assert text.split()[:6] == ["<user>", "what", "is", "one", "<end>", "<assistant>"]
    assert "no sample" not in said


def test_a_sample_that_fails_is_a_line_and_the_run_is_done(ranks, place):
    made = of_text(place, "failed", **ON)
    made["data"] |= {"length": 64}
    text, said = ranks(1, without_generation, made)[0]
    assert text == ""
    assert "no sample for evaluate.prompt: ArithmeticError: odd (evaluate.prompt=false asks for none)" in said


def without_generation(made):
    """`sampled` with an engine that cannot generate."""
    from zero3d.engine.engine import Engine

    with mock.patch.object(Engine, "generate", side_effect=ArithmeticError("odd\nand more")):
        return sampled(made)
