"""A run's measurements beside the formulas: numbers only, `report.py` prints them.

consumer           measured                               formula
-----------------  -------------------------------------  -------------------------------------
parameters         held by the arena                      account/states.py, exact
gradients          held by the arena                      account/states.py, exact
optimizer states   held by the arena                      account/states.py, exact
padding            held by the arena                      from the layouts, exact
temporary buffers  most held at any instant, by kind      engine/transients.py, an upper bound from unit sizes
activations        what autograd saved in one forward     none
device             most allocated and reserved there      none (accelerators only)
buffers off it     held by the accounts of host, disk     none

States are one row for each place that has any: the device, the host, a disk.

What ranks sent is in `traffic.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero3d.engine.checkpoints import COPY
from zero3d.engine.engine import Engine
from zero3d.engine.report import HeldRow, Report
from zero3d.memory.arena import STATES
from zero3d.precision import dtype_of
from zero3d.spec.tiers import DEVICE
from zero3d.train.device_memory import memory_bytes, reserved_bytes
from zero3d.train.tables import MemoryRow

LABELS = {"optimizer": "optimizer states"}


# --- activations --------------------------------------------------------------------------------


class Activations:
    """Counts bytes by dtype that the first forward keeps for its backward: distinct storages, no parameters.

    What autograd saves, and the inputs of recomputed blocks. A view of a parameter lies in its
    unit's storage, which keeps its identity for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self._seen = {unit.weights.full.untyped_storage()._cdata for unit in engine.units}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        for root in engine.chunks.values():
            handles = [root.register_forward_pre_hook(self._begin)]
            handles.append(root.register_forward_hook(partial(self._end, handles)))

    def _begin(self, *_: Any) -> None:
        self._hooks.__enter__()

    def _end(self, handles: list[Any], *_: Any) -> None:
        self._hooks.__exit__()
        for handle in handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.bytes[dtype_of(tensor.dtype).name] += storage.nbytes()
        return tensor.detach()  # an operation's output would hold the operation that holds it


# --- memory -------------------------------------------------------------------------------------


def memory_rows(report: Report, activations: Mapping[str, int], engine: Engine) -> list[MemoryRow]:
    """Return ZeRO's five consumers, padding apart, and the whole of an accelerator.

    `report` is engine.report() right after training.
    """
    here = {row.category: row for row in report.memory if row.place == DEVICE}
    rows = [_state_row(here[category]) for category in STATES]
    for category, row in here.items():
        if row.bound is not None:
            fits = row.peak <= row.bound
            rows.append(MemoryRow(f"temporary: {category}", row.dtype, row.bound, True, row.peak, fits))
    dtypes = " + ".join(sorted(activations)) or "-"
    rows.append(MemoryRow("activations", dtypes, None, False, sum(activations.values()), None))
    reserved = reserved_bytes(engine)
    if reserved is not None:
        rows.append(MemoryRow("device: allocated", "-", None, False, memory_bytes(engine), None))
        rows.append(MemoryRow("device: reserved", "-", None, False, reserved, None))
    for row in report.memory:
        if row.place != DEVICE and row.category in STATES:
            rows.append(_state_row(row))
        elif row.category == COPY:
            equal = row.planned == row.measured
            rows.append(MemoryRow("copy for saves", "-", row.planned, False, row.measured, equal, row.place))
        elif row.place != DEVICE:
            rows.append(MemoryRow(f"temporary: {row.category}", "-", None, False, row.peak, None, row.place))
    return rows


def _state_row(row: HeldRow) -> MemoryRow:
    """Return the row of a category of states at a place, whose formula is exact."""
    label = LABELS.get(row.category, row.category)
    equal = row.planned == row.measured
    return MemoryRow(label, row.dtype, row.planned, False, row.measured, equal, row.place)
