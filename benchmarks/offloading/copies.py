"""Copies in memory, by one thread: what a host can do, whatever lies there."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from offloading.turns import in_turns, rates


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s of copies; a copy of n bytes reads n and writes n, and counts once."""
    nbytes = int(arguments.gigabytes * 1e9)
    here, there = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = in_turns({"memory to memory": lambda: there.copy_(here)}, arguments.rounds)
    return {"rows": rates(seconds, dict.fromkeys(seconds, nbytes)), "seconds": seconds, "targets": []}
