"""What a process that simulates a rank is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """Which rank of how many of which configuration (config.to_dict), with whose collectives: nccl or gloo.

    whole   run every micro-batch, though some repeat others
    """

    config: Mapping[str, Any]
    rank: int
    world: int
    backend: str
    whole: bool = False
