"""Every file in examples/ trains as it stands, in a folder that has what it names; one for 128 GPUs is in test_72b.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from corpora import APPENDS, CHAT, save_tokenizer, write_lines
from training import save_model

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
LARGE = "72b_128gpu"  # a test builds it without memory
SMALL = [path for path in EXAMPLES if path.stem != LARGE]
RANKS = {"llama_3d": 8}  # else 2
NODES = {LARGE: ("--nodes=16", "--gpus-per-node=8")}
WORDS = "what is one and one two four I think "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the examples name: models/llama, text/, chats.jsonl."""
    folder = tmp_path_factory.mktemp("examples")
    save_model(folder / "models" / "llama", vocab=62, max_position_embeddings=512)  # 62: llama_3d has tp 2
    save_tokenizer(folder / "models" / "llama", APPENDS)
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i:02}.txt").write_text(WORDS * (100 + i))
    write_lines(folder / "chats.jsonl", [{"messages": CHAT}] * 300)
    return folder


def zero3d(folder, *words):
    command = [sys.executable, "-m", "zero3d.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=dict(os.environ))


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in RANKS else []) for path in SMALL],
)
def test_it_trains_evaluates_exports_and_resumes(folder, example):
    ranks = f"--ranks={RANKS.get(example.stem, 2)}"
    done = zero3d(folder, "train", example, ranks, "--json")
    assert done.returncode == 0, done.stderr
    result, out = json.loads(done.stdout), folder / "runs" / example.stem
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
    transformers.AutoTokenizer.from_pretrained(out / "hf")
    again = zero3d(folder, "train", example, ranks, "--resume=auto", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == result["steps"]


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_a_cluster_is_told_how_to_run_it(folder, example):
    done = zero3d(folder, "launch", "slurm", example, *NODES.get(example.stem, ["--gpus-per-node=4"]))
    assert done.returncode == 0, done.stderr
    assert str(example) in done.stdout
