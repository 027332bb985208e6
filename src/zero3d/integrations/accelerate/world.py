"""Ranks of a launcher are processes of Accelerate's, on CPUs too.

Accelerate counts a launcher's ranks where they have accelerators, or are told to compute on the CPU (`cpu=True`,
`use_cpu=True`). Elsewhere it takes each for a run of its own, which reads all data, while an engine adds up their
gradients.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from zero3d.distributed.devices import count_devices
from zero3d.errors import ConfigError


def must_say_cpu() -> bool:
    """Return whether ranks of a launcher compute on CPUs, which Accelerate has to be told."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and count_devices() == 0


def refuse_other_world(processes: int, remedy: str) -> None:
    """Raise ConfigError where there are more ranks than processes that Accelerate knows of.

    remedy  what to type instead
    """
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE") or 1)
    if processes != ranks:
        raise ConfigError(
            f"{ranks} ranks were launched, and here there {'is' if processes == 1 else 'are'} {processes}: each would "
            f"train on the data of all. {remedy}"
        )
