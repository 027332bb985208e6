"""A unit's parameters: gathered into one storage, released, updated from their master.

    full    [total]    compute dtype   every parameter is a view into it while gathered
    shard   [total/N]  compute dtype   this rank's slice; a view of full where full is kept
    master             fp32            of what this rank updates; the shard itself in fp32, and when frozen

Note 1, placeholders. While SHARDED a parameter's data is one NaN expanded to its shape: reading
a view of a freed storage is a segmentation fault, reading a NaN is not. Each parameter has its
own, so that a write which lands on it is noticed at the next gather.

Note 2, one storage per unit for ever. Autograd saves views of `full`; freeing and refilling that
same storage brings them alive again, which is why a release between forward and backward is free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.distributed.axis import DONE, Pending
from zero3d.distributed.collectives import same_memory
from zero3d.errors import LayoutError, Zero3dError
from zero3d.precision import to_compute
from zero3d.zero.arriving import arrived, expect
from zero3d.zero.layout import Piece, UnitLayout
from zero3d.zero.policy import Setting, State, parameter_views
from zero3d.zero.streams import compute_stream, wait_on


class Weights:
    """Owns a unit's parameters: their storage, this rank's shard and its master.

    arriving  new weights were left on their way (`leave`)
    """

    arriving = False

    def __init__(
        self, name: str, params: list[nn.Parameter], layout: UnitLayout, dtype: torch.dtype, setting: Setting,
        fill: Callable[[Tensor], None],
    ) -> None:  # fmt: skip
        self.name, self.params, self.layout, self._setting = name, params, layout, setting
        self.trainable = params[0].requires_grad
        self.sharded = setting.policy.stage.shards_parameters
        self.updates_all = not setting.policy.stage.shards_optimizer  # every rank, every parameter (stage 0)
        self._keeps_full = not self.sharded or setting.policy.release == "every_step"
        self.state = State.FULL
        self._pending = DONE
        if self._keeps_full:
            self.full = setting.arena.allocate("parameters", layout.total, layout.numel, dtype)
            self.shard = setting.slot(self.full)
        else:
            self.full = setting.arena.borrow("gathered", layout.total, dtype)
            self.shard = setting.arena.allocate("parameters", layout.shard, layout.used_per_shard, dtype)
        self.views = parameter_views(self.full, layout)
        self.master = self.shard_or_full
        self._placeholders = [placeholder(p, dtype, self.full.device) for p in params]
        self._adopt(fill)
        self._point_at(self.views)
        self._versions = [p._version for p in self.params]
        if self.sharded:
            self.release()

    @property
    def shard_or_full(self) -> Tensor:
        """What this rank updates, in compute dtype: its shard, everything at stage 0."""
        return self.full if self.updates_all else self.shard

    @property
    def used(self) -> Fraction | int:
        """Parameters that `shard_or_full` stands for, padding apart."""
        return self.layout.numel if self.updates_all else self.layout.used_per_shard

    def update_pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of `shard_or_full`, in slot order."""
        return self.layout.whole_pieces() if self.updates_all else self.layout.pieces(rank)

    def _adopt(self, fill: Callable[[Tensor], None]) -> None:
        """Take the first weights: this rank's slice [total/N] and, where all are kept, all ((N-1)/N Psi elements)."""
        comm, dtype, wide = self._setting.comm, self.full.dtype, self._setting.policy.master
        if self.trainable and dtype != wide:
            self.master = self._setting.arena.allocate("optimizer", self.shard_or_full.numel(), self.used, wide)
            slot = self._setting.slot(self.master) if self.updates_all else self.master
            fill(slot)
            if self.updates_all:
                comm.all_gather(self.master, slot, "-").wait()
            to_compute(self.master, dtype, out=self.shard_or_full)
        else:
            fill(self.shard)
        if not self.sharded:
            comm.all_gather(self.full, self.shard, "-").wait()

    # --- gather and release ---------------------------------------------------------------------

    def gather(self) -> None:
        """Start filling `full` from all shards; moves (N-1)/N Psi elements per rank."""
        assert self.state is State.SHARDED
        self.check()
        if not self._keeps_full:
            self._setting.arena.fill("gathered", self.full)
        self._pending = self._setting.comm.all_gather(self.full, self.shard, self.name)
        self.state = State.GATHERING

    def ready(self) -> None:
        """Complete a gather or a refresh: parameters are views of `full`."""
        if self.arriving:
            self._arrive()
        self._pending.wait()
        if self.state in (State.GATHERING, State.KEPT):
            self._point_at(self.views)
            self.state = State.FULL

    def keep(self) -> None:
        """Keep `full`, but let parameters read as NaN: a use now could not be followed into its backward."""
        self.check()
        self._point_at(self._placeholders)
        self.state = State.KEPT

    def release(self) -> None:
        """Go back to placeholders and free `full` (kept under release="every_step": stale, but for the shard in it)."""
        self.ready()
        self.keep()
        if not self._keeps_full:
            self._setting.arena.drain("gathered", self.full, self._setting.policy.poison)
        self.state = State.SHARDED

    def _point_at(self, targets: list[Tensor]) -> None:
        for p, target in zip(self.params, targets, strict=True):
            p.data = target

    def check(self) -> None:
        """Raise LayoutError if a parameter was written or re-pointed behind the engine's back."""
        targets = self.views if self.state is State.FULL else self._placeholders
        for slot, p, target, version in zip(self.layout.slots, self.params, targets, self._versions, strict=True):
            if p.requires_grad != self.trainable:
                what = "was frozen" if self.trainable else "was unfrozen"
            elif p._version != version:
                what = "was written in place" if same_memory(p, target) else "was replaced"
            elif not same_memory(p, target):
                what = "has other data than its unit gave it"
            else:
                continue
            raise LayoutError(
                f"parameter {slot.name!r} {what} outside engine.full_params(): the change would be lost. "
                "Change weights inside `with engine.full_params():`, or before the Engine is built "
                "(requires_grad_, resize_token_embeddings, tie_weights, LoRA merges)."
            )

    # --- after an update ------------------------------------------------------------------------

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """The master and the weights that it is cast to; None where it is they."""
        return None if self.master is self.shard_or_full else (self.master, self.shard_or_full)

    def refresh(self) -> Pending:
        """Cast the master to weights, and `send` them."""
        self.ready()
        if self.cast is not None:
            master, weights = self.cast
            to_compute(master, weights.dtype, out=weights)
        return self.send()

    def send(self) -> Pending:
        """Start to send weights that were cast to all ranks at stages 1 and 2; (N-1)/N Psi elements each.

        `ready` waits for them.
        """
        if self.sharded or self.updates_all:
            return DONE
        self._pending = self.share()
        return self._pending

    def leave(self) -> None:
        """Leave what `send` began on its way where whatever touches a parameter will wait for it; else wait now."""
        if not self._pending.over:
            self._arriving_at = compute_stream(self._setting.arena.device)
            self.arriving = expect(self.params, self.ready)
        if not self.arriving:
            self.ready()

    @_disable_dynamo
    def _arrive(self) -> None:
        """Wait for what was left on its way. Raises Zero3dError where an earlier wait failed."""
        if self._pending.failed:
            raise Zero3dError(f"new weights of unit {self.name!r} did not arrive: look at the first error.")
        wait_on(self._arriving_at, self._pending)
        self.arriving = False
        arrived(self.params)

    def __del__(self) -> None:
        """Complete what was left on its way: its memory goes, and peers still want what this rank sends."""
        if self.arriving:
            with suppress(Zero3dError, RuntimeError):
                wait_on(self._arriving_at, self._pending)

    def absorb(self) -> bool:
        """Keep what was written into gathered parameters, and return whether anything was.

        A master changes only where the weight differs from its cast, so that reading costs no bit.
        """
        written = [p._version for p in self.params] != self._versions
        self._versions = [p._version for p in self.params]
        values = self.full if self.updates_all else self._setting.slot(self.full)
        if self.sharded and not torch.equal(_bits(values), _bits(self.shard)):
            self.shard.copy_(values)
            written = True
        if self.master is not self.shard_or_full:
            changed = _bits(values) != _bits(to_compute(self.master, values.dtype))
            if bool(changed.any()):
                self.master[changed] = values[changed].to(self.master.dtype)
                written = True
        return written

    def share(self) -> Pending:
        """Make every rank's gathered parameters agree after writes: each slice's owner wins."""
        return self._setting.comm.all_gather(self.full, self.shard, self.name)


def placeholder(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one NaN in the shape of a parameter that is released (Note 1)."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(p.shape)


def _bits(values: Tensor) -> Tensor:
    """Return the raw bits, so that NaNs and signed zeros compare as what they are."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])
