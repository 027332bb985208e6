"""`Accelerator` for loops that are written for Accelerate: model and optimizer that it prepares are an engine's.

    from accelerate import Accelerator        from zero3d.integrations.accelerate import Accelerator
    accelerator = Accelerator()               accelerator = Accelerator(stage=3)

The loop stays: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `gather`, `save_state`, `load_state`.
Gradients are added up over a window and averaged over ranks, as with DistributedDataParallel.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import parse_choice_from_env
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.integrations.accelerate.optimizer import EngineOptimizer
from zero3d.integrations.accelerate.world import must_say_cpu, refuse_other_world

OTHERS = (  # what shards or cuts a model in another way
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin",
    "parallelism_config",
)  # fmt: skip
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STATES = "zero3d"  # the folder of a saved state that has the engine's checkpoint


def save_engine(engine: Engine, folder: Path, loop: Mapping[str, Any] | None = None) -> None:
    """Write FOLDER/zero3d, which has one checkpoint; `loop` is for `load_engine`."""
    saved = engine.save(folder / STATES, loop)
    if engine.mesh.rank == 0:
        for earlier in set(saved.parent.glob("step-*")) - {saved}:  # of another run in the same place
            shutil.rmtree(earlier)


def load_engine(engine: Engine, folder: Path) -> Any:
    """Go on from FOLDER/zero3d; return what was given as `loop`. Raises CheckpointError."""
    return engine.load(folder / STATES)


def states_in(folder: Path) -> Path | None:
    """Return FOLDER/zero3d; None where it is not there."""
    return folder / STATES if (folder / STATES).is_dir() else None


def refuse_stage(options: Mapping[str, Any] | None, what: str) -> None:
    """Raise ConfigError where options of an engine have a stage, too: it would replace the one that was given."""
    if "stage" in (options or {}):
        raise ConfigError(f"{what} takes the stage by itself: pass stage={(options or {})['stage']!r}, not in options.")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` whose model and optimizer train on a `zero3d.Engine`, which is `engine`.

    stage            of ZeRO
    options          more of `zero3d.Engine`, such as {"offload": {"optimizer": "host"}}
    mixed_precision  as there: "no", "bf16", "fp16"; weights are in that dtype, and masters in fp32. A model that is
                     loaded in bf16 stays so with "no", too
    others           Accelerate's own
    Ranks that torchrun starts on CPUs are processes of it without `cpu=True`, too. Raises ConfigError for plugins that
    shard in another way, a stage among the options, and a state made before that knows of fewer processes.
    """

    def __init__(
        self,
        *,
        stage: int = 3,
        options: Mapping[str, Any] | None = None,
        mixed_precision: str | None = None,
        **others: Any,
    ) -> None:
        if asked := [name for name in OTHERS if others.get(name) is not None]:
            raise ConfigError(f"Accelerator({asked[0]}=...) would shard the model a second time: leave it out.")
        chosen = str(mixed_precision or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no"))
        if chosen not in PRECISIONS:
            raise ConfigError(f"mixed_precision={chosen!r}: one of {', '.join(PRECISIONS)}.")
        refuse_stage(options, "Accelerator")
        if must_say_cpu():
            others.setdefault("cpu", True)
        super().__init__(mixed_precision="no", **others)  # autocast and its scaler are not used
        refuse_other_world(
            self.num_processes,
            "Pass cpu=True (use_cpu=True to TrainingArguments) where ranks compute on CPUs, and make no PartialState "
            "before the Accelerator.",
        )
        self._stage, self._options, self._precision = stage, dict(options or {}), chosen
        self.engine: Engine | None = None

    @property
    def mixed_precision(self) -> str:
        """What was asked for."""
        return self._precision

    # --- what is prepared -----------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Return the objects prepared: a model together with its optimizer as an engine's, all else as Accelerate does.

        A model alone is for evaluation: it is moved to the device, whole. Raises ConfigError.
        """
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        if optimizers:
            if len(models) != 1 or len(optimizers) != 1:
                raise ConfigError(
                    f"prepare() was given {len(models)} models and {len(optimizers)} optimizers: pass one model with "
                    "its optimizer, and models that are not trained in a call of their own."
                )
            prepared = self._prepared(models[0], optimizers[0])
            objects = tuple(prepared if one is optimizers[0] else one for one in objects)
        return super().prepare(*objects, device_placement=device_placement)

    def _prepared(self, model: nn.Module, optimizer: Optimizer) -> EngineOptimizer:
        """Return the optimizer of a new engine, or that of the model's engine."""
        if not isinstance(optimizer, EngineOptimizer):
            optimizer = EngineOptimizer(self._build(model, optimizer))
        if optimizer.engine.module is not model:
            raise ConfigError("the optimizer belongs to the engine of another model: build one for this model.")
        self.engine = optimizer.engine
        self.engine.release()
        return optimizer

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the engine's model as it is, and another, which is for evaluation alone, on the device."""
        if self.engine is None or model is not self.engine.module:
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> EngineOptimizer:
        """Return an engine's optimizer as it is. Raises ConfigError for another."""
        if not isinstance(optimizer, EngineOptimizer):
            raise ConfigError("an optimizer is prepared with its model: accelerator.prepare(model, optimizer).")
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _build(self, model: nn.Module, optimizer: Optimizer) -> Engine:
        if str(self.state.dynamo_plugin.backend.value).lower() != "no":
            raise ConfigError("a compiled model cannot be sharded yet: leave out torch_compile and dynamo_backend.")
        options: dict[str, Any] = {"stage": self._stage, "precision": self._precision_of(model), **self._options}
        options.setdefault("mesh", Mesh(device=self.device))
        engine = Engine(model, optimizer=optimizer, clip_norm=None, **options)
        if engine.stage == 3 and engine.dp.size > 1 and hasattr(model, "generate"):  # units are gathered by all ranks
            setattr(model, "generate", partial(getattr(model, "generate"), synced_gpus=True))  # noqa: B009, B010
        return engine

    def _precision_of(self, model: nn.Module) -> str:
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        return "bf16" if self._precision == "no" and dtypes == {torch.bfloat16} else PRECISIONS[self._precision]

    def free_memory(self, *objects: Any) -> Any:
        """Let go of the engine and all else that was prepared."""
        self.engine = None
        return super().free_memory(*objects)

    # --- the loop -------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Back-propagate a micro-batch's loss: it is divided by the micro-batches of a window, as by Accelerate."""
        if self.engine is None:
            super().backward(loss, **options)
            return
        if asked := [name for name, value in options.items() if name != "learning_rate" and value]:
            raise ConfigError(f"accelerator.backward({asked[0]}=...) is not here: leave it out.")
        last = self.sync_gradients
        self.engine.backward_sum(loss / self.gradient_accumulation_steps, float(last), last)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Have the step that follows clip the norm of all gradients; return that norm, NaN until the step."""
        if self.engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        trained = {p for p in self.engine.module.parameters() if p.requires_grad}
        if norm_type != 2 or not trained <= given:
            raise ConfigError(
                f"clip_grad_norm_ with {len(trained & given)} of {len(trained)} trained parameters and norm_type="
                f"{norm_type}: the step clips the 2-norm of all: pass model.parameters()."
            )
        return self._optimizer.clip(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise ConfigError: gradients are there in shards, and only while a step is taken."""
        raise ConfigError("clip_grad_value_ is not here: clip the norm, with accelerator.clip_grad_norm_.")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the step divides by the loss scale before it clips."""

    @property
    def _optimizer(self) -> EngineOptimizer:
        return next(one for one in self._optimizers if isinstance(one, EngineOptimizer))

    # --- states ---------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the weights of a model, on rank 0 in the host's memory and {} elsewhere; all ranks call it."""
        if self.engine is None or model is not self.engine.module:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return self.engine.whole_state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Write FOLDER/zero3d, a checkpoint of ours, which loads on any number of ranks, and what Accelerate writes."""
        if self.engine is None:
            return super().save_state(output_dir, *args, **options)
        with self._without_engine():
            folder = super().save_state(output_dir, *args, **options)
        save_engine(self.engine, Path(folder))
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Go on from what `save_state` wrote."""
        if self.engine is None:
            return super().load_state(input_dir, *args, **options)
        if input_dir is None:
            raise ConfigError("load_state() without a folder is not here: name the folder.")
        load_engine(self.engine, Path(input_dir))
        with self._without_engine():
            return super().load_state(input_dir, *args, **options)

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        """Leave model and optimizer out of what Accelerate saves itself."""
        models: list[Any] = self._models  # type: ignore[has-type]
        optimizers: list[Any] = self._optimizers  # type: ignore[has-type]
        self._models = [one for one in models if self.engine is None or one is not self.engine.module]
        self._optimizers = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
