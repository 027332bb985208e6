"""Faults of concurrency that are put into zero3d on purpose, to see which instrument finds which.

Each is a context manager: an engine that is built and trained inside has the fault. Those of one rank's streams are in
planted.py. benchmarks/concurrency.py runs every tool on each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase

from zero3d.distributed import mesh
from zero3d.distributed.axis import DONE, Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.groups import new_group
from zero3d.distributed.mesh import Mesh
from zero3d.zero.gradients import Gradients
from zero3d.zero.hooks import Hooks
from zero3d.zero.local_gradients import LocalGradients
from zero3d.zero.reductions import Reductions
from zero3d.zero.weights import Weights

ODD_ONE = 1  # the rank that does otherwise


@contextmanager
def dropped_wait() -> Iterator[None]:
    """Use gathered weights without waiting for what gathers them."""
    ready = Weights.ready

    def at_once(weights: Any) -> None:
        weights._left_alone, weights._pending_gather = weights._pending_gather, DONE  # its tensors live on
        ready(weights)

    with mock.patch.object(Weights, "ready", at_once):
        yield


@contextmanager
def swapped_messages() -> Iterator[None]:
    """Send a pipeline's first two hidden states, which are of one size, in the other order."""
    send = _PipelineStageBase.get_fwd_send_ops

    def other(stage: Any, micro_batch: int) -> Any:
        if stage.stage_index > 0 or micro_batch > 1:
            return send(stage, micro_batch)
        return [] if micro_batch == 0 else [*send(stage, 1), *send(stage, 0)]

    with mock.patch.object(_PipelineStageBase, "get_fwd_send_ops", other):
        yield


@contextmanager
def other_order() -> Iterator[None]:
    """Reduce two units in another order on one rank; where all units are of one size, no backend notices."""
    extend = Reductions.extend

    def swapped(self: Any, *given: Any) -> None:
        extend(self, *given)
        if dist.get_rank() == ODD_ONE:
            self._order[1], self._order[2] = self._order[2], self._order[1]

    with mock.patch.object(Reductions, "extend", swapped):
        yield


@contextmanager
def late_reduction() -> Iterator[None]:
    """Begin the reduction of a unit with a hole behind the next gather: on other ranks it is before that one."""
    look, needs, inside = Reductions.look, Hooks._backward_needs, threading.local()

    def needs_first(self: Any, units: Any, call: int) -> None:
        inside.now = True
        try:
            needs(self, units, call)
        finally:
            inside.now = False
        if self._reduces:
            look(self._reductions)

    def look_later(self: Any) -> None:
        if not getattr(inside, "now", False):
            look(self)

    with mock.patch.object(Hooks, "_backward_needs", needs_first), mock.patch.object(Reductions, "look", look_later):
        yield


@contextmanager
def hole_until_the_end() -> Iterator[None]:
    """Hold up a unit with a hole, and all behind it, until backward is over."""
    from zero3d.zero.arrivals import Arrivals  # which the code that had the fault did not have

    with mock.patch.object(Arrivals, "_is_to_come", return_value=True):
        yield


@contextmanager
def freed_early() -> Iterator[None]:
    """Give a bucket of gradients back as soon as its reduction has begun."""
    reduce = Gradients.reduce

    def reduced(self: Any, single: bool) -> None:
        reduce(self, single)
        self.local.close()

    with mock.patch.object(Gradients, "reduce", reduced):
        yield


@contextmanager
def groups_in_another_order() -> Iterator[None]:
    """Make the two groups of an axis in another order on one rank: its gathers go over those of others' reductions."""
    with _opened(lambda axis, _: _swap(axis) if dist.get_rank() == ODD_ONE else None):
        yield


@contextmanager
def cold_groups() -> Iterator[None]:
    """Leave out the collective with which all ranks of a group begin it together."""
    with mock.patch.object(mesh, "warm_up"):
        yield


@contextmanager
def third_communicator() -> Iterator[None]:
    """Gather every other unit over a communicator of its own: up to three are at work at once."""
    thirds: dict[int, Any] = {}
    all_gather = Comm.all_gather

    def make(axis: Axis, of: Mesh) -> None:
        if axis.size > 1 and axis.name == "dp":
            thirds[id(axis)] = new_group(axis.name, list(of._ranks("dp")), of.device, axis.size == of.world)

    def gathered(self: Any, full: Any, shard: Any, unit: str) -> Any:
        axis, third = self._axis, thirds.get(id(self._axis))
        if third is None or not unit[-1:].isdecimal() or int(unit[-1]) % 2 == 0:
            return all_gather(self, full, shard, unit)
        self._axis = replace(axis, gathers=third)
        try:
            return all_gather(self, full, shard, unit)
        finally:
            self._axis = axis

    with _opened(make), mock.patch.object(Comm, "all_gather", gathered):
        yield


@contextmanager
def stale_gradients() -> Iterator[None]:
    """Leave what a buffer held before in the place of gradients that did not come."""

    def filled(self: Any) -> None:
        self.land()
        for index, view in enumerate(self.views):
            if index not in self.filled:
                view.fill_(1.0)

    with mock.patch.object(LocalGradients, "fill_up", filled):
        yield


def _swap(axis: Axis) -> None:
    axis.gathers, axis.reductions = axis.reductions, axis.gathers


@contextmanager
def _opened(then: Callable[[Axis, Mesh], object]) -> Iterator[None]:
    open_axis = Mesh.open_axis

    def opened(self: Mesh, name: str) -> Axis:
        axis = open_axis(self, name)
        then(axis, self)
        return axis

    with mock.patch.object(Mesh, "open_axis", opened):
        yield


Fault = Callable[[], AbstractContextManager[object]]
NONE: Fault = nullcontext
FAULTS: dict[str, Fault] = {
    "a wait for a gather is dropped": dropped_wait,
    "two messages of a pipeline are swapped": swapped_messages,
    "one rank's reductions in another order": other_order,
    "one rank's reduction behind the next gather": late_reduction,
    "a bucket is freed before its reduction is over": freed_early,
    "one rank makes its groups in another order": groups_in_another_order,
    "a unit with a hole is held up until backward's end (C1)": hole_until_the_end,
    "groups begin without all of their ranks": cold_groups,
    "a third communicator": third_communicator,
    "a gradient that did not come is not zero": stale_gradients,
}
