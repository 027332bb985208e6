"""The schedules of torch.distributed.pipelining: which rank has which parts, and which numbers of micro-batches fit.

name         torch's                 parts per rank   laid out   micro-batches M of P ranks
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

SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved": ("Interleaved1F1B", 2, False),
    "zero-bubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
}


class Schedule(NamedTuple):
    """A schedule of torch: how many parts a rank has, and whether they are laid out in a V."""

    name: str
    torch: str
    parts_per_rank: int
    in_a_v: bool

    @classmethod
    def of(cls, name: str) -> Schedule:
        """By our name. Raises ConfigError."""
        if name not in SCHEDULES:
            raise ConfigError(f"schedule {name!r} is unknown: pass one of {', '.join(SCHEDULES)}.")
        return cls(name, *SCHEDULES[name])

    @property
    def splits_backward(self) -> bool:
        """Takes gradients of inputs and of weights apart."""
        return "ZeroBubble" in self.torch

    def rank_of(self, part: int, ranks: int) -> int:
        """Who has a part."""
        return next(rank for rank in range(ranks) if part in self.parts_of(rank, ranks))

    def check(self, micro_batches: int, ranks: int) -> None:
        """Raise ConfigError for a number of micro-batches that torch's schedule cannot take."""
        if self.name == "1f1b" and micro_batches < ranks:
            raise ConfigError(
                f"{micro_batches} micro-batches are fewer than {ranks} pipeline stages, and schedule '1f1b' needs one "
                f"for each: pass {ranks} or more micro-batches, or schedule='gpipe'."
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
                f"{micro_batches}: pass {below} or {above} micro-batches, or schedule='1f1b'."
            )

    def parts_of(self, rank: int, ranks: int) -> list[int]:
        """The parts of one rank."""
        if self.in_a_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.parts_per_rank)]
