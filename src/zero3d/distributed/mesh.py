"""The ranks of a run on their axes: DP = world / (PP x TP), tp innermost (degrees.py has the arithmetic).

Every axis of this rank has two process groups over the same ranks (transport.Axis); those of one
rank's axes make torch's DeviceMesh.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from zero3d.distributed.axis import Axis
from zero3d.distributed.degrees import AXES, Degrees, Place
from zero3d.distributed.rendezvous import shared_store
from zero3d.errors import MeshError
from zero3d.memory.arena import Arena

PATIENCE, GLOO_PATIENCE = timedelta(minutes=10), timedelta(minutes=30)  # torch's own defaults


class Mesh:
    """The ranks of a run, arranged by degree; starts torch.distributed when nobody has.

    dp, tp, pp  degrees, whose product must equal the world; one may be left out (dp: or with others, which are 1)
    device      where this rank computes (default: its accelerator, else cpu)
    debug       compare the order of gathers before every gather: slow, and names a culprit at once

    Raises MeshError. Groups are made on first use of an axis, by its ranks together.
    """

    def __init__(
        self,
        dp: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        *,
        device: str | torch.device | None = None,
        debug: bool = False,
    ) -> None:
        start_distributed()
        self.world = dist.get_world_size()
        self.degrees = Degrees.resolve(self.world, dp, tp, pp)
        self.pp, self.dp, self.tp = self.degrees
        self.device = torch.device(device) if device is not None else default_device()
        self.debug = debug
        self.make_arena: Callable[[torch.device], Arena] = Arena  # an observer passes one that tells it of buffers
        self._axes: dict[str, Axis] = {}

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return dist.get_rank()

    @property
    def place(self) -> Place:
        """This rank's coordinates."""
        return self.degrees.place(self.rank)

    @property
    def data(self) -> Axis:
        """The dp axis as this rank sees it: the ranks that hold the same layers."""
        return self.axis("dp")

    @property
    def everyone(self) -> Axis:
        """All ranks of the mesh, over the default group; the dp axis itself where there is no other."""
        return self.axis("dp" if self.dp == self.world else "world")

    @property
    def model_parallel(self) -> Axis:
        """The ranks that hold one copy of the model together with this one: pipeline stages, each with its tp ranks."""
        return self.axis("pp" if self.tp == 1 else "tp" if self.pp == 1 else "replica")  # its name in the ledger

    def axis(self, name: str) -> Axis:
        """Return one of pp, dp, tp, world, replica (the model-parallel group); its groups are made on first use."""
        if name not in self._axes:
            self._axes[name] = axis = self.open_axis(name)
            if axis.size > 1:
                atexit.register(_close, weakref.ref(axis))
        return self._axes[name]

    def open_axis(self, name: str) -> Axis:
        """Make an axis and its groups. All its ranks call it; a dry run has axes of its own."""
        if name == "world":
            return Axis(name, self.rank, self.world, dist.group.WORLD, dist.group.WORLD)
        ranks = self.degrees.model_parallel(self.rank) if name == "replica" else self.degrees.along(name, self.rank)
        position = ranks.index(self.rank)
        if len(ranks) == 1:
            return Axis(name, 0, 1)
        if len(ranks) == self.world:  # the order in which an axis lists all ranks is theirs
            first, second = dist.group.WORLD, dist.new_group(ranks, timeout=_timeout(self.device))
        else:
            first, second = (
                dist.new_group(ranks, timeout=_timeout(self.device), use_local_synchronization=True) for _ in range(2)
            )
        return Axis(name, position, len(ranks), first, second)

    @property
    def torch(self) -> DeviceMesh:
        """The axes of more than one rank as torch's DeviceMesh, over the groups that gathers use. Raises MeshError."""
        axes = [self.axis(name) for name in AXES]
        groups = [axis.gathers for axis in axes if axis.gathers is not None]
        if not groups:
            raise MeshError("one rank has no axis of more than one rank, and so no DeviceMesh.")
        names = tuple(axis.name for axis in axes if axis.gathers is not None)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        ranks = torch.arange(self.world).view([axis.size for axis in axes if axis.gathers is not None])
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine, as the launcher says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def local_world(self) -> int | None:
        """How many ranks this machine has; None where no launcher says so."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(ranks) if ranks.isdecimal() and int(ranks) > 0 else None

    @contextmanager
    def waiting_room(self) -> Iterator[Axis]:
        """Give an axis of all ranks, on the host, with a day's patience: one rank works while the others wait."""
        if self.world == 1:
            yield Axis("world", 0, 1)
            return
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        axis = Axis("world", self.rank, self.world, group, group)
        try:
            yield axis
        finally:
            axis.close()


def default_device() -> torch.device:
    """Return this rank's accelerator (by LOCAL_RANK), else the cpu."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def start_distributed() -> None:
    """Initialise torch.distributed from the environment under a launcher, else as one process."""
    if dist.is_initialized():
        return
    device = default_device()
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    atexit.register(_end)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world = shared_store(os.environ, GLOO_PATIENCE if backend == "gloo" else PATIENCE)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        if backend == "gloo":  # it connects rank by rank: one that leaves at once would fail those still connecting
            dist.barrier()
    else:
        with _loopback():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


@contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo listen on the loopback only, inside: one process has nobody to talk to."""
    name, given = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    if given is None and sys.platform == "linux":
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(name, None)


def _close(axis: weakref.ref[Axis]) -> None:
    """Close an axis at exit, before `_end`: an engine's references would keep a destroyed group's threads running."""
    alive = axis()
    if alive is not None:
        alive.close()


def _end() -> None:
    """End at exit what `start_distributed` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _timeout(device: torch.device) -> timedelta:
    """Return the default group's timeout, for groups made beside it."""
    group = dist.group.WORLD
    options = getattr(group._get_backend(device), "options", None) if group is not None else None
    return getattr(options, "_timeout", None) or timedelta(minutes=10)
