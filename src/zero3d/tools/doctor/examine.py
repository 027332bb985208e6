"""Probes in processes of their own: what hangs or crashes there is a finding, not the doctor's end.

    torch's probes   one process, in the order of the table     ---- versions ---- allreduce ---- gpus ---- pinned
    all others       a process each, some at a time             -- nics --  -- ports --  -- shm --  -- disk -- ...

A probe that has not answered in its time is killed with its process and whatever that started; those behind it in the
same process go on in a fresh one. A process in the kernel's hands (a dead NFS server, a driver) may stay: it is left.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from zero3d.errors import ConfigError, short
from zero3d.memory.cgroups import usable_cores
from zero3d.tools.doctor.finding import BROKEN, UNANSWERED, WARNING, Finding, Request
from zero3d.tools.doctor.table import Probe

BUSY = 1.5  # processes that run or wait, a core: the probes are among them
START = 30.0  # seconds until a process has begun its first probe: busy machines import slowly
KILLED = 2.0  # seconds in which a killed process is gone
AT_ONCE = 4  # processes


@dataclass(frozen=True)
class Examined:
    """A probe's finding and how long it took."""

    finding: Finding
    seconds: float


def examine(
    probes: Sequence[Probe],
    request: Request,
    module: str = "zero3d.tools.doctor.probe",
    report: Callable[[str], None] = lambda name: None,
) -> dict[str, Examined]:
    """Run all probes and return what they found, in their order. report: told of each that is done.

    Raises ConfigError for what the user gave (a folder that is none).
    """
    together = [probe for probe in probes if probe.torch]
    groups = [together] * bool(together) + [[probe] for probe in probes if not probe.torch]
    found: dict[str, Examined] = {}

    def work(group: Sequence[Probe]) -> None:
        rest = list(group)
        while rest:
            for name, examined in _run(rest, request, module).items():
                found[name] = examined
                report(name)
            rest = [probe for probe in rest if probe.name not in found]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(work, group) for group in groups]:
            future.result()
    return {probe.name: found[probe.name] for probe in probes}


def _run(probes: Sequence[Probe], request: Request, module: str) -> dict[str, Examined]:
    """Run probes in one process until all have answered or one has not; that one gets a verdict of its own."""
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-P", "-m", module, *(probe.name for probe in probes)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            return _listen(process, probes, request, errors)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED)


def _listen(
    process: subprocess.Popen[bytes], probes: Sequence[Probe], request: Request, errors: IO[bytes]
) -> dict[str, Examined]:
    """Collect answers. Raises ConfigError."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request.as_dict()).encode())
        process.stdin.close()
    lines = _lines(process)
    found: dict[str, Examined] = {}
    for probe in probes:
        limit, begun = START, time.monotonic()
        while probe.name not in found:
            try:
                line = lines.get(timeout=max(0.0, begun + limit - time.monotonic()))
            except queue.Empty:
                found[probe.name] = Examined(_unanswered(probe, limit), time.monotonic() - begun)
                return found
            if line is None:
                found[probe.name] = Examined(_crashed(process, errors), time.monotonic() - begun)
                return found
            if line.get("begins") == probe.name:
                limit, begun = probe.timeout, time.monotonic()
            elif "refused" in line:
                raise ConfigError(str(line["refused"]))
            elif line.get("name") == probe.name:
                found[probe.name] = Examined(Finding(**line["finding"]), time.monotonic() - begun)
    return found


def _lines(process: subprocess.Popen[bytes]) -> queue.Queue[dict[str, Any] | None]:
    """Return the lines of a process as they come, None behind the last."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with suppress(ValueError, OSError):
            for line in process.stdout:
                lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _unanswered(probe: Probe, limit: float) -> Finding:
    """Judge a probe that has not answered: on a machine with more to do than cores it may only have waited for one."""
    load, cores = os.getloadavg()[0], usable_cores()
    remedy = f"try it alone: zero3d doctor --only {probe.name}; if it still hangs: {probe.remedy}"
    figures = {UNANSWERED: limit, "load": load, "cores": cores}
    if load > BUSY * cores:
        text = f"no answer in {limit:g} s, on a busy machine: {load:.1f} processes wait for {cores} cores"
        return Finding(WARNING, text, f"when the machine has less to do, {remedy}", figures)
    return Finding(BROKEN, f"no answer in {limit:g} s: it hangs, or this machine is very busy", remedy, figures)


def _crashed(process: subprocess.Popen[bytes], errors: IO[bytes]) -> Finding:
    """Say how a process ended that owed an answer, with its last words."""
    try:
        code = process.wait(KILLED)
    except subprocess.TimeoutExpired:
        code = 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    errors.seek(0)
    words = [line for line in errors.read()[-4096:].decode(errors="replace").splitlines() if line.strip()]
    last = f": {short(words[-1])}" if words else ""
    remedy = "what it calls crashes here: reinstall that library or driver, and see `dmesg | tail`"
    return Finding(BROKEN, f"the probe's process {how}{last}", remedy)
