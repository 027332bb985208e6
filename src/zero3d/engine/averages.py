"""Exponential moving average of weights, kept in the masters' dtype beside them, in shards like them.

    loaded        average = master                                       at the start, or where a checkpoint has none
    after_update  average = average + (1 - decay) * (master - average)   after every applied step
    shown         master <-> average, and weights cast from the master   to evaluate and to export

An average is one more state of the optimizer's pieces: checkpoints, resharding, fingerprints and the account of memory
have it with the moments. Its three operations are rounded one by one, so that its bits do not depend on how a unit is
cut. Nothing of training reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from zero3d.account.transients import average_scratch
from zero3d.checkpoint.manifest import AVERAGE
from zero3d.checkpoint.resume_contract import EMA
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import update_bucket, update_scratch
from zero3d.precision import Halves, join_master, joined
from zero3d.zero.optimizer import APPLIED, Outcome, ShardedOptimizer
from zero3d.zero.optimizer_states import state_names
from zero3d.zero.unit import Unit


class Averages(Feature):
    """Owns the averages of an engine's masters, which are in flat buffers of its optimizer.

    decay  share of the old average in the new one
    """

    name = "ema"
    trains_unfrozen = False

    def __init__(self, decay: float, optimizer: ShardedOptimizer, arena: Arena) -> None:
        _check(decay, optimizer)
        self.decay, self.are_shown = decay, False
        self._optimizer, self._arena = optimizer, arena
        self.loaded()

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        decay = parts.options.ema
        return None if decay is None else cls(decay, parts.optimizer, parts.axes.arena)

    def refuse(self, call: str) -> None:
        """Raise ConfigError where weights are averages."""
        if self.are_shown:
            raise ConfigError(f"{call} inside averaged(), where weights are averages: leave the block first.")

    def about(self) -> Mapping[str, Any]:
        return {EMA: f"{self.decay:g}"}

    @torch.no_grad()
    def loaded(self) -> None:
        """Begin with what masters are, where there is no average yet."""
        for owned in self._optimizer.pieces:
            state = self._optimizer.torch.state[owned.master]
            if AVERAGE not in state:
                self._optimizer.put_state(owned, AVERAGE)
                state[AVERAGE].copy_(joined(owned.read()))

    @torch.no_grad()
    def after_update(self, outcome: Outcome) -> None:
        """Take the masters of an applied step into the averages. Moves nothing between ranks."""
        for average, master, scratch in self._ranges() if outcome.reason == APPLIED else ():
            torch.sub(master, average, out=scratch).mul_(1.0 - self.decay)
            average.add_(scratch)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have weights be averages inside; afterwards masters and weights have their own bits again.

        All ranks enter and leave together; nothing is on its way to a weight. Stages 1 and 2 gather all weights twice.
        """
        self._swap()
        self.are_shown = True
        try:
            yield
        finally:
            self._swap()
            self.are_shown = False

    @torch.no_grad()
    def _swap(self) -> None:
        for unit in self._optimizer.units:
            start = 0
            for average, master, scratch in self._ranges(unit):
                scratch.copy_(master)
                unit.weights.masters.write(start, average)
                average.copy_(scratch)
                start += scratch.numel()
            unit.weights.refresh().wait()

    def _ranges(self, *units: Unit) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield averages and masters, bucket by bucket, and scratch of their size, in which halves are joined."""
        device = self._arena.device.type
        size = update_bucket(device)
        for unit in units or self._optimizer.units:
            flat = self._optimizer.flat_state(unit, AVERAGE)
            if flat is None:  # of padding alone
                continue
            scratch = self._arena.borrow("wire", update_scratch(flat.numel(), device), flat.dtype)
            for start in range(0, flat.numel(), size):
                average = flat[start : start + size]
                here, stored = scratch[: average.numel()], unit.weights.masters.read(start, start + average.numel())
                if isinstance(stored, Halves):
                    stored = join_master(stored.weights, stored.remainder, here)
                yield average, stored, here
            self._arena.give_back("wire", scratch)

    @property
    def scratch(self) -> int:
        shards = [unit.weights.elements for unit in self._optimizer.units]
        if not shards:
            return 0
        wide = self._optimizer.units[0].weights.masters.dtype.itemsize
        return average_scratch(max(shards), self._arena.device.type, wide)


def _check(decay: float, optimizer: ShardedOptimizer) -> None:
    """Refuse what no average can be kept of. Raises ConfigError."""
    if not 0 < decay < 1:
        raise ConfigError(f"ema={decay}: the decay of an average of weights lies between 0 and 1: pass ema=0.999.")
    if any(state_names(optimizer.torch, group) is None for group in optimizer.torch.param_groups):
        raise ConfigError(
            f"ema={decay} stores averages among the states of the optimizer, which works for Adam and AdamW without "
            f"amsgrad, Muon and AdamW8bit, and this is {type(optimizer.torch).__name__}: pass ema=None, or "
            "one of these."
        )
