"""What a simulation finds out, as plain data; `to_json` and `from_json` are inverse.

Simulation     a configuration, its degrees and batch, the pipeline's orders; one RankResult per class of ranks
RankResult     states, the peak and its instant, a timeline, traffic and FLOPs of one rank in one step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Instant:
    """Where a step is.

    phase        forward | backward | recomputed | step; empty before the first one
    micro_batch  from 0; -1 in the step
    part         of the pipeline; 0 without one
    """

    phase: str
    micro_batch: int
    part: int
    module: str


@dataclass(frozen=True)
class Alive:
    """A tensor: its bytes at the instant in question, and where it was made."""

    nbytes: int
    category: str
    dtype: str
    shape: tuple[int, ...]
    made: Instant


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at one time: event of the timeline, instant, bytes by category, ten largest tensors."""

    nbytes: int
    event: int
    at: Instant
    categories: Mapping[str, int]
    largest: tuple[Alive, ...]


@dataclass(frozen=True)
class Mark:
    """From this event on the step is there."""

    event: int
    at: Instant


@dataclass(frozen=True)
class Timeline:
    """Bytes by category at some events of a step; an event is a storage that is born, dies or changes its size.

    rows   one per entry of `events`, a number per category
    total  events in all
    """

    categories: tuple[str, ...]
    events: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    marks: tuple[Mark, ...]
    total: int


@dataclass(frozen=True)
class States:
    """Bytes of one category: held by the arena, and by formula (stages.engine_bytes; padding from the layouts)."""

    category: str
    held: int
    formula: int


@dataclass(frozen=True)
class Sent:
    """What this rank sends in a step, which is what it receives."""

    op: str
    axis: str
    unit: str
    calls: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Work:
    """Multiplications and additions of a step: in `phase`, in a pipeline's actions of a kind, of a part."""

    phase: str
    kind: str
    part: int
    flops: int


@dataclass(frozen=True)
class Did:
    """One action of a pipeline: kind F, B, I or W (pipeline/actions.py)."""

    kind: str
    part: int
    micro_batch: int


@dataclass(frozen=True)
class RankResult:
    """One step of one rank, after a first one.

    alike        dp ranks of the same pipeline stage that hold and do the same, this one's among them
    stands_for   ranks in all: those, each with all its tp ranks
    elements     parameters that this rank's units have, padding apart
    seconds, resident  what the simulation took, and the most memory of its process in bytes
    """

    rank: int
    pp: int
    dp: int
    tp: int
    alike: tuple[int, ...]
    stands_for: int
    elements: int
    states: tuple[States, ...]
    peak: Peak
    timeline: Timeline
    sent: tuple[Sent, ...]
    work: tuple[Work, ...]
    did: tuple[Did, ...]
    orders: tuple[tuple[Did, ...], ...]
    seconds: float
    resident: int

    def flops(self, phase: str) -> int:
        """Of a phase: forward, backward or recomputed."""
        return sum(work.flops for work in self.work if work.phase == phase)


@dataclass(frozen=True)
class Simulation:
    """One rank of each class of a mesh.

    backend   whose collectives the ranks would use
    notes     what was left out or assumed
    """

    model: str
    stage: int
    precision: str
    pp: int
    dp: int
    tp: int
    schedule: str
    batch: int
    micro_batch: int
    accumulate: int
    length: int
    backend: str
    ranks: tuple[RankResult, ...]
    notes: tuple[str, ...]


def to_json(value: Any) -> dict[str, Any]:
    """A result as plain values."""
    return asdict(value)


def from_json(kind: type[T], tree: Any) -> T:
    """A result of this kind from what `to_json` gave."""
    made: T = _read(kind, tree)
    return made


def _read(kind: Any, tree: Any) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: _read(hints[field.name], tree[field.name]) for field in fields(kind)})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in tree)
    return tree
