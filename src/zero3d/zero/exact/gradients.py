"""A unit's gradients in exact mode: every backward's are one summand of a tree."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from zero3d.blueprint.layout import UnitLayout
from zero3d.errors import ConfigError
from zero3d.zero.exact.summands import Summands
from zero3d.zero.exact.sums import Counter, add_tree
from zero3d.zero.gradient_memory import GradientMemory
from zero3d.zero.gradient_shards import GradientShard
from zero3d.zero.gradients import Gradients
from zero3d.zero.unit_parts import State, UnitParts


class ExactGradients(Gradients):
    """Owns a unit's gradients; every backward's are a summand, which fills a bucket and is added when it is over."""

    reduced: ExactShard

    def __init__(self, summands: Summands, name: str, layout: UnitLayout, parts: UnitParts) -> None:
        self._summands = summands
        super().__init__(name, layout, parts, ExactShard)

    def fill_up(self) -> None:
        """Complete the summand, before `reduce`; where the step has several, add it to the sum that is kept here."""
        kept = self.reduced.kept_here
        if not kept:
            super().fill_up()
        elif kept < self._summands.micro_batches:
            self.close()

    def close(self) -> None:
        """Add the summand of the backward that has ended to the sum that is kept here."""
        super().fill_up()
        self.reduced.push_local()
        self.local.close()
        self.local.filled.clear()
        self.state = State.SUMMED


class ExactShard(GradientShard):
    """Owns a shard of the sum of all summands.

    every micro-batch   bucket -> all_to_all -> counter of shards -> shard
    every step, M = 1   bucket -> all_to_all -> shard
    every step, M > 1   bucket -> counter of whole buffers -> all_to_all -> shard, which is its slot of the sum

    What sources of experts have is added up, as a part of the tree, before the all_to_all. What copies of shards have
    is added up behind it, after every reduction, as a part of the tree, too: neighbours' sums are its lower levels.
    """

    def _keep(self) -> None:
        layout, local = self._layout, self._local
        self._per_step = not self.unit_plan.policy.often
        size, used = (local.elements, local.used) if self._per_step else (layout.shard, layout.used_per_shard)
        provide = partial(self._parts.gradient_memory, size, used, self._wide)
        self._counter = Counter(self._arena, size, self._wide, provide)
        self._alone: GradientMemory | None = None  # the shard of a step of one micro-batch
        self._most = 0
        self._provide(self.unit_plan.policy.summands)

    def _provide(self, micro_batches: int) -> None:
        """Allocate what steps of so many micro-batches need and is not there yet."""
        if micro_batches <= self._most:
            return
        self._most, used = micro_batches, self._layout.used_per_shard
        self.unit_plan = self.unit_plan.of_steps(micro_batches)
        if self._per_step and self.plan.shard:
            self._alone = self._parts.gradient_memory(self._layout.shard, used, self._wide)
            self._put(self._alone.buffer)
            return
        if self._alone is not None:
            self._alone.drop()
            self._alone = None
        first = self._counter.grow(self.plan.counters)
        if first.there:  # it is new; else the shard is in it
            self._put(self._slot(first.buffer) if self._per_step else first.buffer)

    def _slot(self, sums: Tensor) -> Tensor:
        return self._parts.slot(self._first_row(sums))

    @property
    def memory(self) -> list[GradientMemory]:
        return self._counter.memory if self._alone is None else [self._alone]

    @property
    def is_there(self) -> bool:
        return self._counter.count > 0 if self._alone is None else self._alone.there

    def provide(self) -> None:
        if self._alone is not None:
            self._alone.fill()
        elif not self._counter.count:
            sums = self._counter.open()
            self._put(self._slot(sums) if self._per_step else sums)

    @property
    def whole(self) -> Tensor:
        return self._first_row(self._counter.total())

    @property
    def kept_here(self) -> int:
        """Return how many summands of this step this rank has added up, without those of others."""
        return self._counter.count if self._per_step else 0

    def push_local(self) -> None:
        """Add a backward's summand to those of this rank."""
        assert self._local.buffer is not None
        self._provide(max(2, self._counter.count + 1))
        self._counter.push([self._local.buffer])

    def make_way(self, reduced: bool) -> None:
        """Raise ConfigError where the step's sum is over."""
        if self._per_step and reduced:
            raise ConfigError("exact=True: a backward came after the last one of its step. Call engine.step() first.")

    def reduce(self, single: bool) -> None:
        """Start summing over ranks: this backward's summand, or all of the step's. Moves (N-1)/N Psi elements."""
        source = self._counter.total() if self.kept_here else self._local.buffer
        assert source is not None
        self._pending = self._parts.comm.all_to_all(self._of_sources(source), self._name, self._sum)

    def _add_sources(self, rows: list[Tensor]) -> Tensor:
        self._sum_of_sources = self._arena.borrow("wire", len(rows[0]), self._wide)
        return add_tree(rows, self._sum_of_sources, self._arena)

    def _sum(self, terms: list[Tensor]) -> None:
        if not self._per_step:
            self._provide(self._counter.count + 1)
            self._push(terms)
            return
        self._sum_of_ranks(terms)
        self._over_copies(self.shard)

    def _push(self, terms: list[Tensor]) -> None:
        """Push what all ranks' summands of one number are together."""
        if self._parts.across.size == 1:
            self._counter.push(terms)
            return
        total = self._arena.borrow("bucket", self._layout.shard, self._wide)
        self._over_copies(add_tree(terms, total, self._arena))
        self._counter.push([total])
        self._arena.give_back("bucket", total)

    def _over_copies(self, shard: Tensor) -> None:
        if self._parts.across.size > 1:
            add_up = partial(add_tree, arena=self._arena)
            self._parts.across.all_reduce_tree(shard, self._name, add_up).wait()

    def _sum_of_ranks(self, terms: list[Tensor]) -> None:
        """Add up the only terms of a step, in the shard."""
        if self._alone is not None:
            self._put(add_tree(terms, self._alone.fill(), self._arena))
        elif not self._counter.count:
            self._put(add_tree(terms, self._slot(self._counter.open()), self._arena))
        else:
            self._put(self._slot(self._counter.total()))  # one of the terms
            total = self._arena.borrow("wire", self.shard.numel(), self.shard.dtype)
            self.shard.copy_(add_tree(terms, total, self._arena))
            self._arena.give_back("wire", total)

    def complete(self) -> None:
        if not self._per_step:
            self._put(self._counter.total())

    def reset(self) -> None:
        super().reset()
        self._whole_pieces = []  # of a buffer that may not be the next step's
        self._counter.clear()
