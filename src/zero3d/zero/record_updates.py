"""Updates of buckets whose states are in records, by one of two executors, behind the next forward.

    step() fixes     gradients, clipped; learning rate, weight decay and all other options
    then, unit by unit in forward order, each before its weights are used:

        ahead     records of the next two buckets are on their way
        opened    this bucket's record
        update    on the device: the torch optimizer's own step      on the host: Adam in chunks (host_update.py)
        taken back

Nothing of a step is approximated: its norm was known before the first unit is updated, and the last one's is over
before gradients of the next step come.

    device   any element-wise optimizer; its bits are those of resident states
    host     Adam and AdamW; bits of torch's fused kernel on a CPU
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.errors import Zero3dError
from zero3d.memory.threads import Threads
from zero3d.zero.rounding import TILE
from zero3d.zero.state_records import WEIGHTS, Bucket, Records, UnitRecords
from zero3d.zero.streams import SideStream
from zero3d.zero.unit import Unit
from zero3d.zero.updates import MasterPiece

AHEAD = 2  # records that are brought before their use

Options = Sequence[Mapping[str, Any]]  # of an optimizer's groups, as they were at `step()`


@dataclass(frozen=True)
class RecordPortion:
    """The pieces of one bucket, and the number of its first element among all of the model, for noise."""

    unit: Unit
    records: UnitRecords
    bucket: Bucket
    pieces: Sequence[MasterPiece]
    first: int

    def within(self, owned: MasterPiece) -> slice:
        """Return where a piece is in the bucket."""
        start = owned.piece.offset - self.bucket.start
        return slice(start, start + owned.master.numel())


class Given(NamedTuple):
    """What an executor updates a bucket with: its fields by name, weights and gradient, and the groups' options."""

    fields: dict[str, Tensor]
    weights: Tensor
    grad: Tensor
    options: Options


class Executor(Protocol):
    """Updates a bucket; weights and fields are changed in place."""

    def update(self, portion: RecordPortion, given: Given) -> None: ...


class RecordUpdates:
    """Owns what is left of a step's updates: units in forward order, each updated before its weights are used.

    after    is called with a unit that has been updated: at stages 1 and 2 its new weights are sent
    thread   makes the updates on the host, which would keep compute waiting; None: whoever needs them makes them
    """

    def __init__(
        self, optimizer: Optimizer, executor: Executor, records: Records, portions: Mapping[Unit, list[RecordPortion]],
        after: Callable[[Unit], None], device: torch.device, thread: Threads | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._executor, self._records, self.portions = optimizer, executor, records, portions
        self._after, self._thread = after, thread
        self._device, self._side = device, SideStream(device)
        self._queue: deque[Unit] = deque()
        self._made: dict[Unit, Future[None]] = {}
        self._order = [portion.bucket.record for of_unit in portions.values() for portion in of_unit]
        self._options: Options = ()
        self._grads: dict[Unit, Tensor] = {}
        self._failure: BaseException | None = None

    def begin(self, options: Options) -> None:
        """Take over a step: its gradients are final, and stay until they are used."""
        self.finish()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler would say it came too early
        self._options, self._grads = options, {unit: unit.gradients.owned for unit in self.portions}
        self._queue.extend(self.portions)
        if self._thread is not None:
            self._side.follow()
            self._made = {unit: self._thread.submit(self._make, unit) for unit in self.portions}

    def prefetch(self) -> None:
        """Begin to bring the first records of the next step."""
        if not self._queue:
            for record in self._order[:AHEAD]:
                self._records.ahead(record)

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
        try:
            if self._thread is None:
                self._update_buckets(unit, self.portions[unit])
            else:
                self._made.pop(unit).result()
                self._update_buckets(unit, [p for p in self.portions[unit] if p.bucket.device == self._device])
            self._queue.popleft()
            if not self._queue:
                self._grads = {}
                self._records.commit()
        except BaseException as error:
            self._failure = error
            raise
        self._after(unit)

    def _make(self, unit: Unit) -> None:
        """Update what of a unit is updated on the host, in a thread."""
        with self._side.entered():
            self._update_buckets(unit, [p for p in self.portions[unit] if p.bucket.device != self._device])

    @torch.no_grad()
    def _update_buckets(self, unit: Unit, portions: Sequence[RecordPortion]) -> None:
        """Update weights, masters and optimizer states of these buckets of a unit."""
        if portions:
            with unit.weights.place.opened(True) as weights:
                for portion in portions:
                    self._update_bucket(portion, weights)

    def _update_bucket(self, portion: RecordPortion, weights: Tensor) -> None:
        following = self._order.index(portion.bucket.record) + 1
        for record in self._order[following : following + AHEAD]:
            self._records.ahead(record)
        bucket = portion.bucket
        within = slice(bucket.start, bucket.stop)
        with portion.records.opened(bucket) as fields:
            given = Given(fields, weights[within], self._grads[portion.unit][within], self._options)
            self._executor.update(portion, given)
            if WEIGHTS in fields:
                fields[WEIGHTS].copy_(given.weights)  # one on the host may go to a disk at once


def record_portions(units: Sequence[Unit], pieces: Sequence[MasterPiece]) -> dict[Unit, list[RecordPortion]]:
    """Put pieces into the portions of their buckets: of units in the order of their records."""
    of_unit: dict[Unit, list[MasterPiece]] = {unit: [] for unit in units}
    for owned in pieces:
        of_unit[owned.unit].append(owned)
    portions = {}
    for unit, own in of_unit.items():
        weights, records = unit.weights, unit.weights.records
        assert records is not None
        start = first_of(unit.name) + unit.part * weights.layout.total
        start += 0 if weights.updates_all else unit.comm.rank * weights.layout.shard
        portions[unit] = [
            RecordPortion(
                unit, records, bucket, [owned for owned in own if bucket.start <= owned.piece.offset < bucket.stop],
                start + bucket.start,
            )
            for bucket in records.buckets
        ]  # fmt: skip
    return dict(sorted(portions.items(), key=lambda item: item[1][0].bucket.record))


def first_of(unit: str) -> int:
    """Return the number of a unit's first element, for noise: far from any other unit's, the same on any mesh."""
    return int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=5).digest()) * TILE * (1 << 20)
