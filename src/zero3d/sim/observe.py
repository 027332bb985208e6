"""One step of an engine under the microscope; the engine may be a real one or a dry run's.

The step that is measured is a later one: in the first, orders are recorded and norms are placed. At stage 3, where
gathers follow the recorded order, that first step is a whole one. Below, an empty one does, as long as gradients are
complete in the order that the engine expects; else the step is measured again in the order that was seen.
Python's own garbage collector waits meanwhile, so that what dies when does not depend on chance.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zero3d.engine.engine import Engine
from zero3d.memory.arena import STATES
from zero3d.nested import tensors_in
from zero3d.sim.flops import Flops
from zero3d.sim.memory import BUFFERS, INPUTS, Log, Memory
from zero3d.sim.patches import around
from zero3d.sim.result import Did, Sent, States, Work
from zero3d.sim.where import Where

Batches = Sequence[Mapping[str, Any]]


@dataclass
class Observed:
    """An engine after a step, and what that was."""

    engine: Engine
    log: Log
    flops: Mapping[tuple[str, str, int], int]
    first: tuple[Sent, ...]  # traffic of the step before

    @property
    def states(self) -> tuple[States, ...]:
        """Model states and padding."""
        held = {entry.category: entry for entry in self.engine.memory}
        return tuple(States(name, held[name].measured, held[name].planned or 0) for name in STATES)

    @property
    def sent(self) -> tuple[Sent, ...]:
        """The ledger."""
        return tuple(Sent(*entry) for entry in self.engine.traffic)

    @property
    def work(self) -> tuple[Work, ...]:
        """FLOPs."""
        return tuple(Work(*key, count) for key, count in sorted(self.flops.items()))

    @property
    def did(self) -> tuple[Did, ...]:
        """This rank's actions in the pipeline."""
        pipeline = self.engine.pipeline
        return () if pipeline is None else tuple(Did(*action) for action in pipeline.recorded)

    @property
    def elements(self) -> int:
        """Parameters of this rank's units."""
        return sum(unit.layout.numel for unit in self.engine.units)

    def alike(self, dp: int) -> tuple[int, ...]:
        """The dp ranks that update parts of the same units as rank `dp`: of others, shards are all padding."""
        units = [unit for unit in self.engine.units if unit.grads is not None and not unit.weights.updates_all]
        mine = [bool(unit.layout.pieces(dp)) for unit in units]
        ranks = range(self.engine.dp.size)
        return tuple(rank for rank in ranks if [bool(unit.layout.pieces(rank)) for unit in units] == mine)


def observe(build: Callable[[], Engine], give: Callable[[], Batches], run: tuple[int, int] | None = None) -> Observed:
    """Build an engine and watch a step over the micro-batches that `give` returns.

    run   of these, how many the first step and the one that is watched take (None: all)
    """
    where = Where()
    flops = Flops(where)
    memory = Memory(where, flops)
    with where.watching(), memory.watching(), _garbage_kept():
        engine = build()
        where.follow(engine)
        for buffer in engine.module.buffers():
            memory.lent(BUFFERS, buffer)
        _name_states(engine, memory)
        batches = give()
        warm, taken = run or (len(batches), len(batches))
        for tensor in (t for batch in batches for t in tensors_in(dict(batch))):
            memory.lent(INPUTS, tensor)
        with around(engine, "step", where.step):
            if warm:
                engine.train_batch(batches[:warm])
            else:
                _empty_step(engine)
            first = tuple(Sent(*entry) for entry in engine.traffic)

            def measure() -> list[int]:
                gc.collect()
                where.restart()
                memory.restart()
                flops.reset()
                engine.traffic.reset()
                return _step(engine, batches[:taken])

            order = measure()
            if not warm and order != sorted(order):
                engine.reductions.adopt(order)
                measure()
        return Observed(engine, memory.log, dict(flops.counted), first)


def _empty_step(engine: Engine) -> None:
    """A step over no micro-batch, all gradients zero. The order in which they will be reduced is the engine's own."""
    engine.reductions.due = True
    engine.reductions.flush()
    engine.accumulation.finish(1, [0.0])
    engine.last_step = engine.step()
    engine.reductions.adopted = True


def _step(engine: Engine, batches: Batches) -> list[int]:
    """A step; the order in which gradients were complete, as positions in the one in which they were reduced."""
    order: list[int] = []

    @contextmanager
    def seen() -> Iterator[None]:
        order[:] = engine.reductions.observed()
        yield

    with around(engine.reductions, "catch_up", seen):
        engine.train_batch(batches)
    return order


def _name_states(engine: Engine, memory: Memory) -> None:
    """What the arena lent for a unit was made for it."""
    for unit in engine.units:
        grads = [] if unit.grads is None else unit.grads.buffers
        for tensor in (unit.weights.full, unit.weights.shard, unit.weights.master, *grads):
            memory.name(tensor, unit.name)
    for owned in engine.optimizer.pieces:
        for tensor in engine.optimizer.torch.state[owned.master].values():
            memory.name(tensor, owned.unit.name)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def blank_batches(count: int, shape: tuple[int, int], packed: bool, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Micro-batches as `zero3d train` would read them: ids and labels [micro_batch, length], positions if packed."""

    def one() -> dict[str, Any]:
        names = ["input_ids", "labels"] + ["position_ids"] * packed
        return {name: torch.zeros(shape, dtype=torch.int64) for name in names} | dict(options)

    return [one() for _ in range(count)]
