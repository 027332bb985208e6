"""The outcome of a simulation as plain data; `to_json` and `from_json` are inverse.

Simulation     a configuration, its degrees and batch, the pipeline's orders; one RankResult per class of ranks
RankResult     states, the peak and its instant, a timeline, traffic and FLOPs of one rank in one step

The keys of the JSON are the fields' names but for those of KEYS, which files and scripts know by another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from zero3d.distributed.degrees import Degrees

T = TypeVar("T")
KEYS = {"traffic": "sent", "actions": "did", "chunk": "part"}  # field -> key


@dataclass(frozen=True)
class Instant:
    """A position in a step.

    phase        forward | backward | recomputed | step; empty before the first one
    micro_batch  from 0; -1 in the step
    chunk        of the pipeline; 0 without one
    """

    phase: str
    micro_batch: int
    chunk: int
    module: str


@dataclass(frozen=True)
class LiveTensor:
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
    largest: tuple[LiveTensor, ...]


@dataclass(frozen=True)
class Mark:
    """The event from which on a step is at an instant."""

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
class StateEntry:
    """Bytes of one category at a place: held by an arena, and by formula (account.states, layouts, records)."""

    category: str
    held: int
    formula: int
    place: str = "device"


@dataclass(frozen=True)
class TrafficEntry:
    """A row of the ledger of a step: what this rank sends, which is what it receives."""

    op: str
    axis: str
    unit: str
    calls: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class FlopCount:
    """Multiplications and additions of a step: in `phase`, in a pipeline's actions of a kind, of a model chunk."""

    phase: str
    kind: str
    chunk: int
    flops: int


@dataclass(frozen=True)
class PipelineAction:
    """One action of a pipeline: kind F, B, I or W (pipeline/actions.py)."""

    kind: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class RankResult:
    """One step of one rank, after a first one.

    alike        dp ranks of the same pipeline stage that hold and do the same, this one's among them
    stands_for   ranks in all: those, each with all its tp ranks
    elements     parameters that this rank's units have, padding apart
    states       on the device; `away`: off it
    images       whether its sequences had images, of how many tokens; empty for a model that takes none
    seconds, resident  what the simulation took, and the most memory of its process in bytes
    """

    rank: int
    pp: int
    dp: int
    tp: int
    alike: tuple[int, ...]
    stands_for: int
    elements: int
    states: tuple[StateEntry, ...]
    peak: Peak
    timeline: Timeline
    traffic: tuple[TrafficEntry, ...]
    work: tuple[FlopCount, ...]
    actions: tuple[PipelineAction, ...]
    orders: tuple[tuple[PipelineAction, ...], ...]
    seconds: float
    resident: int
    away: tuple[StateEntry, ...] = ()
    images: str = ""

    def flops(self, phase: str) -> int:
        """Return the FLOPs of a phase: forward, backward or recomputed."""
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
    degrees: Degrees
    schedule: str
    batch: int
    micro_batch: int
    accumulate: int
    length: int
    backend: str
    ranks: tuple[RankResult, ...]
    notes: tuple[str, ...]


def to_json(value: Any) -> dict[str, Any]:
    """Return a result as plain values."""
    return asdict(value, dict_factory=_object)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in fields:
        tree |= value._asdict() if isinstance(value, Degrees) else {KEYS.get(name, name): value}
    return tree


def from_json(kind: type[T], tree: Any) -> T:
    """Return the result of this kind from what `to_json` gave."""
    result: T = _read(kind, tree)
    return result


def _read(kind: Any, tree: Any) -> Any:
    if kind is Degrees:
        return Degrees(**{axis: tree[axis] for axis in Degrees._fields})
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        trees = {
            each.name: tree if hints[each.name] is Degrees else tree[KEYS.get(each.name, each.name)]
            for each in fields(kind)
        }
        return kind(**{name: _read(hints[name], value) for name, value in trees.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], value) for value in tree)
    return tree
