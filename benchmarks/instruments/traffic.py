"""Count the bytes that a training step moves between memory and a cache, by phase, in a model of the cache.

    python benchmarks/instruments/traffic.py [--blocks 4] [--hidden 256] [--cache-mb 8]

The model: `cache` bytes in blocks of 4 KiB, the one used longest ago goes first, and is written back if it was written.
An operation streams through its tensors side by side, a multi-tensor one through one after the other. A block that is
written whole is not read before; what is left in the cache at the end is written back, unless its storage is gone. So a
tensor longer than the cache costs its bytes in every pass, and scratch that fits costs nothing.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 4096
WRITES_ALONE = {"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"}  # whose first argument is not read


class Use(NamedTuple):
    """What an operation does with one tensor."""

    tensor: Tensor
    reads: bool
    writes: bool


class Traffic(TorchDispatchMode):
    """Counts bytes that cross a cache of so many bytes, while operations run inside."""

    def __init__(self, cache: int) -> None:
        super().__init__()
        self.read = self.written = 0
        self._room = cache // BLOCK
        self._blocks: OrderedDict[tuple[int, int], bool] = OrderedDict()  # (storage, number): to be written back
        self._storages: dict[int, StorageWeakRef] = {}

    @property
    def total(self) -> int:
        """Bytes both ways."""
        return self.read + self.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and follow what it touches."""
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):  # else a view
            for lane in _lanes(func._schema, args, kwargs or {}):
                self._stream(lane)
            if not any(r.alias_info is not None for r in returns) and "empty" not in func._schema.name:
                for made in out if isinstance(out, (list, tuple)) else [out]:
                    if isinstance(made, Tensor):
                        self._stream([Use(made, False, True)])
        return out

    def __exit__(self, *error: Any) -> None:
        """Write back what is left."""
        super().__exit__(*error)
        for block in list(self._blocks):
            self._evict(block)

    def _stream(self, uses: list[Use]) -> None:
        for step in zip_longest(*map(_blocks, uses)):
            for use, number in zip(uses, step, strict=True):
                if number is not None:
                    self._touch(use, number)

    def _touch(self, use: Use, number: int) -> None:
        storage = use.tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
        block = storage._cdata, number
        known = block in self._blocks
        self.read += BLOCK if use.reads and not known else 0
        self._blocks[block] = self._blocks.get(block, False) or use.writes
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._room:
            self._evict(next(iter(self._blocks)))

    def _evict(self, block: tuple[int, int]) -> None:
        dirty = self._blocks.pop(block)
        self.written += BLOCK if dirty and not self._storages[block[0]].expired() else 0


def _lanes(schema: Any, args: Any, kwargs: Any) -> Iterator[list[Use]]:
    """Yield tensors that an operation streams through side by side: a multi-tensor one has a lane for each place."""
    single: list[Use] = []
    lists: list[list[Use]] = []
    alone = schema.name.split("::")[1] in WRITES_ALONE
    for at, argument in enumerate(schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        writes = writes and argument.name != "grads"  # of a fused optimizer, which writes them where it unscales them
        reads = not (writes and (argument.is_out or alone))
        if isinstance(value, Tensor):
            single.append(Use(value, reads, writes))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            lists.append([Use(each, reads, writes) for each in value])
    if len(lists) == 1 and single and "foreach" not in schema.name:  # cat: one after the other into one
        yield from ([use] for use in lists[0])
        yield single
        return
    yield from map(list, zip(*lists, strict=True))
    if single:
        yield single


def _blocks(use: Use) -> Iterator[int]:
    """Yield the blocks of its storage that a tensor is in."""
    t = use.tensor
    if not t.numel():
        return iter(())
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    begin = t.storage_offset() * t.element_size()
    return iter(range(begin // BLOCK, (begin + (last + 1) * t.element_size() - 1) // BLOCK + 1))


def step_bytes(engine: Any, cache: int, *given: Any) -> Traffic:
    """Return what the second step of an engine moves, gradients unscaled; `given` to its forward, which is its loss."""
    for counted in (False, True):
        engine.backward(engine(*given), weight=3.0)
        with Traffic(cache if counted else BLOCK) as traffic:
            engine.step()
    return traffic


class Stack(nn.Module):
    """Square matrices one behind the other, with a mean as its loss."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().mean()


def main() -> None:
    """Print bytes a parameter of a step, for stages and forms of masters."""
    parser = argparse.ArgumentParser(description="Count the bytes that a step moves through a cache.")
    parser.add_argument("--blocks", type=int, default=32, help="matrices (default 32)")
    parser.add_argument("--hidden", type=int, default=384, help="their width (default 384)")
    parser.add_argument("--cache-mb", type=float, default=8, help="MiB of the cache (default 8)")
    options = parser.parse_args()
    import zero3d

    torch.set_num_threads(1)
    x = torch.randn(4, options.hidden)
    for name, settings in {
        "fp32": {},
        "bf16": {"precision": "bf16"},
        "split": {"precision": "bf16", "master": "split"},
    }.items():
        torch.manual_seed(0)
        model = Stack(options.blocks, options.hidden)
        numel = sum(p.numel() for p in model.parameters())
        engine = zero3d.Engine(model, clip_norm=1e-6, units=["layers.*"], **({"precision": "fp32"} | settings))
        moved = step_bytes(engine, int(options.cache_mb * (1 << 20)), x)
        print(f"{name:6} {moved.total / numel:6.2f} bytes a parameter: {moved.read / numel:.2f} read")


if __name__ == "__main__":
    main()
