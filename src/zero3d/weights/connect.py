"""Connects a receiver of weights to its trainer, by the carrier that an address names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from zero3d.weights import group, local
from zero3d.weights.protocol import Receiver


def connect(address: str | Path, timeout: float = 60.0, device: str = "cpu") -> Receiver:
    """Return a receiver of the sender at an address, for which it waits so many seconds. Raises StreamError.

    address  a path: a `LocalSender` of this host; tcp://HOST:PORT: a `GroupSender`, perhaps of another one
    device   "cpu", or of a GroupSender on GPUs this process' own, such as "cuda:0"
    """
    if str(address).startswith(group.SCHEME):
        return group.join(str(address), timeout, device)
    return local.join(address, timeout)


def receive(address: str | Path, timeout: float = 60.0, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of one stream from the sender at an address; see `Receiver.receive`."""
    with connect(address, timeout, device) as receiver:
        yield from receiver.receive()
