"""`initialize` and its engine, for programs that are written for DeepSpeed: one import changes.

    import deepspeed                      from zero3d.integrations import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds.json", ...)
    loss = engine(**batch).loss; engine.backward(loss); engine.step()

Everything that has no counterpart is refused when it is called. What is used of DeepSpeed's interface is that of 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zero3d.checkpoint.folders import find
from zero3d.checkpoint.writing import told
from zero3d.config import Config, load, resolve_batch
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.integrations.deepspeed.document import Document, document_of, read_document
from zero3d.integrations.deepspeed.engine_options import engine_options
from zero3d.integrations.deepspeed.merge import tree_of
from zero3d.integrations.deepspeed.translate import Translation, translate
from zero3d.setup.optimizer import adamw
from zero3d.setup.schedule import scheduler
from zero3d.watchdog.own_files import write_whole
from zero3d.zero.optimizer import APPLIED

LATEST = "latest"  # the file of a folder of checkpoints that names the last one, as DeepSpeed writes it
MATTER = ("train.", "optimizer.", "precision", "schedule.")  # keys that nobody else could give where they are "auto"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Return (engine, optimizer, loader of training_data, scheduler), as deepspeed.initialize does.

    model             a plain module, the same on every rank; it may not be used beside the engine any more
    optimizer         one that is built on its parameters, or a callable; it wins over the JSON's
    model_parameters  what is trained, as parameters or groups, for the optimizer of the JSON (all by default)
    lr_scheduler      an object or a callable; the JSON's wins over it, as there
    config            a path, or the JSON as a mapping, by its old name config_params. "auto" has nobody to ask here
    args              may have `deepspeed_config`
    Raises ConfigError, also for options of DeepSpeed's that are not here.
    """
    if model is None:
        raise ConfigError("initialize() needs a model: pass model=MODULE.")
    older = others.pop("config_params", None)
    if asked := [name for name, value in others.items() if value not in (None, False)]:
        raise ConfigError(
            f"initialize({asked[0]}=...) is not here: leave it out; degrees are of the JSON and torchrun."
        )
    given = next((one for one in (config, older, getattr(args, "deepspeed_config", None)) if one is not None), None)
    if given is None:
        raise ConfigError("initialize() needs DeepSpeed's configuration: pass config='ds.json', or a mapping.")
    document = document_of(given, "config") if isinstance(given, Mapping) else read_document(Path(given))
    settings = _settings(document, translate(document))
    engine = DeepSpeedEngine(
        settings, document, model, _optimizer(settings, document, model, optimizer, model_parameters)
    )
    engine.set_lr_scheduler(lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _settings(document: Document, translation: Translation) -> Config:
    """Return the configuration of a JSON alone. Raises ConfigError where "auto" would need a caller."""
    asked = [theirs for ours, theirs in translation.autos.items() if ours.startswith(MATTER)]
    if asked:
        raise ConfigError(
            f"{document.name}: {', '.join(asked)} {'is' if len(asked) == 1 else 'are'} auto, and initialize() has "
            "nobody to ask: give values, or train with zero3d train --deepspeed."
        )
    return load(tree_of({ours: value.value for ours, value in translation.values.items()}))


def _optimizer(
    settings: Config, document: Document, model: nn.Module, optimizer: Any, parameters: Iterable[Any] | None
) -> Any:
    """Return the caller's optimizer, or the JSON's on these parameters."""
    if optimizer is not None:
        return optimizer
    if "optimizer.type" not in document.values:
        raise ConfigError(f"{document.name} has no optimizer, and none is given: add one, or pass optimizer=OPTIMIZER.")
    trained = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    return adamw(settings.optimizer)(trained)


class DeepSpeedEngine:
    """DeepSpeed's methods on a `zero3d.Engine`, which is `engine`. Made by `initialize`."""

    def __init__(self, settings: Config, document: Document, model: nn.Module, optimizer: Any) -> None:
        mesh = Mesh(tp=settings.mesh.tp)
        self.config, self._settings = document.values | document.idle, settings
        self._batch = resolve_batch(settings.train, mesh.dp)
        self.engine = Engine(
            model,
            mesh=mesh,
            optimizer=optimizer,
            clip_norm=settings.optimizer.clip_norm,
            accumulate=self._batch.accumulate,
            **engine_options(settings),
        )
        self.module, self.optimizer = self.engine.module, self.engine.optimizer.torch
        self.lr_scheduler: Any = None
        self.training_dataloader: DataLoader[Any] | None = None
        self.micro_steps = self.skipped_steps = 0
        self._boundary: bool | None = None
        self._grad_norm: Tensor | None = None

    # --- the loop -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate the mean loss of a micro-batch. The gradient is the mean over micro-batches and ranks."""
        if retain_graph or not scale_wrt_gas:
            raise ConfigError(
                "backward(retain_graph=True) and backward(scale_wrt_gas=False) are not here: leave them out."
            )
        self.engine.backward(loss, last=self._boundary)
        return loss

    def step(self, lr_kwargs: None = None) -> None:
        """Apply the step if this micro-batch was the last of it, then go on with the schedule."""
        if self.is_gradient_accumulation_boundary():
            result = self.engine.step()
            self._grad_norm = result.grad_norm
            self.skipped_steps += result.reason != APPLIED
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Say whether the micro-batch that is being computed is the last one of a step."""
        at_end = (self.micro_steps + 1) % self._batch.accumulate == 0
        return at_end if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say for what comes next whether it ends a step, in place of counting."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are reduced when the stage wants it, and the step is the same."""
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step leaves no gradients."""

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's mode for evaluation."""
        return self.train(False)

    # --- what it is -----------------------------------------------------------------------------

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

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm; 0 does not clip."""
        return self._settings.optimizer.clip_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Say whether the model computes in fp16."""
        return self._settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Say whether the model computes in bf16."""
        return self._settings.precision == "bf16"

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step before clipping; None before there was one."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def global_steps(self) -> int:
        """Steps so far, skipped ones too."""
        return self.engine.steps + self.skipped_steps

    @property
    def global_samples(self) -> int:
        """Sequences of those steps."""
        return self.global_steps * self._batch.batch

    @property
    def loss_scale(self) -> float:
        """The factor on losses."""
        return float(self.engine.loss_scale.value)

    cur_scale = loss_scale

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.engine.mesh.device

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

    dp_world_size = property(lambda self: self.engine.mesh.dp, doc="The data-parallel degree.")

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the module's parameters."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters by name."""
        return self.module.named_parameters(*args, **kwargs)

    def set_lr_scheduler(self, given: Any = None) -> None:
        """Take the JSON's schedule, or this one where it has none."""
        name, lr = self._settings.schedule.name, self._settings.optimizer.lr
        if "scheduler.type" in self.config:
            options = self._settings.schedule.options or {}
            if "total_num_steps" in options and options["total_num_steps"] is None:
                raise ConfigError(f"scheduler.params.total_num_steps of {name} is auto: give a number.")
            given = scheduler(self._settings.schedule, 0, lr)
        if given is not None:
            self.engine.scheduler = given
            self.lr_scheduler = self.engine.scheduler

    def deepspeed_io(
        self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None, batch_size: int | None = None
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches: another order in each epoch (`loader.sampler.set_epoch`)."""
        place = self.engine.mesh.place
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, self.engine.mesh.dp, place.dp)
        return DataLoader(dataset, batch_size or self._batch.micro_batch, sampler=sampler, collate_fn=collate_fn)

    # --- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write SAVE_DIR/TAG/step-N, a checkpoint of ours, which resumes on any shape. client_state: plain values."""
        folder, tag = Path(save_dir), tag or f"global_step{self.global_steps}"
        loop = {
            "client_state": dict(client_state or {}),
            "micro_steps": self.micro_steps,
            "skipped": self.skipped_steps,
        }
        self.engine.save(folder / tag, loop)
        if save_latest and self.global_rank == 0:
            with told(folder / LATEST):
                write_whole(folder / LATEST, tag)
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:  # fmt: skip
        """Go on from what `save_checkpoint` wrote; return its path and the client_state, or (None, {}) of none."""
        if not load_optimizer_states or not load_lr_scheduler_states or load_module_only or not load_module_strict:
            raise ConfigError("load_checkpoint takes all of a checkpoint: load weights alone with from_pretrained.")
        latest = Path(load_dir) / LATEST
        if tag is None and not latest.is_file():
            return None, {}
        folder = Path(load_dir) / (tag or latest.read_text().strip())
        path = find(folder)
        loop = self.engine.load(path)
        self.micro_steps, self.skipped_steps = int(loop["micro_steps"]), int(loop["skipped"])
        return str(path), dict(loop["client_state"])

    def save_16bit_model(self, save_dir: str | Path, save_filename: str | None = None) -> bool:
        """Write the weights as a Hugging Face folder."""
        self.engine.export(save_dir)
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the engine has no {name!r} of DeepSpeed's here; `engine.engine` is zero3d's, `engine.module` the model."
        )
