"""The schedules of torch.distributed.pipelining: the model chunks of each rank, and valid batches. No torch.

name         torch's                 chunks per rank  laid out   micro-batches M of P ranks
-----------  ----------------------  ---------------  ---------  -----------------------------
gpipe        GPipe                   1                           any
1f1b         1F1B                    1                           M >= P
interleaved  Interleaved1F1B         2                looped     M // P rounds must divide M
zero-bubble  InterleavedZeroBubble   2                looped     M // P rounds must divide M
zbv          ZBVZeroBubble           2                in a V     any
"""

from __future__ import annotations

from typing import NamedTuple

from zero3d.errors import ConfigError
from zero3d.spec.mesh import SPLIT_BACKWARDS

SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved": ("Interleaved1F1B", 2, False),
    "zero-bubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
}

DEFAULT = "1f1b"
IN_A_FILE = "micro-batches (in a file train.accumulate = train.batch / (train.micro_batch x dp))"


class Schedule(NamedTuple):
    """One of torch's schedules: how many model chunks a rank has, and whether they are laid out in a V."""

    name: str
    torch: str
    chunks_per_rank: int
    in_a_v: bool

    @classmethod
    def of(cls, name: str | None = None) -> Schedule:
        """Return the schedule of this name, 1f1b for None. Raises ConfigError."""
        name = DEFAULT if name is None else name
        if name not in _BY_NAME:
            raise ConfigError(f"schedule {name!r} is unknown: pass one of {', '.join(_BY_NAME)}.")
        return _BY_NAME[name]

    @classmethod
    def requested(cls, pp: int, name: str | None, blocks: str | None) -> Schedule:
        """Return the schedule of an Engine. Raises ConfigError for a pipeline's options without a pipeline."""
        options = {"schedule": name, "blocks": blocks}
        passed = [f"{key}={value!r}" for key, value in options.items() if value is not None]
        if pp == 1 and passed:
            raise ConfigError(
                f"{', '.join(passed)} {'is' if len(passed) == 1 else 'are'} for a pipeline, and pp is 1: pass "
                "mesh=zero3d.Mesh(pp=2) or more (mesh.pp in a file), or leave it out."
            )
        return cls.of(name)

    @property
    def splits_backward(self) -> bool:
        """Whether it takes gradients of inputs and of weights apart."""
        return self.name in SPLIT_BACKWARDS

    def rank_of(self, chunk: int, ranks: int) -> int:
        """Return the rank that has a chunk."""
        return next(rank for rank in range(ranks) if chunk in self.chunks_of(rank, ranks))

    def check_blocks(self, blocks: int, ranks: int, name: str) -> None:
        """Raise ConfigError where the list called `name` has fewer blocks than there are chunks."""
        if blocks >= ranks * self.chunks_per_rank:
            return
        if self.chunks_per_rank == 1:
            problem, keys = f"pp={ranks} pipeline stages need a block each, and {name} has {blocks}", "mesh.pp"
        else:
            keys = "mesh.pp, mesh.schedule"
            problem = (
                f"schedule {self.name!r} puts {self.chunks_per_rank} model chunks on each of {ranks} pipeline stages "
                f"= {ranks * self.chunks_per_rank} chunks, and {name} has {blocks} block{'s' if blocks > 1 else ''}"
            )
        raise ConfigError(f"{problem}: pass {', or '.join(self._alternatives(blocks, ranks))} ({keys} in a file).")

    def _alternatives(self, blocks: int, ranks: int) -> list[str]:
        """Return settings that so few blocks allow: fewer pipeline stages, another schedule, or no pipeline."""
        settings = [_at_most(blocks // self.chunks_per_rank)] if blocks >= 2 * self.chunks_per_rank else []
        if self.chunks_per_rank > 1 and blocks > 1:
            fewer = "" if blocks >= ranks else f"{_at_most(blocks)} with "
            settings.append(f"{fewer}schedule='{DEFAULT}'")
        return settings or ["pp=1"]

    def check(self, micro_batches: int, ranks: int) -> None:
        """Raise ConfigError for a number of micro-batches that torch's schedule cannot take."""
        if self.name == "1f1b" and micro_batches < ranks:
            raise ConfigError(
                f"schedule '1f1b' needs a micro-batch for each of {ranks} pipeline stages, and a step has "
                f"{micro_batches}: pass {ranks} or more {IN_A_FILE}, or schedule='gpipe' (mesh.schedule)."
            )
        rounds = max(1, micro_batches // ranks)
        if self.name in ("interleaved", "zero-bubble") and micro_batches % rounds:
            below, above = (
                next(m for m in numbers if m % max(1, m // ranks) == 0)
                for numbers in (range(micro_batches, 0, -1), range(micro_batches, 2 * micro_batches + 1))
            )
            raise ConfigError(
                f"schedule {self.name!r} runs micro-batches in rounds of equal size, and {micro_batches} over {ranks} "
                f"pipeline stages make {micro_batches} // {ranks} = {rounds} rounds, which do not divide "
                f"{micro_batches}: pass {below} or {above} {IN_A_FILE}, or schedule='1f1b' (mesh.schedule)."
            )

    def chunks_of(self, rank: int, ranks: int) -> list[int]:
        """Return the chunks of one rank."""
        if self.in_a_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.chunks_per_rank)]


_BY_NAME = {name: Schedule(name, *row) for name, row in SCHEDULES.items()}


def _at_most(pp: int) -> str:
    return f"pp={pp}" if pp <= 2 else f"pp={pp} or less"
