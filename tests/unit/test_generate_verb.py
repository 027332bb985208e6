"""`zero3d generate OUTPUT TEXT`: which weights go on with the text, with which tokens, and what is refused."""

import io
import json
import os
import shutil
import sys

import pytest
import torch
from corpora import save_tokenizer
from training import contents, save_model, train, tree

from zero3d.checkpoint.folders import discard
from zero3d.data.tokenizers import ByteTokenizer
from zero3d.tools.cli import generate_source
from zero3d.tools.cli.generate_text import Printer
from zero3d.tools.cli.main import main
from zero3d.train.lock import FolderLock

TEXT = "some words"
TOKENS = 12
CHAT = "{% for m in messages %}{{ '<user> ' + m['content'] + ' <end>' }}{% endfor %}{{ ' <assistant>' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model over bytes, and a text."""
    folder = tmp_path_factory.mktemp("generate")
    ByteTokenizer().save(save_model(folder / "model", vocab=256))
    (folder / "text.txt").write_text("some words and more of them " * 40)
    return folder


@pytest.fixture(scope="module")
def run(place, ranks):
    """A run's output of two steps, each with a checkpoint, and an export."""
    made = tree(
        place, checkpoint={"every": 1, "export": True, "verify": False}, train={"steps": 2}, optimizer={"lr": 0.1}
    )
    made["data"] |= {"train": str(place / "text.txt"), "tokenizer": "bytes"}
    ranks(1, train, made)
    return place / "out"


@pytest.fixture
def copied(run, tmp_path):
    """That output, which a test may change."""
    return shutil.copytree(run, tmp_path / "out")


def by_hand(folder, text=TEXT, tokens=TOKENS):
    """What transformers continues a text of bytes with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = torch.tensor([list(text.encode())])
    made = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return ByteTokenizer().decode(made.tolist())


def typed(capsys, *words, tokens=TOKENS):
    """What a command line prints on stdout, and on stderr."""
    capsys.readouterr()
    code = main(["generate", *map(str, words), "--max-tokens", str(tokens)])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out, out.err


def refused(capsys, *words):
    """The error of a command line that cannot be, in one line."""
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    return out.err.strip().splitlines()[-1]


def test_a_finished_runs_export_goes_on_with_the_text_and_nothing_else_is_printed(run, capsys):
    out, err = typed(capsys, run, TEXT)
    assert out == by_hand(run / "hf") + "\n"
    assert err == f"generating from {run / 'hf'}\n"


def test_a_checkpoint_goes_on_with_its_own_weights(run, capsys, tmp_path):
    said = []
    for step in (1, 2):
        assert main(["ckpt", "export", str(run / "checkpoints" / f"step-{step}"), str(tmp_path / str(step))]) == 0
        said.append(typed(capsys, run / "checkpoints" / f"step-{step}", TEXT)[0])
        assert said[-1] == by_hand(tmp_path / str(step)) + "\n"
    assert said[0] != said[1]
    assert said[1] == typed(capsys, run, TEXT)[0]


def test_a_run_under_way_is_read_at_its_newest_checkpoint_and_nothing_of_it_changes(copied, capsys):
    report = json.loads((copied / "report.json").read_text())
    (copied / "report.json").write_text(json.dumps(report | {"ended": None}))
    with FolderLock() as lock:
        lock.acquire(copied)
        before = contents(copied)
        out, err = typed(capsys, copied, TEXT)
        assert contents(copied) == before
    assert err == f"generating from {copied}/checkpoints/step-2\n"
    assert out == by_hand(copied / "hf") + "\n"


def test_an_export_that_the_run_no_longer_writes_is_not_taken(copied, capsys):
    file = copied / "config.yaml"
    written = file.read_text()
    assert written.count("export: true") == 1
    file.write_text(written.replace("export: true", "export: false"))
    assert typed(capsys, copied, TEXT)[1] == f"generating from {copied}/checkpoints/step-2\n"
    shutil.rmtree(copied / "checkpoints")
    assert "has no export and no checkpoint yet" in refused(capsys, copied, TEXT)
    file.write_text(written)
    (copied / "report.json").unlink()
    assert typed(capsys, copied, TEXT)[1] == f"generating from {copied / 'hf'}\n"


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newest_then(copied, capsys, monkeypatch):
    (copied / "report.json").unlink()
    expected = typed(capsys, copied / "checkpoints" / "step-1", TEXT)[0]
    tried = []

    def removed_first(step, *given):
        tried.append(step.name)
        if len(tried) == 1:
            discard(step.parent, 2)
        return export(step, *given)

    export = generate_source.export
    monkeypatch.setattr(generate_source, "export", removed_first)
    assert typed(capsys, copied, TEXT)[0] == expected
    assert tried == ["step-2", "step-1"]


def test_a_damaged_checkpoint_is_an_error_and_not_tried_again(copied, capsys):
    (copied / "report.json").unlink()
    next((copied / "checkpoints" / "step-2").glob("*.safetensors")).write_bytes(b"")
    assert "CheckpointError" in refused(capsys, copied, TEXT)


def test_a_run_that_was_stopped_is_read_at_its_newest_checkpoint_and_the_best_has_its_step(copied, capsys):
    report = json.loads((copied / "report.json").read_text())
    (copied / "report.json").write_text(json.dumps(report | {"ended": {"how": "stopped", "why": ""}}))
    assert typed(capsys, copied, TEXT)[1] == f"generating from {copied}/checkpoints/step-2\n"
    (copied / "checkpoints" / "best").symlink_to("step-1")
    assert json.loads(typed(capsys, copied / "checkpoints" / "best", TEXT, "--json")[0])["step"] == 1


def test_a_newest_checkpoint_without_its_manifest_is_an_error_and_not_waited_for(copied, capsys, monkeypatch):
    (copied / "report.json").unlink()
    (copied / "checkpoints" / "step-2" / "manifest.json").unlink()
    tried, read = [], generate_source._of_checkpoint

    def counted(step, *given):
        tried.append(step.name)
        if len(tried) > 2:
            pytest.fail("it is tried again and again")
        return read(step, *given)

    monkeypatch.setattr(generate_source, "_of_checkpoint", counted)
    assert "step-2" in refused(capsys, copied, TEXT)
    assert tried == ["step-2", "step-2"]


def test_several_texts_and_one_of_stdin_are_continued_each_by_itself(run, capsys, monkeypatch):
    alone = [typed(capsys, run, text)[0] for text in ("some", "and more words")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("and more words\n"))
    out, _ = typed(capsys, run, "some", "-", "--json")
    found = json.loads(out)
    assert [each["text"] for each in found["texts"]] == ["some", "and more words"]
    assert [each["continuation"] + "\n" for each in found["texts"]] == alone
    out, _ = typed(capsys, run, "some", "and more words")
    assert out == f"==> some <==\n{alone[0]}\n==> and more words <==\n{alone[1]}"


def test_an_exports_step_is_the_last_one_of_its_run_where_that_is_known(copied, place, capsys):
    def step_of(folder):
        return json.loads(typed(capsys, folder, TEXT, "--json")[0])["step"]

    assert [step_of(copied), step_of(copied / "hf"), step_of(place / "model")] == [2, 2, None]
    assert step_of(copied / "checkpoints" / "step-1") == 1
    shutil.rmtree(copied / "checkpoints")
    report = json.loads((copied / "report.json").read_text())
    (copied / "report.json").write_text(json.dumps(report | {"ended": None}))
    assert step_of(copied) is None, "of an earlier session"


def test_tokens_are_drawn_by_the_seed(run, capsys):
    drawn = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95"]
    first = typed(capsys, run, TEXT, *drawn)[0]
    assert first != typed(capsys, run, TEXT)[0]
    assert first == typed(capsys, run, TEXT, *drawn)[0]
    assert first != typed(capsys, run, TEXT, *drawn, "--seed", "1")[0]
    for narrow in (("1.5", "--top-k", "1"), ("1.5", "--top-p", "1e-6"), ("0.001",)):
        assert typed(capsys, run, TEXT, "--temperature", *narrow)[0] == typed(capsys, run, TEXT)[0]


def test_a_text_ends_where_the_models_positions_do(run, capsys):
    out, err = typed(capsys, run, "x" * 60, "--json", tokens=1000)
    assert json.loads(out)["texts"][0]["tokens"] == 4
    assert err.splitlines()[1:] == ["at most 4 tokens, not 1,000: the text has 60 and the model 64 positions"]
    assert len(typed(capsys, run, "x" * 60, tokens=4)[1].splitlines()) == 1
    said = refused(capsys, run, "x" * 70)
    assert said.startswith("ConfigError: the text has 70 tokens and the model 64 positions")
    assert "shorten it by 7 tokens" in said


def chat_model(folder, template):
    save_model(folder)
    save_tokenizer(folder, template)
    return folder


def test_a_chat_is_what_the_template_makes_of_the_message(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = chat_model(tmp_path / "chat", CHAT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(["<user>", "what", "is", "<end>", "<assistant>"])])
    made = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, 5:].tolist()
    out, _ = typed(capsys, folder, "what is", "--chat", "--json")
    found = json.loads(out)["texts"][0]
    assert found["tokens"] == len(made)
    assert found["continuation"].split() == tokenizer.decode(made, skip_special_tokens=True).split()


def test_text_is_handed_on_as_whole_characters():
    tokenizer, shown = ByteTokenizer(), []
    printer = Printer(tokenizer.decode, shown.append)
    printer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for byte in "aé€b".encode():
        printer.put(torch.tensor([byte]))
    printer.end()
    assert [text for text in shown if text] == ["a", "é", "€", "b"]


@pytest.mark.parametrize(("words", "said"), [
    (["model"], "no text to continue"),
    (["nowhere", "a"], "nowhere is not there: give a run's output folder"),
    (["text.txt", "a"], "text.txt is a file"),
    (["s3://bucket/run", "a"], "zero3d ckpt export s3://bucket/run FOLDER"),
    (["empty", "a"], "has no config.yaml of a run and no config.json (it has nothing)"),
    (["model", ""], "has no tokens to continue"),
    (["model", "a", "--chat"], "has no chat template: leave --chat out"),
    (["model", "a", "--image", "a.png"], "LlamaForCausalLM of model takes no images"),
    (["model", "a", "b", "--image", "a.png"], "--image goes with one text, not with 2"),
    (["model", "a", "--max-tokens", "0"], "--max-tokens 0: type a whole number from 1"),
    (["model", "a", "--temperature", "-1"], "--temperature -1.0: type 0"),
    (["model", "a", "--top-k", "5"], "--top-k: at --temperature 0 nothing is drawn"),
    (["model", "a", "--temperature", "1", "--top-p", "1.5"], "--top-p 1.5: type a number above 0"),
    (["model", "a", "--device", "nothing"], "--device nothing"),
    (["bare", "a"], "bare has no tokenizer"),
    (["weightless", "a"], "weightless has no weights (it has none): save it with save_pretrained."),
    (["torn", "a"], "torn cannot be loaded: a file of its weights is damaged ("),
    (["odd", "a"], "odd/config.json is not a config that transformers knows: it "),
    (["model", "a", "--tokenizer", "/nowhere"], "--tokenizer /nowhere: no folder of that name, and nothing is downloaded: type a"),
    (["model", "a", "--tokenizer", "empty"], "): type a folder with tokenizer.json, or bytes where tokens are bytes."),
    (["new", "a"], "new has no export and no checkpoint yet, and the run has ended"),
    (["lost/step-3", "a"], "lost/step-3 lies in no run's folder"),
    (["adapter", "a"], "needs the model that its training began with, /gone, which is not there: type --base FOLDER"),
])  # fmt: skip
def test_what_cannot_be_is_one_line_with_what_to_type(place, monkeypatch, capsys, words, said):
    monkeypatch.chdir(place)
    for name in ("empty", "lost/step-3", "adapter", "new"):
        os.makedirs(name, exist_ok=True)
    save_model("bare")
    (place / "new" / "config.yaml").write_text("output: new\n")
    (place / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/gone"}')
    for name in ("torn", "odd"):
        shutil.copytree("model", name, dirs_exist_ok=True)
    os.truncate("torn/model.safetensors", 1000)
    (place / "odd" / "config.json").write_text('{"model_type": ')
    shutil.copytree("bare", "weightless", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    assert said in refused(capsys, *words)


def test_a_tokenizer_of_another_model_is_refused(place, capsys):
    said = refused(capsys, save_model(place / "small"), "zz", "--tokenizer", "bytes")
    assert "gives token 122, and the model's vocabulary has 61" in said
    assert "gives token 61, and" in refused(capsys, place / "small", chr(61), "--tokenizer", "bytes")
    assert typed(capsys, place / "small", chr(60), "--tokenizer", "bytes")
