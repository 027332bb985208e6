"""DeepSpeed and `initialize` of ours, on the same JSON, the same seed and two CPU ranks: the same curve of losses."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from models import batch, hf, loss_of

from zero3d.tools.cli.main import main
from zero3d.ways import deepspeed

pytestmark = [
    pytest.mark.long, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra bench"),
]  # fmt: skip
TESTS = Path(__file__).parents[1]
DOCUMENT = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 1000,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}},
    "zero_allow_untested_optimizer": True,
}  # fmt: skip
BF16 = {  # its own default sums the gradients of ranks and micro-batches in bf16, ours in fp32: 2e-4 of the loss
    "bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip


def ours(tree):
    """The losses of this rank."""
    return ours_with(deepspeed.initialize(model=hf("llama"), config=tree)[0], 6)


def ours_with(engine, steps):
    losses = []
    for _ in range(steps):
        values = []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, batch(micro, engine.global_rank))
            engine.backward(loss)
            engine.step()
            values.append(loss.item())
        losses.append(sum(values) / len(values))
    return losses


def theirs(tree, folder):
    """The losses of DeepSpeed's ranks."""
    (folder / "ds.json").write_text(json.dumps(tree))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    command = [sys.executable, str(TESTS / "deepspeed_rank.py")]
    peers = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]  # fmt: skip
    told = [peer.communicate(timeout=300)[0].decode() for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0], told[0][-3000:]
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("stage", "precision", "clipping"), [
    (1, "fp32", 1.0), (2, "fp32", 0.05), (3, "fp32", None), (2, "bf16", 1.0), (3, "bf16", 0.05),
])  # fmt: skip
def test_the_same_json_gives_the_same_losses(ranks, tmp_path, stage, precision, clipping):
    tree = DOCUMENT | {"zero_optimization": {"stage": stage}}
    tree |= {} if clipping is None else {"gradient_clipping": clipping}  # absent it is 1.0 for both
    tree |= {} if precision == "fp32" else BF16
    wanted, found = theirs(tree, tmp_path), ranks(2, ours, tree)
    for one, other in zip(wanted, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def gone_on(folder, tree):
    """The losses of this rank after a checkpoint that was imported."""
    engine = deepspeed.initialize(model=hf("llama"), config=tree)[0]
    engine.engine.load(folder)
    assert "it was imported from " in engine.engine.resumed
    return ours_with(engine, 3)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_a_run_goes_on_from_its_checkpoint(ranks, tmp_path, stage, precision):
    tree = {key: value for key, value in DOCUMENT.items() if key != "scheduler"}
    tree["optimizer"] = {"type": "AdamW", "params": DOCUMENT["optimizer"]["params"] | {"lr": 2e-3}}
    tree |= {"zero_optimization": {"stage": stage}} | ({} if precision == "fp32" else BF16)
    wanted = theirs(tree, tmp_path)
    assert main(["ckpt", "import", str(tmp_path / "saved"), str(tmp_path / "ours")]) == 0
    for one, other in zip(wanted, ranks(2, gone_on, tmp_path / "ours", tree), strict=True):
        assert other == pytest.approx(one[3:], rel=1e-4)
    if stage == 1:
        made_universal(tmp_path)
        assert main(["ckpt", "import", str(tmp_path / "universal"), str(tmp_path / "again")]) == 0
        assert main(["ckpt", "diff", str(tmp_path / "ours"), str(tmp_path / "again")]) == 0


def made_universal(folder):
    """Run DeepSpeed's own conversion."""
    words = ["--input_folder", str(folder / "saved" / "global_step3"), "--output_folder", str(folder / "universal"),
             "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]  # fmt: skip
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    subprocess.run(command, check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True, timeout=300)
