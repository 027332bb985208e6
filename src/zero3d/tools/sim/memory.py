"""Every storage on the engine's device from birth to death, to the byte, as a log.

    born     the first operation that returns a tensor in it (a dispatch mode sees all, below autograd)
    resized  gathered weights and gradients are freed and filled in place (`untyped_storage().resize_`)
    dead     its last reference is gone: a weak reference tells

    categories   parameters, gradients, optimizer, padding,
                 gathered, bucket, wire, received                                     as the arena lent it
                 buffers, inputs                                                      of modules; the micro-batches
    activations                                                          autograd saved it for backward
                 temporary                                                            what else there is

A category is known only after birth: the log has changes of size alone, and a storage's last label counts.
Nothing here reads a value, so tensors may be real ones or those of a dry run.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.precision import dtype_name
from zero3d.tools.sim.patches import hear_resizes
from zero3d.tools.sim.position import NOWHERE, Position, PositionTracker

BUFFERS, INPUTS, ACTIVATIONS, TEMPORARY = "buffers", "inputs", "activations", "temporary"
PADDING = "padding"
CATEGORIES = (*STATES, *TRANSIENT, BUFFERS, INPUTS, ACTIVATIONS, TEMPORARY)
NONE = Fraction(0)
ELSEWHERE = -1  # the number of storages that are not in the device's memory
DEVICE, META = torch.ops.prim.device.default, torch.device("meta")


@dataclass(slots=True)
class Storage:
    """One storage. padding: of its bytes at birth."""

    nbytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    born: Position
    padding: Fraction = NONE


@dataclass
class Log:
    """The events of storages: event i changed storage `who[i]` by `changes[i]` bytes; `marks`: (event, its position).

    peak         the most bytes alive, reached by event `peak_event`, at `peak_position`
    """

    storages: list[Storage]
    who: array[int]
    changes: array[int]
    marks: list[tuple[int, Position]]
    peak: int = 0
    peak_event: int = -1
    peak_position: Position = NOWHERE


def device_of(tensor: Tensor) -> torch.device:
    """Return a tensor's device as FakeTensorMode answers of its tensors."""
    if not isinstance(tensor, FakeTensor):
        return tensor.device
    return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the log while `watching()`; `restart()` forgets all but what is alive.

    hear    called after each operation with (operation, arguments, keywords, result)
    """

    def __init__(self, position: PositionTracker, hear: Callable[[Any, Any, Any, Any], None] = lambda *_: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._position, self._hear = position, hear
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by id
        self._alive: dict[int, Storage] = {}  # by place in log.storages
        self.live = 0
        self.log = Log([], array("q"), array("q"), [])

    # --- what happens ---------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it costs as much as the rest of this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # questions: most are on which device, and FakeTensorMode is slow to answer
            return device_of(args[0]) if func is DEVICE else func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, Tensor):
                self.see(value)
        self._hear(func, args, kwargs or {}, out)
        return out

    def see(self, tensor: Tensor, category: str = TEMPORARY) -> Storage | None:
        """Return a tensor's storage, newly logged if it was not known; None for one that takes no memory here."""
        storage = tensor.untyped_storage()
        number = self._number(storage)
        if number is None:
            if tensor.device.type == "meta":
                return None
            position, number = self._position.now(), len(self.log.storages)
            dtype, nbytes = dtype_name(tensor.dtype), storage.nbytes()
            self._alive[number] = Storage(nbytes, category, tuple(tensor.shape), dtype, position)
            self.log.storages.append(self._alive[number])
            self._follow(storage, number)
            self._mark(position)
            self._change(number, nbytes, position)
        return self._alive.get(number)

    def on_borrow(self, category: str, buffer: Tensor, used: Fraction | int | None = None) -> None:
        """Label a buffer that the arena has lent, of whose elements so many are used (None: all)."""
        entry = self.see(buffer, category)
        if entry is not None:
            entry.category = category
            entry.padding = NONE if used is None else entry.nbytes - Fraction(used * buffer.dtype.itemsize)

    def leave_out(self, tensor: Tensor) -> None:
        """Forget a storage, from now on: it is not in the device's memory."""
        storage = tensor.untyped_storage()
        key, number = id(storage), self._number(storage)
        if number is not None:
            self._change(number, -self._alive.pop(number).nbytes)
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key)), ELSEWHERE

    def name(self, tensor: Tensor, module: str) -> None:
        """Write at a tensor's storage that it was made for this module."""
        entry = self.see(tensor)
        if entry is not None:
            entry.born = entry.born._replace(module=module)

    def keep_saved(self, tensor: Tensor) -> Tensor:
        """Label what autograd saves, and return it detached: an output would hold the operation that holds it."""
        entry = self.see(tensor)
        if entry is not None and entry.category == TEMPORARY:
            entry.category = ACTIVATIONS
        return tensor.detach()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log that a storage has been freed or filled in place."""
        number = self._number(storage)
        if number is not None and number != ELSEWHERE:
            entry = self._alive[number]
            change, entry.nbytes = storage.nbytes() - entry.nbytes, storage.nbytes()
            self._change(number, change)

    def _dead(self, key: int, number: int) -> None:
        del self._known[key]
        self._change(number, -self._alive.pop(number).nbytes)

    def _number(self, storage: torch.UntypedStorage) -> int | None:
        known = self._known.get(id(storage))
        return None if known is None else known[1]

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        key = id(storage)
        self._known[key] = weakref.ref(storage, lambda _: self._dead(key, number)), number

    # --- the log --------------------------------------------------------------------------------

    def _change(self, number: int, change: int, position: Position | None = None) -> None:
        log = self.log
        if change == 0:
            return
        log.who.append(number)
        log.changes.append(change)
        self.live += change
        if self.live > log.peak:
            log.peak, log.peak_event = self.live, len(log.who) - 1
            log.peak_position = position or self._position.now()

    def _mark(self, position: Position) -> None:
        marks = self.log.marks
        if not marks or marks[-1][1][:3] != position[:3]:
            marks.append((len(self.log.who), position))

    def restart(self) -> None:
        """Begin a new log with what is alive now."""
        alive = sorted(self._alive.items())
        moved = {number: i for i, (number, _) in enumerate(alive)}
        self._alive = {i: storage for i, (_, storage) in enumerate(alive)}
        self.log = Log(list(self._alive.values()), array("q"), array("q"), [])
        for reference, number in list(self._known.values()):
            storage = reference()
            if storage is not None and number != ELSEWHERE:
                self._follow(storage, moved[number])
        self.live = 0
        for number, living in self._alive.items():
            self._change(number, living.nbytes)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log every storage inside the block; afterwards all is as before."""
        with hear_resizes(self.resized), saved_tensors_hooks(self.keep_saved, lambda tensor: tensor), self:
            yield


class ObservedArena(Arena):
    """An engine's account of buffers that tells a log of what it lends."""

    def __init__(self, log: MemoryTracker, device: torch.device) -> None:
        super().__init__(device)
        self._log = log

    def allocate(self, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer for model states, and label its storage."""
        buffer = super().allocate(category, elements, used, dtype)
        self._log.on_borrow(category, buffer, used)
        return buffer

    def reserve(self, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer for states that come and go, and label its storage."""
        buffer = super().reserve(category, elements, used, dtype)
        self._log.on_borrow(category, buffer, used)
        return buffer

    def borrow(self, category: str, elements: int, dtype: torch.dtype) -> Tensor:
        """Lend a transient buffer, and label its storage."""
        buffer = super().borrow(category, elements, dtype)
        self._log.on_borrow(category, buffer)
        return buffer

    def elsewhere(self, nbytes: int) -> Tensor:
        """Return what stands for memory of a tier."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._log.leave_out(memory)
        return memory
