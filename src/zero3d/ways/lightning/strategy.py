"""`Zero3dStrategy`: a LightningModule and its optimizer on `zero3d.Engine`.

The engine's module is a wrapper whose forward calls the LightningModule's step, as Lightning's own wrappers do; in
manual optimization, whose step has backward and update within it, the step is called by itself.
One optimizer; gradients are added up over a window and averaged over ranks.

    fit           setup         an engine takes the module
                  on_train_end  the module is made whole; it stays the engine's, which can still save its states
    what follows  setup_environment  the engine, this or another Trainer's, is closed: the module is a plain one again
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, OutOfBudget
from zero3d.ways.huggingface.accelerate.accelerator import TAKE_BACK, load_engine, save_engine, take_back
from zero3d.ways.huggingface.accelerate.keywords import autocast_of, check_keywords
from zero3d.ways.huggingface.accelerate.optimizer import forget_by_model
from zero3d.ways.huggingface.accelerate.world import refuse_other_world
from zero3d.ways.lightning.averaging import let_average
from zero3d.ways.lightning.checkpoints import LOOP, PASSING, TIED, is_ours, passing_buffers, read_checkpoint, tied_names

NAME = "zero3d"
PRECISIONS = {
    "32-true": "fp32",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
    "64-true": "fp64",
}


class Wrapper(nn.Module):
    """Has a LightningModule, and forwards to it; Lightning exchanges that forward for a step's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        """Call the LightningModule."""
        return self.module(*given, **named)


class Zero3dStrategy(DDPStrategy):  # type: ignore[misc]
    """A Strategy that trains on an engine, which is `engine`.

    stage    of ZeRO
    options  more of `zero3d.Engine`, such as {"offload": {"optimizer": "host"}}
    others   of DDPStrategy
    A checkpoint is a folder: lightning.ckpt, and zero3d/ with masters and states, which loads on any number of ranks.
    """

    def __init__(self, stage: int = 3, options: Mapping[str, Any] | None = None, **others: Any) -> None:
        options = check_keywords(stage, options, type(self).__name__)
        super().__init__(**others)
        self._stage, self._options = stage, options
        self.engine: Engine | None = None
        self._mesh: Mesh | None = None  # that was made for the engine
        self._waits = False  # inside a window of accumulation: more micro-batches follow
        self._is_whole = False  # parameters are whole, since fit is over
        self._loaded_own = False  # the last checkpoint was one of the engine's
        self._whole_at_end = LambdaCallback(on_train_end=lambda trainer, module: self._unshard())

    # --- setting up -------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the ranks, and take the module back from the engine of an earlier fit, before any hook sees it."""
        super().setup_environment()
        try:
            take_back(self.lightning_module)
        except OutOfBudget:
            if self.engine is None or self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                raise
            self.engine.reshard()  # it goes on evaluating in shards
            self._is_whole = False
        else:
            self.engine, self.model = None, self.lightning_module

    def setup(self, trainer: Any) -> None:
        """Build the engine for fitting; other stages of a Trainer have the module whole. Raises ConfigError."""
        if trainer.state.fn != TrainerFn.FITTING:
            if self.engine is None:
                super().setup(trainer)
            else:
                self.accelerator.setup(trainer)
            return
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ConfigError(BY_NORM)
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers: an engine has one; use its groups."
            )
        wrapper = Wrapper(self.lightning_module)
        asked = {"precision": self._precision(), "autocast": autocast_of(self._mixed(), self._options)}
        options: dict[str, Any] = {"stage": self._stage, **asked, **self._options}
        self._mesh = None if "mesh" in options else Mesh(device=self.root_device)
        options.setdefault("mesh", self._mesh)
        self.engine = Engine(wrapper, optimizer=self.optimizers[0], clip_norm=None, **options)
        refuse_other_world(self.world_size, "Pass devices= and num_nodes= of the launcher to Trainer.")
        self.engine.put(TAKE_BACK, self.close_engine, everywhere=True)
        self._follow(trainer)
        self.model = wrapper if self.lightning_module.automatic_optimization else self.lightning_module
        for line in self.engine.notes if self.is_global_zero else ():
            print(line)

    def _follow(self, trainer: Any) -> None:
        """Have the engine hear of what acts on parameters and gradients: the plugin, each zero_grad, and averages."""
        self._precision_plugin = plugin = self.precision_plugin
        plugin.clip_gradients = self._clip_gradients
        for optimizer in (self.optimizers[0], self._lightning_optimizers[0]):
            optimizer.zero_grad = self._forget_window
        assert self.engine is not None
        self.lightning_module.__dict__["zero_grad"] = forget_by_model(self.engine, self._forget_window)
        for callback in trainer.callbacks:
            let_average(callback, self.whole)
        trainer.callbacks.insert(0, self._whole_at_end)  # ahead of those that read the module then

    def _precision(self) -> str:
        asked = str(self.precision_plugin.precision)
        if asked not in PRECISIONS:
            raise ConfigError(f"precision={asked!r} is not supported: one of {', '.join(PRECISIONS)}.")
        return PRECISIONS[asked]

    def _mixed(self) -> bool:
        return str(self.precision_plugin.precision).endswith("-mixed")

    def setup_precision_plugin(self) -> None:
        """Do nothing for an engine: weights have the dtype of computation, and the loss scale is its own."""
        if self.engine is None:
            super().setup_precision_plugin()

    def close_engine(self) -> None:
        """Close the engine, if there is one: the module is a plain one again. All ranks call it. Raises OutOfBudget."""
        engine, mesh = self.engine, self._mesh
        if engine is not None and not engine.closed:
            if not engine.has_whole_model:
                raise ConfigError(
                    "the module is cut over tp, pp or ep by the engine that has trained it, and no rank has the whole: "
                    "write it with trainer.strategy.engine.export(FOLDER)."
                )
            for owner in (engine.optimizer.torch, self.lightning_module):
                vars(owner).pop("zero_grad", None)
            engine.close()
        plugin: Any = self.precision_plugin
        if "clip_gradients" in vars(plugin):
            del plugin.clip_gradients
        if mesh is not None:
            mesh.close()
        self.engine = self._mesh = None
        self.model, self._is_whole = self.lightning_module, False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have parameters whole inside, in the dtype in which they came; what is written into them is kept."""
        engine = self.engine
        if engine is None or engine.closed or self._is_whole:
            yield
            return
        engine.unshard(masters=engine.has_whole_model)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            engine.reshard()

    # --- training ---------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Take the backward inside for one of a window's earlier micro-batches."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *given: Any, **named: Any) -> Tensor:
        """Back-propagate a micro-batch's share of the window's mean loss, with the hooks around it."""
        if self.engine is None or given or any(named.values()):
            raise ConfigError("backward() with options of torch's is not supported: leave them out.")
        module, plugin, last = self.lightning_module, self.precision_plugin, not self._waits
        Precision.pre_backward(plugin, closure_loss, module)  # those of mixed precision scale the loss besides
        weighs = last and not self.engine.accumulation.weight  # further backwards of a window are added up
        run = module.backward if is_overridden("backward", module) else None
        self.engine.backward_sum(closure_loss, float(weighs), last, run)
        loss: Tensor = Precision.post_backward(plugin, closure_loss, module)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any) -> Any:
        """Run the closure, which computes the loss and its gradient, then the hooks and the engine's step."""
        assert self.engine is not None
        loss = closure()
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        self.engine.step()
        self.engine.clip_norm = None
        return loss

    def _clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Have the step that is due clip the norm of its gradients. Raises ConfigError for another way to clip."""
        assert self.engine is not None
        if not clip_val or clip_val <= 0:
            return
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) != "norm":
            raise ConfigError(BY_NORM)
        before = self.engine.clip_norm
        self.engine.clip_norm = float(clip_val) if before is None else min(before, float(clip_val))

    def _forget_window(self, set_to_none: bool = True) -> None:
        """Forget the gradients of a window whose step was not taken, in the place of the optimizer's zero_grad."""
        if self.engine is not None and self.engine.accumulation.count:
            self.engine.zero_grad()
            self.engine.clip_norm = None

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: the engine loads it."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing of what the engine saves."""
        return super().lightning_module_state_dict() if self.engine is None else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine saves it."""
        return {} if self.engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write FILEPATH/lightning.ckpt and FILEPATH/zero3d; all ranks call it."""
        if self.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(str(filepath)))
        save_engine(self.engine, folder)
        if self.is_global_zero:
            module = self.lightning_module
            ours = {TIED: tied_names(module), PASSING: passing_buffers(module)}
            kept = checkpoint | {"optimizer_states": []} | ours
            self.checkpoint_io.save_checkpoint(kept, folder / LOOP)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load masters and states into the engine; return what Lightning kept, without an engine with all weights."""
        folder, read = Path(checkpoint_path), partial(super().load_checkpoint, weights_only=weights_only)
        self._loaded_own = is_ours(folder)
        if not self._loaded_own:
            return read(checkpoint_path)  # type: ignore[no-any-return]
        if self.engine is None:
            return read_checkpoint(folder, read)
        load_engine(self.engine, folder)
        return read(folder / LOOP)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; an engine has loaded its own."""
        if self.engine is None or not self._loaded_own:
            with self.whole():
                super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load an optimizer's states; an engine has loaded its own. Raises ConfigError for another's."""
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
        elif not self._loaded_own and any(state["state"] for state in checkpoint["optimizer_states"]):
            raise ConfigError(
                "fit(ckpt_path=...) of a checkpoint that another strategy has saved: the engine takes over its "
                "weights, and not the optimizer's states. Start from the weights alone: "
                f"{type(self.lightning_module).__name__}.load_from_checkpoint(PATH), and fit without ckpt_path."
            )

    def teardown(self) -> None:
        """Make the module whole where fit has ended well and it fits; it stays the engine's until `close_engine`."""
        if self.engine is None:
            super().teardown()
            return
        trainer = self.lightning_module.trainer
        if self._whole_at_end in trainer.callbacks:
            trainer.callbacks.remove(self._whole_at_end)
        if trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING:
            self._unshard()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _unshard(self) -> None:
        """Make parameters whole: with the masters' values, or where these do not fit as they compute."""
        assert self.engine is not None
        if self._is_whole:
            return
        self.engine.zero_grad()  # of a window that the last batch has not closed
        try:
            if self.engine.has_whole_model:
                with suppress(OutOfBudget):
                    self.engine.unshard(masters=True)
                    self._is_whole = True
                    return
            self.engine.unshard()
            self._is_whole = True
        except OutOfBudget as error:
            if self.is_global_zero:
                warnings.warn(
                    f"after fit the module stays sharded: {error} (`engine` is trainer.strategy.engine.)", stacklevel=2
                )


BY_NORM = "gradients are clipped by their norm: pass gradient_clip_algorithm='norm'."


def register() -> None:
    """Make zero3d_0 to zero3d_3 names of strategies."""
    for stage in range(4):
        name = f"{NAME}_{stage}"
        if name not in StrategyRegistry.available_strategies():
            StrategyRegistry.register(name, Zero3dStrategy, f"ZeRO stage {stage} of zero3d", stage=stage)
