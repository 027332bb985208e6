"""Every file in examples/ trains as it stands, in a folder that has what it names; one for 128 GPUs is in test_72b.py."""

import json
from pathlib import Path

import pictures
import pytest
import transformers
from corpora import APPENDS, CHAT, save_tokenizer, write_lines
from training import run_in, save_model

from zero3d.tools.cli.main import main

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
LARGE = "72b_128gpu"  # a test builds it without memory
SMALL = [path for path in EXAMPLES if path.stem != LARGE]
RANKS = {"llama_3d": 8}  # else 2
NODES = {LARGE: ("--nodes=16", "--gpus-per-node=8")}
ONE_WORKER = ("llava_lora", "llava_qlora")  # not 4 a rank: each imports anew; tests/unit/test_data_batches.py has two
LLAVA = "llava_v1_5_mix665k.json"
WORDS = "what is one and one two four I think "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What most examples name: models/llama, text/, chats.jsonl."""
    folder = tmp_path_factory.mktemp("examples")
    save_model(folder / "models" / "llama", vocab=62, max_position_embeddings=512)  # 62: llama_3d has tp 2
    save_tokenizer(folder / "models" / "llama", APPENDS)
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i:02}.txt").write_text(WORDS * (100 + i))
    write_lines(folder / "chats.jsonl", [{"messages": CHAT}] * 300)
    return folder


@pytest.fixture(scope="module")
def pictured(folder):
    """It with what LLaVA's example names."""
    pictures.save_model(folder / "models" / "llava-1.5-7b-hf", positions=2048)
    pictures.save_data(folder, pictured=122, plain=70, name=LLAVA)
    return folder


def check_run(folder, example, result, again):
    """A run that learned, was evaluated and exported, and went on after its end without another step."""
    out = folder / "runs" / example.stem
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert ("validation_loss" in records[-1]) == (result["held_out_loss"] is not None)
    kind = transformers.AutoModelForImageTextToText if "llava" in example.stem else transformers.AutoModelForCausalLM
    kind.from_pretrained(result["paths"]["export"])  # also an adapter, by PEFT
    transformers.AutoTokenizer.from_pretrained(result["paths"]["export"])
    assert again["steps"] == result["steps"] == len(losses)


def test_it_trains_evaluates_exports_and_resumes(ranks, folder):
    example = next(path for path in SMALL if path.stem == "lora")
    words = [example, "data.workers=0"]  # ranks of the pool may not start processes
    first, again = (ranks(2, run_in, folder, words, resume)[0] for resume in (None, "auto"))
    check_run(folder, example, first, again)


@pytest.mark.long
@pytest.mark.parametrize("example", SMALL, ids=[path.stem for path in SMALL])
def test_it_does_so_as_a_command(zero3d_in_fork, pictured, tmp_path, example):
    for name in ("models", "text", "chats.jsonl", LLAVA, "images"):
        (tmp_path / name).symlink_to(pictured / name)
    words = ["train", example, f"--ranks={RANKS.get(example.stem, 2)}", "--json"]
    words += ["data.workers=1"] * (example.stem in ONE_WORKER)
    results = []
    for more in ([], ["--resume=auto"]):
        done = zero3d_in_fork(tmp_path, *words, *more)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    check_run(tmp_path, example, *results)


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_a_cluster_is_told_how_to_run_it(folder, monkeypatch, capsys, example):
    monkeypatch.chdir(folder)
    assert main(["launch", "slurm", str(example), *NODES.get(example.stem, ["--gpus-per-node=4"])]) == 0
    assert str(example) in capsys.readouterr().out
