"""Parameters that `Engine.unshard` has made whole, until `reshard`: which are open, and the calls this forbids.

    unshard        whole parameters, with `masters` in the dtype in which they came, and the model's forward in autocast
    reshard        writes are kept, and parameters released
    resharded      not whole inside, and again after it: saves, loads, exports and averages are of masters

Whole parameters themselves, as `full_params` opens them, too, are whole_parameters.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero3d.checkpoint.background import Saves
from zero3d.distributed.agreement import agree
from zero3d.engine.auto_offload import room_of
from zero3d.engine.autocast import in_autocast, out_of_autocast
from zero3d.engine.parts import Parts
from zero3d.errors import ConfigError, LayoutError, OutOfBudget
from zero3d.precision import torch_dtype
from zero3d.spec.sizes import decimal
from zero3d.zero.unit import Unit


class Unsharded:
    """Owns which units are open until `reshard`, and whether their parameters show their masters.

    resized  data of another shape, by name, which the caller has given parameters and a `close()` that failed has taken
    """

    def __init__(self, parts: Parts, saves: Saves) -> None:
        self._parts, self._saves = parts, saves
        self._units: list[Unit] = []
        self._shows_masters = False
        self.resized: dict[str, Tensor] = {}

    def open(self, modules: nn.Module | Sequence[nn.Module] | None) -> list[Unit]:
        """Make the parameters of modules (None: all) whole, when nothing is on its way from or to them."""
        self._parts.registry.check()
        self._saves.await_copy()
        self._parts.optimizer.flush()
        return self._parts.whole_parameters.open(modules)

    def unshard(self, masters: bool) -> None:
        """Open all parameters, as `Engine.unshard` says."""
        shown = self._shows_masters
        if masters and not shown:
            if not self._parts.has_whole_model:
                raise ConfigError(
                    "unshard(masters=True) is for models over dp alone, not over tp, pp or ep: unshard()."
                )
            self.reshard()  # what was written is absorbed by the masters first
            self.refuse_open("unshard(masters=True)")
        needed = sum(unit.weights.bytes_to_open for unit in self._parts.units if not unit.users)
        needed += self._room_of_shown() if masters and not shown else 0
        self._check_room(needed, "unshard(masters=True)" if masters else "unshard()")
        self._units += self.open(None)
        if masters and not shown:
            self._show_masters()
            self._shows_masters = True

    def reshard(self) -> None:
        """End what `unshard` began, if it did. Raises LayoutError after that: for another shape, other parameters."""
        if self._units:
            self._parts.freezing.adopt_unfrozen()
            units, self._units = self._units, []  # they are released also where it raises
            self._hide_masters()
            self._parts.whole_parameters.shut(units)
            self._parts.registry.check()

    @property
    def now(self) -> tuple[bool, bool]:
        """Return whether anything is open, and whether it shows masters: what `again` goes back to."""
        return bool(self._units), self._shows_masters

    def again(self, opened: bool, masters: bool) -> None:
        """Open again what was open."""
        if opened:
            self.unshard(masters)

    @contextmanager
    def resharded(self) -> Iterator[None]:
        """Take what was written since `unshard` into the masters for a block, and unshard again after it."""
        before = self.now
        self.reshard()
        yield
        self.again(*before)

    def refuse_open(self, call: str) -> None:
        """Raise ConfigError inside full_params()."""
        if self._parts.whole_parameters.any_open:
            raise ConfigError(
                f"{call} inside full_params() would be undone on leaving it: leave the block first (after unshard(): "
                "call reshard())."
            )

    def shut_for_close(self) -> None:
        """Reshard for good, and keep what has another shape. Raises OutOfBudget on all ranks without room for all."""
        if self._parts.has_whole_model:
            shapes, dtypes = self._parts.partition.full_model.shapes, self._parts.changes.dtypes
            self._check_room(sum(math.prod(shapes[name]) * dtypes[name].itemsize for name in dtypes), "close()")
        if self._units:
            self.resized |= self._take_resized()
            with torch.no_grad():  # what was unfrozen meanwhile is not to be trained here
                self._parts.whole_parameters.shut(self._units)
            self._units = []
            self._hide_masters()
        self.refuse_open("close()")

    def _take_resized(self) -> dict[str, Tensor]:
        """Return data of another shape that the caller has given whole parameters. Raises LayoutError."""
        found = self._parts.whole_parameters.take_resized(self._units)
        if tiles := [name for name in found if name in self._parts.partition.full_model.tiles]:
            raise LayoutError(
                f"{tiles[0]!r} is a part of a layer's weight, and keeps its shape: resize it after engine.close()."
            )
        return found

    def _check_room(self, needed: int, what: str) -> None:
        """Raise OutOfBudget on all ranks where some rank has no room for so many bytes of whole weights."""
        world, mesh, offload = self._parts.axes.world, self._parts.mesh, self._parts.options.offload

        def check() -> None:
            if mesh.device.type != "cpu":
                torch.get_device_module(mesh.device).empty_cache()  # what the allocator keeps of training is taken
            room = room_of(mesh, offload).device
            if needed > room:
                raise OutOfBudget(
                    f"{what} takes {decimal(needed)} on every rank for the whole model, and rank {world.rank} has room "
                    f"for {decimal(room)}: read weights inside `with engine.full_params(modules):`, or write them with "
                    "engine.export(directory)."
                )

        agree(world, check)

    # --- masters in the weights' place --------------------------------------------------------------

    def _shown_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes in which whole parameters can show their masters, by the names that they have here.

        A parameter's original dtype serves if a cast from it gives the weights: if it is at least as wide as the
        masters'. Tiles of a weight stay as they are.
        """
        parts, came = self._parts, self._parts.changes.dtypes
        full_model, master = parts.partition.full_model, torch_dtype(parts.policy.master)
        names = {slot.name: unit for unit in parts.units for slot in unit.layout.slots}
        found = {name: came.get(full_model.owner(name)) for name in names if name not in full_model.tiles}
        return {
            name: dtype
            for name, dtype in found.items()
            if dtype is not None and dtype.itemsize >= master.itemsize > names[name].dtype.itemsize
        }

    def _room_of_shown(self) -> int:
        """Return the bytes of parameters that show their masters, and of one unit's masters on the way."""
        dtypes, master = self._shown_dtypes(), torch_dtype(self._parts.policy.master)
        layouts = [unit.layout for unit in self._parts.units]
        shown = sum(s.numel * dtypes[s.name].itemsize for layout in layouts for s in layout.slots if s.name in dtypes)
        return shown + max(layout.total for layout in layouts) * master.itemsize if shown else 0

    def _show_masters(self) -> None:
        """Have open parameters show their masters; the model's forward then runs in autocast, if it did not before."""
        dtypes, parts = self._shown_dtypes(), self._parts
        if not dtypes:
            return
        parts.whole_parameters.show_masters(self._units, dtypes)
        for root, hooks in zip(parts.partition.chunks.values(), parts.hooks, strict=True):
            if not parts.options.autocast:
                in_autocast(root, parts.mesh.device.type, parts.precision.dtype)
            hooks.shows_masters = True

    def _hide_masters(self) -> None:
        """Let forwards compute in the dtype of weights again."""
        self._shows_masters = False
        for root, hooks in zip(self._parts.partition.chunks.values(), self._parts.hooks, strict=True):
            if not self._parts.options.autocast:
                out_of_autocast(root)
            hooks.shows_masters = False
