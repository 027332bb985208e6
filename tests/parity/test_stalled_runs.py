"""Whole runs of `zero3d train` with a rank that stands still: who is named, and how a restart goes on."""

import json
import re
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from heard import Heard
from training import field, metrics, save_rows, train, tree
from transformers import LlamaConfig, LlamaForCausalLM

FAULTY = """
import os, signal, time
from pathlib import Path
from transformers import AutoModelForCausalLM

def build():
    model = AutoModelForCausalLM.from_pretrained("model")
    fault, rank, layer, last = os.environ["FAULT"].split()
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == int(last) and os.environ["RANK"] == rank and not Path("fault").exists():
            Path("fault").touch()
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                time.sleep(0.01)

    model.model.layers[int(layer)].register_forward_pre_hook(hook)
    return model
"""


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


@pytest.fixture
def run(zero3d_in_fork, folder):
    """Run until it ends. fault: its kind, in which rank, in which layer and the how-manieth forward of that."""

    def run(fault, *words, **sections):
        made = tree(folder, model={"path": "faulty:build"}, **sections)
        (folder / "run.yaml").write_text(yaml.safe_dump(made))
        return made, zero3d_in_fork(folder, "train", "run.yaml", *words, FAULT=fault)

    return run


@pytest.fixture
def heard(tmp_path):
    made = Heard(tmp_path)
    yield made
    made.close()


def block_of(made):
    return json.loads((Path(made["output"]) / "watchdog.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stop", "loop"])
def test_after_a_stall_all_ranks_start_again_from_the_newest_checkpoint_with_the_same_bits(
    ranks, folder, run, heard, fault
):
    whole = ranks(2, train, tree(folder, "whole"), timeout=300.0)[0]
    made, done = run(
        f"{fault} 1 1 7", "--max-restarts", "1", health={"timeout": 6.0},
        checkpoint={"every": 1, "export": False}, log={"on": heard.on("end")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert heard.lines(2) == ["end failed 3", "end finished 5"]
    said = "Rank 1 is stopped (SIGSTOP" if fault == "stop" else "Rank 1 is stuck or slow in the forward of unit "
    block = done.stderr.index(f"\n{said}")
    restart = f"\nrestart 1 of 1: 2 ranks, dp 2, from {made['output']}/checkpoints/step-3\n"
    assert block < done.stderr.index("\nended by the watchdog: rank 1 is ") < done.stderr.index(restart)
    assert [rank["state"] for rank in block_of(made)["ranks"]] == [
        "waiting", "stopped" if fault == "stop" else "running"
    ]  # fmt: skip
    assert not any(psutil.pid_exists(rank["pid"]) for rank in block_of(made)["ranks"])
    records = [record for record in metrics(made) if "loss" in record]
    for name in ("step", "loss", "grad_norm", "lr"):
        assert field(records, name) == field(whole, name)


STEPS = {"steps": 5, "batch": 8, "accumulate": 4}
BOTH = r"the activations of micro-batch \d from model chunk 0 and the gradients of micro-batch \d for model chunk 0"
# A fault: of its rank's how-manieth forward of a layer. Who waits for whom in what, for each rank that does.
PIPELINES = {
    "last stage": ("loop 1 2 7", {"pp": 2}, {0: (1, "pp", "send and receive", BOTH)}),
    "first stage": ("loop 0 0 11", {"pp": 2, "schedule": "gpipe"}, {
        1: (0, "pp", "receive", r"the activations of micro-batch \d for model chunk 1"),
    }),
    "looped": ("stop 0 2 6", {"pp": 2, "schedule": "interleaved"}, {
        1: (0, "pp", "receive", r"the activations of micro-batch \d for model chunk 3"),
    }),
    "replicas": ("loop 3 2 3", {"pp": 2, "dp": 2}, {
        0: (1, "dp", "exchange", "-"), 1: (3, "pp", "send and receive", BOTH), 2: (3, "dp", "exchange", "-"),
    }),
    "tensor": ("stop 1 1 7", {"tp": 2}, {0: (1, "tp", "all_reduce", "model.layers.1.self_attn.o_proj")}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", PIPELINES)
def test_in_pipelines_and_over_tensor_ranks_every_rank_says_for_which_rank_and_message_it_waits(run, case):
    fault, mesh, waits = PIPELINES[case]
    kind, rank = fault.split()[0], int(fault.split()[1])
    steps = STEPS | ({"accumulate": 2} if "dp" in mesh else {})
    made, done = run(fault, health={"timeout": 6.0}, mesh=mesh, train=steps, zero={"stage": 2})
    assert done.returncode == 1, done.stdout + done.stderr
    block = block_of(made)
    said = f"rank {rank} is " + ("stopped (SIGSTOP" if kind == "stop" else "stuck or slow in the forward of unit ")
    assert block["cause"].startswith(said)
    assert [each["state"] for each in block["ranks"]] == [
        "waiting" if number in waits else {"stop": "stopped", "loop": "running"}[kind]
        for number in range(len(waits) + 1)
    ]  # fmt: skip
    assert [wait["rank"] for wait in block["waits"]] == list(waits)
    for wait, (number, (peer, axis, op, unit)) in zip(block["waits"], waits.items(), strict=True):
        assert (wait["for"], wait["axis"], wait["op"]) == ([peer], axis, op)
        assert re.fullmatch(unit, wait["unit"])
        assert re.search(rf"\nrank {number}: waiting .* on axis {axis}, for rank {peer}, in step 2 ", done.stderr)
    assert not any(psutil.pid_exists(each["pid"]) for each in block["ranks"])
