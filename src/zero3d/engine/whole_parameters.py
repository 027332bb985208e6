"""Whole parameters for use outside a forward and its backward: the caller, an export, a pipeline's weight phase.

open, shut  full_params() and unshard(): reads and writes; what was written is kept on every rank
show_masters  gives open parameters their masters' values and dtype, as in a program that trains by autocast
gathered    one unit, to be read
on_first    one unit, to be exported by the first of its ranks, in the buffer of `receiving`
copied      all units one by one, into the host memory of the first rank
masters     all masters one by one, on every rank: for a model that is given back
of_chunk    all units of a model chunk, for the phase of a split backward that takes gradients of weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor, nn

from zero3d.checkpoint.state import FullModel
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.shared_buffer import SharedBuffer
from zero3d.engine.frozen_originals import FrozenOriginals
from zero3d.errors import LayoutError
from zero3d.models.names import persistent_buffers
from zero3d.precision import joined, to_compute
from zero3d.zero.gathers import EXPORT, OPENED, goes_to_first
from zero3d.zero.unit import Unit, units_of
from zero3d.zero.unit_parts import parameter_views

if TYPE_CHECKING:
    from zero3d.engine.runtime import Runtime

CHUNK = "whole"  # the token of a unit's user


def is_open(unit: Unit) -> bool:
    """Return whether the unit's parameters may be written: inside full_params()."""
    return OPENED in unit.users


class WholeParameters:
    """Gathers units as long as a block lasts, and keeps what was written inside.

    note_writes  is told the units that were written into
    originals    has the frozen parameters' values from before the cast to weights
    """

    def __init__(
        self, parts: Runtime, note_writes: Callable[[Sequence[Unit]], None], originals: FrozenOriginals
    ) -> None:
        self._units, self._gathers = parts.units, parts.gathers
        self._world, self._dp = parts.axes.world, parts.axes.dp
        self._group = parts.model_group
        self._arena = parts.axes.arena
        self._note_writes, self._originals = note_writes, originals

    @property
    def any_open(self) -> bool:
        """Whether this is inside full_params()."""
        return any(is_open(unit) for unit in self._units)

    def open(self, modules: nn.Module | Sequence[nn.Module] | None) -> list[Unit]:
        """Make the parameters of `modules` (None: all) whole until `shut` of the units that this returns."""
        chosen = [modules] if isinstance(modules, nn.Module) else modules
        wanted = None if chosen is None else {p for module in chosen for p in module.parameters()}
        always = self._group.tied  # a write on another pipeline stage may reach them
        units = [u for u in self._units if wanted is None or u in always or any(p in wanted for p in u.weights.params)]
        units = [unit for unit in units if not is_open(unit)]  # others belong to a block around this one
        opened: list[Unit] = []
        try:
            for unit in units:
                unit.weights.lend()
                self._gathers.acquire(unit, OPENED)
                unit.users.add(OPENED)
                unit.weights.open()
                opened.append(unit)
        except BaseException:  # a parameter was written or replaced outside: nothing stays open
            for unit in opened:
                unit.weights.absorb()
            for unit in units:
                self._gathers.release(unit, OPENED)
                unit.users.discard(OPENED)
            raise
        return units

    @torch.no_grad()
    def show_masters(self, units: Sequence[Unit], dtypes: Mapping[str, torch.dtype]) -> None:
        """Give open parameters their masters' values, in these dtypes, by the names that they have here.

        A frozen one has its own values. Moves (N-1)/N Psi elements in the masters' dtype for units that are trained.
        Where it fails no parameter is shown so.
        """
        try:
            for unit in units:
                if not any(slot.name in dtypes for slot in unit.layout.slots):
                    continue
                with self._masters_of(unit) as flat:
                    views = parameter_views(flat, unit.layout)
                    for slot, p, view in zip(unit.layout.slots, unit.weights.params, views, strict=True):
                        if slot.name in dtypes:
                            p.data = self._as_came(unit, slot.name, view, dtypes[slot.name])
        except BaseException:
            for unit in units:
                for p, view in zip(unit.weights.params, unit.weights.views, strict=True):
                    p.data = view
            raise

    def shut(self, units: Sequence[Unit]) -> None:
        """Keep what was written into units that `open` returned, and release them.

        Raises LayoutError on all ranks, after that, where a parameter was given another shape: it has its old one.
        """
        resized = [unit.weights.take_resized() for unit in units]
        try:
            anywhere = self._keep_writes(units, [bool(found) for found in resized])
        finally:
            for unit in units:
                self._gathers.release(unit, OPENED)
                unit.users.discard(OPENED)
        if anywhere:
            names = [f"parameter {name!r}" for found in resized for name in found]
            raise LayoutError(
                f"{names[0] if names else 'a parameter on another rank'} was given another shape, which an engine's "
                "parameters cannot have: its old values are back. Resize it after engine.close(), or before the Engine "
                "is built."
            )

    def take_resized(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        """Return what `Weights.take_resized` finds in them. Raises LayoutError on all ranks where ranks differ."""
        found = {name: values for unit in units for name, values in unit.weights.take_resized().items()}
        shapes = crc32(repr({name: tuple(values.shape) for name, values in found.items()}).encode())
        everywhere = self._dp.exchange(torch.tensor([float(shapes)], dtype=torch.float64))
        if bool((everywhere != shapes).any()):
            raise LayoutError("parameters were given other shapes on some ranks than on others: resize them on all.")
        return found

    @torch.no_grad()
    def _keep_writes(self, units: Sequence[Unit], resized: Sequence[bool]) -> bool:
        """Carry what was written here to all ranks and to tied parameters' copies; return if any rank has `resized`."""
        for unit in units:
            unit.weights.take_other_dtypes()
        for p, view, values in [each for unit in units for each in unit.weights.replaced()]:  # two may have swapped
            view.copy_(values)
            p.data = view
        flags = [float(unit.weights.absorb()) + 2 * odd for unit, odd in zip(units, resized, strict=True)]
        found = self._dp.exchange(torch.tensor(flags, dtype=torch.float64))
        written = [unit for unit, flag in zip(units, (found % 2).amax(0).tolist(), strict=True) if flag]
        for unit in written:
            if unit.weights.records is not None:
                unit.weights.records.records.discard()
            unit.weights.share().wait()
        self._group.share_ties(written)
        self._note_writes(written)
        return bool((found >= 2).any())

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """Keep one unit whole inside."""
        self._gathers.acquire(unit, EXPORT)
        try:
            yield
        finally:
            self._gathers.release(unit, EXPORT)

    @torch.no_grad()
    def copied(self, module: nn.Module, trained_only: bool) -> dict[str, Tensor]:
        """Return copies of parameters and persistent buffers by all their names; on other ranks than the first {}."""
        copies: dict[Tensor, Tensor] = {}
        for unit in self._units:
            if trained_only and unit.grads is None:
                continue
            with self.gathered(unit):
                if self._dp.rank == 0:
                    copies |= {p: p.detach().to("cpu", copy=True) for p in unit.weights.params}
        if self._dp.rank:
            return {}
        if not trained_only:
            copies |= {buffer: buffer.to("cpu", copy=True) for buffer in persistent_buffers(module).values()}
        named = [*module.named_parameters(remove_duplicate=False), *persistent_buffers(module).items()]
        return {name: copies[tensor] for name, tensor in named if tensor in copies}

    @torch.no_grad()
    def masters(self, full_model: FullModel, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return copies of all parameters by their names in the full model, in these dtypes, on every rank.

        They are the masters' values, of frozen ones their own; (N-1)/N Psi elements, one unit after the other.
        """
        values: dict[str, Tensor] = {}
        for unit in self._units:
            with self._masters_of(unit) as flat:
                for slot, view in zip(unit.layout.slots, parameter_views(flat, unit.layout), strict=True):
                    name = full_model.owner(slot.name)
                    tile = full_model.tiles.get(slot.name)
                    if tile is None:
                        values[name] = self._as_came(unit, slot.name, view, dtypes[name])
                        continue
                    if name not in values:
                        values[name] = flat.new_empty(tile.shape, dtype=dtypes[name])
                    rows = values[name].view(-1)[tile.start : tile.start + view.numel()]
                    rows.copy_(self._as_came(unit, slot.name, view, dtypes[name]).view(-1))
        return values

    def _as_came(self, unit: Unit, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy in a dtype of a parameter's masters, or of its weights with what a frozen one was before."""
        return to_compute(values if unit.weights.trainable else self._originals.original(name, values), dtype)

    @contextmanager
    def _masters_of(self, unit: Unit) -> Iterator[Tensor]:
        """Have a unit's whole masters inside, [total]; of a frozen one its weights."""
        weights = unit.weights
        if not weights.trainable:
            with self.gathered(unit):
                yield weights.full
            return
        own = joined(weights.masters.read(0, weights.elements)).to(weights.full.device)
        if weights.updates_all:
            yield own
            return
        whole = self._arena.borrow("gathered", weights.layout.total, own.dtype)
        try:
            unit.comm.all_gather(whole, own, unit.name).wait()
            yield whole
        finally:
            self._arena.give_back("gathered", whole)

    @contextmanager
    def receiving(self, units: Sequence[Unit]) -> Iterator[None]:
        """Have a receive buffer inside for the largest of the units that `on_first` is to gather to this rank alone.

        All ranks enter this at once, with no units where they gather none: if one has no memory, all raise that.
        """
        sizes: dict[Comm, int] = {}
        for unit in filter(goes_to_first, units):
            sizes[unit.comm] = max(sizes.get(unit.comm, 0), unit.layout.total * unit.dtype.itemsize)
        nbytes = max((sizes[comm] for comm in sizes if comm.rank == 0), default=0)
        with ExitStack() as stack:
            with ExitStack() as attaching:
                allocate = partial(SharedBuffer, nbytes, self._arena.device)
                buffer = agree(self._world, lambda: attaching.enter_context(closing(allocate())))
                self._arena.hold("gathered", nbytes, Fraction(1))
                stack.callback(self._arena.give_back, "gathered", buffer.memory)
                for comm, most in sizes.items():
                    stack.enter_context(comm.receiving(None if comm.rank else buffer, most))
            yield

    @contextmanager
    def on_first(self, unit: Unit, token: object = EXPORT) -> Iterator[None]:
        """Keep one unit whole inside on the first of the ranks that it is cut over; on gloo on no other."""
        self._gathers.acquire_on_first(unit, token)
        try:
            yield
        finally:
            self._gathers.release(unit, token)

    @contextmanager
    def of_chunk(self, chunk: nn.Module) -> Iterator[None]:
        """Keep the units of a model chunk whole inside; at stage 3 that costs (N-1)/N Psi where they are not."""
        for unit in units_of(chunk, self._units):
            self._gathers.acquire(unit, CHUNK)
        try:
            yield
        finally:  # and what hooks took for calls (tuples): no gradient reaches an end of every module here
            self._gathers.drop(lambda token: token == CHUNK or isinstance(token, tuple))
