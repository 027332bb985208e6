"""One rank of a world whose other ranks are not there: sends go nowhere, and what arrives is what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero3d.distributed.axis import Axis
from zero3d.distributed.mesh import Mesh
from zero3d.errors import ConfigError


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Run torch.distributed as `rank` of `world` sees it. A step there leaves a process unfit for a second engine.

    Raises ConfigError where torch.distributed runs already.
    """
    if dist.is_initialized():
        raise ConfigError("a simulated rank needs a process of its own, and this one is a rank already.")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class FakeAxis(Axis):
    """An axis on the fake group that gives the name of another backend, from which algorithms and buffers follow."""

    stands_for: str = "nccl"

    @property
    def backend(self) -> str:
        """Name of the backend that a real run would use; "none" for degree 1."""
        return "none" if self.gathers is None else self.stands_for


class FakeMesh(Mesh):
    """A mesh on the fake group, on the CPU, whose axes stand for those of `backend`, on hosts of `per_host` ranks."""

    def __init__(
        self, dp: int | None, tp: int | None, pp: int | None, backend: str, per_host: int | None = None, **folds: Any
    ) -> None:
        super().__init__(dp, tp, pp, **folds, device="cpu")
        self._backend, self._per_host = backend, per_host

    @property
    def on_cpu(self) -> bool:
        """Whether it stands for ranks on CPUs."""
        return self._backend == "gloo"

    @property
    def local_world(self) -> int | None:
        """How many ranks a host would have; None where nobody says so, whatever is true of this process."""
        return self._per_host

    def open_axis(self, name: str) -> Axis:
        """Make an axis over groups that send nothing."""
        axis = super().open_axis(name)
        return FakeAxis(axis.name, axis.rank, axis.size, axis.gathers, axis.reductions, stands_for=self._backend)
