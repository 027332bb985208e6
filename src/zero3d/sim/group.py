"""One rank of a world whose other ranks are not there: sends go nowhere, and what arrives is what was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero3d.errors import ConfigError


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """torch.distributed as `rank` of `world` sees it. A step there leaves a process unfit for a second engine.

    Raises ConfigError where torch.distributed runs already.
    """
    if dist.is_initialized():
        raise ConfigError("a simulated rank needs a process of its own, and this one is a rank already.")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
