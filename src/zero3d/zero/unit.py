"""A unit: the parameters gathered, released and reduced together.

    Weights     full  [total]    compute dtype   every parameter is a view into it while gathered
                shard [total/N]  compute dtype   this rank's slice; a view of full where full is kept
                master           fp32            of what this rank updates; the shard itself in fp32, and when frozen
    Gradients   full  [total]    local gradients of this rank, on their way to the reduction
                shard [total/N]  reduced dtype   the sum over ranks of this rank's slice

    parameters   SHARDED -> GATHERING -> FULL (<-> HELD: gathered, but nobody's turn to read) -> SHARDED
    gradients    EMPTY -> FILLING -> REDUCING -> REDUCED (-> FILLING when more arrive) -> EMPTY
                          FILLING -> SUMMED (-> FILLING) -> REDUCING in the fixed tree of exact.py

Note 1, placeholders. While SHARDED a parameter's data is one NaN expanded to its shape: reading
a view of a freed storage is a segmentation fault, reading a NaN is not. Each parameter has its
own, so that a write which lands on it is noticed at the next gather.

Note 2, one storage per unit for ever. Autograd saves views of `full`; freeing and refilling that
same storage brings them alive again, which is why a release between forward and backward is free.

Note 3, where the sum may live. When local gradients already have the reduced dtype and the whole
buffer is kept, the shard is this rank's slot of the buffer. Gradients that arrive after a
reduction would overwrite it, so it is stashed until the next reduction has been added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero3d.distributed.collectives import Comm, Pending, same_memory
from zero3d.errors import LayoutError
from zero3d.memory.arena import Arena
from zero3d.precision import to_compute
from zero3d.zero.layout import Piece, UnitLayout
from zero3d.zero.stages import Stage

DONE = Pending(lambda: None)


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()
    HELD = auto()
    EMPTY = auto()
    FILLING = auto()
    SUMMED = auto()
    REDUCING = auto()
    REDUCED = auto()


@dataclass(frozen=True)
class Policy:
    """How all units of an engine behave.

    master  dtype of masters and reduced gradients
    wire    dtype in which gradients are reduced; they travel in a narrower one where nothing is rounded
    poison  fill released storages with NaN: finds early releases
    """

    stage: Stage
    release: str
    reduce: str
    accumulate: int
    master: torch.dtype
    wire: torch.dtype
    poison: bool = False


class Setting(NamedTuple):
    """What all units of an engine share. gradients: who owns a unit's, `Gradients` by default."""

    policy: Policy
    comm: Comm
    arena: Arena
    gradients: Callable[[str, UnitLayout, torch.dtype, Setting], Gradients] | None = None

    def slot(self, full: Tensor) -> Tensor:
        """This rank's slice of a unit's storage."""
        return full.view(self.comm.size, -1)[self.comm.rank]


class Weights:
    """Owns a unit's parameters: their storage, this rank's shard and its master."""

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
        else:
            self.full = setting.arena.borrow("gathered", layout.total, dtype)
        self.views = _views(self.full, layout)
        self.shard = setting.slot(self.full)
        if not self._keeps_full:
            self.shard = setting.arena.allocate("parameters", layout.shard, layout.used_per_shard, dtype)
        self.master = self.held
        self._placeholders = [placeholder(p, dtype, self.full.device) for p in params]
        self._adopt(fill)
        self._point_at(self.views)
        self._versions = [p._version for p in self.params]
        if self.sharded:
            self.release()

    @property
    def held(self) -> Tensor:
        """What this rank updates, in compute dtype: its shard, everything at stage 0."""
        return self.full if self.updates_all else self.shard

    @property
    def used(self) -> Fraction | int:
        """Parameters that `held` stands for, padding apart."""
        return self.layout.numel if self.updates_all else self.layout.used_per_shard

    def whole_pieces(self) -> list[Piece]:
        """Every parameter as one piece of `full`."""
        return [Piece(i, 0, s.numel, s.start) for i, s in enumerate(self.layout.slots) if s.numel]

    def update_pieces(self, rank: int) -> list[Piece]:
        """The pieces of `held`, in slot order."""
        return self.whole_pieces() if self.updates_all else self.layout.pieces(rank)

    def _adopt(self, fill: Callable[[Tensor], None]) -> None:
        """Take this rank's slice [total/N] and, where more is held, the others' ((N-1)/N Psi elements)."""
        comm, dtype, wide = self._setting.comm, self.full.dtype, self._setting.policy.master
        if self.trainable and dtype != wide:
            self.master = self._setting.arena.allocate("optimizer", self.held.numel(), self.used, wide)
            own = self._setting.slot(self.master) if self.updates_all else self.master
            fill(own)
            if self.updates_all:
                comm.all_gather(self.master, own, "-").wait()
            to_compute(self.master, dtype, out=self.held)
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
        """Complete a gather: parameters are views of `full`."""
        self._pending.wait()
        if self.state in (State.GATHERING, State.HELD):
            self._point_at(self.views)
            self.state = State.FULL

    def hold(self) -> None:
        """Keep `full`, but let parameters read as NaN: a use now could not be followed into its backward."""
        self.check()
        self._point_at(self._placeholders)
        self.state = State.HELD

    def release(self) -> None:
        """Back to placeholders; frees `full` (kept under release="every_step": stale, but for the shard in it)."""
        self.ready()
        self.hold()
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

    def refresh(self) -> Pending:
        """Masters to weights, and at stages 1 and 2 to all ranks ((N-1)/N Psi elements per rank)."""
        if self.master is not self.held:
            to_compute(self.master, self.held.dtype, out=self.held)
        if self.sharded or self.updates_all:
            return DONE
        return self._setting.comm.all_gather(self.full, self.shard, self.name)

    def absorb(self) -> bool:
        """Keep what was written into gathered parameters; true if anything was.

        A master changes only where the weight differs from its cast, so that reading costs no bit.
        """
        written = [p._version for p in self.params] != self._versions
        self._versions = [p._version for p in self.params]
        own = self.full if self.updates_all else self._setting.slot(self.full)
        if self.sharded and not torch.equal(_bits(own), _bits(self.shard)):
            self.shard.copy_(own)
            written = True
        if self.master is not self.held:
            changed = _bits(own) != _bits(to_compute(self.master, own.dtype))
            if bool(changed.any()):
                self.master[changed] = own[changed].to(self.master.dtype)
                written = True
        return written

    def share(self) -> None:
        """Make every rank's gathered parameters agree after writes: each slice's owner wins."""
        self._setting.comm.all_gather(self.full, self.shard, self.name).wait()


class Gradients:
    """Owns a unit's gradients from autograd to the reduced shard."""

    def __init__(self, name: str, layout: UnitLayout, dtype: torch.dtype, setting: Setting) -> None:
        self._name, self._layout, self._setting, self._arena = name, layout, setting, setting.arena
        self._wide = setting.policy.master
        self.full: Tensor | None = None
        self._views: list[Tensor] = []
        self.shard: Tensor
        self.state = State.EMPTY
        self._filled: set[int] = set()
        self._summed = False  # the shard already holds a sum of this step
        self._stash: Tensor | None = None  # Note 3
        self._pending = DONE
        self._keep(dtype)

    def _keep(self, dtype: torch.dtype) -> None:
        """Allocate what is held between steps."""
        policy, layout, setting, arena = self._setting.policy, self._layout, self._setting, self._arena
        self._wire = policy.wire if policy.wire.itemsize >= dtype.itemsize else policy.master
        self._transient = policy.reduce == "every_micro_batch"
        keep_wide = policy.accumulate > 1 or not policy.stage.shards_optimizer
        self._local = policy.master if keep_wide and not self._transient else dtype
        # In which a single backward's gradients reach their owners: by plan, since ranks must agree on it.
        self.travels = setting.comm.travels(self._local, self._wire)
        if not self._transient:
            self._use(arena.allocate("gradients", layout.total, layout.numel, self._local))
        if self.full is not None and self._local == self._wide:
            self.shard = setting.slot(self.full)
        else:
            self.shard = arena.allocate("gradients", layout.shard, layout.used_per_shard, policy.master)

    def _use(self, full: Tensor) -> None:
        self.full, self._views = full, _views(full, self._layout)

    @property
    def accumulates(self) -> bool:
        """Local gradients are kept in the reduced dtype, by plan or since a second one came."""
        return not self._transient and self._local == self._wide

    @property
    def micro_batches(self) -> int:
        """Of a step with this memory, for `stages.engine_bytes`."""
        return 2 if self.accumulates else 1

    @property
    def buffers(self) -> list[Tensor]:
        """What is kept between steps."""
        return [self.shard] if self.full is None else [self.full, self.shard]

    @property
    def whole(self) -> Tensor:
        """All reduced gradients, once `gather` is done (stage 0)."""
        assert self.full is not None
        return self.full

    @property
    def _in_place(self) -> bool:
        return self.full is not None and same_memory(self.shard, self._setting.slot(self.full))

    def take(self, index: int, grad: Tensor) -> None:
        """Copy one parameter's gradient in, or add it to what came before."""
        self._open()
        assert self.full is not None
        if index in self._filled:
            if self.full.dtype != self._wide:
                self._widen()
            self._views[index].add_(grad)
        else:
            self._views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
            self._filled.add(index)

    def _open(self) -> None:
        """Make room for local gradients."""
        self.finish()
        if self.state is State.REDUCED and self._in_place:
            self._stash = self._arena.borrow("bucket", self.shard.numel(), self.shard.dtype).copy_(self.shard)
        if self.full is None:
            self._use(self._arena.borrow("bucket", self._layout.total, self._local))
        self.state = State.FILLING

    def _widen(self) -> None:
        """Accumulate in the reduced dtype from the second contribution on."""
        old, layout = self.full, self._layout
        assert old is not None
        if self._transient:
            self._use(self._arena.borrow("bucket", layout.total, self._wide).copy_(old))
            self._arena.give_back("bucket", old)
            return
        wide = self._arena.allocate("gradients", layout.total, layout.numel, self._wide)
        self._use(wide.copy_(old))
        self._arena.free("gradients", old, layout.numel)
        self._local = self._wide
        if not self._summed:  # otherwise the separate shard keeps this step's sum until `reset`
            self._move_shard(wide)

    def _move_shard(self, full: Tensor) -> None:
        """From a buffer of its own to this rank's slot of the wide local buffer."""
        self._arena.free("gradients", self.shard, self._layout.used_per_shard)
        self.shard = self._setting.slot(full)

    def reduce(self, single: bool) -> None:
        """Start summing local gradients over the dp axis into what this rank owns.

        full  [Psi]    local dtype     consumed; parameters without a gradient count as zero
        shard [Psi/N]  reduced dtype   accumulated
        single: they are one backward's, so that the narrow dtype they may travel in rounds no sum of
        several. Moves (N-1)/N Psi elements per rank (reduce-scatter, ZeRO section 7).
        """
        self._open()
        assert self.full is not None
        for index, view in enumerate(self._views):
            if index not in self._filled:
                view.zero_()
        add = self._summed and not self._in_place
        wire = self.travels if single else self._wire
        self._pending = self._setting.comm.reduce_scatter(self.full, self.shard, self._name, wire, add)
        self.state = State.REDUCING

    def finish(self) -> None:
        """Complete a reduction under way."""
        if self.state is not State.REDUCING:
            return
        self._pending.wait()
        if self._stash is not None:
            self.shard.add_(self._stash)
            self._drop_stash()
        self._filled.clear()
        self._summed = True
        self._drop_bucket()
        self.state = State.REDUCED

    def gather(self) -> Pending:
        """Every rank's reduced gradients to all, the second half of stage 0's all-reduce."""
        return self._setting.comm.all_gather(self.whole, self.shard, self._name)

    def close(self) -> None:
        """A backward that ends in no reduction has ended."""

    def complete(self) -> None:
        """Nothing more comes in this step."""
        self.finish()

    def reset(self) -> None:
        """Forget this step's gradients."""
        self.finish()
        self._drop_stash()
        self._drop_bucket()
        self._filled.clear()
        self._summed = False
        self.state = State.EMPTY
        if self.full is not None and self.accumulates and not self._in_place:
            self._move_shard(self.full)

    def _drop_stash(self) -> None:
        if self._stash is not None:
            self._arena.give_back("bucket", self._stash)
            self._stash = None

    def _drop_bucket(self) -> None:
        if self._transient and self.full is not None:
            self._arena.give_back("bucket", self.full)
            self.full, self._views = None, []


class Unit:
    """Parameters handled together: one dtype, all trainable or all frozen.

    fill      writes this rank's slice [total/N] of the first weights
    deferred  its gradients may come in several parts (root unit, tied parameters): reduced last
    users     tokens of whoever needs the full parameters now
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        layout: UnitLayout,
        dtype: torch.dtype,
        setting: Setting,
        fill: Callable[[Tensor], None],
        deferred: bool = False,
    ) -> None:
        self.name, self.layout, self.dtype, self.deferred = name, layout, dtype, deferred
        self.users: set[object] = set()
        self.weights = Weights(name, [params[slot.name] for slot in layout.slots], layout, dtype, setting, fill)
        owner = setting.gradients or Gradients
        self.grads = owner(name, layout, dtype, setting) if self.weights.trainable else None

    @property
    def gradients(self) -> Gradients:
        """Of a trainable unit."""
        assert self.grads is not None, f"{self.name} is frozen"
        return self.grads


def _views(full: Tensor, layout: UnitLayout) -> list[Tensor]:
    return [full[s.start : s.start + s.numel].view(s.shape) for s in layout.slots]


def placeholder(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN in the shape of a parameter that is elsewhere (Note 1)."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(p.shape)


def _bits(values: Tensor) -> Tensor:
    """The raw bits, so that NaNs and signed zeros compare as what they are."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])
