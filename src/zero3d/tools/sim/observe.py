"""One watched step of an engine: its memory, traffic, FLOPs and actions. The engine may be a real one or a dry run's.

The watched step is not the first: in that one orders of gathers are recorded, and ranks learn whose norms come where.
At stage 3, where gathers follow the recorded order, the first step is a whole one. Below stage 3 an empty step does, as
long as gradients are complete in the order that the engine expects; else the step is made again in the order that was
seen. Python's garbage collector is off meanwhile, so that what dies when does not depend on chance.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.memory.arena import STATES
from zero3d.nested import tensors_in
from zero3d.tools.sim.flops import FlopCounter
from zero3d.tools.sim.images import Images, with_images
from zero3d.tools.sim.memory import BUFFERS, INPUTS, Log, MemoryTracker, ObservedArena
from zero3d.tools.sim.patches import around
from zero3d.tools.sim.position import PositionTracker
from zero3d.tools.sim.result import FlopCount, PipelineAction, StateEntry, TrafficEntry

Batches = Sequence[Mapping[str, Any]]


@dataclass
class Observation:
    """An engine after a watched step, and the records of that step. first: traffic of the step before."""

    engine: Engine
    log: Log
    flops: Mapping[tuple[str, str, int], int]
    first: tuple[TrafficEntry, ...]

    @property
    def states(self) -> tuple[StateEntry, ...]:
        """Return the bytes of model states and padding on the device."""
        here = self.engine.arena.place
        return tuple(StateEntry(*entry) for entry in self._entries if entry[-1] == here)

    @property
    def away(self) -> tuple[StateEntry, ...]:
        """Return those off it."""
        here = self.engine.arena.place
        return tuple(StateEntry(*entry) for entry in self._entries if entry[-1] != here)

    @property
    def _entries(self) -> Iterator[tuple[str, int, int, str]]:
        for entry in self.engine.memory:
            if entry.category in STATES:
                yield entry.category, entry.measured, entry.planned or 0, entry.place

    @property
    def traffic(self) -> tuple[TrafficEntry, ...]:
        """Return the ledger of the step."""
        return tuple(TrafficEntry(*entry) for entry in self.engine.traffic)

    @property
    def work(self) -> tuple[FlopCount, ...]:
        """Return the FLOPs of the step."""
        return tuple(FlopCount(*key, count) for key, count in sorted(self.flops.items()))

    @property
    def actions(self) -> tuple[PipelineAction, ...]:
        """Return this rank's actions in the pipeline."""
        pipeline = self.engine.pipeline
        return () if pipeline is None else tuple(PipelineAction(*action) for action in pipeline.recorded)

    @property
    def elements(self) -> int:
        """Count the parameters of this rank's units."""
        return sum(unit.layout.numel for unit in self.engine.units)

    def alike(self, dp: int) -> tuple[int, ...]:
        """Return the dp ranks that update pieces of the same units as rank `dp`: of others, shards are all padding."""
        units = [unit for unit in self.engine.units if unit.grads is not None and not unit.weights.updates_all]

        ranks = self.engine.dp.size

        def updates(rank: int) -> list[bool]:
            return [bool(unit.layout.pieces(unit.layout.rank_of(rank))) for unit in units]

        return tuple(rank for rank in range(ranks) if updates(rank) == updates(dp))


def observe(
    mesh: Mesh, build: Callable[[], Engine], make_batches: Callable[[], Batches], run: tuple[int, int] | None = None
) -> Observation:
    """Build an engine on `mesh` and watch a step over the micro-batches that `make_batches` returns.

    run   of these, how many the first step and the one that is watched take (None: all)
    """
    position = PositionTracker()
    flops = FlopCounter(position)
    memory = MemoryTracker(position, flops)
    mesh.make_arena = partial(ObservedArena, memory)
    with position.watching(), memory.watching(), _garbage_kept():
        engine = build()
        position.follow(engine)
        own = dict.fromkeys(engine.module.buffers())
        for buffer in engine._parts.changes.model.buffers():
            if buffer not in own:  # of another stage: it stays where the model was built, on the host
                memory.leave_out(buffer)
        for buffer in own:
            memory.on_borrow(BUFFERS, buffer)
        _name_states(engine, memory)
        batches = make_batches()
        warm, taken = run or (len(batches), len(batches))
        for tensor in (t for batch in batches for t in tensors_in(dict(batch))):
            memory.on_borrow(INPUTS, tensor)
        with around(engine._parts.stepper, "step", position.step):
            if warm:
                engine.train_batch(batches[:warm])
            else:
                _empty_step(engine)
            first = tuple(TrafficEntry(*entry) for entry in engine.traffic)

            def measure() -> list[int]:
                gc.collect()
                position.restart()
                memory.restart()
                flops.reset()
                engine.traffic.reset()
                return _step(engine, batches[:taken])

            order = measure()
            if not warm and order != sorted(order):
                engine.reductions.adopt(order)
                measure()
        return Observation(engine, memory.log, dict(flops.counted), first)


def _empty_step(engine: Engine) -> None:
    """Make a step over no micro-batch, all gradients zero. They are reduced in the engine's own order from then on."""
    engine.reductions.due = True
    engine.reductions.end_backward()
    engine.accumulation.finish(1, [0.0])
    engine.last_step = engine.step()
    engine.reductions.adopted = True


def _step(engine: Engine, batches: Batches) -> list[int]:
    """Make a step, and return in which order gradients were complete, as positions in the order of reductions."""
    order: list[int] = []

    @contextmanager
    def seen() -> Iterator[None]:
        order[:] = engine.reductions.observed()
        yield

    with around(engine.reductions, "catch_up", seen):
        engine.train_batch(batches)
    return order


def _name_states(engine: Engine, memory: MemoryTracker) -> None:
    """Write at the buffers of each unit's states that they were made for it."""
    for unit in engine.units:
        grads = [] if unit.grads is None else unit.grads.buffers
        stored = unit.weights.masters.stored
        beside = [tensor for tensor in (stored, unit.weights.second_shard) if tensor is not None]
        shard = [] if unit.plan.from_masters else [unit.weights.shard]
        for tensor in (unit.weights.full, *shard, *beside, *grads):
            memory.name(tensor, unit.name)
    for owned in engine.optimizer.pieces:
        for state in engine.optimizer.torch.state[owned.master].values():
            if isinstance(state, torch.Tensor):
                memory.name(state, owned.unit.name)
    for owner, _, flat in engine.optimizer.flat_states():
        memory.name(flat, owner)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Keep Python's garbage collector off inside the block."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def blank_batches(
    count: int, shape: tuple[int, int], packed: bool, options: Mapping[str, Any], images: Images | None = None
) -> list[dict[str, Any]]:
    """Return micro-batches as `zero3d train` reads them: ids and labels [micro_batch, length], positions if packed.

    images   those of every sequence
    """

    def one() -> dict[str, Any]:
        names = ["input_ids", "labels"] + ["position_ids"] * packed
        made = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        if images is not None:
            ids, shown = with_images(images, *shape)
            made |= {"input_ids": ids} | shown
        return made | dict(options)

    return [one() for _ in range(count)]
