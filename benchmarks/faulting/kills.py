"""SIGKILL at a random moment of `zero3d train`, again and again: no bit changes, nothing that was saved is lost.

    start --resume auto -> a moment -> kill -> all processes gone -> every checkpoint verifies, none was lost -> again

    victim   one rank, the launcher, or all processes at once
    moment   any time of a run as long as the undisturbed one's, or right after a save has begun or ended

A run ends when one of its lives was not hit; its records and its last checkpoint must then be those, bit for bit, of
the run that nobody disturbed. Then another run begins, until there were so many kills.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file
from training import metrics, save_model, save_rows, tree

from faulting.cases import Result, failure, none_failed
from zero3d.checkpoint.integrity import verify

COUNT = 200
RANKS, STEPS = 2, 8
GONE = 30.0  # seconds for all processes to be gone after a kill
LONGEST = 600.0  # seconds of a life that nobody disturbs
LOOK = 0.002  # seconds between two looks at the checkpoints
VICTIMS = ("a rank", "the launcher", "all")
MOMENTS = ("any", "while saving", "after a save")
NUMPY = "rng:numpy"  # in a checkpoint
SAME = ("step", "loss", "grad_norm", "lr", "tokens")  # of a record, what no kill may change


class Wrong(Exception):
    """A promise that was not kept."""


class Bed:
    """A configuration, the undisturbed run of it, and how long that took.

    words  of the command line, beside the configuration
    """

    def __init__(self, folder: Path, *words: str, ranks: int = RANKS, **sections: dict[str, Any]) -> None:
        self.folder, self.words = folder, ["--ranks", str(ranks), *words]
        folder.mkdir()
        save_model(folder / "model")
        save_rows(folder / "rows.npy")
        self.sections = {
            "train": {"steps": STEPS, "batch": 4, "accumulate": 2},
            "data": {"shuffle": True},  # nothing held out: a run that is asked to stop leaves an evaluation out
            **sections,
            "checkpoint": {"every": 1, "keep": 2, "export": False, **sections.get("checkpoint", {})},
        }
        whole = Life(self, "whole")
        self.begun = 0.0  # seconds until its first checkpoint began
        whole.until(lambda: whole.saving or whole.newest > 0, LONGEST)
        self.begun = whole.age
        if whole.wait(LONGEST) != 0:
            raise Wrong(f"the undisturbed run failed: {whole.said()}")
        self.seconds, self.result = whole.age, whole.result()


class Life:
    """One process tree of a run, from its start to its end."""

    def __init__(self, bed: Bed, name: str) -> None:
        made: dict[str, Any] = tree(bed.folder, name, **bed.sections)
        self.output = Path(made["output"])
        config = bed.folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(made))
        self.log = bed.folder / f"{name}.log"
        words = ["train", str(config), *bed.words, "--resume", "auto"]
        self.begun = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zero3d.tools.cli.main", *words], stdout=log, stderr=log, start_new_session=True
            )

    @property
    def age(self) -> float:
        return time.monotonic() - self.begun

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.output / "checkpoints").glob(".step-*.tmp"))

    @property
    def newest(self) -> int:
        """The newest checkpoint's number; 0 where there is none."""
        return max((int(path.name[5:]) for path in (self.output / "checkpoints").glob("step-*")), default=0)

    def until(self, event: Callable[[], bool], seconds: float) -> None:
        """Wait for an event, the end of this life, or so many seconds."""
        end = time.monotonic() + seconds
        while self.alive and not event() and time.monotonic() < end:
            time.sleep(LOOK)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None where it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def kill(self, victim: str, draw: random.Random) -> None:
        """Kill a rank, the launcher or all, and see all of them gone. Raises Wrong where some are not."""
        family, ranks = self.family(), self.ranks()
        chosen = {"a rank": [draw.choice(ranks)] if ranks else family[:1], "the launcher": family[:1], "all": family}
        for process in chosen[victim]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        code = self.wait(GONE)
        left = psutil.wait_procs(family[1:], timeout=GONE)[1]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if code is None or left:
            self.end()
            raise Wrong(f"{1 + len(left)} processes were there {GONE:g} s after {victim} was killed: {self.said()}")

    def family(self) -> list[psutil.Process]:
        """Return the launcher and all that it has started."""
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks' processes."""
        return [process for process in self.family()[1:] if process.ppid() == self.process.pid]

    def end(self) -> None:
        """Leave no process behind."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def said(self) -> str:
        """Return the end of what it printed."""
        return self.log.read_text(errors="replace")[-1000:]

    @property
    def last(self) -> Path:
        """The checkpoint that a whole run ends with."""
        return self.output / "checkpoints" / f"step-{STEPS}"

    def records(self) -> list[Result]:
        """Return of all steps' records what no kill may change."""
        return [{key: row[key] for key in SAME if key in row} for row in metrics({"output": self.output})]

    def result(self) -> tuple[list[Result], dict[tuple[str, str], bytes]]:
        """Return what no kill may change: the records, and the last checkpoint's tensors.

        Numpy's random state is not seeded, and differs from run to run.
        """
        records = self.records()
        files = {file.name: load_file(file) for file in sorted(self.last.glob("*.safetensors"))}
        tensors = {(file, key): tensor for file, found in files.items() for key, tensor in found.items()}
        return records, {
            place: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            for place, tensor in tensors.items() if place[1] != NUMPY
        }  # fmt: skip


def measure(arguments: argparse.Namespace) -> Result:
    """Kill so often; what was hit when, and what was not as it must be."""
    sections = {"checkpoint": {"asynchronous": True}} if arguments.asynchronous else {}
    bed = Bed(arguments.scratch / "kills", **sections)
    hit: Counter[str] = Counter()
    failures, kills, run, begun = [], 0, 0, time.monotonic()
    count = arguments.count or COUNT
    while kills < count and len(failures) < 5:
        name, seen, disturbed = f"run-{run}", 0, True
        while disturbed:
            seed = arguments.seed + kills
            life = Life(bed, name)
            try:
                what, seen = one_life(bed, life, seed, seen, kills < count)
            except Wrong as error:
                failures.append(failure("kills", seed, error))
                kills += 1
                break
            finally:
                life.end()
            disturbed = what != ""
            kills += disturbed
            hit[what or "not hit: the run's end"] += 1
            if arguments.verbose:
                print(f"{kills} kills, {run} whole runs, {what or 'not hit'}: step {seen}", flush=True)
        run += 1
    return {
        "rows": {what: {"lives": number} for what, number in sorted(hit.items())},
        "failures": failures, "seconds": round(time.monotonic() - begun, 1), "runs": run,
        "targets": [none_failed(len(failures), kills)],
    }  # fmt: skip


def one_life(bed: Bed, life: Life, seed: int, seen: int, may_kill: bool) -> tuple[str, int]:
    """Kill a life at its moment, or let it end; what was hit ("" for nothing), the newest checkpoint. Raises Wrong."""
    draw = random.Random(seed)
    victim, moment = draw.choice(VICTIMS), draw.choice(MOMENTS)
    if may_kill:
        wait_for(bed, life, moment, draw)
    else:
        life.wait(LONGEST)
    seen = max(seen, life.newest)  # acknowledged: it is there by its name
    if life.alive:
        if not may_kill:
            raise Wrong(f"an undisturbed life did not end in {LONGEST:g} s: {life.said()}")
        life.kill(victim, draw)
        check_saved(life, seen)
        return f"{victim}, {moment}", life.newest
    if life.process.returncode != 0:
        raise Wrong(f"undisturbed, it ended with exit code {life.process.returncode}: {life.said()}")
    check_saved(life, seen)
    if life.result() != bed.result:
        found = [
            what for what, a, b in zip(("records", "last checkpoint"), life.result(), bed.result, strict=True) if a != b
        ]
        raise Wrong(f"the {' and the '.join(found)} are not those of the undisturbed run")
    return "", life.newest


def wait_for(bed: Bed, life: Life, moment: str, draw: random.Random) -> None:
    """Wait for the moment to kill; a life may end before it comes."""
    if moment == "any":
        life.until(lambda: False, draw.uniform(0, bed.seconds))
        return
    for _ in range(draw.randint(1, 3)):  # the first save of a life, or a later one
        before = life.newest
        life.until(lambda: life.saving, LONGEST)
        if moment == "after a save":
            life.until(lambda: life.newest > before, LONGEST)  # noqa: B023 (it is over before the next one begins)
        else:
            life.until(lambda: False, draw.uniform(0, 0.03))


def check_saved(life: Life, seen: int) -> None:
    """Verify every byte of every checkpoint. Raises Wrong where one is damaged, or the newest was lost."""
    if life.newest < seen:
        raise Wrong(f"step-{seen} was there before the kill, and step-{life.newest} is the newest after it")
    for path in sorted((life.output / "checkpoints").glob("step-*")):
        try:
            verify(path)
        except Exception as error:
            if not path.exists():  # a run that goes on by itself keeps the newest ones only
                continue
            raise Wrong(f"{path.name} was saved before the kill: {error}") from error
