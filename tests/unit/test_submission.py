"""What `zero3d launch` refuses before a job waits in a queue, and what it says that it could not look at."""

import json

import pytest
from corpora import save_tokenizer

from zero3d.tools.cli.main import main

SMALL = {"model_type": "llama", "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "odd.json").write_text(json.dumps(SMALL | {"vocab_size": 257}))
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": role, "content": "hi"} for role in ("user", "assistant")]}) + "\n"
    )
    (tmp_path / "run.yaml").write_text(
        "output: runs/a\nmodel: {path: config.json, init: random}\ndata: {train: a.jsonl, tokenizer: bytes, length: 64}\n"
    )
    return tmp_path


@pytest.mark.parametrize(("words", "message"), [
    (["data.train=b.jsonl"], "b.jsonl does not exist. Did you mean a.jsonl?"),
    (["data.train=FILL-ME"], "data.train=FILL-ME stands for the data"),
    (["data.tokenizer=FILL-ME"], "data.tokenizer=FILL-ME stands for a folder"),
    (["data.tokenizer=a.json"], "no folder of that name"),
    (["data.train=chat.jsonl"], "the tokenizer bytes has no chat template"),
    (["data.length=256"], "data.length=256 is more than the model's 128 positions"),
    (["mesh.tp=8"], "tp=8 cannot split num_attention_heads=4"),
    (["model.path=odd.json", "mesh.tp=2"], "tp=2 cannot split vocab_size=257"),
    (["mesh.pp=4", "train.accumulate=4"], "mesh.pp=4 cuts config.json into 4 stages, and it has 2 blocks"),
    (["model.path=qwen3-8c"], "Did you mean 'qwen3-8b'?"),
    (["model.attn=flesh"], "model.attn=flesh"),
    (["train.batch=12"], "train.batch 12 is not a multiple of dp 8"),
])  # fmt: skip
def test_what_every_rank_would_refuse_is_refused_here(folder, capsys, words, message):
    assert main(["launch", "slurm", "run.yaml", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_file_that_trains_is_launched_without_a_comment(folder, capsys):
    assert main(["launch", "torchrun", "run.yaml"]) == 0
    assert capsys.readouterr().out.startswith("torchrun ")


def test_a_pipeline_may_have_a_block_a_stage(folder, capsys):
    assert main(["launch", "torchrun", "run.yaml", "mesh.pp=2", "train.accumulate=2"]) == 0


def test_chats_are_left_to_ranks_where_the_tokenizer_is(folder, capsys):
    assert main(["launch", "torchrun", "run.yaml", "data.train=chat.jsonl", "data.tokenizer=/models/words"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# not checked: ")]
    assert said == ["# not checked: data.tokenizer=/models/words, which is not on this machine"]


def test_a_tokenizer_of_more_tokens_than_the_vocabulary_is_refused(folder, capsys):
    save_tokenizer(folder / "words")
    (folder / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 10}))
    assert main(["launch", "slurm", "run.yaml", "data.tokenizer=words"]) == 2
    assert "tokenizer and vocabulary disagree" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["qwen3-8b", "config.json"])
def test_the_default_text_is_for_models_of_bytes(folder, capsys, path):
    (folder / "run.yaml").write_text(
        f"output: runs/a\nmodel: {{path: {path}, init: random}}\ndata: {{tokenizer: bytes}}\n"
    )
    assert main(["launch", "slurm", "run.yaml"]) == 2
    assert "data.train is missing" in capsys.readouterr().err
    assert main(["launch", "slurm", "run.yaml", "data.train=stdlib"]) == 0  # asked for by name


@pytest.mark.parametrize("target", ["slurm", "k8s", "torchrun"])
def test_what_is_not_here_is_a_comment(folder, capsys, target):
    words = [
        "model.path=/models/llama",
        "data.train=[/data/a.jsonl, s3://bucket/b.jsonl]",
        "data.tokenizer=/models/words",
    ]
    assert main(["launch", target, "run.yaml", *words]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# not checked: ")]
    assert said == [
        "# not checked: model.path=/models/llama, which is not on this machine",
        "# not checked: data in /data/a.jsonl, which is not on this machine",
        "# not checked: data in s3://bucket/b.jsonl, which ranks read over the network",
        "# not checked: data.tokenizer=/models/words, which is not on this machine",
    ]


def test_own_code_is_left_to_ranks(folder, capsys):
    words = ["model.path=own.model:make", "data.train=own.data:rows"]
    assert main(["launch", "torchrun", "run.yaml", *words]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "# not checked: model.path=own.model:make, which ranks import", "# not checked: data of own.data:rows, which ranks import",
    ]  # fmt: skip


def test_a_name_with_a_line_break_stays_in_its_comment(folder, capsys):
    assert main(["launch", "slurm", "run.yaml", "data.train=/data/a\nrm -rf b.jsonl"]) == 0
    assert "# not checked: data in /data/a rm -rf b.jsonl" in capsys.readouterr().out.splitlines()[13]


def test_what_a_plan_emits_for_a_preset_is_to_be_filled_in(folder, capsys):
    assert (
        main(["plan", "qwen3-0.6b", "--gpus", "8", "--seq", "512", "--tokens-per-batch", "65536", "--emit", "p.yaml"])
        == 0
    )
    capsys.readouterr()
    for words, message in (([], "data.train=FILL-ME"), (["data.train=a.jsonl"], "data.tokenizer=FILL-ME")):
        for verb in (["launch", "slurm"], ["train"]):
            assert main([*verb, "p.yaml", *words]) == 2
            assert message in capsys.readouterr().err
    save_tokenizer(folder / "words")
    assert main(["launch", "slurm", "p.yaml", "data.train=a.jsonl", "data.tokenizer=words"]) == 0
