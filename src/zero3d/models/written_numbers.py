"""Numbers that modules have as attributes: those that forwards write beside a buffer, and a hash of all for bits.

Such a buffer is outside of the state dict, and the number says how far a rotary table has grown, for example.

transformers' dynamic NTK keeps `inv_freq`, a buffer, for the longest sequence so far, and its length as an attribute.
A run that goes on needs both: with the table alone it would be grown again by a shorter sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WrittenNumber:
    """Names a number of a module: an attribute, and its value before the first forward."""

    module: nn.Module
    attribute: str
    initial: float

    @property
    def value(self) -> float | None:
        """Return what it is now; where it is a tensor, that is read. None where it is no number any more."""
        value = getattr(self.module, self.attribute, None)
        if isinstance(value, Tensor) and not value.dim():
            value = value.item()
        return value if isinstance(value, (int, float)) else None

    @property
    def is_written(self) -> bool:
        """Return whether a forward has changed it."""
        return self.value not in (self.initial, None)

    @property
    def tensor(self) -> Tensor:
        """Return it as a tensor [] of int64 or float64; only where it is a number."""
        value = self.value
        return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)

    def write(self, value: Tensor) -> None:
        """Set it to a value that was saved."""
        setattr(self.module, self.attribute, value.item())

    def reset(self) -> None:
        """Set it to its value before the first forward, which is not saved."""
        setattr(self.module, self.attribute, self.initial)


def numbers_of(modules: Iterable[nn.Module]) -> dict[str, WrittenNumber]:
    """Return the numbers of modules that have a buffer outside of the state dict, by their names in the model."""
    return {
        f"{prefix}.{name}" if prefix else name: WrittenNumber(inner, name, value)
        for module in modules
        for prefix, inner in module.named_modules()
        for name, value in _numbers(inner)
        if not isinstance(value, Tensor)
    }


def places_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where such numbers of a module are, also behind forwards, which may have put tensors there."""
    return [(inner, name) for inner in module.modules() for name, _ in _numbers(inner)]


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield numbers of one module, and tensors of one element and no dimension, by the names of their attributes."""
    for name, value in vars(module).items() if module._non_persistent_buffers_set else ():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not name.startswith("_") and (number or (isinstance(value, Tensor) and not value.dim())):
            yield name, value


# --- all of them ----------------------------------------------------------------------------------


def numbers_in(model: nn.Module) -> str:
    """Return a hash of the classes of all modules, and of their numbers by name; of a model before it is cut."""
    told = [(name, type(module).__qualname__, _plain(vars(module))) for name, module in model.named_modules()]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


def _plain(attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return numbers, and mappings of numbers, as PEFT has them by an adapter's name; flags change no bit."""
    return sorted((name, value) for name, value in attributes.items() if not name.startswith("_") and _is_plain(value))


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return bool(value) and all(isinstance(each, (int, float)) for each in value.values())
    return isinstance(value, (int, float)) and not isinstance(value, bool)
