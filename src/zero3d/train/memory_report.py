"""A post-mortem of memory: its use when it ran out and settings to change, as data, as text and as JSON.

    rank 1 of 4 (host box) ran out of memory: cuda:0, NVIDIA H100, 84.9 GB
    step 3, backward of model.layers.11.mlp (modeling_llama.py:180): asked for 1.5 GB where 0.9 GB were free; ...

    live on this rank, by category and place            the arena's account, and the rest of what is allocated
    largest tensors                                     names, shapes and dtypes
    processes of this host                              of host memory alone: page cache is in no row
    cheapest settings to change                         by the run's planner, with what each saves and costs

The first two lines are what other ranks quote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from zero3d.spec.text import columns, size
from zero3d.spec.tiers import DEVICE

VERSION = 1
SHOWN = 6  # settings
NOT_BY_SETTINGS = "no setting of the plan changes what fills the memory"
NOTHING_LIVE = "nothing allocated by the engine yet"


class Live(NamedTuple):
    """Bytes of one category at one place."""

    place: str
    category: str
    nbytes: int


class LiveTensor(NamedTuple):
    """A storage and the largest tensor on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class RankProcess(NamedTuple):
    """Bytes of a rank's process that the kernel cannot take back: no page cache, no files."""

    rank: int
    pid: int
    nbytes: int


@dataclass(frozen=True)
class Shortage:
    """The memory that ran out, of a device or of a host.

    where        the device and its name, or the source of the host's limit
    limit, free  bytes, None where nobody knows
    asked        bytes of the failed allocation; None if none has failed yet
    missing      bytes that were short, or should be free
    falling      bytes per second by which the free memory shrinks
    allocated, reserved   by the device's allocator
    """

    place: str
    where: str
    limit: int | None
    free: int | None
    asked: int | None
    missing: int
    allocated: int | None = None
    reserved: int | None = None
    falling: float | None = None


class Remedy(NamedTuple):
    """Settings to change, and the effects of the change.

    settings  as a command line takes them: activations=full
    saved     bytes
    slower    relative change of the step's time, below 0 if it becomes faster
    enough    the saved bytes are at least the missing ones
    """

    settings: tuple[str, ...]
    saved: float
    slower: float
    enough: bool


@dataclass(frozen=True)
class Advice:
    """Settings to change, the command that takes one, or why there is no advice.

    missing  bytes to save, for a setting to be enough
    planned  bytes of the plan at its peak
    """

    reliefs: Sequence[Remedy] = ()
    missing: int = 0
    planned: int | None = None
    command: str = ""
    why_none: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryReport:
    """Everything that a post-mortem says of one rank."""

    rank: int
    ranks: int
    host: str
    time: str
    step: int | None
    doing: str
    shortage: Shortage
    live: Sequence[Live] = ()
    tensors: Sequence[LiveTensor] = ()
    processes: Sequence[RankProcess] = ()
    advice: Advice = Advice()


def as_json(report: MemoryReport) -> dict[str, Any]:
    """Return plain values."""
    tree = asdict(report)
    settings = [
        {
            "settings": list(relief.settings),
            "saved_bytes": relief.saved,
            "slower": relief.slower,
            "enough": relief.enough,
        }
        for relief in report.advice.reliefs
    ]
    of_rows = {name: [row._asdict() for row in getattr(report, name)] for name in ("live", "tensors", "processes")}
    tree["advice"]["reliefs"] = settings
    return {"version": VERSION, "kind": "out-of-memory", **tree, **of_rows}


def as_text(report: MemoryReport) -> str:
    """Write the post-mortem for people: the first two lines say it all."""
    return "\n".join([*_head(report), *_live(report), *_tensors(report), *_processes(report), *_advice(report)])


def _head(report: MemoryReport) -> Iterator[str]:
    short = report.shortage
    limit = "" if short.limit is None else f", {_size(short.limit)}"
    yield f"rank {report.rank} of {report.ranks} (host {report.host}) ran out of memory: {short.where}{limit}"
    when = "before the first step" if report.step is None else f"step {report.step}"
    yield f"{', '.join(filter(None, (when, report.doing)))}: {'; '.join(_figures(short))}"


def _figures(short: Shortage) -> Iterator[str]:
    free = None if short.free is None else f"{_size(short.free)} {'were' if short.asked else 'are'}"
    if short.asked is not None:
        yield f"asked for {_size(short.asked)}" + (f" where {free} free" if free else "")
    elif free is not None:
        speed = f" and it falls by {_size(int(short.falling))} a second" if short.falling else ""
        yield f"{free} left{speed}; ended before the kernel kills a process"
    if short.allocated is not None and short.reserved is not None:
        yield f"{_size(short.allocated)} in tensors, {_size(short.reserved)} reserved by the allocator for them"


def _live(report: MemoryReport) -> Iterator[str]:
    yield f"\nlive on rank {report.rank}, by category and place:"
    rows = [(live.place, live.category, _size(live.nbytes)) for live in report.live if live.nbytes]
    yield from columns(rows, "<<>") if rows else [f"   {NOTHING_LIVE}"]


def _tensors(report: MemoryReport) -> Iterator[str]:
    if report.tensors:
        yield "\nlargest tensors (autograd holds others that have no name):"
        rows = [(_size(each.nbytes), str(list(each.shape)), each.dtype, each.name) for each in report.tensors]
        yield from columns(rows, "><<<")


def _processes(report: MemoryReport) -> Iterator[str]:
    if report.processes:
        yield f"\nprocesses of the run on host {report.host}, page cache not counted:"
        rows = [(f"rank {each.rank}", f"process {each.pid}", _size(each.nbytes)) for each in report.processes]
        yield from columns(rows, "<<>")


def _advice(report: MemoryReport) -> Iterator[str]:
    advice, short = report.advice, report.shortage
    if not advice.reliefs:
        yield f"\nno setting to advise: {advice.why_none or NOT_BY_SETTINGS}"
        return
    of = "a rank's device" if short.place == DEVICE else "this host"
    planned = "" if advice.planned is None else f"; the plan of this run has a peak of {_size(advice.planned)}"
    much = f"at least {_size(advice.missing)} too much{planned}"
    yield f"\ncheapest settings to change, as zero3d plan predicts for {of} ({much}):"
    yield from columns([_row(relief) for relief in advice.reliefs[:SHOWN]], "<>><")
    for note in advice.notes:
        yield f"   {note}"
    if advice.command:
        yield f"for example: {advice.command}"


def _row(relief: Remedy) -> tuple[str, ...]:
    verdict = "enough" if relief.enough else "not enough alone" if len(relief.settings) < 3 else "not enough"
    return " ".join(relief.settings), f"-{_size(int(relief.saved))}", f"{100 * relief.slower:+.1f} % time", verdict


def _size(nbytes: int) -> str:
    return size(nbytes, keep_zero=True)
