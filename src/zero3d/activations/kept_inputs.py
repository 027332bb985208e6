"""Where the inputs of recomputed blocks are kept between forward and backward: ZeRO-R's P_a and P_a+cpu.

    partitioned   tp ranks have the same hidden states: each keeps 1/tp and they gather them before the recomputation
    on the host   in slots of the host's memory (host_slots.py), of a partitioned one the part

The *input* of a block is the first of its arguments that needs a gradient, the hidden states. Masks, positions and what
else blocks share stays as it is. So does an input that does not fill its memory, such as a slice of another tensor: its
strides decide the last bits of results computed with it.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero3d.activations.host_slots import HostSlots, Slot
from zero3d.activations.segments import Recomputed, Recorder
from zero3d.distributed.collectives import same_memory
from zero3d.nested import tensors_in

Gather = Callable[[Tensor, str], Tensor]


class Partition(NamedTuple):
    """How tp ranks share inputs. gather: (this rank's part, module's name) -> all parts, one behind the other."""

    rank: int
    size: int
    gather: Gather


@dataclass
class KeptInput:
    """One input: its shape, strides and dtype, and its place.

    part  what autograd is to save of it on the device, in its place; empty if it is on the host
    slot  on the host
    """

    owner: KeptInputs
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    part: Tensor
    slot: Slot | None

    def taken(self) -> Tensor:
        """Hand over the part, which is not held here any more."""
        part, self.part = self.part, self.part.new_empty(0)
        return part

    def restore(self, part: Tensor) -> Tensor:
        """Return the input again, a leaf, from the part that autograd has saved."""
        return self.owner.restore(self, part)


class KeptInputs:
    """Keeps inputs of one model's recomputed modules: in parts over tp, on the host, or both."""

    def __init__(self, partition: Partition | None, slots: HostSlots | None) -> None:
        self.partition, self.slots = partition, slots

    @torch.no_grad()
    def keep(self, t: Tensor, name: str) -> KeptInput | None:
        """Keep an input of the module of this name; None for one that must stay as it is. Raises OutOfBudget."""
        if not _fills_its_memory(t):
            return None
        flat = t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
        part = flat if self.partition is None else _part(flat, self.partition)
        slot = None if self.slots is None else self.slots.put(part)
        here = part if slot is None else part.new_empty(0)
        return KeptInput(self, name, t.shape, t.stride(), t.dtype, here, slot)

    @torch.no_grad()
    def restore(self, kept: KeptInput, part: Tensor) -> Tensor:
        """Return an input as it was; moves (N-1)/N of it over tp where that is partitioned."""
        if kept.slot is not None and self.slots is not None:
            part = self.slots.get(kept.slot, self._length(kept), kept.dtype)
        full = part.clone() if self.partition is None else self.partition.gather(part, kept.name)
        if kept.slot is not None and self.slots is not None:
            self.slots.let_go(kept.slot)
        return full.as_strided(kept.shape, kept.stride).requires_grad_()

    def _length(self, kept: KeptInput) -> int:
        """Return the elements of an input that this rank keeps."""
        size = 1 if self.partition is None else self.partition.size
        return -(-kept.shape.numel() // size)

    # --- where --------------------------------------------------------------------------------------

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Let the recomputed modules below these keep their inputs here."""
        for root in modules:
            for recorder in recorders_of(root):
                recorder.keep = self.keep
            for module in checkpointed(root):
                module._gradient_checkpointing_func = partial(self._called, module._gradient_checkpointing_func)

    def _called(self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch's checkpoint of a Hugging Face block, whose first argument with a gradient is kept here."""
        given = next((t for t in tensors_in(args) if t.requires_grad), None)
        if given is None or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kwargs)
        with self._saving(given):
            return checkpoint(function, *args, **kwargs)

    @contextmanager
    def _saving(self, given: Tensor) -> Iterator[None]:
        """Keep a tensor here when autograd saves it inside; all else is saved as it is."""

        def pack(t: Tensor) -> Tensor | KeptInput:
            same = same_memory(t, given) and t.shape == given.shape and t.stride() == given.stride()
            return (self.keep(t, "") or t) if same else t

        with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept.restore(kept.part)):
            yield


def recorders_of(root: nn.Module) -> list[Recorder]:
    """Return what records the recomputed modules below one, each once."""
    calls = (module.forward for module in root.modules() if isinstance(module.forward, Recomputed))
    return list(dict.fromkeys(call.recorder for call in calls))


def checkpointed(root: nn.Module) -> list[Any]:
    """Return the blocks below a module that Hugging Face calls through torch's checkpoint."""
    on = [module for module in root.modules() if _is_on(module)]
    return [module for module in on if sum(_is_on(inner) for inner in module.modules()) == 1]


def _is_on(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False)) and hasattr(module, "_gradient_checkpointing_func")


def inputs_per_pass(chunks: Mapping[int, nn.Module]) -> int:
    """Count the inputs that a micro-batch has on this rank: one for each segment of recomputed modules."""
    count = 0
    for root in chunks.values():
        every = [module.forward.every for module in root.modules() if isinstance(module.forward, Recomputed)]
        count += -(-len(every) // every[0]) if every else len(checkpointed(root))
    return count


def _fills_its_memory(t: Tensor) -> bool:
    """Return whether a tensor's elements lie one behind the other, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return t.numel() > 0


def _part(flat: Tensor, partition: Partition) -> Tensor:
    """Return a copy of this rank's part; the last ones are filled up to the length of the others."""
    length = -(-flat.numel() // partition.size)
    mine = flat[partition.rank * length : (partition.rank + 1) * length]
    if mine.numel() == length:
        return mine.clone()
    part = flat.new_zeros(length)
    part[: mine.numel()] = mine
    return part
