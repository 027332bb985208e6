"""A part in a fresh process with a limit; whatever becomes of it is a result.

passed   it ended, and all that it found is as it must be
failed   it ended, and something is not
crashed  its process died, of an exception or a signal
hung     it was killed at its limit
stopped  the campaign was stopped meanwhile

A limit is one of a quiet machine. Where the CPU stands in for the card, a part measures how long it takes to begin,
and has so many times more as that is slower (`limit_of`): beside other work nothing is taken for hanging that is slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from campaign.account import ONE_A_RANK, Place

GLANCE_S = 0.5  # how often the account is looked at
QUIET_START_S = 6.0  # until a part begins on two quiet cores of a slow machine: imports
STARTED = "started_s"  # the file in which a part says how long it took to begin
STARTING_S = 180.0  # until a part on the CPU is given up that has not begun
ENDING_S = 10.0  # for processes that were killed to be gone
LAST_LINES = 40
VISIBLE = "CUDA_VISIBLE_DEVICES"
BENCHMARKS = Path(__file__).parents[1]
Result = dict[str, Any]


def run_part(work: str, place: Place, changed: Callable[[Result], None]) -> Result:
    """Run MODULE:FUNCTION at a place; `changed` is given the result so far whenever there is news."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name)
        process = start(work, place, folder)
        outcome, seen = "stopped", ""
        limit, started = (max(place.limit_s, STARTING_S) if place.on_cpu else place.limit_s), 0.0
        try:
            while (code := waited(process, begun + limit)) is None and time.monotonic() < begun + limit:
                seen = tell(folder, seen, changed)
                if started == 0 and (started := told_start(folder)):
                    limit = limit_of(place, started)
            outcome = "hung" if code is None else "crashed" if code else ""
        finally:
            end(process)
            result = account_of(folder) | {"seconds": round(time.monotonic() - begun, 1), "limit_s": limit}
            result["slow"] = slowness(started) if place.on_cpu else 1.0
            result["outcome"] = outcome or judge(result)
            why = {"hung": f"killed after {limit:.3g} s", "crashed": f"ended with {describe(process.returncode)}"}
            if outcome in why:
                said = (folder / "said").read_text(errors="replace").splitlines()
                result |= {"why": why[outcome], "said": said[-LAST_LINES:]}
            changed(result)
    return result


def limit_of(place: Place, started: float) -> float:
    """Return the limit of a part, in seconds from the start of its process, that took so many until it began."""
    return started + place.limit_s * slowness(started) if place.on_cpu else place.limit_s


def slowness(started: float) -> float:
    """Return how many times slower than a quiet machine one is on which a part took so long to begin; at least 1."""
    return max(1.0, started / QUIET_START_S)


def told_start(folder: Path) -> float:
    """Return the seconds that a part took until it began; 0 until then."""
    file = folder / STARTED
    return float(file.read_text() or 0) if file.is_file() else 0.0


def judge(result: Result) -> str:
    """Return the outcome of a part that ended well."""
    if result["failed"]:
        return "failed"
    return "passed" if result["ran"] else "skipped"


def start(work: str, place: Place, folder: Path) -> subprocess.Popen[bytes]:
    """Start the worker, in a session of its own; all that it prints goes to FOLDER/said."""
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path} | visible(place)
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "campaign.worker", work, str(folder), json.dumps(asdict(place))]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def visible(place: Place) -> dict[str, str]:
    """Return the variable for the cards that a part sees: none, the first that this process sees, or all of these."""
    if place.device == ONE_A_RANK:
        return {}
    return {VISIBLE: "" if place.on_cpu else os.environ.get(VISIBLE, "0").partition(",")[0]}


def waited(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Wait for a moment; return the exit code if there is one."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=max(min(GLANCE_S, deadline - time.monotonic()), 0.0))
    return None


def tell(folder: Path, seen: str, changed: Callable[[Result], None]) -> str:
    """Pass the account on if it has changed; return its text."""
    file = folder / "account.json"
    text = file.read_text() if file.is_file() else ""
    if text != seen:
        changed(json.loads(text) | {"outcome": "running"})
    return text


def account_of(folder: Path) -> Result:
    """Return what a part wrote down; one that died before it began wrote nothing."""
    file = folder / "account.json"
    return (
        json.loads(file.read_text()) if file.is_file() else dict[str, Any](ran={}, skipped={}, failed={}, headlines={})
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and all that it has started, in whatever sessions, and see them ended."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=ENDING_S)


def describe(code: int) -> str:
    """Say how a process ended."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
