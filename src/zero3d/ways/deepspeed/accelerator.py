"""deepspeed.accelerator for programs: `get_accelerator()` is torch.accelerator by DeepSpeed's names.

A name that is not written out here is the device module's, torch.cuda's or torch.cpu's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero3d.distributed.devices import count_devices

__path__: list[str] = []  # a package without files


class Accelerator:
    """Answers for the current accelerator, or for the CPU where there is none that engines compute on."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda" or "cpu", or with a number as "cuda:1"."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    @property
    def _name(self) -> str:
        return self._kind

    @property
    def _kind(self) -> str:
        found = torch.accelerator.current_accelerator() if count_devices() else None
        return "cpu" if found is None else found.type

    @property
    def _module(self) -> Any:
        return getattr(torch, self._kind)

    def is_available(self) -> bool:
        """Return True: a CPU is an accelerator here, as there."""
        return True

    def device_count(self) -> int:
        """Return the number of accelerators of this host; of CPUs 1."""
        return count_devices() or 1

    def current_device(self) -> int | str:
        """Return the number of the current accelerator, or "cpu"."""
        return "cpu" if self._kind == "cpu" else int(torch.accelerator.current_device_index())

    def current_device_name(self) -> str:
        """Return the name of the current device, as "cuda:1"."""
        return "cpu" if self._kind == "cpu" else f"{self._kind}:{self.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a device, or a context of one on accelerators."""
        return torch.device("cpu") if self._kind == "cpu" else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make an accelerator the current one."""
        if self._kind != "cpu":
            torch.accelerator.set_device_index(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._kind != "cpu":
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return the backend by which ranks talk."""
        if dist.is_initialized():
            return str(dist.get_backend())
        return "gloo" if self._kind == "cpu" else str(dist.get_default_backend_for_device(self._kind))

    def is_bf16_supported(self) -> bool:
        """Return whether models compute in bf16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Return whether models compute in fp16."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; 0 on CPUs."""
        return 0 if self._kind == "cpu" else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of these bytes; 0 on CPUs."""
        return 0 if self._kind == "cpu" else int(self._module.max_memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that the allocator holds; 0 on CPUs."""
        return 0 if self._kind == "cpu" else int(self._module.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of these bytes; 0 on CPUs."""
        return 0 if self._kind == "cpu" else int(self._module.max_memory_reserved(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin the peaks anew."""
        if self._kind != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        """Give back memory that the allocator holds and no tensor has."""
        if self._kind != "cpu":
            self._module.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator."""
    return _ACCELERATOR
