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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.distributed.collectives import same_memory
from zero3d.errors import Zero3dError
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import cast_scratch
from zero3d.precision import cast_all, join_master, rounds_away, split_master
from zero3d.zero.host_update import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.zero.masters import REMAINDER
from zero3d.zero.record_masters import absent
from zero3d.zero.rounding import TILE, Draw, noise_table, round_to_bf16
from zero3d.zero.state_records import MASTER, WEIGHTS, Bucket, Records, UnitRecords
from zero3d.zero.unit import Unit
from zero3d.zero.updates import MasterPiece, stepping

AHEAD = 2  # records that are brought before their use
MOMENTS = ("exp_avg", "exp_avg_sq")

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


class DeviceExecutor:
    """Steps the torch optimizer on the device, over one bucket at a time."""

    def __init__(self, optimizer: Optimizer, arena: Arena) -> None:
        self._optimizer, self._arena = optimizer, arena
        self._table: Tensor | None = None

    def update(self, portion: RecordPortion, given: Given) -> None:
        fields, device = given.fields, self._arena.device
        near = given.weights.device == device
        weights = given.weights if near else given.weights.to(device, non_blocking=True)
        with self._scratch(portion, fields) as scratch:
            stored = fields.get(MASTER)
            split = stored is not None and stored.dtype == REMAINDER
            master = weights if stored is None else join_master(weights, stored, scratch[0]) if split else stored
            moments = iter(scratch[1:] if split else scratch)
            wide = {
                name: next(moments).copy_(values) if values.dtype == torch.bfloat16 else values
                for name, values in fields.items()
                if name not in (MASTER, WEIGHTS)
            }
            with (
                self._pointed(portion, master, wide, given.grad),
                stepping(self._optimizer, given.options, portion.pieces),
            ):
                self._optimizer.step()
            self._round(portion, fields, wide)
            if split:
                assert stored is not None
                split_master(master, weights, stored, scratch=master)
            elif stored is not None:
                self._cast(stored, weights)
        if not near:
            given.weights.copy_(weights, non_blocking=True)

    @contextmanager
    def _scratch(self, portion: RecordPortion, fields: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
        """Lend fp32 memory for every field in 16 bits but the weights."""
        narrow = [name for name, values in fields.items() if name != WEIGHTS and values.dtype.itemsize == 2]
        size = portion.bucket.stop - portion.bucket.start
        lent = [self._arena.borrow("wire", size, torch.float32) for _ in narrow]
        try:
            yield lent
        finally:
            for each in lent:
                self._arena.give_back("wire", each)

    @contextmanager
    def _pointed(
        self, portion: RecordPortion, master: Tensor, states: Mapping[str, Tensor], grad: Tensor
    ) -> Iterator[None]:
        """Have the pieces' tensors be parts of these inside. States that the optimizer has made go into their fields."""
        known = self._optimizer.state
        for owned in portion.pieces:
            within = portion.within(owned)
            owned.master.data, owned.master.grad = master[within], grad[within]
            for name, values in states.items():
                if name in known[owned.master]:
                    known[owned.master][name].data = values[within]
        try:
            yield
        finally:
            for owned in portion.pieces:
                within, of_piece = portion.within(owned), known[owned.master]
                owned.master.grad, owned.master.data = None, absent(master[within])
                for name, values in states.items():
                    if name in of_piece:
                        if not same_memory(of_piece[name], values[within]):
                            values[within].copy_(of_piece[name])
                        of_piece[name] = absent(values[within])

    def _round(self, portion: RecordPortion, fields: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> None:
        """Round moments to bf16 at random."""
        for moment, name in enumerate(MOMENTS):
            if name in fields and fields[name] is not wide[name] and portion.pieces:
                if self._table is None:
                    self._table = noise_table(self._arena.device)
                step = int(self._optimizer.state[portion.pieces[0].master]["step"])
                noise = self._arena.borrow("wire", wide[name].numel(), torch.float32)
                round_to_bf16(wide[name], fields[name], Draw(0, step, moment), portion.first, self._table, noise)
                self._arena.give_back("wire", noise)

    def _cast(self, master: Tensor, weights: Tensor) -> None:
        if not rounds_away(master.dtype, weights.dtype):
            weights.copy_(master)
            return
        scratch = self._arena.borrow("wire", cast_scratch(master.numel(), master.device.type), torch.float32)
        cast_all([(master, weights)], scratch)
        self._arena.give_back("wire", scratch)


class OnHost:
    """Updates buckets on the host; of an accelerator gradients come down and weights go up, through staging memory.

    staging  on an accelerator: host memory of the longest bucket's gradient, fp32, and of its weights
    """

    def __init__(self, optimizer: Optimizer, executor: HostExecutor, staging: tuple[Tensor, Tensor] | None) -> None:
        self._optimizer, self._executor, self._staging = optimizer, executor, staging

    def update(self, portion: RecordPortion, given: Given) -> None:
        if not portion.pieces:
            return
        rules = [AdamRule.of(self._optimizer, options) for options in given.options]
        counts = [self._optimizer.state[owned.master]["step"] for owned in portion.pieces]
        for count in counts:
            count.add_(1)
        weights, grad = self._here(given.weights, 1), self._here(given.grad, 0)
        fields = given.fields
        stored = fields.get(MASTER)
        states = BucketStates(
            weights if stored is None else stored, None if stored is None else weights,
            fields["exp_avg"], fields["exp_avg_sq"], grad, portion.first,
        )  # fmt: skip
        ordered = sorted(portion.pieces, key=lambda owned: owned.piece.offset)
        pieces = [BucketPiece(within.start, within.stop, rules[owned.group]) for owned in ordered
                  for within in [portion.within(owned)]]  # fmt: skip
        self._executor.update(states, pieces, int(counts[0]))
        if weights is not given.weights:
            given.weights.copy_(weights, non_blocking=True)
            torch.accelerator.current_stream(given.weights.device).synchronize()  # staging is used again

    def _here(self, values: Tensor, which: int) -> Tensor:
        """Return a tensor in the host's memory."""
        if values.device.type == "cpu":
            return values
        assert self._staging is not None
        here = self._staging[which][: values.numel()]
        here.copy_(values, non_blocking=True)
        torch.accelerator.current_stream(values.device).synchronize()
        return here


class RecordUpdates:
    """Owns what is left of a step's updates: units in forward order, each updated before its weights are used.

    after  is called with a unit that has been updated: at stages 1 and 2 its new weights are sent
    """

    def __init__(
        self, optimizer: Optimizer, executor: Executor, records: Records, portions: Mapping[Unit, list[RecordPortion]],
        after: Callable[[Unit], None],
    ) -> None:  # fmt: skip
        self._optimizer, self._executor, self._records, self.portions = optimizer, executor, records, portions
        self._after = after
        self._queue: deque[Unit] = deque()
        self._order = [portion.bucket.record for of_unit in portions.values() for portion in of_unit]
        self._next = 0  # of the order
        self._options: Options = ()
        self._grads: dict[Unit, Tensor] = {}
        self._failure: BaseException | None = None

    def begin(self, options: Options) -> None:
        """Take over a step: its gradients are final, and stay until they are used."""
        self.finish()
        self._options, self._grads = options, {unit: unit.gradients.owned for unit in self.portions}
        self._queue.extend(self.portions)
        self._next = 0

    def prefetch(self) -> None:
        """Begin to bring the first records of the next step."""
        if not self._queue:
            for record in self._order[:AHEAD]:
                self._records.ahead(record)

    def confirm(self) -> None:
        """Say that all ranks have ended their last step."""
        self._records.confirm()

    def through(self, unit: Unit) -> None:
        """Update all units up to this one, if its update is due."""
        while unit in self._queue:
            self._update(self._queue[0])

    def finish(self) -> None:
        """Update all units that are due."""
        while self._queue:
            self._update(self._queue[0])

    @torch.no_grad()
    def _update(self, unit: Unit) -> None:
        if self._failure is not None:
            raise Zero3dError(
                "an update of this step failed, and weights are partly new: look at the first error, and go on from a "
                "checkpoint."
            ) from self._failure
        try:
            with unit.weights.place.opened(True) as weights:
                for portion in self.portions[unit]:
                    self._update_bucket(portion, weights)
            self._queue.popleft()
            if not self._queue:
                self._grads = {}
                self._records.commit()
        except BaseException as error:
            self._failure = error
            raise
        self._after(unit)

    def _update_bucket(self, portion: RecordPortion, weights: Tensor) -> None:
        self._next += 1
        for record in self._order[self._next : self._next + AHEAD]:
            self._records.ahead(record)
        bucket = portion.bucket
        within = slice(bucket.start, bucket.stop)
        with portion.records.opened(bucket) as fields:
            given = Given(fields, weights[within], self._grads[portion.unit][within], self._options)
            self._executor.update(portion, given)
            if WEIGHTS in fields:
                fields[WEIGHTS].copy_(given.weights, non_blocking=True)


def record_portions(units: Sequence[Unit], pieces: Sequence[MasterPiece], rank: int) -> dict[Unit, list[RecordPortion]]:
    """Put pieces into the portions of their buckets: of units in the order of their records."""
    of_unit: dict[Unit, list[MasterPiece]] = {unit: [] for unit in units}
    for owned in pieces:
        of_unit[owned.unit].append(owned)
    portions = {}
    for unit, own in of_unit.items():
        weights, records = unit.weights, unit.weights.records
        assert records is not None
        start = first_of(unit.name) + (0 if weights.updates_all else rank * weights.layout.shard)
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
