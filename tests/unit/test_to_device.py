"""How a batch reaches a device: from pinned memory, since a copy from any other makes the host wait."""

from types import SimpleNamespace

import torch

from zero3d.train.loop import to_device


def test_an_accelerator_copies_from_pinned_memory_without_the_host():
    done = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: done.append(f"to {device}, {non_blocking}"))
    to_device(SimpleNamespace(pin_memory=lambda: done.append("pin") or pinned), torch.device("cuda", 1))
    assert done == ["pin", "to cuda:1, True"]


def test_the_host_copies_nothing():
    batch = torch.arange(3)
    assert to_device(batch, torch.device("cpu")) is batch
