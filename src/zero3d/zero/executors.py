"""The two executors that update a bucket whose states are in a record.

device   the torch optimizer's own step on the device: any element-wise optimizer, bits of resident states
host     Adam and AdamW in chunks on the host (host_update.py): bits of torch's fused kernel on a CPU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena, host_value
from zero3d.memory.scratch import cast_scratch
from zero3d.precision import cast_all, join_master, rounds_away, split_master
from zero3d.zero.host_update import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.zero.masters import REMAINDER
from zero3d.zero.record_masters import absent
from zero3d.zero.record_updates import Given, Options, RecordPortion
from zero3d.zero.rounding import Draw, noise_table, round_to_bf16
from zero3d.zero.state_records import MASTER, WEIGHTS
from zero3d.zero.streams import wait_for_device
from zero3d.zero.updates import stepping

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeviceExecutor:
    """Steps the torch optimizer on the device, over one bucket at a time."""

    def __init__(self, optimizer: Optimizer, arena: Arena) -> None:
        self._optimizer, self._arena = optimizer, arena
        self._table: Tensor | None = None
        self._counted: Options = ()
        self._step = 0

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
                self._pointed(portion, master, wide, given.grad.to(device, non_blocking=True)),
                stepping(self._optimizer, given.options, portion.pieces),
            ):
                self._optimizer.step()
            self._round(portion, given, wide)
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
        """Have the pieces' tensors be parts of these inside. States that the optimizer makes go into their fields."""
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

    def _round(self, portion: RecordPortion, given: Given, wide: Mapping[str, Tensor]) -> None:
        """Round moments to bf16 at random."""
        fields = given.fields
        for moment, name in enumerate(MOMENTS):
            if name in fields and fields[name] is not wide[name] and portion.pieces:
                if self._table is None:
                    self._table = noise_table(self._arena.device)
                step = self._applied(portion, given)
                noise = self._arena.borrow("wire", wide[name].numel(), torch.float32)
                round_to_bf16(wide[name], fields[name], Draw(0, step, moment), portion.first, self._table, noise)
                self._arena.give_back("wire", noise)

    def _applied(self, portion: RecordPortion, given: Given) -> int:
        """Return the applied steps, this one included: read of the device once a step, whose options are one object."""
        if given.options is not self._counted:
            count = self._optimizer.state[portion.pieces[0].master]["step"]
            self._counted, self._step = given.options, int(host_value(count.view(1), [1.0])[0])
        return self._step

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
    near     updates buckets whose records have stayed on an accelerator
    """

    def __init__(
        self, optimizer: Optimizer, executor: HostExecutor, staging: tuple[Tensor, Tensor] | None, near: DeviceExecutor
    ) -> None:
        self._optimizer, self._executor, self._staging, self._near = optimizer, executor, staging, near

    def update(self, portion: RecordPortion, given: Given) -> None:
        if portion.bucket.device.type != "cpu":
            self._near.update(portion, given)
            return
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
            wait_for_device(given.weights.device)  # staging is used again

    def _here(self, values: Tensor, which: int) -> Tensor:
        """Return a tensor in the host's memory."""
        if values.device.type == "cpu":
            return values
        assert self._staging is not None
        here = self._staging[which][: values.numel()]
        here.copy_(values, non_blocking=True)
        wait_for_device(values.device)
        return here
