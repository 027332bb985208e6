"""Reads of parameters that the hooks of modules do not cover.

External parameters are read outside their module's forward, such as a head's weight by a fused loss: their unit is
gathered with the root's from the first such read on, for all of the root's forward and its backward. Others are read
where the caller's own hooks on saved tensors pack them (saved.py, Note 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from zero3d.zero.saved import callers_hooks_pack
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name, which tell when one is read while its unit has no values, or hooks would pack it.

    units  of the parameters that are watched, by name
    read   is told the unit
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], units: Mapping[str, Unit], read: Callable[[Unit], None]
    ) -> None:
        super().__init__(parameters)
        self._units, self._read = units, read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self._units.get(name)
        if unit is not None and (unit.weights.state is not State.FULL or callers_hooks_pack()):
            self._read(unit)
        return super().__getitem__(name)


def watch(module: nn.Module, units: Mapping[str, Unit], read: Callable[[Unit], None]) -> None:
    """Have a module tell when its parameters are read while their unit has no values, or hooks would pack them."""
    module._parameters = WatchedParameters(module._parameters, units, read)
