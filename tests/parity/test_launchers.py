"""Trainers under the launchers that people use: torchrun, accelerate launch, and notebook_launcher after a training."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cpus
import pytest
from trainers import logged

HERE = Path(__file__).parents[1]
STAGES = """
    import json, os
    from models import hf
    from trainers import Rows, arguments, losses_of
    from transformers import TrainerCallback
    from zero3d.ways.huggingface.transformers import Trainer

    class Notes(TrainerCallback):
        def on_train_begin(self, *_, **__):
            engine = trainer.accelerator.engine
            notes.append([engine.stage, engine.dp.size])

    found, notes = [], []
    for stage in range(4):
        args = arguments("out", per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)))
        trainer = Trainer(hf("llama"), args, stage=stage, train_dataset=Rows(16), callbacks=[Notes()])
        trainer.train()
        found.append(losses_of(trainer)[0])
    if trainer.args.process_index == 0:
        json.dump([notes, found], open("found.json", "w"))
"""
NOTEBOOK = """
    import json
    import torch
    import torch.distributed as dist
    from accelerate import notebook_launcher
    from accelerate.state import AcceleratorState, GradientState
    from models import hf
    from trainers import Rows
    from zero3d.ways.huggingface.accelerate import Accelerator

    def train():
        accelerator, model = Accelerator(cpu=True, stage=3), hf("llama")
        loader = torch.utils.data.DataLoader(Rows(8), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        worlds = [accelerator.engine.dp.size, accelerator.num_processes, accelerator.engine.steps]
        json.dump(worlds, open(f"world-{accelerator.process_index}.json", "w"))
        accelerator.free_memory()

    train()
    assert not dist.is_initialized()
    assert json.load(open("world-0.json")) == [1, 1, 4]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    notebook_launcher(train, num_processes=2)
"""


def run(folder, script, *launcher):
    (folder / "script.py").write_text(textwrap.dedent(script))
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    environment = cpus.as_here({**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "world"), [
    (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), 2),
    (("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
      "--mixed_precision", "no", "--dynamo_backend", "no"), 1),
], ids=["torchrun", "accelerate-launch"])  # fmt: skip
def test_every_stage_has_the_curve_of_a_plain_trainer(ranks, tmp_path, launcher, world):
    run(tmp_path, STAGES, *launcher)
    notes, found = json.loads((tmp_path / "found.json").read_text())
    assert notes == [[0, world], [1, world], [2, world], [2 if world == 1 else 3, world]]  # one process has all weights
    wanted = ranks(1, logged, "plain", tmp_path / "plain")[0][0]
    for steps in found:
        for values, expected in zip(steps, wanted, strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.long
def test_a_notebook_trains_alone_and_then_on_two_processes(tmp_path):
    run(tmp_path, NOTEBOOK)
    assert [json.loads((tmp_path / f"world-{rank}.json").read_text()) for rank in range(2)] == [[2, 2, 2]] * 2
