"""TRL's trainers on Qwen3-VL at stage 3. Needs the extra trl.

In SFT and DPO a rank's micro-batch may be text alone. In GRPO all prompts of a rank have images, or none has: TRL itself
takes no others beside.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pictures import save_model
from trainers import arguments, launched, losses_of

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra trl")]
ROWS = 16
CLOSE = {"rel": 1e-4, "abs": 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-VL and its processor."""
    return Path(save_model(tmp_path_factory.mktemp("qwen3") / "model", "qwen3_vl", positions=128)).parent


def said(role, text):
    return [{"role": role, "content": text}]


def rows(run=1, **columns):
    """Rows of which every other `run` have an image: of each column, what it makes of a row's number and colour."""
    from datasets import Dataset, Features, Image, List
    from PIL import Image as Drawn

    colours = [("red", "blue")[i // 2 % 2] for i in range(ROWS)]
    made = {name: [of(i, colour) for i, colour in enumerate(colours)] for name, of in columns.items()}
    images = [[] if i // run % 2 else [Drawn.new("RGB", (30, 30), colour)] for i, colour in enumerate(colours)]
    found = Dataset.from_dict(made)
    shown = Dataset.from_dict({"images": images}, features=Features({"images": List(Image())}))
    return found.add_column("images", shown.data.column("images"), feature=List(Image()))


def trained(stage, folder, train):
    """What a trainer logs, at a stage of ours or unpatched."""
    from zero3d.data.images import open_processor
    from zero3d.ways.huggingface.transformers import patch

    undo = (lambda: None) if stage is None else patch(stage=stage)
    try:
        with launched():
            torch.manual_seed(0)
            trainer = train(folder, stage, open_processor(folder / "model"))
            trainer.train()
            assert stage == (trainer.accelerator.engine.stage if hasattr(trainer.accelerator, "engine") else None)
            return losses_of(trainer)[0]
    finally:
        undo()


def options(folder, stage, kind, **more):
    """Arguments of a trainer; DistributedDataParallel must be told that a rank may not use its tower."""
    told = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}, "ddp_find_unused_parameters": stage is None}
    return arguments(folder / f"{kind.__name__}-{stage}", kind, **told | more)


def fine_tuning(folder, stage, processor):
    from trl import SFTConfig, SFTTrainer

    args = options(folder, stage, SFTConfig, max_length=None)
    data = rows(messages=lambda i, colour: said("user", "what is it ?") + said("assistant", f"a {colour} circle"))
    return SFTTrainer(str(folder / "model"), args=args, train_dataset=data, processing_class=processor)


def preferring(folder, stage, processor):
    from trl import DPOConfig, DPOTrainer

    args = options(folder, stage, DPOConfig, max_length=None, learning_rate=1e-3)
    data = rows(
        prompt=lambda i, colour: said("user", "what is it ?"), chosen=lambda i, colour: said("assistant", colour),
        rejected=lambda i, colour: said("assistant", "a square"),
    )  # fmt: skip
    return DPOTrainer(str(folder / "model"), args=args, train_dataset=data, processing_class=processor)


def in_groups(folder, stage, processor, run=ROWS, **more):
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **others):
        return [len(set(str(completion))) / 50 for completion in completions]

    args = options(
        folder, stage, GRPOConfig, num_generations=4, max_completion_length=6, per_device_train_batch_size=4,
        learning_rate=1e-3, beta=0.1, **more,
    )  # fmt: skip
    data = rows(run, prompt=lambda i, colour: said("user", "what is it ?"))
    return GRPOTrainer(
        str(folder / "model"), reward_funcs=reward, args=args, train_dataset=data, processing_class=processor
    )


def in_groups_of_a_rank(folder, stage, processor):
    """The same with images on one rank of two: it gets two prompts, the other the next two."""
    return in_groups(folder, stage, processor, run=2, shuffle_dataset=False, log_multimodal=False)


@pytest.mark.parametrize("train", [fine_tuning, preferring, in_groups, in_groups_of_a_rank])
def test_trainers_of_a_model_that_sees_have_the_losses_of_plain_ones(ranks, folder, train):
    wanted = ranks(2, trained, None, folder, train)[0]
    for found in ranks(2, trained, 3, folder, train):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)
    assert len(wanted) == 6
