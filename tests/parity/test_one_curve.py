"""One model, one order of data, six steps: every way in has the curve of a loop of plain PyTorch on one process."""

import json
import os

import numpy
import pytest
import torch
import torch.distributed as dist
from models import hf
from trainers import arguments, launched, losses_of
from training import save_rows, train as train_file, tree

STEPS, BATCH, LENGTH = 6, 4, 16
LR, CLIP = 1e-2, 0.5
ADAM = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def rows(folder):
    return torch.from_numpy(numpy.load(folder / "rows.npy"))


def adam(parameters):
    return torch.optim.AdamW(parameters, **ADAM)


def of_this_rank(folder):
    """The micro-batches of this rank: two of a step's sequences each, or all four."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return [step.chunk(world)[rank] for step in rows(folder).split(BATCH)]


def mean(losses):
    """Means over ranks, on each of them."""
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def plain(folder):
    model, losses = hf("llama"), []
    optimizer = adam(model.parameters())
    for ids in rows(folder).split(BATCH):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_trainer(folder, stage):
    from zero3d.ways.huggingface.transformers import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

    with launched():
        data = [{"input_ids": ids, "labels": ids} for ids in rows(folder)]
        args = arguments(
            folder, max_steps=STEPS, learning_rate=LR, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=CLIP,
            warmup_steps=0, lr_scheduler_type="constant", gradient_accumulation_steps=1,
            per_device_train_batch_size=BATCH // dist.get_world_size(), accelerator_config={"split_batches": False},
        )  # fmt: skip
        trainer = InOrder(hf("llama"), args, train_dataset=data, stage=stage)
        trainer.train()
        return [step[0] for step in losses_of(trainer)[0]]


def by_accelerator(folder, stage):
    from accelerate.state import AcceleratorState, GradientState

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator, model, losses = Accelerator(cpu=True, stage=stage), hf("llama"), []
        model, optimizer = accelerator.prepare(model, adam(model.parameters()))
        for ids in of_this_rank(folder):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return mean(losses)


def by_deepspeeds_loop(folder, stage):
    from zero3d.ways import deepspeed

    params = {key: list(value) if isinstance(value, tuple) else value for key, value in ADAM.items()}
    document = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(), "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": params},
    }  # fmt: skip
    engine, losses = deepspeed.initialize(model=hf("llama"), config=document)[0], []
    for ids in of_this_rank(folder):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return mean(losses)


def by_file(folder, stage):
    made = tree(
        folder, output=f"out-{stage}", zero={"stage": stage}, optimizer=ADAM | {"betas": [0.9, 0.95], "clip_norm": CLIP},
        schedule={"name": "constant", "warmup": 0}, train={"steps": STEPS, "batch": BATCH, "accumulate": 1},
    )  # fmt: skip
    return [record["loss"] for record in train_file(json.loads(json.dumps(made)))]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """The data, the model for a file, and the curve."""
    folder = tmp_path_factory.mktemp("curve")
    save_rows(folder / "rows.npy", rows=STEPS * BATCH, length=LENGTH)
    hf("llama").save_pretrained(folder / "model")
    return folder, ranks(1, plain, folder)[0]


@pytest.mark.parametrize(("way", "stage"), [
    (by_trainer, 3), pytest.param(by_trainer, 1, marks=pytest.mark.long), (by_file, 3),
    *(pytest.param(*case, marks=pytest.mark.long) for case in ((by_accelerator, 2), (by_deepspeeds_loop, 3))),
])  # fmt: skip
def test_every_way_in_has_the_same_curve(ranks, saved, way, stage):
    folder, wanted = saved
    assert len(wanted) == STEPS
    for found in ranks(2, way, folder, stage):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert os.environ.get("RANK") is None
