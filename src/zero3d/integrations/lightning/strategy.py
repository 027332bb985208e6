"""`Zero3dStrategy`: a LightningModule and its optimizer on `zero3d.Engine`.

The engine's module is a wrapper whose forward calls the LightningModule's step, as Lightning's own wrappers do.
Automatic optimization with one optimizer; gradients are added up over a window and averaged over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.integrations.accelerate.accelerator import load_engine, save_engine
from zero3d.integrations.accelerate.keywords import check_keywords
from zero3d.integrations.accelerate.world import refuse_other_world

NAME = "zero3d"
LOOP = "lightning.ckpt"  # what Lightning keeps of loops and callbacks, beside the engine's checkpoint
PRECISIONS = {
    "32-true": "fp32",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
    "64-true": "fp64",
}
SHARDED = ("state_dict", "optimizer_states")  # of Lightning's checkpoint: the engine has them


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
        self._waits = False  # inside a window of accumulation: more micro-batches follow

    # --- setting up -------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Build the engine for fitting; other stages of a Trainer have the module whole. Raises ConfigError."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        if not self.lightning_module.automatic_optimization:
            raise ConfigError("manual optimization is not supported: leave automatic_optimization at True.")
        if is_overridden("configure_gradient_clipping", self.lightning_module):
            raise ConfigError(
                "configure_gradient_clipping is not supported: the step clips, by Trainer(gradient_clip_val=)."
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ConfigError("gradients are clipped by their norm: pass gradient_clip_algorithm='norm'.")
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers: an engine has one; use its groups."
            )
        wrapper = Wrapper(self.lightning_module)
        options: dict[str, Any] = {"stage": self._stage, "precision": self._precision(), **self._options}
        options.setdefault("mesh", Mesh(device=self.root_device))
        clip = trainer.gradient_clip_val or None
        self.engine = Engine(wrapper, optimizer=self.optimizers[0], clip_norm=clip, **options)
        refuse_other_world(self.world_size, "Pass devices= and num_nodes= of the launcher to Trainer.")
        self.model = wrapper
        for line in self.engine.notes if self.is_global_zero else ():
            print(line)

    def _precision(self) -> str:
        asked = str(self.precision_plugin.precision)
        if asked not in PRECISIONS:
            raise ConfigError(f"precision={asked!r} is not supported: one of {', '.join(PRECISIONS)}.")
        return PRECISIONS[asked]

    def setup_precision_plugin(self) -> None:
        """Do nothing: weights have the dtype of computation, and the loss scale is the engine's."""

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
        """Back-propagate a micro-batch's share of the window's mean loss."""
        if self.engine is None or given or any(named.values()):
            raise ConfigError("backward() with options of torch's is not supported: leave them out.")
        self.engine.backward_sum(closure_loss, float(not self._waits), not self._waits)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any) -> Any:
        """Run the closure, which computes the loss and its gradient, then the engine's step."""
        assert self.engine is not None
        loss = closure()
        if loss is not None:  # training_step gave none: Lightning leaves such a step out
            self.engine.step()
        return loss

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
            kept = {key: value for key, value in checkpoint.items() if key not in SHARDED}
            self.checkpoint_io.save_checkpoint(kept | {"state_dict": {}, "optimizer_states": []}, folder / LOOP)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load masters and states into the engine; return what Lightning kept."""
        folder = Path(checkpoint_path)
        if self.engine is None or not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[no-any-return]
        load_engine(self.engine, folder)
        return super().load_checkpoint(folder / LOOP, weights_only)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing for an engine, which has loaded its own."""
        if self.engine is None:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing for an engine, which has loaded its own."""
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)

    def teardown(self) -> None:
        """Leave the module to its engine, which holds it in shards: `engine` exports it, or opens whole weights."""
        if self.engine is None:
            super().teardown()
            return
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def register() -> None:
    """Make zero3d_0 to zero3d_3 names of strategies."""
    for stage in range(4):
        name = f"{NAME}_{stage}"
        if name not in StrategyRegistry.available_strategies():
            StrategyRegistry.register(name, Zero3dStrategy, f"ZeRO stage {stage} of zero3d", stage=stage)
