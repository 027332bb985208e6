"""The two executors that update a bucket whose states are in a record.

device   the torch optimizer's own step on the device: any element-wise optimizer, bits of resident states
host     Adam and AdamW in chunks on the host (host_adam.py): bits of torch's fused kernel on a CPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.account.transients import STAGED
from zero3d.memory.arena import Arena, host_value
from zero3d.offload.host_adam import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.offload.rounding import Draw, first_of, noise_table, round_to_bf16
from zero3d.spec.optimizer import MOMENTS
from zero3d.zero.buckets import MASTER
from zero3d.zero.streams import wait_for_device
from zero3d.zero.updates import BucketPieces, OpenBucket, Options, update_buckets

WIDE = 4  # bytes of an element of a gradient that an optimizer takes


class Executor(Protocol):
    """Updates a bucket; weights and fields are changed in place."""

    def ahead(self, grad: Tensor) -> None:
        """Begin to bring the gradient of one of the next two updates; nobody waits."""

    def update(self, opened: OpenBucket, options: Options) -> None: ...


class StagedGradients:
    """Owns buffers on the device to which gradients come from the host, on a stream of their own: the next one ahead.

    buffers  free ones, each with the event after which compute no longer uses its contents
    coming   buffers on their way, by the gradient's address, each with the event of its arrival
    """

    def __init__(self, arena: Arena, elements: int, dtype: torch.dtype) -> None:
        self._device, self._stream = arena.device, torch.Stream(arena.device)
        self._buffers = deque((arena.borrow("wire", elements, dtype), self._event()) for _ in range(STAGED))
        self._coming: dict[int, tuple[Tensor, torch.Event]] = {}

    def _event(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def ahead(self, grad: Tensor) -> None:
        """Begin to bring a gradient, if a buffer is free and it does not come already."""
        if grad.data_ptr() in self._coming or not self._buffers:
            return
        buffer, used = self._buffers.popleft()
        self._stream.wait_event(used)
        with self._stream:
            buffer[: grad.numel()].copy_(grad, non_blocking=True)
            self._coming[grad.data_ptr()] = buffer, self._event()

    @contextmanager
    def here(self, grad: Tensor) -> Iterator[Tensor]:
        """Have a gradient on the device inside, for what compute does there."""
        self.ahead(grad)
        buffer, arrived = self._coming.pop(grad.data_ptr())
        torch.accelerator.current_stream(self._device).wait_event(arrived)
        yield buffer[: grad.numel()]
        self._buffers.append((buffer, self._event()))


class DeviceExecutor(Executor):
    """Steps the torch optimizer on the device, over one bucket at a time. staged: brings gradients from the host."""

    def __init__(self, optimizer: Optimizer, arena: Arena, staged: StagedGradients | None = None) -> None:
        self._optimizer, self._arena = optimizer, arena
        self._staged = staged
        self._table: Tensor | None = None
        self._counted: Options = ()
        self._step = 0

    def ahead(self, grad: Tensor) -> None:
        """Begin to bring a gradient that is on the host."""
        if self._staged is not None:
            self._staged.ahead(grad)

    def update(self, opened: OpenBucket, options: Options) -> None:
        with nullcontext(opened.grad) if self._staged is None else self._staged.here(opened.grad) as grad:
            wide = grad if grad.dtype.itemsize >= WIDE else self._arena.borrow("wire", grad.numel(), torch.float32)
            if wide is not grad:
                wide.copy_(grad)
            for factor in opened.factors:
                if factor != 1.0:
                    wide.mul_(factor)
            self._update(opened._replace(grad=wide), options)
            if wide is not grad:
                self._arena.give_back("wire", wide)

    def _update(self, opened: OpenBucket, options: Options) -> None:
        device, weights = self._arena.device, opened.weights
        near = weights.device == device
        here = opened._replace(weights=weights if near else weights.to(device, non_blocking=True))

        def narrow(of: BucketPieces, name: str, wide: Tensor, field: Tensor) -> None:
            if of.pieces:
                self._round(of, MOMENTS.index(name), wide, field, options)

        update_buckets(self._optimizer, options, [here], self._arena, narrow)
        if not near:
            weights.copy_(here.weights, non_blocking=True)

    def _round(self, of: BucketPieces, moment: int, wide: Tensor, field: Tensor, options: Options) -> None:
        """Round a moment to bf16 at random."""
        if self._table is None:
            self._table = noise_table(self._arena.device)
        step = self._applied(of, options)
        noise = self._arena.borrow("wire", wide.numel(), torch.float32)
        round_to_bf16(wide, field, Draw(0, step, moment), first_element(of), self._table, noise)
        self._arena.give_back("wire", noise)

    def _applied(self, of: BucketPieces, options: Options) -> int:
        """Return the applied steps, this one included: read of the device once a step, whose options are one object."""
        if options is not self._counted:
            count = self._optimizer.state[of.pieces[0].master]["step"]
            self._counted, self._step = options, int(host_value(count.view(1), [1.0])[0])
        return self._step


class OnHost(Executor):
    """Updates buckets on the host; of an accelerator gradients come down and weights go up, through staging memory.

    staging  on an accelerator: host memory of the longest bucket's gradient, fp32, and of its weights
    near     updates buckets whose records have stayed on an accelerator
    """

    def __init__(
        self, optimizer: Optimizer, executor: HostExecutor, staging: tuple[Tensor, Tensor] | None, near: DeviceExecutor
    ) -> None:
        self._optimizer = optimizer
        self._executor = executor
        self._staging = staging
        self._near = near

    def ahead(self, grad: Tensor) -> None:
        """Bring nothing: a thread updates on the host, which may be far from the bucket that `near` has next."""

    def update(self, opened: OpenBucket, options: Options) -> None:
        of = opened.of
        if of.bucket.device.type != "cpu":
            self._near.update(opened, options)
            return
        if not of.pieces:
            return
        rules = [AdamRule.of(self._optimizer, group) for group in options]
        counts = [self._optimizer.state[owned.master]["step"] for owned in of.pieces]
        for count in counts:
            count.add_(1)
        weights, grad = self._here(opened.weights, 1), self._here(opened.grad, 0)
        fields = opened.fields
        stored = fields.get(MASTER)
        states = BucketStates(
            master=weights if stored is None else stored,
            weights=None if stored is None else weights,
            exp_avg=fields["exp_avg"],
            exp_avg_sq=fields["exp_avg_sq"],
            grad=grad,
            first=first_element(of),
        )
        ordered = sorted(of.pieces, key=lambda owned: owned.piece.offset)
        places = [(of.within(owned), rules[owned.group]) for owned in ordered]
        pieces = [BucketPiece(within.start, within.stop, rule) for within, rule in places]
        self._executor.update(states, pieces, int(counts[0]), opened.factors)
        if weights is not opened.weights:
            opened.weights.copy_(weights, non_blocking=True)
            wait_for_device(opened.weights.device)  # staging is used again

    def _here(self, values: Tensor, which: int) -> Tensor:
        """Return a tensor in the host's memory."""
        if values.device.type == "cpu":
            return values
        assert self._staging is not None
        here = self._staging[which][: values.numel()]
        here.copy_(values, non_blocking=True)
        wait_for_device(values.device)
        return here


def first_element(of: BucketPieces) -> int:
    """Return the number of a bucket's first element among all of the model, for noise."""
    weights = of.unit.weights
    start = first_of(of.unit.name) + of.unit.part * weights.layout.total
    return start + of.bucket.start + (0 if weights.updates_all else of.unit.comm.rank * weights.layout.shard)
