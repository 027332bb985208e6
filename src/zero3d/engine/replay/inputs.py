"""What a micro-batch's gradients depend on beside the weights, and its way to another rank.

Two ranks trade a number for what must be alike (names, dtypes, options), then sizes, then all bytes in one message.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.distributed.collectives import Comm
from zero3d.models.written_numbers import places_of
from zero3d.nested import map_tensors, tensors_in
from zero3d.rng import rng_state, set_rng_state


@dataclass(frozen=True)
class Inputs:
    """A micro-batch with values of the model's buffers and random states, all from before its forward.

    rng, plain  as `rng_state` returns them
    numbers     that forwards write beside buffers (`models/written_numbers.py`)
    """

    batch: Any
    buffers: list[Tensor]
    rng: Mapping[str, Tensor]
    plain: Any
    numbers: list[float]

    @classmethod
    def now(cls, batch: Any, module: nn.Module, device: torch.device) -> Inputs:
        """Return a micro-batch with what is there before its forward; buffers are copied."""
        numbers = [_number(getattr(owner, name)) for owner, name in places_of(module)]
        return cls(batch, [buffer.clone() for *_, buffer in _buffers(module)], *rng_state(device), numbers)

    def trade(self, comm: Comm, peer: int) -> Inputs | None:
        """Send this to a rank and return its own; None on both where they are not alike enough to be exchanged."""
        tensors = self._tensors()
        alike = zlib.crc32(repr((_outline(self.batch), sorted(self.rng), [_kind(t) for t in tensors])).encode())
        sizes = [size for t in tensors for size in (*t.shape, *torch.empty_like(t).stride())]
        data = torch.cat([_raw(t).to(comm.device) for t in tensors])
        theirs, length = _trade_numbers(comm, peer, [alike, data.numel()])
        if theirs != alike:
            return None
        sizes = _trade_numbers(comm, peer, sizes)
        padded = data.new_zeros(max(length, data.numel()))
        padded[: data.numel()] = data
        return self._like(sizes, comm.trade(padded, peer, "-"))

    def _tensors(self) -> list[Tensor]:
        plain = torch.frombuffer(bytearray(json.dumps([self.plain, self.numbers]).encode()), dtype=torch.uint8)
        return [*tensors_in(self.batch), *self.buffers, *(self.rng[name] for name in sorted(self.rng)), plain]

    def _like(self, sizes: list[int], data: Tensor) -> Inputs:
        """Return another rank's inputs from its data: of the same structure as these, with tensors of these sizes."""
        left, made, place = iter(sizes), [], 0
        for like in self._tensors():
            shape, stride = ([next(left) for _ in range(like.dim())] for _ in range(2))
            t = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
            raw = _raw(t)
            raw.copy_(data[place : place + raw.numel()])
            place += raw.numel()
            made.append(t)
        parts = iter(made)
        batch = map_tensors(self.batch, lambda _: next(parts))
        buffers = [next(parts) for _ in self.buffers]
        rng = {name: next(parts) for name in sorted(self.rng)}
        return Inputs(batch, buffers, rng, *json.loads(bytes(next(parts).tolist())))


@dataclass(frozen=True)
class Surroundings:
    """The buffers and random states of this process, as they were before others are put in their place.

    numbers  attributes of modules that forwards write beside buffers, and what was there
    inputs   the values of both; its micro-batch is not used
    """

    module: nn.Module
    device: torch.device
    places: list[tuple[nn.Module, str, Tensor]]
    numbers: list[tuple[nn.Module, str, Any]]
    inputs: Inputs

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Surroundings:
        """Remember the present ones."""
        numbers = [(owner, name, getattr(owner, name)) for owner, name in places_of(module)]
        return cls(module, device, list(_buffers(module)), numbers, Inputs.now(None, module, device))

    @torch.no_grad()
    def become(self, inputs: Inputs) -> None:
        """Have the values of a micro-batch's own."""
        for (owner, name, buffer), values in zip(self.places, inputs.buffers, strict=True):
            owner._buffers[name] = buffer
            buffer.copy_(values)
        for (owner, name, number), value in zip(self.numbers, inputs.numbers, strict=True):
            setattr(owner, name, number.new_tensor(value) if isinstance(number, Tensor) else value)
        set_rng_state(inputs.rng, inputs.plain, self.device)

    def restore(self) -> None:
        """Have the values of before."""
        self.become(self.inputs)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _trade_numbers(comm: Comm, peer: int, numbers: list[int]) -> list[int]:
    values = torch.tensor(numbers, dtype=torch.int64, device=comm.device)
    return [int(number) for number in comm.read(comm.trade(values, peer, "-"), list(numbers))]


def _kind(t: Tensor) -> str:
    return f"{t.dtype} {t.dim()}"


def _raw(t: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order in which they lie; of one with gaps or overlaps those of a copy."""
    dense = t if torch.empty_like(t).stride() == t.stride() else torch.empty_like(t).copy_(t)
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _outline(value: Any) -> Any:
    """Return a nest without its tensors: names, and what is plain in it."""
    if isinstance(value, Mapping):
        return [(str(key), _outline(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_outline(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(part.name, _outline(getattr(value, part.name))) for part in dataclasses.fields(value)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
