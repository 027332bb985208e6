"""Trainers on few tokens: what the tests of transformers' and Accelerate's loops run, on every rank."""

import contextlib
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from models import VOCAB, hf

ROWS = 32
IGNORED = -100


class Rows(torch.utils.data.Dataset):
    """Sequences of different length, padded; labels of the padding and of some prompts are ignored."""

    def __init__(self, rows=ROWS, seed=0, length=10):
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, VOCAB, (rows, length), generator=draw)
        self.sizes = torch.randint(3, length + 1, (rows,), generator=draw)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = torch.arange(self.ids.shape[1]) < self.sizes[index]
        labels = self.ids[index].where(mask & (torch.arange(self.ids.shape[1]) >= index % 3), torch.tensor(IGNORED))
        return {"input_ids": self.ids[index], "attention_mask": mask.long(), "labels": labels}


class Seen(Rows):
    """Rows that note which of them were asked for."""

    def __init__(self, rows):
        super().__init__(rows)
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


@contextlib.contextmanager
def launched():
    """The environment that torchrun gives a rank of the pool, inside."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    said = {} if world == 1 else {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def arguments(folder, made=None, **options):
    """TrainingArguments of 6 steps of 8 sequences on the CPU: 2 micro-batches of 2 on 2 ranks, of 4 on one."""
    from transformers import TrainingArguments

    world = dist.get_world_size() if dist.is_initialized() else 1
    return (made or TrainingArguments)(**{
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 8 // world,
        "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-2, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "warmup_steps": 3, "save_strategy": "no", "seed": 7, "dataloader_pin_memory": False,
    } | options)  # fmt: skip


def losses_of(trainer):
    """Loss, norm and learning rate of every step, and losses of evaluations."""
    logs = trainer.state.log_history
    steps = [(log["loss"], float(log["grad_norm"]), log["learning_rate"]) for log in logs if "loss" in log]
    return steps, [log["eval_loss"] for log in logs if "eval_loss" in log]


def train(kind, folder, options=None, given=None, model="llama", resume=None):
    """What a Trainer has logged after training. kind: "plain", or the stage of ours."""
    import transformers

    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        options, given = dict(options or {}), dict(given or {})
        module = hf(model) if isinstance(model, str) else model and model()
        given = {"train_dataset": Rows(16), "eval_dataset": Rows(8, seed=1)} | given
        args = arguments(folder, **options)
        if kind == "plain":
            trainer = transformers.Trainer(module, args, **given)
        else:
            trainer = Trainer(module, args, stage=kind, **given)
        trainer.train(resume_from_checkpoint=resume)
        assert kind in ("plain", None) or trainer.accelerator.engine.stage == kind
        return trainer, losses_of(trainer)


def logged(*given, **named):
    """Only the numbers of `train`, which can be sent."""
    return train(*given, **named)[1]


def keep_only(folder, step):
    """Leave a folder as it was when the checkpoint of a step was there, and none later."""
    for other in Path(folder).glob("checkpoint-*"):
        if int(other.name.rpartition("-")[2]) > step:
            shutil.rmtree(other)
