"""What a program asks DeepSpeed's engine about itself: batch, stage, precision, rates, ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.config import Config
from zero3d.config.batch import Batch
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError

WITH_MOMENTUM = ("SGD", "RMSprop")  # whose momentum `get_mom` returns; of all others their betas


class Questions:
    """Answers from the settings and from a `zero3d.Engine`; changes nothing."""

    engine: Engine
    module: nn.Module
    optimizer: torch.optim.Optimizer
    skipped_steps: int
    _batch: Batch
    _settings: Config
    _values: Mapping[str, Any]
    _grad_norm: Tensor | None
    micro_steps: int
    lr_scheduler: Any
    training_dataloader: Any
    _loaded_steps: int
    _boundary: bool | None

    # --- the configuration ----------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the sequences of a step over all ranks."""
        return self._batch.batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the sequences of a forward."""
        return self._batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step and rank."""
        return self._batch.accumulate

    def zero_optimization_stage(self) -> int:
        """Return the stage."""
        return self.engine.stage

    def zero_optimization(self) -> bool:
        """Say whether anything is sharded."""
        return self.engine.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Say whether gradients are sharded."""
        return self.engine.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Say whether weights are sharded."""
        return self.engine.stage >= 3

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm; 0 does not clip."""
        return self._settings.optimizer.clip_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Say whether the model computes in fp16."""
        return self._settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Say whether the model computes in bf16."""
        return self._settings.precision == "bf16"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the model, and that in which gradients are accumulated."""
        return self.engine.precision.dtype, torch.float32

    def loss_scale(self) -> float:
        """Return the JSON's factor on losses; 0 is one that follows overflows. `cur_scale` is the one in use."""
        return float(self._values.get("fp16.loss_scale") or 0.0)

    def dynamic_loss_scale(self) -> bool:
        """Say whether the factor on losses follows overflows."""
        return self.loss_scale() == 0

    def optimizer_name(self) -> str:
        """Return the name of the optimizer's class."""
        return type(self.optimizer).__name__

    def optimizer_params(self) -> dict[str, Any]:
        """Return the JSON's optimizer.params."""
        above = "optimizer.params."
        return {key.removeprefix(above): value for key, value in self._values.items() if key.startswith(above)}

    def scheduler_name(self) -> str | None:
        """Return the JSON's scheduler.type."""
        return self._values.get("scheduler.type")

    def scheduler_params(self) -> Any:
        """Return the JSON's scheduler.params."""
        return self._values.get("scheduler.params")

    def steps_per_print(self) -> int | None:
        """Return the JSON's steps_per_print."""
        return self._values.get("steps_per_print")

    # --- the state ------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step before clipping; None before there was one."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return each group's momentum of SGD and RMSprop, betas of other optimizers; 0 where it has none."""
        return self._of_groups("momentum" if self.optimizer_name() in WITH_MOMENTUM else "betas")

    def _of_groups(self, name: str) -> list[Any]:
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]

    @property
    def global_steps(self) -> int:
        """Steps so far, skipped ones too."""
        return self.engine.steps + self.skipped_steps + self._loaded_steps

    @property
    def global_samples(self) -> int:
        """Sequences of those steps."""
        return self.global_steps * self._batch.batch

    @property
    def cur_scale(self) -> float:
        """The factor on losses."""
        return float(self.engine.loss_scale.value)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.engine.mesh.device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the module's parameters."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by name."""
        return self.module.named_parameters(*args, **kwargs)

    def _refuse_window(self, call: str) -> None:
        if self.engine.accumulation.count:
            raise ConfigError(
                f"{call} after {self.engine.accumulation.count} micro-batches of a step that is not applied yet: call "
                "it after the step() that applies it, or forget them with zero_grad()."
            )

    # --- the ranks ------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """The rank on this host."""
        return self.engine.mesh.local_rank

    @property
    def global_rank(self) -> int:
        """The rank."""
        return self.engine.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.engine.mesh.world

    @property
    def dp_world_size(self) -> int:
        """Return the number of parts of a batch: the data-parallel degree divided by the ranks that share sequences."""
        return self.engine.mesh.degrees.rows

    @property
    def mp_world_size(self) -> int:
        """The tensor-parallel degree."""
        return self.engine.mesh.tp

    def get_data_parallel_rank(self) -> int:
        """Return which part of a batch this rank trains on."""
        return self.engine.mesh.row

    def get_tensor_parallel_rank(self) -> int:
        """Return the rank among those that share every layer."""
        return self.engine.mesh.place.tp

    get_model_parallel_rank = get_tensor_parallel_rank
