"""A run's folder read from outside, of a run that has finished, died or still goes on. No torch.

config.yaml        what was asked for
metrics.jsonl      how far it came, losses, time by part
report.json        memory, traffic, versions, how the session ended (train/session_report.py)
.lock              whether it goes on
watchdog.json, out-of-memory.txt    what was said of one that died

Each may be missing, cut off or of another program: what cannot be read is said, and the rest is shown.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero3d.checkpoint.folders import checkpoints
from zero3d.config import Config, load
from zero3d.config.describe import plain
from zero3d.config.keys import KEYS, value_of
from zero3d.engine.report_view import rows_of
from zero3d.errors import ConfigError, short
from zero3d.memory.file_lock import holder, is_held
from zero3d.reading import Unreadable, open_regular, parse_object, read_text
from zero3d.stores.urls import is_url
from zero3d.tools.doctor.dead_run import describe, read_runs, went_on, words
from zero3d.train.folder import Folder, parse_record
from zero3d.train.lock import LOCK
from zero3d.train.series import Series
from zero3d.train.step_times import Times
from zero3d.train.tables import MemoryRow, TrafficRow

RUNNING, UNKNOWN, DIED = "still running", "not known", "died"
FINISHED, EARLY, STOPPED, FAILED = "finished", "ended early", "stopped", "failed"  # as report.json says it
RECENT = 100  # records, of which the present speed is taken
MOST_BYTES = 64 << 20  # of report.json
IMPORTANT = (
    "model.path", "precision", "zero.stage", "optimizer.name", "optimizer.lr", "optimizer.clip_norm", "train.steps",
    "train.batch", "train.micro_batch", "train.accumulate", "data.length", "seed",
)  # fmt: skip


@dataclass
class Course:
    """Holds what metrics.jsonl says of a run.

    losses    of each step, NaN where it had none
    last      the last record
    values    of the last evaluation, by name
    seconds   of all steps
    odd       lines that are no records
    parts     seconds of a step by part
    series    its curves
    recent    the last records
    peak      the most bytes on the device that a record has
    slowest   the last record that names a slow rank
    """

    losses: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    odd: int = 0
    parts: Times = field(default_factory=Times)
    series: Series = field(default_factory=Series)
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
    peak: float = 0.0
    slowest: Mapping[str, Any] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the next record."""
        loss, seconds = record.get("loss"), record.get("seconds")
        self.losses.append(float("nan") if loss is None else float(loss))
        self.last = dict(record)
        self.seconds += float(seconds or 0.0)
        self.values |= {
            name: value for name, value in record.items() if "validation_loss" in name and value is not None
        }
        self.parts.add(record)
        self.series.add(record)
        self.recent.append(record)
        self.peak = max(self.peak, *(record.get(name) or 0.0 for name in ("memory_bytes", "peak_memory_bytes")))
        if record.get("slowest_rank") is not None:
            self.slowest = record


@dataclass(frozen=True)
class Left:
    """Holds what a run has left in its folder.

    config    None where config.yaml cannot be read
    report    report.json; empty where there is none
    state     one of the words above
    why       what ended it, or who runs it, in lines
    unread    what could not be read, and why
    """

    folder: Folder
    config: Config | None
    course: Course
    report: Mapping[str, Any]
    state: str
    why: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def engine(self) -> Mapping[str, Any]:
        """The engine's report."""
        found = self.report.get("engine")
        return found if isinstance(found, Mapping) else {}

    @property
    def times(self) -> list[Mapping[str, Any]]:
        """The seconds of a step by part."""
        names = ("part", "least", "mean", "largest")
        rows: list[Mapping[str, Any]] = [
            {name: getattr(row, name) for name in names} for row in self.course.parts.rows()
        ]
        return rows or rows_of(self.engine, "times")

    @property
    def steps(self) -> int | None:
        """The step that the run was to come to, where it is known."""
        asked = self.report.get("steps") or (None if self.config is None else self.config.train.steps)
        return asked if isinstance(asked, int) else None

    @property
    def rows(self) -> tuple[list[MemoryRow], list[TrafficRow]]:
        """The rows of memory and of traffic; none where any of them is not what a run writes."""
        try:
            memory = [MemoryRow.of_json(row) for row in rows_of(self.report, "memory")]
            return memory, [TrafficRow.of_json(row) for row in rows_of(self.report, "traffic")]
        except (KeyError, TypeError):
            return [], []

    def count(self, name: str) -> int:
        """Return a whole number of report.json; 0 for all else."""
        value = self.report.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    @property
    def go_on(self) -> str | None:
        """Return the command that goes on with a run that ended before its last step; None for any other run."""
        if self.config is None or self.state in (RUNNING, FINISHED, EARLY):
            return None
        try:
            saved = bool(checkpoints(self.folder.checkpoints)) or self.folder.url is not None
        except OSError:
            saved = False
        words = ["zero3d", "train", str(self.folder.config), *(["--resume", "auto"] if saved else ["--overwrite"])]
        free = self.config.mesh.dp is None and self.config.train.batch is None
        if saved and free and self.count("ranks"):
            words.append(f"--ranks={self.count('ranks')}")  # another number would change the batch
        return shlex.join(words)

    def settings(self, every: bool = False) -> list[dict[str, Any]]:
        """Return the keys that are not the default, and the important ones; every: all of them."""
        if self.config is None:
            return []
        rows = []
        for name, key in KEYS.items():
            value = value_of(self.config, name)
            if every or value != key.default or name in IMPORTANT:
                rows.append({"name": name, "value": plain(value), "default": plain(key.default)})
        return rows


def read_run(output: str) -> Left:
    """Read a run's folder. Raises ConfigError for what is none."""
    if is_url(output):
        raise ConfigError(
            f"{short(output)} is a URL, and a run writes its folder to a disk: give that folder. Checkpoints of a "
            f"store: zero3d ckpt ls {short(output)}."
        )
    folder, unread = Folder(Path(output)), list[str]()
    _refuse_others(folder)
    config, report, course = None, dict[str, Any](), Course()
    try:
        config = load(folder.config)
    except ConfigError as error:
        unread.append(str(error))
    try:
        report = parse_object(read_text(folder.report, MOST_BYTES))
    except FileNotFoundError:
        unread.append("no report.json: an earlier version left none, or the run has not come to its first step")
    except (OSError, Unreadable) as error:
        unread.append(f"{folder.report} {_reason(error)}")
    try:
        _read_metrics(folder.metrics, course)
    except FileNotFoundError:
        unread.append("no metrics.jsonl: the run has not come to its first step")
    except (OSError, Unreadable) as error:
        unread.append(f"{folder.metrics} {_reason(error)}")
    course.series.add_saves(report.get("saves"))
    if course.odd:
        unread.append(f"{course.odd} line{'s' * (course.odd > 1)} of {folder.metrics}, cut off or no record")
    state, why = _end_of(folder, report, unread)
    return Left(folder, config, course, report, state, tuple(why), tuple(unread))


def _refuse_others(folder: Folder) -> None:
    """Raise ConfigError for a folder that no run has written."""
    root = folder.root
    if not root.is_dir():
        what = "is a file" if root.exists() else "is not there"
        raise ConfigError(f"{short(root)} {what}: give the output folder of a run, as config.yaml's output names it.")
    if not any(path.exists() for path in (folder.metrics, folder.report)) and not folder.of_a_run:
        empty = "is empty" if not any(root.iterdir()) else "has no config.yaml, metrics.jsonl or report.json of a run"
        raise ConfigError(f"{short(root)} {empty}: give the output folder of a run, as config.yaml's output names it.")


def _read_metrics(path: Path, course: Course) -> None:
    with open_regular(path) as file:
        for line in file:
            if (record := parse_record(line.decode(errors="replace"))) is not None:
                course.add(record)
            elif line.strip():
                course.odd += 1


def _reason(error: Exception) -> str:
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


# --- how it ended -------------------------------------------------------------------------------


def _end_of(folder: Folder, report: Mapping[str, Any], unread: list[str]) -> tuple[str, list[str]]:
    """Return the state of a run (it goes on, or how it ended), and the reasons in lines."""
    lock = folder.root / LOCK
    if is_held(lock):
        return RUNNING, [words(holder(lock)[0])]
    told = [*_watchdog(folder, unread), *_out_of_memory(folder, report)]
    ended = report.get("ended")
    if isinstance(ended, Mapping) and ended.get("how") in (FINISHED, EARLY, STOPPED, FAILED):
        own = [words(line) for line in str(ended.get("why") or "").splitlines()[:3]]
        return str(ended["how"]), own if ended["how"] in (FINISHED, EARLY) else [*own, *told]
    if told:
        return DIED, told
    if not report:
        return UNKNOWN, []
    return DIED, ["it left no word: killed, as for want of the host's memory, or its machine went down"]


def _watchdog(folder: Folder, unread: list[str]) -> Iterator[str]:
    """Yield what the watchdog said of a run that has not gone on since."""
    try:
        runs = read_runs(folder.root)
    except ConfigError as error:
        unread.append(str(error))
        return
    for run in runs:
        if not went_on(run, folder.root):
            yield f"watchdog: {run.cause or run.kind}"
            yield from (f"watchdog: {describe(rank)}" for rank in run.culprits[:3])


def _out_of_memory(folder: Folder, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the head of a post-mortem that is newer than the last that the run has written of itself."""
    with suppress(OSError, Unreadable):
        text = read_text(folder.post_mortem)
        written = folder.report.stat().st_mtime if report.get("ended") is None and report else 0.0
        if folder.post_mortem.stat().st_mtime >= written:
            yield from (words(line) for line in text.splitlines()[:2])
