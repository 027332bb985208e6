"""DeepSpeed's engine like for like with the others (`peers.py`), in processes of its own.

DeepSpeed replaces parts of torch for the whole process (stage 3: `nn.functional.linear`) and makes
process groups of its own, so every stage of it lives in its own processes (`crews.py`).

    weights       bf16, fp32 masters that start from the bf16 weights (`build_gpt` makes weights that bf16
                  can hold, so that all engines start from the same); fp32: the weights are the masters
    optimizer     the others' `adamw`: torch's fused AdamW, over the stage's flat fp32 partition
                  (bf16 stage 0: over one fp32 master per parameter)
    reduced in    `communication_data_type`: the setting's reduce dtype, what gloo's all-reduce sums in
    result in     fp32 reduction: `data_types.grad_accum_dtype` fp32 at stages 1-3, as everywhere else
                  here. Below fp32 stage 0 knows only the weights' dtype: its fp32 sum is rounded to bf16.
                  bf16 reduction: bf16, DeepSpeed's default
    clipping      1.0, by the global norm
    the rest      as DeepSpeed comes (buckets of 5e8 elements, parameters below 1e5 elements whole at
                  stage 3, overlap where the stage has it), but for two things. Its shared-memory
                  all-reduce is not compiled: training never calls it. And the folder of compiled
                  extensions is private: a build that was killed leaves a lock there, on which every
                  later run waits for ever.

In bf16 stage 0's first update differs: it makes a dummy optimizer step when it is built, after
which Adam's bias correction is that of the second step. Its loss is shown, not compared.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peers import CLIP, Setting, adamw
from torch import Tensor

STAGES_KEEPING_FP32 = (1, 2, 3)


def installed() -> bool:
    """Whether `[bench]` is there; nothing is imported."""
    return find_spec("deepspeed") is not None


@contextmanager
def private_extensions() -> Iterator[None]:
    """DeepSpeed's compiled extensions go to a folder that dies with this run; for processes started inside."""
    with TemporaryDirectory(prefix="zero3d-bench-") as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = folder
        yield


def settings(setting: Setting, stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration for the table above."""
    low = setting.precision != "fp32"
    keep_fp32 = low and setting.reduce_dtype == "fp32" and stage in STAGES_KEEPING_FP32
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping: the batch itself is what `step` is given
        "gradient_clipping": CLIP,
        "bf16": {"enabled": low},
        "communication_data_type": setting.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32"} if keep_fp32 else {},
        "zero_optimization": {"stage": stage},
    }


def quiet() -> None:
    """Keep DeepSpeed's notes, and torch's about the collectives that DeepSpeed calls, off the terminal."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")


class DeepSpeed:
    """DeepSpeed's engine."""

    def __init__(self, setting: Setting, stage: int) -> None:
        if setting.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        quiet()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        model = setting.build().to(setting.device)
        with redirect_stdout(StringIO()):  # it prints what it holds
            self.engine, *_ = deepspeed.initialize(
                model=model, model_parameters=list(model.parameters()), optimizer=adamw, config=settings(setting, stage)
            )

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(ids, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(ids, targets)
        return loss
