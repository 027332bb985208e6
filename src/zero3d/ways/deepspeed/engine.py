"""DeepSpeed's engine on ours: its loop, and what belongs to the end of a step.

    loss = engine(**batch).loss      the module
    engine.backward(loss)            gradient += that of loss / accumulation steps; averaged over ranks at the boundary
    engine.step()                    at the boundary: clip, update, schedule; every call counts one micro-batch

The boundary is counted in calls of `step`, as in DeepSpeed: `zero_grad` and `no_sync` do not move it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.config import Config, degrees_of, resolve_batch
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.precision import at_least_fp32
from zero3d.train.setup.schedule import scheduler
from zero3d.ways.deepspeed.batches import Batches
from zero3d.ways.deepspeed.checkpoints import Checkpoints
from zero3d.ways.deepspeed.document import Document
from zero3d.ways.deepspeed.engine_options import engine_options
from zero3d.ways.deepspeed.names import INSTEAD
from zero3d.ways.deepspeed.owners import forget, register
from zero3d.zero.accumulation import Contribution
from zero3d.zero.optimizer import APPLIED, NOT_DUE


class DeepSpeedEngine(Batches, Checkpoints):
    """DeepSpeed's methods on a `zero3d.Engine`, which is `engine`. Made by `initialize`.

    An attribute that is not DeepSpeed's is the module's, as there. One of DeepSpeed's that is not here raises
    AttributeError with what to use; docs/deepspeed-reference.md has them all.
    """

    def __init__(
        self, settings: Config, document: Document, model: nn.Module, optimizer: Any, given: Any = None
    ) -> None:
        mesh = Mesh(**degrees_of(settings.mesh))
        self.config = given
        self._values = document.values | document.idle
        self._settings = settings
        self._batch = resolve_batch(settings.train, mesh.dp, mesh.sp)
        self.is_compiled = settings.train.compile
        self._frozen = [] if optimizer is not None else _freeze(model)
        self.engine = Engine(
            model,
            mesh=mesh,
            optimizer=optimizer,
            clip_norm=settings.optimizer.clip_norm,
            accumulate=self._batch.accumulate,
            **engine_options(settings),
        )
        register(self.engine)
        self.module = self.engine.module
        self.optimizer: Any = None if optimizer is None else self.engine.optimizer.torch
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.micro_steps = self.skipped_steps = self._loaded_steps = 0
        self._boundary: bool | None = None
        self._applied = self._in_no_sync = False
        self._grad_norm: Tensor | None = None

    # --- the loop -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Back-propagate a micro-batch's loss, divided by the accumulation steps, and return that, in the loss's dtype.

        scale_wrt_gas  False: the loss is not divided, so gradients of micro-batches are added up
        Over ranks gradients are averaged. Several losses of a micro-batch are added up; with retain_graph=True what a
        later one needs of the graph is kept. Raises ConfigError for a loss of several numbers, and where the engine
        evaluates only.
        """
        self._refuse_evaluating("backward()")
        _refuse_several("backward", loss)
        scaled = at_least_fp32(loss) / self._batch.accumulate if scale_wrt_gas else loss
        counts = self._contribution()
        kept: Any = {"run": lambda total: total.backward(retain_graph=True)} if retain_graph else {}
        self.engine.backward_sum(scaled, counts.weight, counts.last, **kept)
        return scaled.to(loss.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return a micro-batch's loss times the loss scale: `engine.scale(loss).backward()` is `engine.backward(loss)`.

        In fp16 a plain `loss.backward()` is refused, here as in DeepSpeed. Raises ConfigError like `backward`.
        """
        self._refuse_evaluating("scale()")
        _refuse_several("scale", loss)
        scaled = at_least_fp32(loss) * self.engine.loss_scale.value
        scaled.register_hook(self._begin_scaled)  # type: ignore[no-untyped-call]
        return scaled

    def _begin_scaled(self, gradient: Tensor) -> Tensor:
        self.engine.accumulation.give_in_backward(self._contribution())
        return gradient / self._batch.accumulate

    def _contribution(self) -> Contribution:
        """Return what a backward counts for: 1 per rank and step, so that a step has the mean over ranks."""
        last = self.is_gradient_accumulation_boundary() and not self._in_no_sync
        return Contribution(float(last and not self.engine.accumulation.reached), last)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Apply the step if this micro-batch was the last of it, then go on with the schedule.

        Raises ConfigError inside no_sync(), and where the boundary's backward was inside it.
        """
        self._refuse_evaluating("step()")
        if self._in_no_sync:
            raise ConfigError("step() inside no_sync(), where gradients are not reduced: leave the block first.")
        if lr_kwargs:
            raise ConfigError(
                "step(lr_kwargs=...) is not supported: give the scheduler its arguments when it is built."
            )
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            waiting = self.engine.accumulation.count
            result = self.engine.step()
            if result.reason == NOT_DUE and waiting:
                raise ConfigError(
                    f"step() ends a step whose {waiting} micro-batches are not reduced yet, since the last backward "
                    "was inside no_sync() or before set_gradient_accumulation_boundary(True): call backward outside of "
                    "no_sync() for the last micro-batch, or forget them with zero_grad()."
                )
            if result.reason != NOT_DUE:
                self._grad_norm = result.grad_norm
            self._applied = result.reason == APPLIED
            self.skipped_steps += not self._applied
        self.micro_steps += 1

    def was_step_applied(self) -> bool:
        """Return whether the latest `step` updated parameters: at a boundary, with a finite gradient."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step."""
        at_end = (self.micro_steps + 1) % self._batch.accumulate == 0
        return at_end if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the following micro-batches end a step; from then on they are not counted."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, no backward ends a step; the first one outside reduces what they have added up.

        Raises ConfigError at stages 2 and 3, which reduce after every backward, and inside another one.
        """
        if self.zero_optimization_partition_gradients():
            raise ConfigError(
                f"no_sync() at stage {self.engine.stage}, which partitions gradients after every backward: leave it "
                "out, or train at stage 0 or 1."
            )
        if self._in_no_sync:
            raise ConfigError("no_sync() inside no_sync(): leave the inner one out.")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def zero_grad(self) -> None:
        """Forget the gradients that were accumulated since the last step, at every stage. All ranks call it."""
        if self.engine.accumulation.count and self.zero_optimization_partition_gradients():
            warnings.warn(
                f"zero_grad() forgets {self.engine.accumulation.count} micro-batches of a step that is not applied. "
                f"DeepSpeed's own keeps what stage {self.engine.stage} has reduced already. In a loop that calls it "
                "before every micro-batch, call it only after step(), or never.",
                stacklevel=2,
            )
        self.engine.zero_grad()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's mode for evaluation."""
        return self.train(False)

    def generate(self, input_ids: Tensor, max_new_tokens: int = 20, **options: Any) -> Tensor:
        """Continue token ids, as `zero3d.Engine.generate` does, at any stage."""
        return self.engine.generate(input_ids, max_new_tokens, **options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing where the JSON's compile.enabled has compiled the blocks. Raises ConfigError where it has not."""
        if not self.is_compiled:
            raise ConfigError(
                "compile() after the engine is built would compile its hooks: write compile: {enabled: true} in the "
                "JSON, and initialize() compiles every block before."
            )

    def destroy(self) -> None:
        """Give the module back, whole and trainable, and let go of everything else. Nothing else may follow."""
        forget(self.engine)
        self.engine.close()
        for p, required in self._frozen:
            p.requires_grad_(required)

    def _refuse_evaluating(self, call: str) -> None:
        if self.optimizer is None:
            raise ConfigError(
                f"{call} of an engine without an optimizer, which evaluates only: give initialize() model_parameters "
                "and name an optimizer in the JSON, or pass optimizer=OPTIMIZER."
            )

    # --- what may be changed between steps ------------------------------------------------------

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups; a scheduler sets its own after the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the sequences of a step, by the number of its micro-batches. Raises ConfigError."""
        self._refuse_window("set_train_batch_size()")
        unit = self._batch.micro_batch * self._batch.dp
        if train_batch_size < unit or train_batch_size % unit:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): a batch is a multiple of micro_batch "
                f"{self._batch.micro_batch} x {self._batch.name} {self._batch.dp} = {unit}."
            )
        self._batch = replace(self._batch, batch=train_batch_size, accumulate=train_batch_size // unit)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the sequences of a forward; the number of micro-batches of a step stays."""
        self._refuse_window("set_train_micro_batch_size()")
        batch = micro_batch_size * self._batch.accumulate * self._batch.dp
        self._batch = replace(self._batch, batch=batch, micro_batch=micro_batch_size)

    def set_lr_scheduler(self, given: Any = None) -> None:
        """Take the JSON's schedule, or this one where it has none."""
        if "scheduler.type" in self._values:
            given = scheduler(self._settings.schedule, 0, self._settings.optimizer.lr)
        if given is not None:
            self.engine.scheduler = given
            self.lr_scheduler = self.engine.scheduler

    def empty_partition_cache(self) -> None:
        """Release gathered parameters that no forward needs, and the allocator's free memory."""
        self.engine.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        if (why := INSTEAD.get(f"engine.{name}")) is not None:
            raise AttributeError(f"the engine has no {name!r} of DeepSpeed's here: {why}.")
        module = self.__dict__.get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(
            f"the engine has no {name!r} of DeepSpeed's here; `engine.engine` is zero3d's, `engine.module` the model."
        )


def _refuse_several(call: str, loss: Tensor) -> None:
    if loss.numel() != 1:
        raise ConfigError(f"{call} needs one number, and the loss has shape {tuple(loss.shape)}: pass loss.mean().")


def _freeze(model: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """Freeze a model that is for evaluation; return which parameters required a gradient.

    An engine is of something to train: the smallest parameter, whose states cost least. No step is ever taken.
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    min((p for p, _ in before if p.is_floating_point()), key=torch.Tensor.numel).requires_grad_(True)
    return before
