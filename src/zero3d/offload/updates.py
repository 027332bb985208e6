"""Updates of buckets whose states are in records, by one of two executors, behind the next forward.

    step() fixes     gradients, clipped; learning rate, weight decay and all other options
    then, unit by unit in forward order, each before its weights are used:

        ahead     records of the next two buckets are on their way
        opened    this bucket's record
        update    on the device: the torch optimizer's own step      on the host: Adam in chunks (host_adam.py)
        taken back

Nothing of a step is approximated: its norm was known before the first unit is updated, and the last one's is over
before gradients of the next step come.

    device   any element-wise optimizer; its bits are those of resident states
    host     Adam and AdamW; bits of torch's fused kernel on a CPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from zero3d.errors import Zero3dError
from zero3d.memory.threads import Threads
from zero3d.offload.executors import Executor
from zero3d.zero.buckets import WEIGHTS, Records
from zero3d.zero.clocks import Clocks
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.step_parts import OFFLOAD
from zero3d.zero.streams import ThreadStream
from zero3d.zero.unit import Unit
from zero3d.zero.updates import BucketPieces, DeferredUpdates, OpenBucket, Options, buckets_of

AHEAD = 2  # records that are brought before their use


class RecordUpdates(DeferredUpdates):
    """Owns what is left of a step's updates: units in forward order, each updated before its weights are used.

    thread   makes the updates on the host, which would keep compute waiting; None: whoever needs them makes them
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        executor: Executor,
        records: Records,
        device: torch.device,
        clocks: Clocks,
        thread: Threads | None = None,
    ) -> None:
        self._optimizer = optimizer.torch
        self._executor = executor
        self._records = records
        found = buckets_of([unit for unit in optimizer.units if unit.weights.records is not None], optimizer.pieces)
        self._buckets = dict(sorted(found.items(), key=lambda item: item[1][0].bucket.record))
        self._send, self._thread = optimizer.send, thread
        self._device, self._side = device, ThreadStream(device)
        self._clocks = clocks
        self._queue: deque[Unit] = deque()
        self._made: dict[Unit, Future[None]] = {}
        self._order = [each for of_unit in self._buckets.values() for each in of_unit]
        self._step: tuple[Options, Sequence[float]] = ((), ())  # options of groups, factors of gradients
        self._grads: dict[Unit, Tensor] = {}
        self._failure: BaseException | None = None

    @property
    def buckets(self) -> dict[Unit, list[BucketPieces]]:
        """What is updated, by unit in forward order."""
        return self._buckets

    def begin(self, options: Options, factors: Sequence[float] = ()) -> None:
        """Take over a step: its gradients stay until they are used, and are final but for these factors."""
        self.finish()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would say it came too early
        self._step, self._grads = (options, factors), {unit: unit.gradients.lend() for unit in self._buckets}
        self._queue.extend(self._buckets)
        self._bring_gradients(0)
        if self._thread is not None:
            self._side.follow()
            self._made = {unit: self._thread.submit(self._make, unit) for unit in self._buckets}

    def _bring_gradients(self, place: int) -> None:
        """Begin to bring the gradients of a bucket and of the one behind it to where they are updated."""
        for each in self._order[place : place + 2]:
            self._executor.ahead(self._grads[each.unit][each.range])

    def prefetch(self) -> None:
        """Begin to bring the first records of the next step."""
        if not self._queue:
            for each in self._order[:AHEAD]:
                self._records.ahead(each.bucket.record)

    def confirm(self) -> None:
        """Say that all ranks have ended their last step."""
        self._records.confirm()

    def replace(self, step: int) -> None:
        """Say that a checkpoint of a step takes the place of all records."""
        self.finish()
        self._records.discard()
        self._records.count_from(step)

    def through(self, unit: Unit) -> None:
        """Update all units up to this one, if its update is due."""
        while unit in self._queue:
            self._update(self._queue[0])

    def finish(self) -> None:
        """Update all units that are due. Raises Zero3dError where an update has failed before."""
        self._check()
        while self._queue:
            self._update(self._queue[0])

    def _check(self) -> None:
        if self._failure is not None:
            raise Zero3dError(
                "an update of this step failed, and weights are partly new: look at the first error, and go on from a "
                "checkpoint: start again with --resume auto, or a new Engine and its load()."
            ) from self._failure

    def _update(self, unit: Unit) -> None:
        self._check()
        with self._clocks.of(OFFLOAD):
            self._make_due(unit)
        self._send(unit)

    def _make_due(self, unit: Unit) -> None:
        """Make the update of the next unit, or wait for the thread that does."""
        try:
            if self._thread is None:
                self._update_buckets(unit, self._buckets[unit])
            else:
                self._made.pop(unit).result()
                self._update_buckets(unit, [p for p in self._buckets[unit] if p.bucket.device == self._device])
            self._queue.popleft()
            unit.gradients.take_back()
            if not self._queue:
                self._grads = {}
                self._records.commit()
        except BaseException as error:
            self._failure = error
            raise

    def _make(self, unit: Unit) -> None:
        """Update what of a unit is updated on the host, in a thread."""
        with self._side.entered():
            self._update_buckets(unit, [p for p in self._buckets[unit] if p.bucket.device != self._device])

    @torch.no_grad()
    def _update_buckets(self, unit: Unit, buckets: Sequence[BucketPieces]) -> None:
        """Update weights, masters and optimizer states of these buckets of a unit."""
        if buckets:
            with unit.weights.place.opened(True) as weights:
                for each in buckets:
                    self._update_bucket(each, weights)

    def _update_bucket(self, each: BucketPieces, weights: Tensor) -> None:
        place = next(place for place, other in enumerate(self._order) if other is each)
        for following in self._order[place + 1 : place + 1 + AHEAD]:
            self._records.ahead(following.bucket.record)
        self._bring_gradients(place)
        options, factors = self._step
        with each.buckets.opened(each.bucket) as fields:
            grad = self._grads[each.unit][each.range]
            opened = OpenBucket(each, fields, weights[each.range], grad, factors=factors)
            self._executor.update(opened, options)
            if WEIGHTS in fields:
                fields[WEIGHTS].copy_(opened.weights)  # one on the host may go to a disk at once
