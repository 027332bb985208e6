"""`zero3d compare` as a user runs it: two stages of a tiny Llama, one table."""

import json

import pytest

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
RUN = """
model: {path: "chatty:make"}
data: {train: text.txt, validation: text.txt, tokenizer: bytes, length: 32, cache: cache}
train: {steps: 2, micro_batch: 2}
evaluate: {batches: 2}
"""
CHATTY = f"""
import os, torch
from transformers import LlamaConfig, LlamaForCausalLM
print("a note of somebody else")
def make():
    os.system("echo and one of a library")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{LLAMA}))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "chatty.py").write_text(CHATTY)
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i} quick brown foxes\n" for i in range(200)))
    (tmp_path / "tiny.yaml").write_text(RUN)
    return tmp_path


@pytest.mark.long
def test_two_stages_have_the_same_bits_and_measure_what_the_formulas_say(zero3d_in_fork, folder):
    done = zero3d_in_fork(folder, "compare", "tiny.yaml", "--ranks=2", "zero.stage=0,3")
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert "bytes: equal to the formula in every run" in message
    assert "losses: the same bits at every step of every run" in message
    out = folder / "zero3d-compare-tiny"
    assert "a note of somebody else" in (out / "zero.stage=0.log").read_text()  # stdout is the result's alone
    names = ["compare.json", "compare.png", *(f"zero.stage={stage}{end}" for stage in (0, 3) for end in ("", ".log"))]
    assert sorted(path.name for path in out.iterdir()) == names
    zero, three = (run["figures"] for run in json.loads((out / "compare.json").read_text())["runs"])
    assert three["same_bits"]
    assert three["memory"]["optimizer states"]["measured"] * 2 == zero["memory"]["optimizer states"]["measured"]
    assert not (out / "zero.stage=0" / "hf").exists()


@pytest.mark.long
def test_bases_of_16_and_of_4_bits_are_compared(zero3d_in_fork, folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    adapters = ("model.path=config.json", "lora.rank=2", "lora.targets=[all-linear]")
    done = zero3d_in_fork(folder, "compare", "tiny.yaml", *adapters, "model.quantize=null,nf4", "--ranks=2")
    assert done.returncode == 0, done.stderr
    assert "bytes: equal to the formula in every run" in done.stdout
    runs = json.loads((folder / "zero3d-compare-tiny" / "compare.json").read_text())["runs"]
    plain, packed = (run["figures"]["memory"]["parameters"]["measured"] for run in runs)
    assert packed < 0.8 * plain


@pytest.mark.long
def test_exact_runs_at_dp_1_2_and_4_print_the_same_digits_and_one_hash(zero3d_in_fork, folder):
    done = zero3d_in_fork(folder, "compare", "tiny.yaml", "mesh.dp=1,2,4", "zero.exact=true", "train.batch=8")
    assert done.returncode == 0, done.stderr
    message = done.stdout
    assert "bytes: equal to the formula in every run" in message
    assert "losses: the same bits at every step of every run" in message
    assert "exact: all runs have the same losses and the same states" in message
    digits = [line.split()[1:] for line in message.splitlines() if " 0x1." in line]
    assert len(digits) == 3
    assert digits[1] == digits[2] == digits[0]
