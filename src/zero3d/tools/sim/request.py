"""The input of a process that simulates one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """A rank of a world under a configuration (config.to_dict), with the collectives of a backend: nccl or gloo.

    whole     run every micro-batch, though some repeat others
    per_host  ranks on each host; None: on one
    patches   fields of tools.plan.images.Patches; None: of one image
    """

    config: Mapping[str, Any]
    rank: int
    world: int
    backend: str
    whole: bool = False
    per_host: int | None = None
    patches: Sequence[Any] | None = None
