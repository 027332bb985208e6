"""How often a vision tower runs in a forward: as often on every rank, since at stage 3 each run gathers its units.

    entry of the micro-batch    `zero3d train` knows it from the order of its data: nothing is sent (`images.CALLS`)
    asked before the forward    anywhere else: 8 bytes from each rank, the most of which counts
    units that are gathered     such as inside full_params(): a run gathers nothing, and ranks may run it apart
    units that will stay so     without grad the first run gathers them, on a blank image where there is none: ranks
                                may evaluate and generate apart from then on, so nobody is asked

The ranks are those of dp, in the order of their reductions. What they send here is in no plan, and not in the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import device_values
from zero3d.models.images import at_least_once
from zero3d.zero.unit import Unit

if TYPE_CHECKING:
    from zero3d.zero.gathers import Gathers
    from zero3d.zero.hooks import Hooks

GENERATION = "generation"  # token of units that are held for one


class TowerCalls:
    """Agrees with the other ranks on how often the tower runs.

    hooks  of the model chunk that has the tower
    units  that have parameters of the tower
    stray  those of them that no module of the tower gathers, but the model's forward, such as LLaVA-NeXT's line ends
    """

    def __init__(
        self, dp: Comm, hooks: Hooks, units: Collection[Unit], gathers: Gathers, stray: Collection[Unit]
    ) -> None:
        self._dp = dp
        self._hooks, self._units = hooks, units
        self._gathers, self._stray = gathers, stray

    def agree(self, own: int) -> int | None:
        """Return how often it runs in this forward, which all ranks make, for `own` runs of this rank's images.

        None where ranks may run it apart: each as often as its own images say.
        """
        if all(unit.users for unit in self._units):
            return None
        if self._hooks.stay_gathered:
            return at_least_once(own)
        of_all = self._dp.exchange(device_values([float(own)], self._dp.device), recorded=False)
        return int(self._dp.read(of_all.amax().view(1), [at_least_once(own)])[0])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep stray units gathered inside, on all ranks: `generate` may run the tower before any forward."""
        for unit in self._stray:
            self._gathers.acquire(unit, GENERATION)
        try:
            yield
        finally:
            for unit in self._stray:
                self._gathers.release(unit, GENERATION)
