"""Two drills: a rank that is stopped in a phase of a run must be named in time, and a killed one loses no bit."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - as all parts do: a part's limit is by how long it took to begin
from campaign.account import Account, Place
from watchdog import PHASES, one_fault

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from faulting.kills import LONGEST, Bed, Life, Wrong, check_saved

PATIENCE_S, CPU_PATIENCE_S = 30.0, 3.0
CPU_PHASES = ("backward",)
KILLED_AFTER = 3  # checkpoints


def hangs(place: Place, account: Account) -> None:
    """Stop a rank (SIGSTOP) in each phase: the watchdog names it, and no process is left."""
    patience, phases = (CPU_PATIENCE_S, CPU_PHASES) if place.on_cpu else (PATIENCE_S, PHASES)
    for phase in phases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = one_fault(Path(folder), f"stop:{phase}", patience)
            except RuntimeError as error:  # the other phases have their turn
                account.ran(f"stopped in {phase}", {}, str(error))
                continue
        account.ran(f"stopped in {phase}", row, "" if row["met"] else missed(row))


def missed(row: dict[str, Any]) -> str:
    """Return what a block does not name, or that it came late."""
    absent = [name for name, there in row["named"].items() if not there]
    return (
        f"it does not name: {', '.join(absent)}"
        if absent
        else f"after {row['block_s']:.1f} s, gone after {row['gone_s']:.1f} s"
    )


def kills(place: Place, account: Account) -> None:
    """Kill a rank behind the third checkpoint and go on: records and states are those of the undisturbed run."""
    sections: dict[str, Any] = {"train": {"steps": 8, "batch": 4, "accumulate": 2, "deterministic": not place.on_cpu}}
    with tempfile.TemporaryDirectory() as folder:
        bed = Bed(Path(folder) / "bed", ranks=2, **sections)
        account.ran("undisturbed", {"seconds": bed.seconds, "steps": len(bed.result[0])})
        wrong, at = "", 0
        life = Life(bed, "killed")
        try:
            life.until(lambda: life.newest >= KILLED_AFTER, LONGEST)
            if not life.alive:
                raise Wrong(f"the run ended before it was killed: {life.said()}")
            life.kill("a rank", random.Random(0))
            check_saved(life, KILLED_AFTER)
            at = life.newest
            life = Life(bed, "killed")
            if life.wait(LONGEST) != 0:
                raise Wrong(f"the run that goes on failed: {life.said()}")
            if life.result() != bed.result:
                raise Wrong("records or states are not those of the undisturbed run")
        except Wrong as error:
            wrong = str(error)
        finally:
            life.end()
        account.ran("killed and resumed", {"from_step": at}, wrong)
