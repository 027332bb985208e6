"""A user's own commands, started when something happens in a run: `log.on: {end: COMMAND}`.

    event       when, on rank 0
    straggler   a rank makes the others wait, and is named
    nonfinite   the first of steps in a row that are skipped for a loss or norm which is not finite (under fp16 only
                where the loss scale can fall no further), and when a run gives up
    end         a session has finished, ended early, was stopped or failed

    ZERO3D_EVENT, ZERO3D_RUN, ZERO3D_OUTPUT, ZERO3D_STEP    in the environment of all
    ZERO3D_HOW, ZERO3D_REASON, ZERO3D_LOSS, ...             what the caller of `fire` tells beside them

A command is a line of /bin/sh, run as the user who trains. Nobody waits for it: it has a session of its own, no input,
and OUTPUT/events.log for what it prints. A thread takes note of its end, so that none stays a zombie. What fails or
hangs changes nothing; of one event at most MOST run at a time.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from zero3d.train.folder import APPENDED
from zero3d.watchdog.own_files import FOR_ALL

MOST = 4
FILE = "events.log"


class EventCommands:
    """Starts the commands of a run, on rank 0 alone.

    commands  by event
    say       prints one line: of the first command that cannot be started
    """

    def __init__(
        self, commands: Mapping[str, str] | None, output: Path, rank: int = 0, say: Callable[[str], Any] = warnings.warn
    ) -> None:
        self._commands = commands if commands and rank == 0 else {}
        self._output = output.resolve()
        self._say = say
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._warned = False

    def fire(self, event: str, facts: Mapping[str, Any]) -> None:
        """Start the command of an event, where it has one, with facts by name: `loss` is ZERO3D_LOSS. Never raises."""
        if (command := self._commands.get(event)) is None:
            return
        running = [process for process in self._running.get(event, ()) if process.poll() is None]
        self._running[event] = running
        if len(running) == MOST:
            return self._warn(event, f"{MOST} of them still run")
        told = {"event": event, "run": self._output.name, "output": str(self._output)} | dict(facts)
        try:
            running.append(self._started(command, told))
        except (OSError, ValueError) as error:  # no room for a process or a file, a text that none can hold
            return self._warn(event, str(error))
        Thread(target=running[-1].wait, name=f"log.on.{event}", daemon=True).start()

    def _started(self, command: str, told: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        named = {f"ZERO3D_{name.upper()}": str(value).replace("\0", " ") for name, value in told.items()}
        file = os.open(self._output / FILE, APPENDED, FOR_ALL)
        try:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            os.write(file, f"--- {when} {told['event']} at step {told.get('step', '?')}: {command}\n".encode())
            return subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **named},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        finally:
            os.close(file)

    def _warn(self, event: str, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: the command of log.on.{event} is not started, and the run goes on: {why}")


def facts_of(step: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what commands are told of a step, by its record or the last one before."""
    return {"step": step} | {name: record.get(name, math.nan) for name in ("loss", "grad_norm")}
