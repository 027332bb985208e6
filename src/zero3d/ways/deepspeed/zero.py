"""deepspeed.zero for programs: parameters that are whole inside a block."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero3d.errors import ConfigError
from zero3d.ways.deepspeed.names import refusing
from zero3d.ways.deepspeed.owners import engine_of

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it


class Init:
    """Does nothing, and says so once: a model that is built inside is whole until `initialize` shares it out."""

    told = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if not Init.told:
            warnings.warn(
                "deepspeed.zero.Init does nothing: the model is built whole on each rank, and initialize() keeps a "
                "shard. Of one that has no room so build it on torch.device('meta') and pass "
                "zero3d.Engine(weights=...).",
                stacklevel=2,
            )
        Init.told = True

    def __enter__(self) -> None:
        """Begin nothing."""

    def __exit__(self, *_: object) -> None:
        """End nothing."""


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Have parameters whole inside, with all of the modules that they are in; what is written inside is kept.

    modifier_rank  the rank that writes, whose values all take; None: all ranks write the same
    Parameters of no engine are whole already. All ranks enter and leave together. Raises ConfigError.
    """
    wanted = [params] if isinstance(params, nn.Parameter) else list(params)
    engine = next((found for p in wanted if (found := engine_of(p)) is not None), None) if enabled else None
    if fwd_module is not None:
        raise ConfigError(
            "GatheredParameters(fwd_module=...) is not supported: leave it out; a forward gathers what it uses."
        )
    if engine is None:
        yield
        return
    if modifier_rank is not None and engine.mesh.tp > 1:
        raise ConfigError("GatheredParameters(modifier_rank=...) over tp would mix slices: write on all ranks.")
    modules = [
        module
        for module in engine.module.modules()
        if any(own is p for own in module.parameters(recurse=False) for p in wanted)
    ]
    with engine.full_params(modules):
        yield
        if modifier_rank is not None and engine.mesh.world > 1:
            with torch.no_grad():
                for p in wanted:
                    dist.broadcast(p.data, modifier_rank)


__getattr__ = refusing("zero")
