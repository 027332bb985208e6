"""Attempts of a run on this machine: after a fault all its workers are started again, from the newest checkpoint.

attempt    one start of all workers. `--max-restarts K` allows K more: after a worker that was killed or crashed, and
           after a stall that the watchdog has ended; not after bad input, NaNs, a signal that asked to stop, or an
           alarm of health.replay, whose machine is to be replaced, and whose newest checkpoints are in doubt
slot       a worker's place on this machine, 0 ..., and its accelerator. It is lost while its accelerator is missing or
           OUTPUT/lost-slots names it, and for good when its process died twice with no new step in between
dp         of the slots that are left, under health.min_ranks (config/shrinking.py); spare slots are idle. Looked at
           before every attempt: dp grows when a slot is back

What an attempt after the first begins with:

    given           no checkpoint of these attempts yet                a new one
    nothing         --resume auto: the folder it began, from step 1    --resume auto
    --overwrite     the same                                           --resume auto
    --resume auto   the same                                           --resume auto
    --resume PATH   the same; what was left in a fresh folder goes     --resume auto
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero3d.checkpoint.folders import checkpoints
from zero3d.config import Config, fitting_ranks
from zero3d.distributed.degrees import Degrees
from zero3d.errors import BAD_INPUT, CheckpointError, CorruptionError, MeshError, NonFiniteError, Zero3dError
from zero3d.reading import Unreadable, read_bytes
from zero3d.tools.cli.oom import oom_kills
from zero3d.tools.cli.workers import (
    MAIN,
    Worker,
    chosen_output,
    conclude,
    first_failure,
    killed_twice,
    message_of,
    report_failure,
    resume_command,
    run_workers,
    stopped_before,
)
from zero3d.train.folder import AUTO, Folder
from zero3d.train.start import Start
from zero3d.train.stop import Stopped, StopRequest
from zero3d.watchdog.own_files import private_folder

DEATHS = 2  # of a slot's process in a row, without a new step
COUNT = "from zero3d.distributed.devices import count_devices; print(count_devices())"
BEGINNING = ("--resume=", "--overwrite", "--ranks=")  # of a command line, what differs from attempt to attempt


@dataclass(frozen=True)
class Job:
    """Describes a run on this machine.

    words     of `zero3d`, options as --NAME=VALUE
    ranks     with all slots
    restarts  how many attempts may follow the first
    devices   accelerators of this machine when it began
    """

    words: Sequence[str]
    config: Config
    start: Start
    ranks: int
    restarts: int = 0
    devices: int = 0


def devices_here(config: Config, restarts: int) -> int:
    """Count this machine's accelerators, where a slot may be found lost without its own."""
    if not restarts and config.health.min_ranks is None:
        return 0
    from zero3d.distributed.devices import count_devices

    return count_devices()


def run_job(job: Job, *, module: str = MAIN) -> int:
    """Run attempts until one ends that none may follow; return its exit code, as `launch` does.

    Raises Zero3dError where too few slots are left.
    """
    course, slots = Course(job), Slots(job)
    with StopRequest() as request:
        try:
            code = None
            while code is None:
                code = _attempt(course, slots, request, module)
        except KeyboardInterrupt:
            return killed_twice()
        except Stopped as stop:
            return stopped_before(stop.signal)
    return code


def _attempt(course: Course, slots: Slots, request: StopRequest, module: str) -> int | None:
    """Start all workers once and wait for them; return the exit code, None where another attempt is to follow."""
    job = course.job
    with request.at_once():
        taken = slots.choose(course.folder, course.command)
    words = course.begin()
    for line in (*slots.lines(taken), *course.lines(len(taken))):
        print(line, file=sys.stderr)
    kills = oom_kills()
    with private_folder() as folder:
        workers, failed = run_workers(words, taken, folder, request, module)
        course.note_output(chosen_output(workers[0]))
        if request.signal is not None or course.restarts == job.restarts or not is_fault(failed):
            return conclude(workers, failed, request.signal, job.words, kills)
        report_failure(failed, "", kills)
        several = sum(bool(worker.blamed) for worker in failed) > 1  # a stall that says of nobody that it is his
        slots.note_death(None if several else taken[first_failure(failed).rank], progressed=course.progressed)
    return None


def is_fault(failed: Sequence[Worker]) -> bool:
    """Say whether workers failed in a way in which the next attempt may not.

    Not by bad input, NaNs or corruption, nor was one asked to stop before it trained.
    """
    if not failed:
        return False
    first = first_failure(failed)
    told = tuple(f"{kind.__name__}:" for kind in (NonFiniteError, CorruptionError))
    return first.code not in (BAD_INPUT, -signal.SIGTERM) and not message_of(first).startswith(told)


class Course:
    """Follows a run through its attempts: its folder, how the next one begins, whether it came to a new step.

    folder    None until the run has chosen one
    restarts  attempts after the first
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = None if job.config.output is None else Folder.of(job.config)
        self.restarts = -1
        self._saved_before = _identities(self.folder)
        self._metrics_before: object = None
        self._step_before = 0

    def note_output(self, chosen: str) -> None:
        """Take the folder that the run has chosen for itself, if it has."""
        if self.folder is None and chosen:
            self.folder = replace(Folder.of(self.job.config), root=Path(chosen))

    def begin(self) -> list[str]:
        """Return the words of the next attempt's workers, for which the folder is made ready."""
        self.restarts += 1
        words = [word for word in self.job.words if not word.startswith(BEGINNING)]
        if self.job.config.output is None and self.folder is not None:
            words.append(f"output={self.folder.root}")
        resume, checkpoint = self.resume, self.checkpoint
        if self.restarts and self.folder is not None and resume not in (None, AUTO) and not self._is_inside(checkpoint):
            self.folder.clear()  # begun from a checkpoint elsewhere, and none of its own: it would be refused as used
        self._step_before = _step_of(checkpoint)
        self._metrics_before = _identity(self.folder.metrics) if self.folder is not None else None
        if resume is not None:
            return [*words, f"--resume={resume}"]
        return [*words, "--overwrite"] if self.job.start.overwrite else words

    @property
    def resume(self) -> str | None:
        """What the attempt says for --resume."""
        start = self.job.start
        if self.restarts == 0 or self.folder is None:
            return start.resume
        has_saved = _identities(self.folder) != self._saved_before
        return AUTO if has_saved or not (start.overwrite or start.resume) else start.resume

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the attempt goes on from, where there is one."""
        if self.folder is None or (self.resume is None and self.job.start.overwrite):
            return None
        try:
            return self.folder.resume_from(self.resume)
        except CheckpointError:
            return None  # the workers say it

    @property
    def progressed(self) -> bool:
        """Whether the attempt has come to a step after those that it began with; earlier ones' go when it begins."""
        if self.folder is None or _identity(self.folder.metrics) == self._metrics_before:
            return False
        return self.folder.last_step > self._step_before

    @property
    def command(self) -> str:
        """What to type to go on later."""
        chosen = str(self.folder.root) if self.folder is not None and self.job.config.output is None else ""
        return resume_command(self.job.words, chosen)

    def lines(self, ranks: int) -> list[str]:
        """Say which restart this is, with what; nothing of the first attempt."""
        if not self.restarts:
            return []
        mesh = self.job.config.mesh
        dp = Degrees.resolve(ranks, None, mesh.tp, mesh.pp).dp
        source = self.checkpoint or "the beginning: no checkpoint was saved"
        many = f"{ranks} rank{'s' if ranks > 1 else ''}"
        return [f"restart {self.restarts} of {self.job.restarts}: {many}, dp {dp}, from {source}"]

    def _is_inside(self, checkpoint: Path | None) -> bool:
        folder = self.folder
        return checkpoint is None or folder is None or checkpoint.resolve().parent == folder.checkpoints.resolve()


class Slots:
    """Knows which of this machine's slots are lost, and why."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._deaths: Counter[int] = Counter()
        self._lost: dict[int, str] = {}
        self._looked = False

    def choose(self, folder: Folder | None, command: str) -> list[int]:
        """Return the slots of the next attempt. Raises Zero3dError where too few are left."""
        job, least = self._job, self._job.config.health.min_ranks
        self._lost = self._find_lost(folder)
        left = [slot for slot in range(job.ranks) if slot not in self._lost]
        if least is None and self._lost:
            slot, why = next(iter(self._lost.items()))
            raise Zero3dError(
                f"slot {slot} of this machine is lost ({why}): {len(left)} of {job.ranks} ranks are left, and a run "
                "needs all. Type health.min_ranks=N (with train.batch and train.micro_batch) to go on with fewer, or "
                f"mend it and go on with: {command}"
            )
        try:
            return left[: fitting_ranks(job.config, len(left))]
        except MeshError as error:  # the machine's fault by now: what was typed fits all slots
            lost = "; ".join(f"slot {slot} is lost: {why}" for slot, why in self._lost.items())
            raise Zero3dError(f"{error} {lost}. Go on with: {command}" if lost else str(error)) from error

    def note_death(self, slot: int | None, *, progressed: bool) -> None:
        """Count a death of a slot's process that came before a new step; None: nobody knows whose fault it was."""
        if progressed:
            self._deaths.clear()
        elif slot is not None:
            self._deaths[slot] += 1

    def lines(self, taken: Sequence[int]) -> list[str]:
        """Say which slots are lost, which are idle, and what becomes of mesh.dp."""
        config, ranks = self._job.config, self._job.ranks
        lines = [f"slot {slot} is lost: {why}" for slot, why in self._lost.items()]
        idle = [str(slot) for slot in range(ranks) if slot not in self._lost and slot not in taken]
        if idle:
            lines.append(f"idle: slot {', '.join(idle)}; {ranks - len(self._lost)} are left, and {len(taken)} fit")
        dp = Degrees.resolve(len(taken), None, config.mesh.tp, config.mesh.pp).dp if len(taken) < ranks else None
        if dp is not None and config.mesh.dp is not None:
            lines.append(f"mesh.dp={config.mesh.dp} is overridden by health.min_ranks: dp is {dp}")
        return lines

    def _find_lost(self, folder: Folder | None) -> dict[int, str]:
        job = self._job
        lost = {
            slot: "its process died twice before a step was reached" for slot, n in self._deaths.items() if n >= DEATHS
        }
        for slot in _named(folder):
            if slot < job.ranks:
                lost.setdefault(slot, f"{folder.lost_slots if folder else ''} names it")
        devices = _count_devices() if job.devices and self._looked else job.devices
        self._looked = True
        known = job.devices if job.config.health.min_ranks is None else job.ranks  # else a worker's error says it
        for slot in range(devices, known if job.devices else 0):
            lost.setdefault(slot, f"{devices} accelerators are visible")
        return dict(sorted(lost.items()))


def _named(folder: Folder | None) -> list[int]:
    """Return the numbers in a run's file of lost slots."""
    try:
        text = read_bytes(folder.lost_slots) if folder is not None else b""
    except (OSError, Unreadable):
        return []
    return [int(word) for word in text.decode(errors="replace").split() if word.isdecimal() and len(word) < 9]


def _count_devices() -> int:
    """Count this machine's accelerators in a new process: this one may remember those that are gone."""
    done = subprocess.run([sys.executable, "-P", "-c", COUNT], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0


def _identity(path: Path) -> object:
    """Return what tells a file from one that was written later; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _identities(folder: Folder | None) -> dict[int, object]:
    """Return the checkpoints of a run's folder, one that was saved again as another."""
    found = checkpoints(folder.checkpoints) if folder is not None else {}
    return {step: _identity(path) for step, path in found.items()}


def _step_of(checkpoint: Path | None) -> int:
    number = re.search(r"step-(\d{1,18})", checkpoint.resolve().name) if checkpoint is not None else None
    return int(number[1]) if number else 0
