"""Live bytes over time: every storage that operators make, from its birth to its death.

with StorageTracker() as live:        inside FakeTensorMode no data is ever there
    live.mark("block 0 begins")       instants, to be told apart later
    ...
live.events                           (bytes, storage) in order; negative bytes are a death
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3d.tools.sim.flops import FORMULAS

ATEN = torch.ops.aten
FREE = frozenset((ATEN.empty, ATEN.empty_like, ATEN.new_empty, ATEN.empty_strided, ATEN.detach, ATEN.lift_fresh))
LOOKUPS = frozenset((ATEN.embedding, ATEN.index_select, ATEN.gather))
SCORES = ("attention", "bmm", "mixer_products")  # in the names of operators whose factors are both activations


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows storages and counts floating-point operations.

    events    (change in bytes, number of the storage), in order
    marks     (instant, what happens): an instant is a position in `events`
    shapes    number of a storage -> shape of the tensor it was made for
    flops     (instant, operations, whether they are attention's scores)
    moved     (instant, bytes that kernels of mixers read and write)
    launches  (instant, bytes that a kernel reads and writes; 0 for a product, and for what decodes weights)
    decoding  kernels decode weights now, whose bytes do not follow the tokens
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.marks: dict[Any, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.flops: list[tuple[int, float, bool]] = []
        self.moved: list[tuple[int, float]] = []
        self.launches: list[tuple[int, float]] = []
        self.decoding = False
        self._numbers: dict[int, int] = {}
        self._refs: dict[int, Any] = {}

    def leave_out(self, *tensors: Tensor) -> None:
        """Never count these: they were there before."""
        for t in tensors:
            self._numbers[t.untyped_storage()._cdata] = -1
            self._refs[t.untyped_storage()._cdata] = t.untyped_storage()

    def mark(self, name: Any) -> None:
        """Remember this instant, if it is the first of its name."""
        self.marks.setdefault(name, len(self.events))

    def number_of(self, t: Tensor) -> int:
        """Return the number of a tensor's storage, -1 where it is not followed."""
        return self._numbers.get(t.untyped_storage()._cdata, -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count_flops(func, args, kwargs or {}, out)
        self._count_launch(func, (args, kwargs), out)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._follow(t)
        return out

    def _follow(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        number, size = len(self.events), storage.nbytes()
        self._numbers[key], self.shapes[number] = number, tuple(t.shape)
        self.events.append((size, number))
        self._refs[key] = weakref.ref(storage, partial(self._dies, key, number, size))

    def _dies(self, key: int, number: int, size: int, _: Any) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key], self._refs[key]
        self.events.append((-size, number))

    def _count_launch(self, func: Any, given: Any, out: Any) -> None:
        """Count a kernel: what makes values runs one, a view or memory without values does not."""
        packet, (read, made) = func._overloadpacket, (_tensors(given), _tensors(out))
        there = {t.untyped_storage()._cdata for t in read}
        new = any(t.untyped_storage()._cdata not in there for t in made)
        if packet in FREE or not (new or (made and func._schema.is_mutable)):
            return
        if self.decoding or packet in FORMULAS:
            nbytes = 0
        else:  # of a table, rows are read
            nbytes = sum(t.nbytes for t in (made if packet in LOOKUPS else read)) + sum(t.nbytes for t in made)
        self.launches.append((len(self.events), float(nbytes)))

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            counted = formula(*args, **kwargs, out_val=out)
            self.flops.append((len(self.events), counted, any(word in str(func) for word in SCORES)))
            if "mixer_products" in str(func):
                self.moved.append((len(self.events), args[2]))
