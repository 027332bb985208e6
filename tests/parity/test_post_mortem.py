"""Runs that are out of memory: what they say, what they leave, and that it is the rank at fault that says it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensor
from training import save_model, save_rows, train, tree

from zero3d.errors import MemoryExhaustedError

SAID = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 0.90 GiB is free."
)


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def test_a_run_says_what_was_live_and_what_to_change_and_its_checkpoints_stay(folder, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain, calls = LlamaMLP.forward, []

    def forward(self, x):
        if not (x.is_meta or isinstance(x, FakeTensor)) and self.training:
            calls.append(1)
            if len(calls) > 10:
                raise torch.OutOfMemoryError(SAID)
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    made = tree(folder, checkpoint={"every": 1, "export": False})
    with pytest.raises(MemoryExhaustedError) as raised:
        train(made)
    error, out = raised.value, Path(made["output"])
    assert error.exit_code == 1
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    first, second, *rest = str(error).splitlines()
    assert first.startswith("rank 0 of 1 (host ")
    assert ", forward of model.layers." in second
    assert ".mlp (test_post_mortem.py:" in second
    assert ": asked for 1.6 GB where " in second
    assert "live on rank 0, by category and place:" in rest
    assert any(line.split()[:2] == ["device", "optimizer"] for line in rest)
    assert any("cheapest settings to change, as zero3d plan predicts" in line for line in rest)
    assert rest[-1] == f"all of it: {out / 'out-of-memory.txt'}"
    text, data = (out / "out-of-memory.txt").read_text(), json.loads((out / "out-of-memory.json").read_text())
    assert text.startswith(first)
    assert "Traceback (most recent call last)" in text
    assert data["step"] == int(second.split(",")[0].removeprefix("step "))
    assert data["shortage"]["asked"] == int(1.5 * 2**30)
    assert {row["category"] for row in data["live"]} >= {"parameters", "gradients", "optimizer"}
    assert data["tensors"]
    assert data["advice"]["reliefs"]
    assert (out / f"checkpoints/step-{data['step'] - 1}").is_dir()
    monkeypatch.setattr(LlamaMLP, "forward", plain)
    assert len(train(made, "auto")) == 5


FAULTY = """
import os
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Faulty(LlamaForCausalLM):
    calls, kept = 0, []

    def forward(self, input_ids=None, position_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, labels=labels, **kwargs)
        if self.training and out.loss.device.type == "cpu" and type(out.loss.data) is torch.Tensor and os.environ.get("RANK") == "1":
            type(self).calls += 1
            if type(self).calls > 5:
                FAULT
        return out

def model():
    return Faulty(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    ))
"""


def save_faulty(folder, fault):
    """A run of two ranks, of which the second has a fault in its third step."""
    (folder / "faulty.py").write_text(FAULTY.replace("FAULT", fault))
    made = tree(folder, model={"path": "faulty:model"}, checkpoint={"every": 1, "export": False})
    (folder / "run.yaml").write_text(yaml.safe_dump(made))
    return folder / "out"


@pytest.mark.long
def test_of_two_ranks_the_one_at_fault_says_it_once(zero3d_in_fork, folder):
    out = save_faulty(folder, f"raise torch.OutOfMemoryError({SAID!r})")
    done = zero3d_in_fork(folder, "train", "run.yaml", "--ranks=2")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("MemoryExhaustedError: rank 1 of 2 (host ") == 1
    assert "cheapest settings to change" in done.stderr
    assert "Traceback" not in done.stderr
    text = (out / "out-of-memory.txt").read_text()
    assert "step 3, forward" in text
    assert "  float32  optimizer states exp_avg\n" in text
    assert "gradients" not in text.partition("cheapest settings")[0]  # they have no memory in a step's first forward
    assert (out / "checkpoints/step-2").is_dir()


@pytest.fixture
def limited():
    """A memory cgroup of 2.5 GB, as a command that enters it; skipped where none can be made."""
    base, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not (base / limit).exists():
        base, limit = Path("/sys/fs/cgroup"), "memory.max"
    folder = base / f"zero3d-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text("2500000000")
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    folder.rmdir()


@pytest.mark.long
def test_a_rank_that_fills_the_host_says_so_before_the_kernel_kills_it(folder, limited):
    fault = "import time; [(type(self).kept.append(torch.ones(4_000_000)), time.sleep(0.05)) for _ in range(1000)]"
    out = save_faulty(folder, fault)
    command = [*limited, sys.executable, "-m", "zero3d.tools.cli.main", "train", "run.yaml", "--ranks=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert signal.SIGKILL.name not in done.stderr
    assert done.stderr.count("MemoryExhaustedError: rank 1 of 2 (host ") == 1
    assert "ended before the kernel kills a process" in done.stderr
    data = json.loads((out / "out-of-memory.json").read_text())
    assert data["step"] == 3
    assert [each["rank"] for each in data["processes"]] == [0, 1]
    assert data["processes"][1]["nbytes"] > data["processes"][0]["nbytes"]
    assert (out / "checkpoints/step-2").is_dir()
