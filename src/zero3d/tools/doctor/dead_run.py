"""The watchdog's files of a run that hung or died, read as files that a stranger has given.

OUTPUT/watchdog.json, or watchdog-HOST.json of each host:

    {"version": 1, "kind": "stall" | "died" | "stopped" | "launcher", "time", "host", "cause", "step",
     "timeout",
     "ranks": [{"rank", "host", "pid", "state", "phase", "axis", "op", "unit", "number", "step", "seconds", "stack"}],
     "waits": [{"rank", "for": [ranks], "axis", "op", "unit"}], "advice": [...]}

Entries that are missing or of another type count as not there; texts lose control characters and their ends.
A file outlives its fault: where the run was started again since and has come further, that is a warning.
The culprits are the ranks that are dead, else those stopped, else those in no collective, else those that most
others wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError
from zero3d.memory.file_lock import holder, is_held
from zero3d.reading import Unreadable, parse_object, read_text
from zero3d.tools.doctor.finding import BROKEN, OK, WARNING, Finding
from zero3d.train.folder import Folder
from zero3d.watchdog.waits import DEAD, RUNNING, STOPPED

FILE, OF_HOSTS, LOCK = "watchdog.json", "watchdog-*.json", ".lock"
MOST_FILES = 64
MOST_BYTES = 16 << 20
LONGEST = 200  # characters of a text
MOST = 4096  # ranks and waits
FRAMES = 40  # lines of a stack, of advice
NO_UNIT = "-"
HEADER = ("Thread ", "Current thread ")  # of each thread in a stack
VERSION = 1
KINDS = {
    "stall": "a rank stood still",
    "died": "a rank died",
    "stopped": "a rank was stopped (SIGSTOP)",
    "launcher": "the launcher died",
}
GO_ON = "go on from the newest checkpoint: the same command with --resume auto"


@dataclass(frozen=True)
class Rank:
    """One rank as the watchdog last saw it; seconds since it last moved; its main thread's stack, innermost first."""

    rank: int
    host: str
    pid: int | None
    state: str
    phase: str
    axis: str
    op: str
    unit: str
    number: int | None
    step: int | None
    seconds: float | None
    stack: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where it was: its phase and the collective it was in."""
        collective = f"{self.op} ({self.axis})" if self.op and self.axis else self.op
        number = f" number {self.number}" if collective and self.number else ""
        of = f" of {self.unit}" if self.unit and collective else ""
        last = "its last call: " if collective and self.state in (RUNNING, DEAD) else ""
        return ", ".join(filter(None, (self.phase, f"{last}{collective}{of}{number}"))) or "nobody knows where"


@dataclass(frozen=True)
class Wait:
    """A rank that waits, and for whom."""

    rank: int
    peers: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class DeadRun:
    """What the file says."""

    kind: str
    time: str
    host: str
    cause: str
    step: int | None
    timeout: float | None
    ranks: tuple[Rank, ...]
    waits: tuple[Wait, ...]
    advice: tuple[str, ...]

    @property
    def culprits(self) -> tuple[Rank, ...]:
        """The ranks that the others wait for."""
        for state in (DEAD, STOPPED, RUNNING):
            if found := tuple(rank for rank in self.ranks if rank.state == state):
                return found
        wanted = Counter(peer for wait in self.waits for peer in wait.peers)
        most = max(wanted.values(), default=0)
        return tuple(rank for rank in self.ranks if most and wanted[rank.rank] == most)


def read_runs(output: Path) -> list[DeadRun]:
    """Read the watchdogs' files of an output folder, none where there are none. Raises ConfigError."""
    if not output.is_dir():
        raise ConfigError(f"--run {output}: there is no such folder; give a run's output folder.")
    paths = [output / FILE] * (output / FILE).exists() + sorted(output.glob(OF_HOSTS))[:MOST_FILES]
    return [read_run(path) for path in paths]


def read_run(path: Path) -> DeadRun:
    """Read one file. Raises ConfigError."""
    try:
        return of_tree(parse_object(read_text(path, MOST_BYTES)))
    except Unreadable as error:
        raise ConfigError(f"{path} {error}; {path.with_suffix('.txt')} says the same for people.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def of_tree(tree: Mapping[str, Any]) -> DeadRun:
    """Make data of the file's object. Raises Unreadable for another version, and where it says nothing."""
    if tree.get("version") != VERSION:
        raise Unreadable(f"is of version {words(tree.get('version')) or 'none'}, and only {VERSION} is read here")
    if not any((words(tree.get("kind")), words(tree.get("cause")), _objects(tree.get("ranks")))):
        raise Unreadable("says nothing of a run: no kind, no cause, no ranks")
    ranks = [_rank(entry) for entry in _objects(tree.get("ranks")) if _whole(entry.get("rank")) is not None]
    waits = [
        Wait(int(entry["rank"]), _wholes(entry.get("for")), _collective(entry))
        for entry in _objects(tree.get("waits"))
        if _whole(entry.get("rank")) is not None
    ]
    return DeadRun(
        words(tree.get("kind")),
        words(tree.get("time")),
        words(tree.get("host")),
        words(tree.get("cause")),
        _whole(tree.get("step")),
        _real(tree.get("timeout")),
        tuple(ranks),
        tuple(waits),
        tuple(filter(None, (words(each) for each in _list(tree.get("advice"))[:FRAMES]))),
    )


def _rank(entry: Mapping[str, Any]) -> Rank:
    texts = {key: words(entry.get(key)) for key in ("host", "state", "phase", "axis", "op", "unit")}
    texts["unit"] = texts["unit"] if texts["unit"] != NO_UNIT else ""
    return Rank(
        rank=int(entry["rank"]),
        pid=_whole(entry.get("pid")),
        number=_whole(entry.get("number")),
        step=_whole(entry.get("step")),
        seconds=_real(entry.get("seconds")),
        stack=_main_thread(entry.get("stack")),
        **texts,
    )


def _main_thread(stack: object) -> tuple[str, ...]:
    """Return the lines of the first thread in a stack."""
    lines = [words(line).strip() for line in _list(stack)]
    heads = [number for number, line in enumerate(lines) if line.startswith(HEADER)]
    begin, end = (heads[0] + 1 if heads else 0), (heads[1] if len(heads) > 1 else len(lines))
    return tuple(filter(None, lines[begin:end]))[:FRAMES]


def _collective(entry: Mapping[str, Any]) -> str:
    op, axis, unit = (words(entry.get(key)) for key in ("op", "axis", "unit"))
    unit = "" if unit == NO_UNIT else unit
    return f"{op or 'something'}{f' ({axis})' if axis else ''}{f' of {unit}' if unit else ''}"


def words(value: object) -> str:
    """Return a text without control characters and not too long; numbers as text; nothing for all else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.15g}" if isinstance(value, float) else str(value) if abs(value) < 10**18 else ""
    if not isinstance(value, str):
        return ""
    plain = re.sub(r"[^\x20-\x7e\xa1-\ud7ff\uf900-\uffef]", " ", value[: 4 * LONGEST])
    return re.sub(r"[\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", "", plain).rstrip()[:LONGEST]


def _list(value: object) -> list[Any]:
    return value[:MOST] if isinstance(value, list) else []


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in _list(value) if isinstance(entry, dict)]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def _wholes(value: object) -> tuple[int, ...]:
    return tuple(each for each in _list(value) if _whole(each) is not None)


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:  # NaN is not, either
        return None
    return float(value)


def judge_silence(output: Path) -> Finding:
    """Give the verdict on a folder in which no watchdog has written anything."""
    if is_held(output / LOCK):
        return Finding(OK, f"no {FILE} in {output}, and the run goes on: {words(holder(output / LOCK)[0])}")
    return Finding(OK, f"no {FILE} in {output}: its watchdog has given up on no rank")


def judge_run(run: DeadRun, output: Path) -> Finding:
    """Give the verdict on a run by what its watchdog said, and by what has come after in its output folder."""
    after = f" after step {run.step}" if run.step is not None else ""
    limit = f", health.timeout {run.timeout:g} s" if run.timeout is not None else ""
    told = [f"{run.cause or KINDS.get(run.kind, f'the watchdog ended it ({run.kind})')}{after}{limit}"]
    told += [describe(rank) for rank in run.culprits[:3]]
    told += describe_waits(run.waits)[:3]
    remedy = "; ".join(run.advice[:3]) or GO_ON
    figures = {"kind": run.kind, "step": run.step, "culprits": [rank.rank for rank in run.culprits]}
    if went_on(run, output):
        step = Folder(output).last_step
        told = [f"it died at {run.time} and was started again since, to step {step}", *told]
        return Finding(WARNING, "; ".join(told), f"nothing now; had it died again, {FILE} would be newer", figures)
    return Finding(BROKEN, "; ".join(told), remedy, figures)


def went_on(run: DeadRun, output: Path) -> bool:
    """Return whether the folder was locked anew after the watchdog's file, and the run is further than it was then.

    A copy of a folder has other times, too, but its steps are those of the run that died.
    """
    if run.step is not None and Folder(output).last_step <= run.step and not is_held(output / LOCK):
        return False
    with suppress(ValueError, OSError, OverflowError):
        moment = datetime.fromisoformat(run.time)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        last = moment.timestamp() + 1.0  # it has whole seconds
        return min((output / name).stat().st_mtime for name in (LOCK, "metrics.jsonl")) > last
    return False


def describe(rank: Rank) -> str:
    """Say in one line where a rank was."""
    who = ", ".join(filter(None, (rank.host, f"pid {rank.pid}" if rank.pid is not None else "", rank.state)))
    since = f" for {rank.seconds:.0f} s" if rank.seconds is not None else ""
    return f"rank {rank.rank}{f' ({who})' if who else ''}: {rank.place}{since}"


def describe_waits(waits: Sequence[Wait]) -> list[str]:
    """Say who waits for whom, ranks that wait alike together."""
    alike: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for wait in waits:
        alike.setdefault((wait.peers, wait.what), []).append(wait.rank)
    return [
        f"rank {_listed(ranks)} wait{'s' * (len(ranks) == 1)}{f' for rank {_listed(peers)}' if peers else ''} in {what}"
        for (peers, what), ranks in alike.items()
    ]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
