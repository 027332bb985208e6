"""The largest tensors alive when memory has run out, with the names under which they are known.

    whose                       name
    --------------------------  ------------------------------------------------------
    a unit of the engine        parameters (gradients, master, optimizer) of unit NAME
    a variable of a call        VARIABLE in FUNCTION (FILE:LINE), of the callstack of the error
    nobody that is known        unnamed

Only Python's own list of objects is read: nothing is allocated on the device. Tensors saved by autograd are left alone,
since reading one may run code again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.engine.engine import Engine
from zero3d.precision import dtype_name
from zero3d.train.memory_report import LiveTensor

SHOWN = 8


def largest_tensors(device: torch.device, engine: Engine | None, frames: Sequence[FrameType]) -> list[LiveTensor]:
    """Return the largest storages on a device, each with its largest tensor."""
    names = dict(_variables(frames)) | ({} if engine is None else dict(_of_units(engine)))
    found: dict[int, LiveTensor] = {}
    for tensor in _tensors(device.type):
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        held = found.get(key)
        if nbytes and (held is None or tensor.numel() > _numel(held)):
            dtype = dtype_name(tensor.dtype)
            found[key] = LiveTensor(names.get(key, "unnamed"), tuple(tensor.shape), dtype, nbytes)
    return sorted(found.values(), key=lambda each: (-each.nbytes, each.name))[:SHOWN]


def _numel(tensor: LiveTensor) -> int:
    return int(torch.Size(tensor.shape).numel())


def _tensors(kind: str) -> Iterator[Tensor]:
    """Yield the tensors that Python knows on devices of a kind; wrappers without memory of their own are left out."""
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and not issubclass(type(item), FakeTensor):  # no `__class__` of a proxy runs
            try:
                if item.device.type == kind and item.layout == torch.strided:
                    item.untyped_storage()
                    yield item
            except Exception:  # noqa: BLE001 (a tensor class of somebody's own may refuse anything in its own way)
                continue


def _of_units(engine: Engine) -> Iterator[tuple[int, str]]:
    """Yield storages of an engine's units."""
    held: list[tuple[Any, str, str]] = []
    for unit in engine.units:
        held += [(unit.weights.full, "parameters", unit.name), (unit.weights.masters.stored, "master", unit.name)]
        held += [(unit.weights.second_shard, "second shard", unit.name)]
        held += [(buffer, "gradients", unit.name) for buffer in (() if unit.grads is None else unit.grads.buffers)]
    for tensor, category, name in held:
        if tensor is not None:
            yield tensor.untyped_storage()._cdata, f"{category} of unit {name}"
    for state in engine.optimizer.torch.state.values():
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                yield tensor.untyped_storage()._cdata, f"optimizer states {name}"
    for _, name, flat in engine.optimizer.flat_states():
        yield flat.untyped_storage()._cdata, f"optimizer states {name}"


def _variables(frames: Sequence[FrameType]) -> Iterator[tuple[int, str]]:
    """Yield storages of local variables of calls, the innermost call's last, whose name then counts."""
    for frame in frames:
        code = frame.f_code
        for variable, value in frame.f_locals.items():
            if issubclass(type(value), Tensor) and not issubclass(type(value), FakeTensor):
                try:
                    key = value.untyped_storage()._cdata
                except Exception:  # noqa: BLE001 (as above)
                    continue
                yield key, f"{variable} in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
