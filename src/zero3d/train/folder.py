"""A run's output folder: claimed once, never written over by accident.

OUTPUT/
  config.yaml     what was run; `zero3d train OUTPUT/config.yaml` runs it again
  metrics.jsonl   one line per step
  metrics-unread.txt  lines of it that were no records when a run went on: what a killed run or a full disk has cut off
  checkpoints/    step-N: the last few and the best; best -> step-N
  kept.safetensors  tensors of the model's folder that exports carry on, where there are any (models/kept.py)
  hf/, adapter/   what is exported (export_places.py); written as .hf.new, renamed when complete
  run.png
  trace-rank-R.json, trace.json   steps that were traced, of each rank and of all (traces.py)
  report.json     memory, traffic, settings, versions, how the session ended (session_report.py)
  report.html     the page of zero3d report OUTPUT --html
  profile.json    rates of the cluster by the run's first steps, for zero3d plan --cluster
  tensorboard/, wandb/, swanlab/, mlflow/, metrics.prom   what trackers keep there (trackers.py)
  events.log      what the user's own commands print (event_commands.py)
  out-of-memory.txt, .json  the post-mortem of a run that ended so (post_mortem.py)
  offload/        states on a disk while a run goes on, where it has any and names no folder for them
  lost-slots      by hand: numbers of this machine's slots that a restart leaves out, one a line (tools/cli/elastic.py)
  watchdog.txt, watchdog.json    who waited for whom when a run came to a stall (watchdog/block.py)
  .run            a number of its own, by which it knows what it has left in another folder
  .lock           while a run writes (lock.py)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES
from pathlib import Path

from zero3d.checkpoint.copies import Copies, find_places, located, told
from zero3d.checkpoint.folders import checkpoints, complete_steps, discard, find, tidy
from zero3d.config import Config, load
from zero3d.config.problems import FOLDER
from zero3d.config.retired import is_of_a_run
from zero3d.errors import CheckpointError, ConfigError, remedy_of, short
from zero3d.reading import Unreadable, open_regular, parse_object
from zero3d.train.export_places import HF, NAMES, all_places
from zero3d.train.lock import LOCK, FolderLock
from zero3d.train.traces import MERGED
from zero3d.watchdog.own_files import write_whole

UNREAD, APPENDED = "metrics-unread.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
REPORT, PAGE = "report.json", "report.html"
KEPT = "kept.safetensors"
WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    *NAMES,
    KEPT,
    f".{KEPT}.tmp",
    "run.png",
    "loss.png",  # of earlier versions
    MERGED,
    "profile.json",
    REPORT,
    PAGE,
    *("tensorboard", "wandb", "swanlab", "mlflow", "metrics.prom"),
    "events.log",
    ".run",
    UNREAD,
    "watchdog.txt",
    "watchdog.json",
    "out-of-memory.txt",
    "out-of-memory.json",
)
RUN, LONGEST_ID = ".run", 64
LOST_SLOTS = "lost-slots"
UNFINISHED = "config.tmp"
TAIL = 1 << 16  # bytes at the end of metrics.jsonl, in which its last line is
NO_WORK = (LOCK, RUN, FOLDER, UNFINISHED, LOST_SLOTS)  # of entries that may be there before a run has done anything
LARGEST = 1 << 63  # whole numbers in a record are below
AUTO = "auto"
FOREIGN = "has no config.yaml of a run that names it, so no run wrote it"


@dataclass(frozen=True)
class Folder:
    """Holds the paths of a run's output folder; claims it, prunes its checkpoints, publishes its export.

    url  of the store that has copies of its checkpoints (checkpoint.to), if one has
    """

    root: Path
    url: str | None = None

    @classmethod
    def of(cls, config: Config) -> Folder:
        """Return the one that a configuration names; without a name nothing is there."""
        url = config.checkpoint.to
        return cls(Path(config.output or "."), None if url is None else url.rstrip("/"))

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 where it has none."""
        try:
            with open_regular(self.metrics) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                lines = file.read(TAIL).decode(errors="replace").splitlines()
        except (OSError, Unreadable):
            return 0
        for line in reversed(lines):
            try:
                step = parse_object(line).get("step")
            except Unreadable:
                continue
            if isinstance(step, int):
                return step
        return 0

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / HF

    @property
    def kept(self) -> Path:
        return self.root / KEPT

    @property
    def curves(self) -> Path:
        return self.root / "run.png"

    @property
    def report(self) -> Path:
        return self.root / REPORT

    @property
    def lost_slots(self) -> Path:
        return self.root / LOST_SLOTS

    @property
    def offload(self) -> Path:
        return self.root / FOLDER

    @property
    def post_mortem(self) -> Path:
        """Why the run ran out of memory; the same as data is beside it."""
        return self.root / "out-of-memory.txt"

    # --- claiming -----------------------------------------------------------------------------------

    def refuse(self, resume: str | None, overwrite: bool, checkpoint: Path | None = None) -> None:
        """Refuse a used folder, with the three choices, and one that no run wrote. Touches nothing. Raises ConfigError.

        checkpoint  the one that `resume` means: a run goes on in its own folder, or begins a fresh one
        """
        self._refuse_place()
        if not self.used:
            return
        if not self.root.is_dir():
            raise ConfigError(
                f"output {self.root} is a file, and a run writes a folder: choose one with output=FOLDER."
            )
        if overwrite and not self.of_a_run:
            raise ConfigError(f"--overwrite: {self.root} {FOREIGN}: remove it yourself.")
        continues = checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve()
        if overwrite or continues or (resume == AUTO and self.of_a_run):
            return
        used = f"output {self.root} is used already ({', '.join(sorted(self._names())[:4])})"
        if resume == AUTO:
            raise ConfigError(f"{used}, and it {FOREIGN}: write elsewhere with output=FOLDER.")
        raise ConfigError(
            f"{used}: go on with --resume auto, write elsewhere with output=FOLDER, or start anew with --overwrite."
        )

    def refuse_copies(self, resume: str | None, overwrite: bool) -> None:
        """Refuse a store that has checkpoints of another run. Raises ConfigError, CheckpointError."""
        goes_on = resume is not None and (resume == AUTO or resume.startswith(f"{self.url}/") or resume == self.url)
        if self.url is not None and not (overwrite or goes_on) and (there := find_places(self.url)):
            raise ConfigError(
                f"checkpoint.to {short(self.url)} has checkpoints already (step-{max(there)}): go on with --resume "
                "auto, give another URL, or start anew with --overwrite."
            )

    def _refuse_place(self) -> None:
        """Refuse a folder that could not be made, or be written to. Raises ConfigError."""
        problem = None
        try:
            self.root.stat()
            existing = self.root
        except FileNotFoundError:
            existing = next(path for path in self.root.resolve().parents if path.exists())
        except OSError as error:
            problem = error.strerror
        if problem is None and existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
            problem = os.strerror(EACCES)
        if problem is not None:
            raise ConfigError(
                f"output {short(self.root.resolve())} cannot be created ({problem}): choose another with output=FOLDER."
            )

    def claim(self, lock: FolderLock, resume: str | None, overwrite: bool, checkpoint: Path | None = None) -> None:
        """Make and lock the folder, or refuse it as `refuse` does; clean up leftovers of saves. Raises ConfigError."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output {self.root.resolve()} cannot be created ({error.strerror}): choose another with output=FOLDER."
            ) from error
        lock.acquire(self.root)
        self.refuse(resume, overwrite, checkpoint)  # once more, now that nobody else writes to it
        if overwrite and self.used:
            self.clear()
        if overwrite and self.url is not None:
            with told(self.url, "cleared"):
                Copies(self.url).clear()
        tidy(self.checkpoints)

    def write_config(self, text: str) -> None:
        """Write config.yaml, the first thing of a run, whole or not at all: it marks the folder. Raises ConfigError.

        And the run's number before it, which a resumed run keeps.
        """
        if not self.run_id:
            try:
                (self.root / RUN).write_text(secrets.token_hex(8))
            except OSError as error:
                raise _unwritable(self.root / RUN, error) from error
        fresh = self.root / UNFINISHED
        try:
            fresh.write_text(text)
            fresh.replace(self.config)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise _unwritable(self.config, error) from error

    @property
    def used(self) -> bool:
        """Whether anything is in it."""
        return self.root.exists() and (not self.root.is_dir() or any(self._names()))

    def _names(self) -> Iterator[str]:
        """Yield the names of the folder's entries; a lock is nobody's work."""
        return (entry.name for entry in self.root.iterdir() if entry.name not in NO_WORK)

    @property
    def run_id(self) -> str:
        """The run's number, nothing before it has one."""
        try:
            with open_regular(self.root / RUN) as file:
                return file.read(LONGEST_ID).decode(errors="replace")
        except (OSError, Unreadable):
            return ""

    @property
    def of_a_run(self) -> bool:
        """Whether a run wrote it: its config.yaml names it, or stands beside checkpoints where it was moved."""
        try:
            named = load(self.config).output
        except ConfigError:
            return False
        return is_of_a_run(self.config, named)

    def clear(self) -> None:
        """Remove what a run has written."""
        for place in all_places(self.root):
            place.refuse()
        for path in (
            *(self.root / name for name in WRITTEN),
            *self.root.glob("watchdog-*.*"),
            *self.root.glob("trace-rank-*.json"),
            *self.root.glob("metrics.prom.[0-9]*.[0-9]*"),  # of a writer that was killed
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    # --- resuming -----------------------------------------------------------------------------------

    def resume_from(self, resume: str | None) -> Path | None:
        """Return the checkpoint to resume from: `auto` is the newest of this folder or of the store's copies, if any.

        One of a store is in the cache, where its files come when they are opened.
        """
        if resume is None:
            return None
        if resume == AUTO:
            return self._newest()
        try:
            return find(located(resume))
        except OSError as error:
            raise CheckpointError(f"--resume {short(resume)} cannot be read: {error.strerror}.") from None

    def _newest(self) -> Path | None:
        """Return the newest checkpoint, that of the store where it is of a later step than any here."""
        here = checkpoints(self.checkpoints)
        copies = {} if self.url is None else find_places(self.url)
        if copies and max(copies) > max(here, default=-1):
            return copies[max(copies)]
        return here[max(here)] if here else None

    # --- checkpoints --------------------------------------------------------------------------------

    def prune(self, last: int, keep: int, best: int | None) -> None:
        """Leave `keep` checkpoints up to `last`, the one just saved, and the best one, and point `best` at it.

        Later ones are of a course that was left: the run went back and on from an older checkpoint.
        """
        steps = complete_steps(self.checkpoints)
        kept = {*[step for step in steps if step <= last][-keep:], best}
        for step in set(steps) - kept:
            discard(self.checkpoints, step)
        try:
            self._point_at_best(best if best in steps else None)
        except OSError as error:
            warnings.warn(f"{self.checkpoints / 'best'} could not be set ({error.strerror}).", stacklevel=2)

    def prune_copies(self, last: int, keep: int, best: int | None) -> None:
        """Leave the same checkpoints in the store; where that cannot be, warn and go on."""
        if self.url is None:
            return
        try:
            with told(self.url, "pruned"):
                Copies(self.url).prune(last, keep, best)
        except CheckpointError as error:
            warnings.warn(f"older checkpoints stay: {error}", stacklevel=2)

    def _point_at_best(self, step: int | None) -> None:
        link = self.checkpoints / "best"
        if step is not None:
            fresh = self.checkpoints / ".best.tmp"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(f"step-{step}")
            try:
                fresh.replace(link)
            finally:
                fresh.unlink(missing_ok=True)
        elif link.is_symlink() and not link.exists():
            link.unlink()

    def keep_metrics(self, step: int) -> list[dict[str, float]]:
        """Drop lines after `step`, which will be written again; return the records that are left.

        Lines that are no records, as a run that was killed cuts one off, go to `metrics-unread.txt` with a warning.
        Raises CheckpointError where the disk does not take that, and leaves metrics.jsonl as it was.
        """
        try:
            with open_regular(self.metrics) as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            lines = []
        except (OSError, Unreadable) as error:
            raise CheckpointError(
                f"{self.metrics} cannot be read ({error}): move it away, then go on with --resume auto."
            ) from error
        records = [parse_record(line.decode(errors="replace")) for line in lines]
        odd = [line for line, record in zip(lines, records, strict=True) if record is None and line.strip()]
        kept = [record for record in records if record is not None and record["step"] <= step]
        try:
            if odd:
                with os.fdopen(os.open(self.root / UNREAD, APPENDED, 0o666), "ab") as file:
                    file.write(b"\n".join([*odd, b""]))
            write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.root} ({error.strerror}): {remedy_of(error)}, then go on with --resume auto."
            ) from error
        if odd:
            warnings.warn(
                f"{self.metrics} has {len(odd)} line{'s' * (len(odd) > 1)} that cannot be read (a killed run or a full "
                f"disk cuts lines off): kept in {self.root / UNREAD}",
                stacklevel=2,
            )
        return kept


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path.resolve()} cannot be written ({error.strerror}): choose another with output=FOLDER.")


def parse_record(line: str) -> dict[str, float] | None:
    """Return the record of a line, or None where a crash cut it off, or no run has written it."""
    try:
        record = parse_object(line)
    except Unreadable:
        return None
    has_numbers = all(value is None or _is_number(value) for value in record.values())
    return record if has_numbers and isinstance(record.get("step"), int) else None


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can be made of: whole ones of JSON may be of any length."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST)


def first_free(stem: str) -> int:
    """Make the first free one of STEM, STEM-2, STEM-3, ...; return its number."""
    number = 1
    while True:
        try:
            numbered(stem, number).mkdir(parents=True)
            return number
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"{numbered(stem, number).resolve()} cannot be created ({error.strerror}): give a folder that you may "
                "write to with output=FOLDER."
            ) from error


def numbered(stem: str, number: int) -> Path:
    """Return the path with this number: STEM, STEM-2, ..."""
    return Path(stem if number == 1 else f"{stem}-{number}")
