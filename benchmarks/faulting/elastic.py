"""SIGKILL and lost slots in `zero3d train --max-restarts` under zero.exact: dp goes 4, 2, 4, ..., and no bit changes.

    a moment -> other slots are lost -> kill -> the old ranks are gone, every checkpoint verifies -> a new step -> again

victim   a rank: the launcher starts all again by itself; now and then the launcher or all processes: then this does
moment   as in kills.py
slots    none, one or two of the four are in the run's file of lost slots: dp 4, 2, 2
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter

import psutil

from faulting.cases import Result, failure, none_failed
from faulting.kills import GONE, LONGEST, Bed, Life, Wrong, check_saved, wait_for
from zero3d.checkpoint.difference import compare
from zero3d.checkpoint.stored_states import StoredStates

COUNT = 60
RANKS = 4
VICTIMS = ("a rank",) * 6 + ("the launcher", "all")
LOST = ("", "0", "1", "3 2", "0 2")
RESTART = re.compile(r"^restart \d+ of \d+: \d ranks, (dp \d), from", re.M)


def measure(arguments: argparse.Namespace) -> Result:
    """Kill so often; how often an attempt began at which dp, and what was not as it must be."""
    bed = Bed(
        arguments.scratch / "elastic", "--max-restarts", "1000", ranks=RANKS,
        train={"steps": 8, "batch": 8, "micro_batch": 1, "accumulate": None}, zero={"exact": True},
        mesh={"dp": 4}, health={"min_ranks": 2},
    )  # fmt: skip
    began: Counter[str] = Counter()
    failures, kills, run, begun = [], 0, 0, time.monotonic()
    count = arguments.count or COUNT
    while kills < count and len(failures) < 5:
        first, over = kills, False
        while not over:
            life = Life(bed, f"run-{run}")
            try:
                kills, over = one_life(bed, life, arguments.seed, kills, count)
                if over:
                    check_whole(bed, life)
            except Wrong as error:
                failures.append(failure("elastic", arguments.seed + kills, error))
                kills, over = kills + 1, True
            finally:
                life.end()
            began.update(RESTART.findall(life.log.read_text(errors="replace")))
        if arguments.verbose:
            print(f"run {run}: kills {first} to {kills}; {dict(began)}", flush=True)
        run += 1
    return {
        "rows": {f"restarts at {dp}": {"attempts": number} for dp, number in sorted(began.items())},
        "failures": failures, "seconds": round(time.monotonic() - begun, 1), "runs": run,
        "targets": [none_failed(len(failures), kills)],
    }  # fmt: skip


def one_life(bed: Bed, life: Life, seed: int, kills: int, count: int) -> tuple[int, bool]:
    """Kill until this launcher is gone, the run is over or there were enough; the kills, whether it is over.

    Raises Wrong.
    """
    seen = life.newest
    while True:
        draw = random.Random(seed + kills)
        if kills < count:
            wait_for(bed, life, draw.choice(("any", "while saving", "after a save")), draw)
        else:
            life.wait(LONGEST)
        seen = max(seen, life.newest)
        if not life.alive:
            if life.process.returncode == 0:
                return kills, True
            if "died twice" in life.said():  # said so, and a slot too few was left: somebody has to start it
                return kills, False
            raise Wrong(f"it ended with exit code {life.process.returncode}: {life.said()}")
        if kills >= count:
            raise Wrong(f"an undisturbed life did not end in {LONGEST:g} s: {life.said()}")
        life.output.mkdir(exist_ok=True)
        (life.output / "lost-slots").write_text(draw.choice(LOST) if kills + 1 < count else "")
        victim = draw.choice(VICTIMS)
        kills += 1
        if victim != "a rank":
            life.kill(victim, draw)
            check_saved(life, seen)
            return kills, False
        kill_rank(life, draw)
        check_saved(life, seen)
        reached = max(seen, life.newest)
        life.until(lambda: life.newest > reached, LONGEST)  # noqa: B023 (it is over before the next one begins)


def kill_rank(life: Life, draw: random.Random) -> None:
    """Kill one rank, and see all ranks of its attempt gone. Raises Wrong where some are not."""
    ranks = life.ranks()
    if not ranks:
        return
    draw.choice(ranks).kill()
    left = psutil.wait_procs(ranks, timeout=GONE)[1]
    if left:
        raise Wrong(f"{len(left)} ranks were there {GONE:g} s after one was killed: {life.said()}")


def check_whole(bed: Bed, life: Life) -> None:
    """Hold a run's records and its last checkpoint's states to the undisturbed run's. Raises Wrong."""
    check_saved(life, life.newest)
    if life.records() != bed.result[0]:
        raise Wrong("the records are not those of the undisturbed run")
    found = compare(StoredStates(bed.folder / "whole" / "checkpoints" / life.last.name), StoredStates(life.last))
    if not found.equal:
        raise Wrong(f"the last checkpoint is not the undisturbed run's: {found.differences[0]}")
