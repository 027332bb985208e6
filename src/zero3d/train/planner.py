"""The interface of a planner, which a run is given as `Start.planner`. No torch.

    before anything is read        Planner.refuse     a cluster file that cannot be
    before parameters are cut      Planner.plan       rank 0: the run as it is planned, or why it cannot be
    `auto`, before the engine is   Planned.offload    what leaves the device
                                   Planned.weights    kept, or cast in gathers
    `auto` has become something    Planned.again      the plan of that
    the third step                 Planner.check      plan against actual
    memory has run out             Planned.advise     settings to change; Planner.late makes the plan where none is

A run imports no tool: the verb `zero3d train` passes the planner. The one that stands here knows nothing, so that a run
without another is not planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from zero3d.blueprint.auto import Room
    from zero3d.config import Config
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.engine import Engine
    from zero3d.train.folder import Folder
    from zero3d.train.memory_report import Advice, Shortage


class Planned(ABC):
    """A run as a planner sees it. Only the planner knows what is in it."""

    @abstractmethod
    def again(self, config: Config, mesh: Mesh) -> Planned | str:
        """Return the plan of the same model under another configuration, or why there is none in a line."""

    @abstractmethod
    def offload(self, config: Config, mesh: Mesh, room: Room) -> tuple[Mapping[str, Any], list[str]]:
        """Return what `auto` becomes in the section `offload`, by the least room of any rank, and why in lines."""

    @abstractmethod
    def weights(self, config: Config, mesh: Mesh) -> tuple[str, str]:
        """Return what `zero.weights=auto` becomes, and why in a line."""

    @abstractmethod
    def advise(self, shortage: Shortage, ranks: int, config: Config, folder: Folder | None) -> Advice:
        """Return settings for what is short. ranks: of a host."""


class Check(Protocol):
    """Holds a plan against what a run measures."""

    def lines(self, history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield what there is to say after a step of this session. All ranks call it."""


class Planner:
    """Answers a run's questions without any plan."""

    def refuse(self, config: Config) -> None:
        """Refuse what cannot be planned with, before anything is read. Raises ConfigError."""

    def plan(self, config: Config, model: nn.Module, mesh: Mesh, steps: int) -> Planned | str | None:
        """Return a run's plan on rank 0, or why there is none in a line; None on other ranks and for a short run."""

    def late(self, config: Config, mesh: Mesh) -> Planned | str:
        """Return the plan of a run on any rank, when it is under way, or why there is none in a line."""
        return "this run has no planner"

    def check(self, config: Config, engine: Engine, planned: Planned | str | None, steps: int) -> Check | None:
        """Return what checks a plan, on all ranks or on none, for they measure together. planned: on rank 0."""
