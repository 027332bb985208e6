"""Inputs of recomputed blocks in the host's memory, while no backward needs them.

    forward    input --copy--> buffer --ring--> slot        compute goes on; the input's own memory is free
    backward   input <--copy-- buffer <--ring-- slot        what is needed next is on its way by then

    slots     of the largest input's size so far: as many at a time as a micro-batch has inputs, until inputs of all
              micro-batches in flight have one. Their number is known after the first pass; later growth is reported
    buffers   three of a slot's size on the device, however deep the model is
    pass      the time between two moments without a waiting input: a micro-batch, in a pipeline a step
    order     inputs are brought in the order of the last pass; before there is one, in reverse of the forward

A slot is free again when the graph that would have needed it is gone. A dry run takes the buffers and counts the rest.
ZeRO section 6.1 calls this P_a+cpu.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.account.transients import DEPTH
from zero3d.errors import OutOfBudget
from zero3d.memory.arena import Arena
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.offload.ring import HostStore, Ring
from zero3d.spec.sizes import decimal

PART = "inputs of recomputed blocks"
AHEAD = DEPTH - 1  # buffers for inputs on their way up; one is left for an input on its way down


class Slot:
    """The place of one input, which is number `number` of its pass. Free when nobody has this any more."""

    def __init__(self, slots: SlotSet, index: int, number: int) -> None:
        self.slots = slots
        self.index = index
        self.number = number
        self.read = False

    def __del__(self) -> None:
        self.slots.left.append(self.index)


class Footing(NamedTuple):
    """Bytes that slots take on the host and their buffers on the device."""

    host: int
    device: int


class SlotSet:
    """Slots of one size, their memory, and the ring through which they are reached.

    free    slots without an input
    left    slots whose input is gone, by the garbage collector's leave
    """

    def __init__(self, arena: Arena, size: int) -> None:
        self._arena, self.size = arena, size
        self.buffers = [arena.borrow("wire", size, torch.uint8) for _ in range(DEPTH)]
        self.dry = isinstance(self.buffers[0], FakeTensor)
        self.count = 0
        self.free: list[int] = []
        self.left: list[int] = []
        self._coming: set[int] = set()
        self._unread: set[int] = set()
        self._whole: list[Tensor] = []
        self._memory: list[Tensor] = []  # of each slot as much as its input takes
        self._records: list[Record] = []
        self._ring: Ring | None = None

    @property
    def host(self) -> int:
        """Return the bytes of all slots on the host."""
        return self.count * padded(self.size)

    @property
    def in_use(self) -> int:
        """Return how many slots have an input."""
        return self.count - len(self.free) - len(self.left)

    def add(self, count: int) -> None:
        """Make so many slots more. Raises OutOfBudget where the system has no memory."""
        new = [Record(f"input {self.count + i}", ((torch.uint8, self.size),)) for i in range(count)]
        if not self.dry:
            self._whole += HostSlab({PART: new}, self._arena.device).memory[PART]
            self._memory += self._whole[self.count :]
            self._records += new
            if self._ring is None:
                self._ring = Ring(HostStore(self._memory), self._records, self.buffers)
        self.free += range(self.count + count - 1, self.count - 1, -1)
        self.count += count

    def put(self, index: int, flat: Tensor) -> None:
        """Begin to take an input's bytes down to a slot."""
        self._unread.add(index)
        if self._ring is not None:  # nothing of this slot is under way: `tidy`
            self._memory[index] = self._whole[index][: flat.numel()]
            self._records[index] = Record(f"input {index}", ((torch.uint8, flat.numel()),))
            self._ring.put(index)[0].copy_(flat)
            self._ring.retire(index)

    def ahead(self, index: int) -> None:
        """Begin to bring a slot, if there are buffers for that."""
        if self._ring is not None and self._ring.idle > 1 and index not in self._coming:
            self._coming.add(index)
            self._ring.ahead(index)

    def fetch(self, index: int) -> Tensor:
        """Return a slot's input on the device, for what compute does until it is let go of; in a dry run any bytes."""
        self._unread.discard(index)
        self._coming.discard(index)
        return self.buffers[0] if self._ring is None else self._ring.fetch(index)[0]

    def let_go(self, index: int) -> None:
        """Let a fetched slot's buffer be used again."""
        if self._ring is not None:
            self._ring.retire(index, changed=False)

    def tidy(self) -> None:
        """Free slots with inputs that are gone; wait for copies to or from them."""
        while self.left:
            index = self.left.pop()
            if index in self._coming:
                self.fetch(index)
                self.let_go(index)
            elif index in self._unread and self._ring is not None:
                self._ring.drain()
            self._unread.discard(index)
            self.free.append(index)

    def close(self) -> None:
        """Wait for what is under way, and give the buffers back."""
        if self._ring is not None:
            self._ring.close()
        for buffer in self.buffers:
            self._arena.give_back("wire", buffer)


class HostSlots:
    """Takes inputs down to the host and brings them back.

    a_pass   inputs that one micro-batch has on this rank
    budget   bytes that this rank may take of its host's memory; `others`: the part taken for other uses
    """

    def __init__(self, arena: Arena, a_pass: int, budget: HostBudget) -> None:
        self._arena = arena
        self._a_pass = a_pass
        self._budget = budget
        self.others = 0
        self._slots: SlotSet | None = None
        self._outgrown: list[SlotSet] = []
        self._live: WeakValueDictionary[int, Slot] = WeakValueDictionary()
        self._count = self._passes = 0
        self._last: list[int] = []  # numbers in the order of the last pass
        self._fetched: list[int] = []
        self.peak = Footing(0, 0)

    @property
    def footing(self) -> Footing:
        """Return the bytes that all this takes."""
        sets = [*self._outgrown, *([] if self._slots is None else [self._slots])]
        return Footing(sum(slots.host for slots in sets), sum(DEPTH * slots.size for slots in sets))

    def put(self, flat: Tensor) -> Slot:
        """Take an input, one-dimensional, to the host. Raises OutOfBudget."""
        raw = flat.view(torch.uint8)
        if all(slot.read for slot in self._live.values()):
            self._begin_pass()
        slots = self._room(raw.numel())
        slot = Slot(slots, slots.free.pop(), self._count)
        slots.put(slot.index, raw)
        self._live[slot.number] = slot
        self._count += 1
        self._bring_next()
        return slot

    def get(self, slot: Slot, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an input of so many elements on the device, for what compute does until `let_go`."""
        slot.slots.tidy()
        found = slot.slots.fetch(slot.index)[: elements * dtype.itemsize].view(dtype)
        self._fetched.append(slot.number)
        slot.read = True
        return found

    def let_go(self, slot: Slot) -> None:
        """Let go of the input returned by `get`, and begin to bring the next one."""
        slot.slots.let_go(slot.index)
        self._bring_next()

    def _begin_pass(self) -> None:
        if self._fetched:
            self._last, self._fetched = self._fetched, []
            self._passes += 1
        self._count = 0

    def _bring_next(self) -> None:
        """Begin to bring what comes next: as in the last pass if this one is like it so far, else in reverse."""
        done = len(self._fetched)
        if done == 0 or self._last[done - 1 : done] == self._fetched[-1:]:
            coming = self._last[done : done + AHEAD]
        else:
            coming = list(range(self._fetched[-1] - 1, self._fetched[-1] - 1 - AHEAD, -1))
        for number in coming:
            slot = self._live.get(number)
            if slot is not None and not slot.read:
                slot.slots.ahead(slot.index)

    # --- memory ---------------------------------------------------------------------------------

    def _room(self, nbytes: int) -> SlotSet:
        """Return slots of at least so many bytes, one of them free; new ones where there is none."""
        for slots in self._outgrown:
            slots.tidy()
            if not slots.in_use:
                slots.close()
        self._outgrown = [slots for slots in self._outgrown if slots.in_use]
        known, before = self._slots, self.footing.host
        if known is not None:
            known.tidy()
            if known.size >= nbytes and known.free:
                return known
        if known is not None and known.size >= nbytes:
            count, size, why = self._a_pass, known.size, f"more than {known.count} are needed at once"
        else:
            count, size, why = self._a_pass, nbytes, f"one of {decimal(nbytes)} came, longer than all before"
            if known is not None:
                count = known.count
                self._outgrow(known)
        self._check(count, size)
        self._slots = self._slots or SlotSet(self._arena, size)
        self._slots.add(count)
        self.peak = Footing(*map(max, self.peak, self.footing))
        if self._passes:
            warnings.warn(
                f"offload.activations=host: memory of the host for {PART} grows from {decimal(before)} to "
                f"{decimal(self.footing.host)} ({self._slots.count} slots of {decimal(size)}): {why}.",
                stacklevel=2,
            )
        return self._slots

    def _outgrow(self, slots: SlotSet) -> None:
        """Give back memory in whose place larger slots come, now or as soon as nothing is in it."""
        self._slots = None
        if slots.in_use:
            self._outgrown.append(slots)
        else:
            slots.close()

    def _check(self, count: int, size: int) -> None:
        """Refuse more memory than there is for this rank. Raises OutOfBudget."""
        here, new = self.footing.host, count * padded(size)
        if self.others + here + new > self._budget.nbytes:
            held = f" beside {decimal(self.others)} of its states" if self.others else ""
            raise OutOfBudget(
                f"offload.activations=host: {PART} take {decimal(here + new)} of the host's memory ({decimal(here)} so "
                f"far and {count} more of {decimal(size)}){held}, and a rank may take {decimal(self._budget.nbytes)}: "
                f"{self._budget}. Type a smaller train.micro_batch or data.length, activations=every:4 (fewer inputs), "
                "mesh.partition_activations=true (with mesh.tp above 1), or offload.activations=none."
            )
