"""Train PyTorch and Hugging Face models that do not fit on one device: ZeRO's stages 0 to 3, also inside pipelines and
tensor parallelism, with the same bits.

    import torch
    import zero3d
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    engine = zero3d.Engine(
        model,
        mesh=zero3d.Mesh(),                 # Mesh(pp=2, tp=2): the other ranks are data-parallel
        stage=3,
        precision="bf16",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    )
    for batch in loader:                    # input_ids and labels, another batch on every rank
        loss = engine(**batch).loss
        engine.backward(loss, weight=(batch["labels"][:, 1:] != -100).sum())
        result = engine.step()
    engine.save("checkpoints")              # resumes on any number of ranks, at any stage
    engine.export("hf")                     # from_pretrained loads it

    torchrun --nproc-per-node 8 train.py    # on eight devices; `python train.py` runs it on one

Engine              trains a model: forward, backward, step, evaluate, save, load, export; help(zero3d.Engine)
Mesh                the ranks, by axis: dp, tp, pp, ep, sp
Offload             which states and activations are kept on the host or a disk
optim               optimizers that know of shards: muon, adamw8bit
from_config         what `zero3d train` would build from a YAML file, for a loop of your own
make_deterministic  the same bits in every run on this machine; called before Mesh and Engine
StepResult          what a step returns: applied, grad_norm, loss_scale, lr, reason
errors              Zero3dError, and below it ConfigError, MeshError, LayoutError, OrderError, ReleasedParameterError,
                    OutOfBudget, CheckpointError, DataError, RankError

On the command line: zero3d --help. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d import optim as optim, weights as weights
    from zero3d.distributed.determinism import make_deterministic as make_deterministic
    from zero3d.distributed.mesh import Mesh as Mesh
    from zero3d.engine.engine import Engine as Engine
    from zero3d.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        LayoutError as LayoutError,
        MeshError as MeshError,
        OrderError as OrderError,
        OutOfBudget as OutOfBudget,
        RankError as RankError,
        ReleasedParameterError as ReleasedParameterError,
        Zero3dError as Zero3dError,
    )
    from zero3d.spec.offload import Offload as Offload
    from zero3d.train.setup.build import from_config as from_config
    from zero3d.zero.optimizer import StepResult as StepResult

__version__ = "0.1.0"

_HOME = {
    "Engine": "engine.engine",
    "Mesh": "distributed.mesh",
    "Offload": "spec.offload",
    "from_config": "train.setup.build",
    "make_deterministic": "distributed.determinism",
    "StepResult": "zero.optimizer",
    "Zero3dError": "errors",
    "ConfigError": "errors",
    "MeshError": "errors",
    "LayoutError": "errors",
    "OrderError": "errors",
    "ReleasedParameterError": "errors",
    "OutOfBudget": "errors",
    "CheckpointError": "errors",
    "DataError": "errors",
    "RankError": "errors",
}
__all__ = list(_HOME)


_ROOMS = ("activations", "checkpoint", "engine", "errors", "models", "optim", "plan", "weights")  # have public names


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"zero3d.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'zero3d' has no attribute {name!r}")
    return getattr(import_module(f"zero3d.{_HOME[name]}"), name)
