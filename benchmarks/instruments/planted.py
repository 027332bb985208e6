"""Faults to plant in an engine, one function each: a tool of this folder that cannot see one is no proof against it.

Each is a context manager around the steps of engines, whichever tool watches them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from zero3d.memory.arena import Arena
from zero3d.tools.sim.patches import replaced
from zero3d.zero import gathers, reductions
from zero3d.zero.gradients import Gradients
from zero3d.zero.streams import SideStream


@contextmanager
def tail_joined() -> Iterator[None]:
    """Let compute wait for all that a side stream was given, also for units ahead: what decision 95 has changed."""

    def join(self: SideStream, unit: str) -> None:
        self.note("join", unit)
        if self._stream is not None:
            torch.accelerator.current_stream(self._arena.device).wait_stream(self._stream)
            self._used.let_go(self._issued)

    with replaced(SideStream, "join", join):
        yield


@contextmanager
def window_of_one() -> Iterator[None]:
    """Gather one unit ahead, and have one reduction in flight."""
    with ExitStack() as stack:
        for owner, name in ((gathers, "AHEAD"), (reductions, "IN_FLIGHT")):
            stack.enter_context(replaced(owner, name, 1))
        yield


@contextmanager
def join_dropped() -> Iterator[None]:
    """Let compute not wait for side streams: neither for what they added up, nor before memory comes back."""

    def join(self: SideStream, unit: str) -> None:
        self.note("join", unit)
        self._used.let_go(self._issued)

    with replaced(SideStream, "join", join):
        yield


@contextmanager
def bucket_given_back_early() -> Iterator[None]:
    """Give a bucket back when its reduction is added up on the side stream: compute has not waited for that yet."""
    add_up = Gradients.add_up

    def added_up(self: Gradients) -> None:
        add_up(self)
        arena = self.local._arena
        used, arena.used = arena.used, None
        self.local.close()
        arena.used = used

    with replaced(Gradients, "add_up", added_up):
        yield


@contextmanager
def given_back_at_once() -> Iterator[None]:
    """Let what a side stream gives back go to compute's pool at once."""

    def give_back(self: Arena, category: str, buffer: Tensor) -> None:
        self._account(category, -buffer.nbytes)

    with replaced(Arena, "give_back", give_back):
        yield


@contextmanager
def stream_without_device() -> Iterator[None]:
    """Make side streams on the current device, whichever that is, in place of the engine's."""
    make = torch.Stream

    class OfCurrent:
        def __new__(cls, device: Any = None, **how: Any) -> Any:
            return make(**how)

    with replaced(torch, "Stream", OfCurrent):
        yield


@contextmanager
def device_without_number() -> Iterator[None]:
    """Name the type of device alone where numbers of the host are copied to it."""

    def device_values(values: Sequence[float], device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device.type).to(device)

    with ExitStack() as stack:
        for module in [module for module in list(sys.modules.values()) if hasattr(module, "device_values")]:
            stack.enter_context(replaced(module, "device_values", device_values))
        yield
