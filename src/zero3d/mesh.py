"""Degrees to ranks: DP = world / (PP x TP), tp innermost.

    rank = (pp * DP + dp) * TP + tp

Only dp is built so far; the other degrees are 1.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from zero3d.errors import MeshError
from zero3d.transport import Axis


class Mesh:
    """The ranks of a run, arranged by degree. Starts torch.distributed when nobody has.

    dp, tp, pp  degrees; one may be left out (dp is computed), the product must equal the world
    device      where this rank computes (default: its accelerator, else cpu)
    debug       compare the order of gathers before every gather: slow, and names a culprit at once
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
        self.dp, self.tp, self.pp = resolve_degrees(self.world, dp, tp, pp)
        self.device = torch.device(device) if device is not None else default_device()
        self.debug = debug
        self._axis: Axis | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def data(self) -> Axis:
        """The dp axis as this rank sees it; its second group is made on first use."""
        if self._axis is None:
            if self.dp == 1:
                self._axis = Axis("dp", 0, 1)
            else:
                second = dist.new_group(list(range(self.world)), timeout=_timeout(self.device))
                self._axis = Axis("dp", self.rank, self.dp, dist.group.WORLD, second)
                atexit.register(_close, weakref.ref(self._axis))
        return self._axis

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine, as the launcher says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @contextmanager
    def waiting_room(self) -> Iterator[Axis]:
        """All ranks, on the host, with a day's patience: for work that one rank does while the others wait."""
        if self.world == 1:
            yield Axis("world", 0, 1)
            return
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        axis = Axis("world", self.rank, self.world, group, group)
        try:
            yield axis
        finally:
            axis.close()


def resolve_degrees(world: int, dp: int | None, tp: int | None, pp: int | None) -> tuple[int, int, int]:
    """Complete and check (dp, tp, pp) against the world. Raises MeshError with the arithmetic."""
    for name, degree in (("dp", dp), ("tp", tp), ("pp", pp)):
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise MeshError(f"{name}={degree!r} is no degree: pass a whole number from 1.")
    if (tp or 1) > 1 or (pp or 1) > 1:
        raise MeshError(
            f"pp={pp or 1} x tp={tp or 1}: pipeline and tensor parallelism are not built yet; leave them out or pass 1."
        )
    dp = world if dp is None else dp
    if dp != world:
        raise MeshError(
            f"{world} ranks cannot form pp=1 x dp={dp} x tp=1 (= {dp}). dp must be {world} / (1*1) = {world}: "
            "leave dp out and it is computed."
        )
    return dp, 1, 1


def default_device() -> torch.device:
    """This rank's accelerator (by LOCAL_RANK), else the cpu."""
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
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _close(axis: weakref.ref[Axis]) -> None:
    """At exit, before `_end`: an engine's references would keep a destroyed group's threads running."""
    alive = axis()
    if alive is not None:
        alive.close()


def _end() -> None:
    """At exit: what `start_distributed` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _timeout(device: torch.device) -> timedelta:
    """The default group's timeout, for groups made beside it."""
    group = dist.group.WORLD
    options = getattr(group._get_backend(device), "options", None) if group is not None else None
    return getattr(options, "_timeout", None) or timedelta(minutes=10)
