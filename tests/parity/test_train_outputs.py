"""What a run writes beside its checkpoints: TensorBoard, Weights & Biases, traces; and that it asks no network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from corpora import save_tokenizer
from training import field, metrics, save_model, save_rows, train, tree

NO_NETWORK = """
import socket

def refuse(*asked, **_):
    print("NETWORK", asked, flush=True)
    with open(TOLD, "a") as file:
        file.write(f"{asked}\\n")
    raise OSError("no network in this test")

def local(address):
    return not isinstance(address, tuple) or str(address[0]) in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", "None")

class Socket(socket.socket):
    def connect(self, address):
        return super().connect(address) if local(address) else refuse(address)

    def connect_ex(self, address):
        return super().connect_ex(address) if local(address) else refuse(address)

    def sendto(self, data, *rest):
        return super().sendto(data, *rest) if local(rest[-1]) else refuse(rest[-1])

def lookup(original):
    def look(host, *rest, **options):
        known = ("localhost", socket.gethostname(), None, "", b"localhost")
        return original(host, *rest, **options) if host in known or local((host,)) else refuse(host)
    return look

socket.socket = Socket
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, lookup(getattr(socket, name)))
"""


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def scalars(folder):
    """name -> {step: value} of all event files, read by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_reads_what_metrics_jsonl_says_also_after_a_resume(ranks, folder):
    pytest.importorskip("tensorboard")
    made = tree(folder, log={"tensorboard": True}, checkpoint={"every": 2, "keep": 9}, data={"validation": 0.2})
    made["evaluate"] = {"every": 2}
    ranks(2, train, made)
    for checkpoint in ("step-4", "step-5"):  # as after a crash in step 5
        ranks(2, train, made, str(Path(made["output"]) / "checkpoints" / checkpoint))
    read, lines = scalars(Path(made["output"]) / "tensorboard"), metrics(made)
    assert set(read) == set().union(*lines) - {"step"}
    assert {"validation_loss", "perplexity", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(read)
    for name, points in read.items():
        expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [value for _, value in points] == pytest.approx([float(value) for _, value in expected], rel=1e-6)


def test_weights_and_biases_gets_the_records_offline(ranks, folder, monkeypatch):
    pytest.importorskip("wandb")
    made = tree(folder, log={"wandb": "zero3d-test"})
    ranks(1, offline, made)
    assert list((Path(made["output"]) / "wandb").glob("offline-run-*/*.wandb"))


def offline(made):
    os.environ["WANDB_MODE"] = "offline"
    return train(made)


def test_a_trace_of_the_asked_steps_is_readable(ranks, folder):
    made = tree(folder, profile={"steps": 2, "after": 1})
    ranks(2, train, made)
    assert [path.name for path in Path(made["output"]).glob("trace*")] == ["trace-rank-0.json"]
    events = json.loads((Path(made["output"]) / "trace-rank-0.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name == "aten::embedding" for name in names) == 2 * 2, "two steps of two micro-batches"


def test_metrics_are_valid_json_and_count_what_was_done(ranks, folder):
    made = tree(folder, data={"validation": 0.2}, evaluate={"every": 2})
    records = ranks(2, train, made)[0]
    lines = metrics(made)
    assert lines == records
    assert field(lines, "step") == [1, 2, 3, 4, 5]
    assert field(lines, "tokens") == [step * 4 * 16 for step in range(1, 6)]
    rows = 14 - round(14 * 0.2)
    assert field(lines, "epoch") == pytest.approx([step * 4 / rows for step in range(1, 6)])
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 5]
    for line in lines[1::2]:
        assert line["perplexity"] == pytest.approx(math.exp(line["validation_loss"]))


def test_a_whole_run_with_its_export_asks_no_network(folder):
    told = folder / "asked"
    (folder / "sitecustomize.py").write_text(f"TOLD = {str(told)!r}\n{NO_NETWORK}")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words to learn, and a few more of them\n" * 40)
    made = tree(folder, data={"train": str(folder / "text"), "tokenizer": "bytes", "validation": 0.2})
    made |= {"model": {"path": "demo"}, "checkpoint": {"export": True, "verify": True}, "train": {"steps": 2}}
    made["evaluate"] = {"prompt": "some"}
    (folder / "run.yaml").write_text(yaml.safe_dump(made))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    proof = subprocess.run(
        [sys.executable, "-c", "import socket; socket.create_connection(('example.com', 80))"],
        env=environment, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert proof.returncode != 0
    assert "NETWORK" in proof.stdout
    told.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "zero3d.cli.main", "train", "run.yaml", "--ranks", "2", "--json"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not told.exists(), told.read_text()
    result = json.loads(done.stdout)
    assert result["reloaded_loss"] == pytest.approx(result["held_out_loss"], rel=1e-6)
    assert (Path(made["output"]) / "hf" / "model.safetensors").is_file()


def test_an_export_has_the_models_tokenizer_though_the_data_are_token_ids(ranks, folder):
    from transformers import AutoTokenizer

    bare = tree(folder, "bare", train={"steps": 1}, checkpoint={"export": True})
    ranks(1, train, bare)
    save_tokenizer(folder / "model")
    ranks(1, train, tree(folder, train={"steps": 1}, checkpoint={"export": True}))
    exported = AutoTokenizer.from_pretrained(folder / "out" / "hf", local_files_only=True)
    own = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    assert exported("one and two")["input_ids"] == own("one and two")["input_ids"] != []
    assert not list((folder / "bare" / "hf").glob("tokenizer*"))
