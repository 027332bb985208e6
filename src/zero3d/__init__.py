"""zero3d: ZeRO as the data axis of 3D parallelism. Public names, imported on first use."""

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
    from zero3d.setup.build import from_config as from_config
    from zero3d.spec.offload import Offload as Offload
    from zero3d.zero.optimizer import StepResult as StepResult

__version__ = "0.1.0"

_HOME = {
    "Engine": "engine.engine",
    "Mesh": "distributed.mesh",
    "Offload": "spec.offload",
    "from_config": "setup.build",
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


def __getattr__(name: str) -> Any:
    if name in ("optim", "weights"):
        return import_module(f"zero3d.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'zero3d' has no attribute {name!r}")
    return getattr(import_module(f"zero3d.{_HOME[name]}"), name)
