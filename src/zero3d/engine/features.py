"""The features of an engine, one row each (feature.py).

They are checked, opened and called at each moment in this order. It means something in three places:

    messages     all dp ranks have the same rows, so what a row sends meets its own on every rank. After an update
                 running statistics send, and gradients of towers once
    refusals     where several rows refuse, the first is told: replay=-1 is wrong by itself, whether or not experts
                 have a bias, which goes with no replay at all
    loss scale   follows an update behind all rows (step.py): an overflow counts as a bad step only where the scale can
                 fall no further, and Health asks before it falls

Else the order is free: no row reads what another one writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from zero3d.engine.averages import Averages
from zero3d.engine.expert_bias import ExpertBias
from zero3d.engine.feature import Feature
from zero3d.engine.health import Health
from zero3d.engine.muon import MatrixSteps
from zero3d.engine.replay.replay import Replay
from zero3d.engine.runtime import Runtime
from zero3d.engine.statistics import RunningStatistics
from zero3d.engine.stream_guard import Streaming
from zero3d.engine.tower_gradients import TowerGradients

if TYPE_CHECKING:
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.options import Options

FEATURES: tuple[type[Feature], ...] = (
    RunningStatistics,  # always, where there are any
    Health,  # always
    MatrixSteps,  # optimizer=zero3d.optim.muon(...)
    Averages,  # ema
    Replay,  # replay
    ExpertBias,  # expert_bias_rate; always counts, where there are experts
    Streaming,  # always
    TowerGradients,  # always, where there is a vision tower that is trained
)

F = TypeVar("F", bound=Feature)


def check_features(model: nn.Module, mesh: Mesh, options: Options) -> None:
    """Refuse options of features that cannot be. Raises ConfigError."""
    for feature in FEATURES:
        feature.check(model, mesh, options)


def open_features(parts: Runtime) -> tuple[Feature, ...]:
    """Return the features of an engine, in the order of the rows. Raises ConfigError."""
    opened = (feature.opened(parts) for feature in FEATURES)
    return tuple(feature for feature in opened if feature is not None)


def find(features: Sequence[Feature], kind: type[F]) -> F | None:
    """Return the feature of a kind; None where there is none."""
    return next((feature for feature in features if isinstance(feature, kind)), None)


def required(features: Sequence[Feature], kind: type[F]) -> F:
    """Return the feature of a kind that every engine has."""
    return next(feature for feature in features if isinstance(feature, kind))


def having(features: Sequence[Feature], moment: str) -> list[Feature]:
    """Return the features that act at a moment, by the name of its method."""
    return [feature for feature in features if getattr(type(feature), moment) is not getattr(Feature, moment)]
