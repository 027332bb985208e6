"""exact=True: the same bits at any number of data-parallel ranks.

The micro-batches of a step are one global list, its *leaves*. Everything that is summed over them (gradients,
losses, weights) is summed in one binary tree over that list, whatever the number N of ranks:

    leaf    0   1   2   3   4   5   6   7          reduce every micro-batch   rank r's k-th is leaf k N + r
             \\ /     \\ /     \\ /     \\ /             reduce every step          rank r's k-th is leaf r M + k
              01      23      45      67
                \\    /          \\    /              a list that is no power of two long is filled up with zeros:
                 0123            4567              what is left over is added from small to large
                     \\          /
                       01234567

                        leaves of one rank                   leaves of several ranks
    every micro-batch   2nd: a `Counter` of shards           1st: all_to_all, then `add_tree` over the N parts
    every step          1st: a `Counter` of whole buffers    2nd: the same

A leaf travels in the dtype of its backward, sums in that of masters. N must be a power of two that divides the
layout's 64 segments: then vector tails, padding and pieces of checkpoints are those of every other such N. The norm
is that of 64 norms, one of each segment of all units; dropout's seed follows from the number of the leaf. Matrix
products depend on their shapes, so the size of a micro-batch, tp and pp must stay as they are.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm, same_memory
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.nested import tensors_in
from zero3d.zero.gradients import Gradients
from zero3d.zero.layout import CANONICAL
from zero3d.zero.optimizer import OwnedPiece, ShardedOptimizer
from zero3d.zero.policy import State
from zero3d.zero.stages import counter_buffers


class Leaves:
    """Which leaf is which, and what follows from its number.

    micro_batches  of a rank in the present step, which numbers need where gradients are reduced every step
    seed, batches  of dropout: rank 0's at construction, and steps so far, skipped ones too
    rows           of a micro-batch, as `train_batch` saw it last, here or before a checkpoint
    """

    def __init__(self, comm: Comm, per_step: bool, micro_batches: int, seed: int) -> None:
        self.comm, self.per_step = comm, per_step
        self._usual = micro_batches
        self.seed, self.batches = seed, 0
        self.rows: int | None = None
        self.begin(micro_batches)

    def begin(self, micro_batches: int | None = None) -> None:
        """A step of so many, or of as many as usual. Raises ConfigError."""
        micro_batches = self._usual if micro_batches is None else micro_batches
        if self.per_step and micro_batches & (micro_batches - 1):
            raise ConfigError(
                f"exact=True with reduce='every_step' sums a rank's micro-batches before those of others, in halves: "
                f"{micro_batches} per rank and step is no power of two. Pass {1 << micro_batches.bit_length() - 1} or "
                f"{1 << micro_batches.bit_length()}, or reduce='every_micro_batch' (stages 2 and 3)."
            )
        self.micro_batches = micro_batches

    def see(self, batch: Any) -> None:
        """The first micro-batch of a step: warn if it is not of the size of those before."""
        rows = next((len(t) for t in tensors_in(batch) if t.dim()), None)
        if rows != self.rows and None not in (rows, self.rows):
            warnings.warn(
                f"exact=True: micro-batches had {self.rows} rows and have {rows} now, and matrix products of other "
                "shapes have other bits: the curve is not that of the run before.",
                stacklevel=4,
            )
        self.rows = rows

    def end(self, count: int) -> None:
        """The step is over, `count` micro-batches of it on this rank. Raises ConfigError."""
        wanted = self.micro_batches
        if self.per_step and count != wanted:
            raise ConfigError(
                f"exact=True with reduce='every_step' needs to know how many micro-batches a rank's step has, to "
                f"number them: this one had {count}, and was to have {wanted}. Pass Engine(accumulate={count}), or "
                "call engine.train_batch(micro_batches)."
            )
        self.batches += 1

    @property
    def per_batch(self) -> int:
        """Leaves of a usual step."""
        return self._usual * self.comm.size

    def state(self, tp: int, pp: int) -> dict[str, Any]:
        """For a checkpoint; `covers`: degrees and rows with which a run that goes on from it has the bits of this."""
        fits = [1 << i for i in range(CANONICAL.bit_length()) if self.per_batch % (1 << i) == 0]
        covers = {"dp": fits, "tp": tp, "pp": pp, "rows": self.rows}
        return {"seed": self.seed, "batches": self.batches, "covers": covers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on drawing where `state` was."""
        self.seed, self.batches, self.rows = int(state["seed"]), int(state["batches"]), state["covers"]["rows"]

    def number(self, k: int) -> int:
        """The leaf that is this rank's k-th micro-batch."""
        return self.comm.rank * self.micro_batches + k if self.per_step else k * self.comm.size + self.comm.rank

    def draw(self, k: int, part: int = 0) -> None:
        """Before the forward of this rank's k-th micro-batch through a part of the model: seed torch."""
        name = f"{self.seed} {self.batches} {self.number(k)} {part}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))

    def sum_of(
        self, seen: Sequence[tuple[Tensor, float | Tensor]], micro_batches: int, per_step: bool | None
    ) -> Tensor:
        """[2] sum and weight of all ranks' micro-batches, of which this one has `seen` all or none."""
        values = torch.zeros(micro_batches, 2, dtype=torch.float64, device=self.comm.device)
        for row, (total, weight) in zip(values, seen, strict=False):
            row[0], row[1] = total.detach().double(), weight
        return self.total(self.comm.exchange(values.flatten()).view(-1, micro_batches, 2), per_step)

    def total(self, values: Tensor, per_step: bool | None = None) -> Tensor:
        """[N, M, ...] of all ranks' micro-batches -> [...], the sum in the tree."""
        contiguous = self.per_step if per_step is None else per_step
        rows = (values if contiguous else values.transpose(0, 1)).flatten(0, 1)
        size = 1 << (len(rows) - 1).bit_length()
        rows = torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
        while len(rows) > 1:
            rows = rows[0::2] + rows[1::2]
        return rows[0]


def check_exact(n: int, per_step: bool, pp: int, reduces_in: tuple[torch.dtype, torch.dtype]) -> None:
    """Refuse what would not be exact. reduces_in: what was asked for, and what masters are. Raises ConfigError."""
    if n & (n - 1) or CANONICAL % n:
        near = [str(1 << n.bit_length() - 1), str(1 << n.bit_length())]
        ways = " or ".join(f"dp={each}" for each in near if int(each) <= CANONICAL) or f"dp={CANONICAL}"
        raise ConfigError(
            f"exact=True cuts a sum in halves and a unit in {CANONICAL} segments: dp={n} must be a power of two that "
            f"divides {CANONICAL}, and {CANONICAL} / {n} = {CANONICAL / n:.4g}. Pass {ways}, or exact=False."
        )
    if pp > 1 and not per_step:
        raise ConfigError(
            f"exact=True in a pipeline (pp={pp}) sums a rank's micro-batches before those of others: leave "
            "reduce='every_micro_batch' out."
        )
    asked, wide = (str(dtype).removeprefix("torch.") for dtype in reduces_in)
    if asked != wide:
        raise ConfigError(
            f"exact=True adds gradients up in {wide}, and reduce_dtype asks for {asked}: leave it out. Gradients of "
            "one micro-batch travel in the compute dtype all the same."
        )


# --- sums -------------------------------------------------------------------------------------------


def add_tree(parts: Sequence[Tensor], out: Tensor, arena: Arena) -> Tensor:
    """out = (p0 + p1) + (p2 + p3) + ... in halves, in the dtype of `out`; a power of two of parts."""
    if len(parts) == 1:
        return out if same_memory(parts[0], out) else out.copy_(parts[0])
    half = len(parts) // 2
    add_tree(parts[:half], out, arena)
    if half == 1:
        return out.add_(parts[1])
    scratch = arena.borrow("wire", out.numel(), out.dtype)
    out.add_(add_tree(parts[half:], scratch, arena))
    arena.give_back("wire", scratch)
    return out


class Counter:
    """A sum in halves of leaves that come one after another, as a binary counter adds one.

        leaf         0     1      2         3        4
        sums held    0     01     01, 2     0123     0123, 4          older first; 2 buffers at most for 5 leaves

    It keeps its `buffers`; there are as many as `stages.counter_buffers` says of the most leaves there have been.
    """

    def __init__(self, arena: Arena, elements: int, used: Fraction | int, dtype: torch.dtype) -> None:
        self._arena, self._elements, self._used, self._dtype = arena, elements, used, dtype
        self.buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._held: list[Tensor] = []
        self.count = 0

    def grow(self, buffers: int) -> Tensor:
        """Have so many buffers, at least; the first of them."""
        while len(self.buffers) < buffers:
            self.buffers.append(self._arena.allocate("gradients", self._elements, self._used, self._dtype))
            self._free.append(self.buffers[-1])
        return self.buffers[0]

    def push(self, parts: Sequence[Tensor]) -> None:
        """Add the sum of `parts`, the next leaf."""
        number, self.count = self.count, self.count + 1
        if not number & 1:
            self._held.append(add_tree(parts, self._free.pop(), self._arena))
            return
        if len(parts) == 1:
            self._held[-1].add_(parts[0])
        else:
            scratch = self._arena.borrow("wire", self._elements, self._dtype)
            self._held[-1].add_(add_tree(parts, scratch, self._arena))
            self._arena.give_back("wire", scratch)
        while (number := number >> 1) & 1:
            self._merge()

    def _merge(self) -> None:
        newer = self._held.pop()
        self._held[-1].add_(newer)
        self._free.append(newer)

    def open(self) -> Tensor:
        """An empty buffer, which the caller fills with the sum of all leaves."""
        self.count = 1
        self._held.append(self._free.pop())
        return self._held[0]

    def total(self) -> Tensor:
        """The sum of all leaves, after the last one."""
        while len(self._held) > 1:
            self._merge()
        return self._held[0]

    def clear(self) -> None:
        """Forget them."""
        self._free, self._held, self.count = list(self.buffers), [], 0


# --- gradients ----------------------------------------------------------------------------------


class ExactGradients(Gradients):
    """Owns a unit's gradients; every backward's are a leaf, which fills a bucket and is summed when it is over.

    every micro-batch   bucket -> all_to_all -> counter of shards -> shard
    every step, M = 1   bucket -> all_to_all -> shard
    every step, M > 1   bucket -> counter of whole buffers -> all_to_all -> shard, which is its slot of the sum
    """

    def __init__(self, leaves: Leaves, *given: Any) -> None:
        self._leaves, self._per_step = leaves, leaves.per_step
        super().__init__(*given)

    def _keep(self, dtype: torch.dtype) -> None:
        policy, layout = self._setting.policy, self._layout
        self._local, self._transient = dtype, True
        self._everywhere = not policy.stage.shards_optimizer  # stage 0: every rank needs them whole
        size, used = (layout.total, layout.numel) if self._per_step else (layout.shard, layout.used_per_shard)
        self._counter = Counter(self._arena, size, used, self._wide)
        self._alone: Tensor | None = None  # the shard of a step of one micro-batch
        self._most = 0
        self._provide(policy.accumulate)

    def _provide(self, micro_batches: int) -> None:
        """Have the memory for steps of so many."""
        if micro_batches <= self._most:
            return
        self._most, used = micro_batches, self._layout.used_per_shard
        self.travels = self._local if micro_batches == 1 or not self._per_step else self._wide
        if micro_batches == 1 and self._per_step and not self._everywhere:
            self.shard = self._alone = self._arena.allocate("gradients", self._layout.shard, used, self._wide)
            return
        if self._alone is not None:
            self._arena.free("gradients", self._alone, used)
            self._alone = None
        first = self._counter.grow(counter_buffers(micro_batches))
        self.shard = self._setting.slot(first) if self._per_step else first

    @property
    def micro_batches(self) -> int:
        """The most that a step has had."""
        return self._most

    @property
    def buffers(self) -> list[Tensor]:
        return self._counter.buffers if self._alone is None else [self._alone]

    @property
    def whole(self) -> Tensor:
        return self._counter.total()

    def _open(self) -> None:
        """Make room for a leaf."""
        self.finish()
        if self._per_step and self.state is State.REDUCED:
            raise ConfigError("exact=True: a backward came after the last one of its step. Call engine.step() first.")
        if self.full is None:
            self._use(self._arena.borrow("bucket", self._layout.total, self._local))
        self.state = State.FILLING

    def _leaf(self) -> Tensor:
        """The bucket, with zeros where no gradient came."""
        self._open()
        assert self.full is not None
        for index, view in enumerate(self._views):
            if index not in self._filled:
                view.zero_()
        return self.full

    def close(self) -> None:
        """A backward has ended: its leaf goes into the sum that is kept here."""
        leaf = self._leaf()
        self._provide(max(2, self._counter.count + 1))
        self._counter.push([leaf])
        self._drop_bucket()
        self._filled.clear()
        self.state = State.SUMMED

    def reduce(self, single: bool) -> None:
        """Start summing over the dp axis: this backward's leaf, or all of the step's. Moves (N-1)/N Psi elements."""
        if self._per_step and 0 < self._counter.count < self._leaves.micro_batches:
            self.close()
        source = self._counter.total() if self._per_step and self._counter.count else self._leaf()
        self._pending = self._setting.comm.all_to_all(source, self._name, self._sum)
        self.state = State.REDUCING

    def _sum(self, parts: list[Tensor]) -> None:
        """Add up what came from all ranks."""
        if not self._per_step:
            self._provide(self._counter.count + 1)
            self._counter.push(parts)
        elif self._alone is not None:
            self.shard = add_tree(parts, self._alone, self._arena)
        elif not self._counter.count:
            self.shard = add_tree(parts, self._setting.slot(self._counter.open()), self._arena)
        else:
            self.shard = self._setting.slot(self._counter.total())  # one of the parts
            total = self._arena.borrow("wire", self.shard.numel(), self.shard.dtype)
            self.shard.copy_(add_tree(parts, total, self._arena))
            self._arena.give_back("wire", total)

    def complete(self) -> None:
        self.finish()
        if not self._per_step:
            self.shard = self._counter.total()

    def reset(self) -> None:
        super().reset()
        self._counter.clear()


# --- the step -----------------------------------------------------------------------------------


class ExactOptimizer(ShardedOptimizer):
    """Weights and the norm in an order that N does not change. `step` takes all micro-batches' weights [M]."""

    def __init__(self, leaves: Leaves, *given: Any) -> None:
        self._leaves = leaves
        super().__init__(*given)

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, Tensor]:
        assert isinstance(weight, Tensor)
        orders = torch.tensor(self._comm.order_values(), dtype=torch.float64, device=weight.device)
        seen = self._comm.exchange(torch.cat([weight, orders]))
        hashes = seen[:, len(weight) :]
        total = self._leaves.total(seen[:, : len(weight)])
        rows = self._replica.exchange(torch.stack([total, (hashes != hashes[0]).any().double()]))
        return self._replica.count_once(rows)[:, 0].sum(), (rows[:, 1].sum() == 0).double()

    def _norm(self) -> Tensor:
        """Of the norms of 64 segments, each one the norm of its parts in model order; 64/N numbers per rank."""
        own = CANONICAL // self._comm.size
        parts = sorted(self._segment_grads(), key=lambda part: part[:2])
        norms = [(segment, o.order, o.name, torch.linalg.vector_norm(grad)) for segment, _, o, grad in parts]
        wide = self._units[0].weights.master.dtype if self._units else torch.float32
        partials = self._comm.exchange(self._replica.norms(norms, own, wide).double()).flatten().to(wide)
        norm: Tensor = torch.linalg.vector_norm(partials)
        return torch.where(partials.amin() < 0, partials.amin(), norm)

    def _segment_grads(self) -> Iterator[tuple[int, int, OwnedPiece, Tensor]]:
        """This rank's reduced gradients cut at segments: (segment, place in the model, whose, values)."""
        for owned, grad in self.shard_grads():
            if owned.unit in self._replica.copies:
                continue
            layout, shard = owned.unit.layout, owned.unit.gradients.shard
            begin = int(grad.storage_offset() - shard.storage_offset())
            for segment, low, high in layout.segments(begin, grad.numel()):
                yield segment, owned.order, owned, grad[low:high]
