"""Random states of a process as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


def rng_state(device: torch.device) -> tuple[dict[str, Tensor], Any]:
    """Return this process's random states: torch's, on `device` too, and numpy's as tensors, Python's as JSON."""
    tensors = dict(zip(("torch", "accelerator"), torch_rng(device), strict=False))
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    tensors["numpy"] = torch.from_numpy(numpy.asarray(keys).astype(numpy.int64))
    return tensors, {"python": random.getstate(), "numpy": [str(kind), int(position), int(has_gauss), float(gauss)]}


def set_rng_state(tensors: Mapping[str, Tensor], plain: Mapping[str, Any], device: torch.device) -> None:
    """Continue from `rng_state(device)`; on the CPU without the state of the accelerator that saved it."""
    names = ("torch",) if device.type == "cpu" else ("torch", "accelerator")
    set_torch_rng(device, [tensors[name] for name in names if name in tensors])
    version, keys, gauss = plain["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    numpy.random.set_state((kind, tensors["numpy"].numpy().astype(numpy.uint32), position, has_gauss, cached))


def torch_rng(device: torch.device) -> tuple[Tensor, ...]:
    """Return torch's random state on the CPU, and on `device` where it is another."""
    states = (torch.get_rng_state(),)
    return states if device.type == "cpu" else (*states, torch.get_device_module(device).get_rng_state(device))


def set_torch_rng(device: torch.device, states: Sequence[Tensor]) -> None:
    """Continue from `torch_rng(device)`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def share_torch_rng(device: torch.device, broadcast: Callable[[Tensor], None]) -> None:
    """Continue from the state of the rank whose tensors `broadcast` sends, which is on `device`; about 5 kB."""
    states = [state.to(device) for state in torch_rng(device)]
    for state in states:
        broadcast(state)
    set_torch_rng(device, [state.cpu() for state in states])
