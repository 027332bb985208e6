"""`zero3d train` as a user runs it: a fresh directory, two workers, no network, everything measured equals its formula."""

import json
import os
import subprocess
import sys
from pathlib import Path

import offline
import pytest
import torch
from commands import run_in_fork

from zero3d.tools.cli.main import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMAND = [sys.executable, "-m", "zero3d.tools.cli.main", "train"]


def train(folder, *words, environment=os.environ):
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=600, env=dict(environment)
    )


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """What a process with offline.environment reads and writes; one that asks for a network is refused and told."""
    guard = tmp_path_factory.mktemp("guard")
    ask = "import socket; socket.create_connection(('example.com', 80))"
    proof = subprocess.run([sys.executable, "-c", ask], env=offline.environment(guard), capture_output=True, text=True)
    assert proof.returncode != 0
    assert "NETWORK" in proof.stdout
    (guard / "asked").unlink()
    return guard


SHORT = ("--steps", "4", "--ranks", "2", "--json", "train.micro_batch=2", "evaluate.batches=1", "log.report=full")


@pytest.fixture(scope="module")
def run(tmp_path_factory, pool):
    """One short run at stage 3: its folder, what it printed and its JSON."""
    folder, output = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("printed")
    code = pool.alone(run_in_fork, ["train", *SHORT], folder, dict(os.environ), output)
    said = (output / "stderr").read_text()
    assert code == 0, said
    return folder, said, json.loads((output / "stdout").read_text())


def test_it_leaves_metrics_a_curve_a_checkpoint_and_a_model(run):
    folder, _, result = run
    out = folder / "zero3d-demo"
    assert sorted(path.name for path in folder.iterdir()) == ["zero3d-demo"]
    assert sorted(path.name for path in out.iterdir()) == [
        ".run",
        "checkpoints",
        "config.yaml",
        "hf",
        "metrics.jsonl",
        "report.json",
        "run.png",
    ]
    assert (out / "checkpoints" / "step-4" / "manifest.json").is_file()
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    times = lines[-1]
    for part in ("data", "forward", "backward", "gathers", "reductions", "update"):
        assert 0 < times[f"{part}_s_least"] <= times[f"{part}_s"] <= times[f"{part}_s_largest"]
    assert "forward_s" not in lines[0]  # no step was over
    assert [line["loss"] for line in lines] == result["losses"]
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.long
def test_with_its_export_it_asks_no_network(guard, tmp_path):
    done = train(tmp_path, *SHORT, environment=offline.environment(guard))
    assert done.returncode == 0, done.stderr
    asked = guard / "asked"
    assert not asked.exists(), asked.read_text()


def test_memory_is_what_the_formulas_say(run):
    rows = {row["consumer"]: row for row in run[2]["memory"]}
    for consumer in ("parameters", "gradients", "optimizer states", "padding"):
        assert rows[consumer]["measured"] == rows[consumer]["formula"] > 0
    for consumer in ("temporary: gathered", "temporary: bucket", "temporary: wire"):
        assert 0 < rows[consumer]["measured"] <= rows[consumer]["formula"]
    of_the_engine = sum(row["measured"] for name, row in rows.items() if name != "activations")
    assert rows["optimizer states"]["measured"] < run[2]["peak_held"] < of_the_engine  # which are of several instants
    assert rows["activations"]["measured"] > 0
    assert all(row["agrees"] in (True, None) for row in rows.values())


def test_traffic_is_what_the_formulas_say(run):
    rows = {row["op"]: row for row in run[2]["traffic"]}
    assert set(rows) == {"all_gather", "reduce_scatter", "exchange", "broadcast"}
    for row in rows.values():
        assert row["equal"]
        assert row["measured"] == row["formula"]


def test_its_bytes_are_those_that_the_readme_shows(run):
    recorded = json.loads((RESULTS / "demo.json").read_text())["runs"][0]["result"]
    shown, found = ({row["consumer"]: row for row in each["memory"]} for each in (recorded, run[2]))
    assert list(shown) == list(found)
    for consumer in ("parameters", "gradients", "optimizer states", "padding"):
        assert shown[consumer] == found[consumer]
    assert run[2]["traffic"] == recorded["traffic"]


def test_the_exported_model_loads_and_has_the_same_held_out_loss(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run[2]
    assert result["reloaded_loss"] == pytest.approx(result["held_out_loss"], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(result["paths"]["export"], dtype="auto")
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == result["params"]
    tokenizer = AutoTokenizer.from_pretrained(result["paths"]["export"], local_files_only=True)
    assert tokenizer("def f(x):")["input_ids"] == list(b"def f(x):")


def test_the_console_shows_progress_sample_and_tables(run):
    text = run[1]
    for expected in (
        "tokenizer: bytes, 256 tokens; the model's vocabulary: 256\n",
        "step 4/4",
        "grad norm",
        "tokens/s",
        "a sample",
        "memory of rank 0",
        "traffic of rank 0",
        "the same",
    ):
        assert expected in text
    assert "UNEQUAL" not in text
    assert "Traceback" not in text


def tables_in(text):
    """The tables of memory and traffic, from their title to the blank line behind their caption."""
    lines = [line.rstrip() for line in text.splitlines()]
    begin, end = (next(n for n, line in enumerate(lines) if line.startswith(said)) for said in ("memory of", "equal:"))
    return lines[begin : end + 1]


def test_its_report_has_what_it_measured_and_shows_what_it_printed(run, capsys, monkeypatch):
    folder, printed, result = run
    report = json.loads((folder / "zero3d-demo" / "report.json").read_text())
    assert (report["memory"], report["traffic"]) == (result["memory"], result["traffic"])
    assert (report["ended"]["how"], report["step"], report["steps"]) == ("finished", 4, 4)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(folder / "zero3d-demo")]) == 0
    shown = capsys.readouterr().out
    assert tables_in(shown) == tables_in(printed)
    assert "demo on 2 ranks, finished" in shown


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [["--stage", str(stage)] for stage in range(3)] + [["--precision", "fp32"], ["--ranks", "1"]]
)
def test_the_other_stages_precisions_and_degrees_agree_too(zero3d_in_fork, tmp_path, words):
    (tmp_path / "zero3d-demo").mkdir()
    done = zero3d_in_fork(tmp_path, "train", "--steps", "2", "--json", *words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert all(row["equal"] for row in result["traffic"])
    assert all(row["agrees"] in (True, None) for row in result["memory"])
    assert result["paths"]["folder"].endswith("zero3d-demo-2")


@pytest.mark.long
def test_ranks_that_share_sequences_train_as_one_that_has_them_whole(zero3d_in_fork, tmp_path):
    """README's command, and docs/parallelism.md's beside it, of fewer steps."""
    losses = []
    for words in (["mesh.sp=2", "--ranks", "2"], ["--ranks", "1"]):
        (folder := tmp_path / words[-1]).mkdir()
        done = zero3d_in_fork(
            folder, "train", "model.path=demo", *words, "--json", "--steps", "40", "evaluate.batches=1"
        )
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["losses"])
    shared, whole = losses
    assert shared[0] == whole[0]
    assert shared[-1] == pytest.approx(whole[-1], abs=0.01)
    assert whole[-1] < whole[0] - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stage", "7"], "zero.stage=7"),
        (["--stage", "three"], "zero.stage=three"),
        (["--precision", "int4"], "fp32, bf16, fp16 or fp64"),
        (["--ranks", "0"], "--ranks 0"),
        (["--steps", "-1"], "train.steps=-1"),
        (["--frobnicate"], "--frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_once_before_anything_is_written(tmp_path, words, said):
    done = train(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ConfigError: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_adapters_on_a_base_of_four_bits_run_as_one_types_them(tmp_path):
    words = ("model.path=demo", "lora.rank=8", "model.quantize=nf4", "--steps", "3", "--ranks", "2", "--json")
    done = train(tmp_path, *words, "train.micro_batch=2", "evaluate.batches=1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [Path(path).name for path in result["paths"]["exports"]] == ["hf"]
    assert result["reloaded_loss"] == pytest.approx(result["held_out_loss"], rel=0.02)
    assert "on the base in full precision, before it was quantised" in done.stderr


@pytest.mark.long
def test_a_workers_error_is_told_once_by_the_launcher(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name, *_, **__: {str(tmp_path / 'library')!r}\n"
    )
    done = train(tmp_path, environment=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith("DataError: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "zero3d-demo").exists()
