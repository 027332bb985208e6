"""verl itself, in an environment of its own beside this one's packages: its registry, batches and loss on our engine."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import cpus
import pytest
import torch
from models import hf

pytestmark = pytest.mark.long
VERSION = "0.9.1"
PATIENCE = 1800  # seconds for pip, which brings a hundred packages
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with verl, and the transformers that it takes; skips where there can be none."""
    folder = tmp_path_factory.mktemp("verl")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    made = str(folder / "bin" / "python")
    words = [made, "-m", "pip", "install", "--quiet", f"verl=={VERSION}", *os.environ.get("PIP_OPTIONS", "").split()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip has not installed verl in {PATIENCE} s")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"pip: {' '.join(said)[:500] or done.stderr[-500:]}")
    return made


def run_peer(python, model, folder, lora_rank=0, tp=1):
    """What verl and our engine say of three steps, and on every rank alike what rollouts get."""
    model.save_pretrained(folder)
    environment = cpus.as_here({**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"})
    words = [python, str(TESTS / "verl_peer.py"), str(folder), str(lora_rank), str(tp)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*words, str(place)], **pipe) for place in range(tp)]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * tp, said[0][1][-4000:]
    found, *others = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert others == [found | {"norm": None}] * (tp - 1)  # verl keeps it on the rank whose outputs it collects
    assert found["losses"][0] == pytest.approx(plain_loss(model), rel=1e-5)
    assert found["losses"][2] < found["losses"][0]
    assert found["norm"] > 0
    assert found["logs"] == [5, 3, 6, 4]
    return found["sent"]


def test_verls_batches_and_loss_train_our_engine_and_it_gives_all_weights(python, tmp_path):
    model = hf("llama", vocab=64)
    sent = run_peer(python, model, tmp_path / "model")
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert sent["True"] == sent["False"] == {"shapes": shapes, "config": None}


def test_verl_trains_adapters_over_tp_and_gives_the_base_under_its_own_names_and_them_under_pefts(python, tmp_path):
    model = hf("llama", vocab=64)
    sent = run_peer(python, model, tmp_path / "model", 8, 2)
    layers = [name.removesuffix(".weight") for name in model.state_dict() if name.endswith("_proj.weight")]
    adapter, base = sent["True"], sent["False"]
    assert adapter["config"] == base["config"] == {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8}
    expected = {f"base_model.model.{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
    assert adapter["shapes"].keys() == expected
    assert {name for name in base["shapes"] if ".base_layer." in name} == {f"{x}.base_layer.weight" for x in layers}
    assert {name.replace(".base_layer", "") for name in base["shapes"]} == model.state_dict().keys()


@torch.no_grad()
def plain_loss(model):
    """What verl's loss is of the first weights: over all tokens, of every token but each micro-batch's last one's next.

    The last token's label of a sequence is its neighbour's first, in micro-batches of two; verl masks none of them here.
    """
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (n,), generator=draw) for n in (5, 3, 6, 4)]
    total = 0.0
    for pair in (rows[:2], rows[2:]):
        logs = torch.cat([model(input_ids=row[None]).logits[0].log_softmax(-1) for row in pair])
        labels = torch.cat(pair).roll(-1)
        total -= float(logs.gather(1, labels[:, None]).sum())
    return total / sum(map(len, rows))
