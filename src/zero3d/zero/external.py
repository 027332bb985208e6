"""External parameters: those that are read outside their module's forward, such as a head's weight by a fused loss.

Their unit is gathered with the root's from the first such read on: for all of the root's forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from zero3d.zero.policy import State
from zero3d.zero.unit import Unit


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name, which tell when one is read while its unit has no values.

    read  is told the unit
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], unit: Unit, read: Callable[[Unit], None]) -> None:
        super().__init__(parameters)
        self._unit, self._read = unit, read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if self._unit.weights.state is not State.FULL:
            self._read(self._unit)
        return super().__getitem__(name)


def watch(module: nn.Module, unit: Unit, read: Callable[[Unit], None]) -> None:
    """Have a module tell when its parameters are read while their unit has no values."""
    module._parameters = WatchedParameters(module._parameters, unit, read)
