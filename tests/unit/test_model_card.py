"""The model card of an export: what it says, what it leaves out, and which page it never replaces."""

import json
import math

import pytest
import yaml
from models import build
from safetensors import safe_open
from training import save_model, save_rows, train, tree

import zero3d
from zero3d.checkpoint.base_licence import licence_of
from zero3d.checkpoint.copies import copy_export
from zero3d.checkpoint.model_card import CARD, Card, hub_name, is_card, told_place, write_card
from zero3d.checkpoint.resume_contract import USUAL
from zero3d.checkpoint.source_commit import of_clone, of_installer
from zero3d.errors import CheckpointError
from zero3d.stores.store import Store
from zero3d.tools.cli.main import main
from zero3d.train.run_card import record_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CACHED = "/home/alice/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"
ABOUT = {"pp": 2, "dp": 4, "tp": 1, "ep": 2, "sp": 1, "shard": None, "stage": 3, "precision": "bf16"}


def parts(folder):
    """The front matter of a card, its rows by name, and those of settings."""
    _, front, page = (folder / CARD).read_text().split("---\n", 2)
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:2] == "| "]
    return yaml.safe_load(front), {name: rest for name, *rest in rows if name not in ("---", "trained with", "setting")}


def written(folder, card, *files):
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_text("{}")
    write_card(folder, card)
    return parts(folder)


def test_a_card_says_what_is_known_for_people_and_for_the_hub(tmp_path):
    base = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    base.mkdir(parents=True)
    (base / CARD).write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Qwen\nlicense: mit\n")
    card = Card(
        base=str(base),
        base_folder=base,
        data={"hf://datasets/owner/name@main/train.parquet": 0.7, "mine/b.jsonl": 0.3},
        held_out=["0.05 of the documents of each source"],
        steps=1200,
        tokens=9_830_400,
        losses={"training": 2.34567, "held-out": 2.5, "other": math.nan},
        about=ABOUT | {"moments": "int8", "attention": "sdpa", "groups": "2 (abcd)"},
    )
    front, rows = written(tmp_path / "hf", card, "config.json")
    assert front == {
        "license": "apache-2.0",
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["owner/name"],
        "library_name": "transformers",
        "tags": ["zero3d"],
    }
    assert rows.pop("zero3d")[0].startswith(zero3d.__version__)
    assert rows == {
        "base": ["`Qwen/Qwen3-0.6B`"],
        "licence of the base": ["apache-2.0, by the base's README.md"],
        "data": ["`hf://datasets/owner/name@main/train.parquet` (weight 0.7), `mine/b.jsonl` (weight 0.3)"],
        "held-out data": ["`0.05 of the documents of each source`"],
        "steps": ["1,200"],
        "tokens": ["9,830,400"],
        "mesh": ["pp 2 x dp 4 x tp 1, of dp: ep 2"],
        "ZeRO stage": ["3"],
        "precision": ["bf16"],
        "training loss": ["2.3457"],
        "held-out loss": ["2.5000"],
        "moments": ["`int8`", "`fp32`", "moments are rounded differently"],
    }


def test_what_is_not_known_is_left_out(tmp_path):
    front, rows = written(tmp_path / "net", Card())
    assert (front, list(rows)) == ({"tags": ["zero3d"]}, ["zero3d"])
    front, rows = written(tmp_path / "adapter", Card(base="models/mine", steps=3), "adapter_config.json", "config.json")
    assert front == {"library_name": "peft", "tags": ["zero3d"]}, "a path is no name of the Hub's"
    assert rows["base"] == ["`models/mine`"]
    page = (tmp_path / "net" / CARD).read_text()
    assert "Settings" not in page
    assert "None" not in page


def test_only_settings_that_are_not_as_usual_are_listed(tmp_path):
    _, rows = written(tmp_path / "usual", Card(about=dict(USUAL)))
    assert list(rows) == ["zero3d"]


@pytest.mark.parametrize(("place", "told"), [
    ("corpora/a.jsonl", "corpora/a.jsonl"),
    ("stdlib", "stdlib"),
    ("my_data:records", "my_data:records"),
    ("/home/alice/secret project/a.jsonl", "a.jsonl"),
    ("~/a.jsonl", "a.jsonl"),
    ("../../home/alice/a.jsonl", "a.jsonl"),
    ("/home/alice/corpus/", "corpus"),
    ("s3://bucket/corpus", "s3://bucket/corpus"),
    ("s3://key:word@bucket/corpus", "corpus"),
    ("file:///home/alice/corpus", "corpus"),
    ("sftp://alice@machine.internal/home/alice/corpus", "corpus"),
    ("gs://bucket/corpus?token=abc", "gs://bucket/corpus"),
    (CACHED, "Qwen/Qwen3-0.6B"),
])  # fmt: skip
def test_places_name_neither_folders_of_a_host_nor_hosts_nor_passwords(place, told):
    assert told_place(place) == told


def test_the_hub_is_told_only_names_that_are_its_own():
    assert hub_name(CACHED) == "Qwen/Qwen3-0.6B"
    assert hub_name("hf://datasets/owner/name") == "owner/name"
    assert hub_name("hf://datasets/owner/name/a.parquet") == "owner/name"
    assert [hub_name(place) for place in ("models/mine", "s3://owner/name", "hf://owner/name", "stdlib")] == [None] * 4


@pytest.mark.parametrize(("file", "text", "keys", "words"), [
    (CARD, "---\nlicense: other\nlicense_name: mine\nlicense_link: https://a.b/c\n---\n",
     {"license": "other", "license_name": "mine", "license_link": "https://a.b/c"}, "other mine, by the base's README.md"),
    (CARD, "---\nlicense: other\nlicense_link: LICENSE\n---\n", {"license": "other"}, "other, by the base's README.md"),
    ("LICENSE", "\n   Apache License\n  Version 2.0, January 2004\n", {"license": "apache-2.0"},
     "Apache License, by the base's LICENSE"),
    ("LICENSE.txt", "# MIT License\n", {"license": "mit"}, "MIT License, by the base's LICENSE.txt"),
    ("LICENSE", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nnot the MIT License\n", {},
     "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT, by the base's LICENSE"),
    (CARD, "license: mit\n", None, None),
    (CARD, "---\nlicense: mit\n", None, None),
    (CARD, "---\nlicense: [mit]\n---\n", None, None),
    (CARD, "---\nlicense: {{\n---\n", None, None),
    ("LICENSE", " \n", None, None),
])  # fmt: skip
def test_the_licence_is_what_the_bases_folder_says(tmp_path, file, text, keys, words):
    (tmp_path / file).write_text(text)
    found = licence_of(tmp_path)
    assert found == (None if keys is None else (keys, words))


def test_a_card_that_somebody_wrote_or_changed_stays_and_an_exports_own_is_written_anew(tmp_path):
    write_card(tmp_path, Card(steps=1))
    write_card(tmp_path, Card(steps=2))
    assert parts(tmp_path)[1]["steps"] == ["2"]
    file = tmp_path / CARD
    for theirs in ("# My model\n", file.read_text().replace("| steps | 2 |", "| steps | 2, by me |")):
        file.write_text(theirs)
        assert not is_card(file)
        write_card(tmp_path, Card(steps=3))
        assert file.read_text() == theirs


def test_marks_in_names_change_no_table(tmp_path):
    _, rows = written(tmp_path, Card(data={"a|b.jsonl": None, "`c`\nd": None}, about={"precision": "<b>|"}))
    assert rows["data"] == ["`a\\|b.jsonl`, `` `c` d ``"]
    assert rows["precision"] == ["\\<b\\>\\|"]


def test_a_commit_is_told_where_it_is_written_down(tmp_path):
    assert of_installer(json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})) == COMMIT
    for text in ("{}", "[]", "x", '{"vcs_info": {"commit_id": "main"}}'):
        assert of_installer(text) is None
    git, project = tmp_path / ".git", tmp_path / "pyproject.toml"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert of_clone(tmp_path) is None
    (git / "packed-refs").write_text(f"# packed\n{COMMIT} refs/heads/main\n")
    project.write_text('[project]\nname = "theirs"\n')
    assert of_clone(tmp_path) is None, "code that lies in another project is not of its commit"
    project.write_text('[project]\nname = "zero3d"\n')
    assert of_clone(tmp_path) == COMMIT
    (git / "refs" / "heads" / "main").write_text(COMMIT[::-1])
    assert of_clone(tmp_path) == COMMIT[::-1]


def test_the_record_of_a_step_is_the_last_one_of_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"st\n{"step": 2, "loss": 1.5}\n{"step": 3, "loss": 1}\n'
    )
    assert record_of(tmp_path / "metrics.jsonl", 2)["loss"] == 1.5
    assert record_of(tmp_path / "metrics.jsonl", 4) == record_of(tmp_path / "none", 2) == {}


def test_an_engine_of_ones_own_exports_a_card_and_replaces_it_and_no_other(tmp_path):
    engine = zero3d.Engine(build("net"), stage=2, precision="fp32")
    place = engine.export(tmp_path / "hf")
    front, rows = parts(place)
    assert front == {"tags": ["zero3d"]}
    assert {name: rows[name] for name in ("steps", "mesh", "ZeRO stage", "precision")} == {
        "steps": ["0"], "mesh": ["pp 1 x dp 1 x tp 1"], "ZeRO stage": ["2"], "precision": ["fp32"],
    }  # fmt: skip
    assert not {"base", "data", "tokens", "training loss"} & rows.keys()
    before = (place / CARD).read_bytes()
    assert (engine.export(place, overwrite=True) / CARD).read_bytes() == before
    (place / CARD).write_bytes(before + b"and of mine\n")
    with pytest.raises(CheckpointError, match=r"README\.md was not exported by zero3d, and nothing else is replaced"):
        engine.export(place, overwrite=True)
    assert (place / CARD).read_bytes() == before + b"and of mine\n"


def test_a_card_in_a_store_that_somebody_changed_stays(tmp_path):
    url = f"file://{tmp_path / 'store'}"
    folder = tmp_path / "hf"
    written(folder, Card(steps=1))
    copy_export(folder, url)
    write_card(folder, Card(steps=2))
    copy_export(folder, url)
    assert Store(url).read(CARD) == (folder / CARD).read_bytes()
    Store(url).write(CARD, b"# My model\n")
    copy_export(folder, url)
    assert Store(url).read(CARD) == b"# My model\n"


def test_a_run_and_a_checkpoint_of_it_export_what_its_file_and_records_say(ranks, tmp_path, capsys):
    save_model(tmp_path / "model")
    (tmp_path / "model" / CARD).write_text("---\nlicense: mit\n---\n# The base's own words\n")
    save_rows(tmp_path / "rows.npy")
    made = tree(
        tmp_path, data={"validation": 0.25}, train={"steps": 2}, evaluate={"every": 2}, checkpoint={"export": True}
    )
    records = ranks(1, train, made)[0]
    exported = tmp_path / "out" / "hf"
    front, rows = parts(exported)
    assert front == {"license": "mit", "library_name": "transformers", "tags": ["zero3d"]}
    assert {name: rows[name][0] for name in ("base", "data", "held-out data", "steps")} == {
        "base": "`model`", "data": "`rows.npy`", "held-out data": "`0.25 of the documents of each source`", "steps": "2",
    }  # fmt: skip
    assert rows["training loss"] == [f"{records[-1]['loss']:.4f}"]
    assert rows["held-out loss"] == [f"{records[-1]['validation_loss']:.4f}"]
    assert rows["tokens"] == [f"{records[-1]['tokens']:,}"]
    page = (exported / CARD).read_text()
    assert is_card(exported / CARD)
    assert "The base's own words" not in page
    assert str(tmp_path) not in page
    assert main(["ckpt", "export", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / CARD).read_text() == page
    with safe_open(tmp_path / "again" / "model.safetensors", framework="np") as file:
        assert file.metadata()["writer"] == "zero3d"
    step = tmp_path / "out" / "checkpoints" / "step-2"
    assert main(["ckpt", "export", str(step), str(tmp_path / "bare"), "--config", str(tmp_path / "model")]) == 0
    bare = parts(tmp_path / "bare")[1]
    assert not {"data", "tokens", "training loss"} & bare.keys(), "a model was typed, and no run"
    assert bare["steps"] == ["2"]
    capsys.readouterr()
