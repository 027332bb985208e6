"""A user's own commands, started when something happens in a run: `log.on: {end: COMMAND}`.

    event       when, on rank 0
    straggler   a rank makes the others wait, and is named
    nonfinite   the first of steps in a row that are skipped for a loss or norm which is not finite (under fp16 only
                where the loss scale can fall no further), and when a run gives up
    end         a session has finished, ended early, was stopped or failed; also one whose rank 0 was killed

    ZERO3D_EVENT, ZERO3D_RUN, ZERO3D_OUTPUT, ZERO3D_STEP    in the environment of all
    ZERO3D_HOW, ZERO3D_REASON, ZERO3D_LOSS, ...             what the caller of `fire` tells beside them

A command is a line of /bin/sh, run as the user who trains. Nobody waits for it: it has a session of its own, no input,
and OUTPUT/events.log for what it prints. A thread takes note of its end, so that none stays a zombie. What fails or
hangs changes nothing; of one event at most MOST run at a time.

A rank 0 that is killed, by the watchdog or for lack of memory, tells nobody. Where there is a command for the end, a
shell outlives it, and waits at a pipe: its end without the word TOLD is the end of a rank that said nothing.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from zero3d.config.sections import END
from zero3d.train.folder import APPENDED
from zero3d.watchdog.own_files import FOR_ALL

MOST = 4
# Of a rank, by its launcher: a command is none, and may start a run of its own.
OF_A_RANK = re.compile(r"(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|ZERO3D)_.*")
FILE = "events.log"
TOLD = b"told\n"
GONE = "rank 0 has ended without a word: killed, or ended by the watchdog or its launcher"
# $1 is the command. The shell in the background is no child of rank 0: who kills that with its children spares it.
OUTLIVES = r"""
exec 3<&0
{
  read -r word
  [ "$word" = told ] && exit
  last() { sed -n "\$s/.*\"$1\": \([^,}]*\).*/\1/p" "$ZERO3D_OUTPUT/metrics.jsonl"; }
  exec >> "$ZERO3D_OUTPUT/events.log" 2>&1 < /dev/null
  ZERO3D_STEP=$(last step) ZERO3D_LOSS=$(last loss) ZERO3D_GRAD_NORM=$(last grad_norm)
  export ZERO3D_STEP ZERO3D_LOSS ZERO3D_GRAD_NORM
  echo "--- $(date +%Y-%m-%dT%H:%M:%S%z) end at step $ZERO3D_STEP: $1"
  /bin/sh -c "$1" 3<&-
} <&3 &
"""


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
        self._word: int | None = None  # the pipe to the shell that outlives this process

    def begin(self, how: str) -> None:
        """Begin a session, whose end is told of even if this process is killed; `how` is then how it has ended."""
        if (command := self._commands.get(END)) is None:
            return
        try:
            ends = os.pipe()
        except OSError as error:  # no file is left to open
            self._warn(END, str(error))
            return
        try:
            shell = ["/bin/sh", "-c", OUTLIVES, "sh", command]
            told = self._told(END, {"how": how, "why": GONE})
            self._popen(shell, told, stdin=ends[0], stdout=subprocess.DEVNULL).wait()  # it only forks
            self._word = ends[1]
        except OSError as error:
            os.close(ends[1])
            self._warn(END, str(error))
        finally:
            os.close(ends[0])

    def fire(self, event: str, facts: Mapping[str, Any]) -> None:
        """Start the command of an event, where it has one, with facts by name: `loss` is ZERO3D_LOSS. Never raises."""
        if (command := self._commands.get(event)) is None:
            return
        running = [process for process in self._running.get(event, ()) if process.poll() is None]
        self._running[event] = running
        try:
            if len(running) == MOST:
                raise BlockingIOError(f"{MOST} of them still run")
            running.append(self._started(event, command, facts))
            Thread(target=running[-1].wait, name=f"log.on.{event}", daemon=True).start()
        except (OSError, ValueError, RuntimeError) as error:  # no room for a process, a file, a thread; no such text
            self._warn(event, str(error))
        if event == END:
            self._say_told()

    def _started(self, event: str, command: str, facts: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        file = os.open(self._output / FILE, APPENDED, FOR_ALL)
        try:
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            os.write(file, f"--- {when} {event} at step {facts.get('step', '?')}: {command}\n".encode())
            told = self._told(event, facts)
            return self._popen(["/bin/sh", "-c", command], told, stdin=subprocess.DEVNULL, stdout=file)
        finally:
            os.close(file)

    def _told(self, event: str, facts: Mapping[str, Any]) -> dict[str, str]:
        told = {"event": event, "run": self._output.name, "output": self._output, **facts}
        return {f"ZERO3D_{name.upper()}": str(value).replace("\0", " ") for name, value in told.items()}

    def _popen(self, words: list[str], told: dict[str, str], stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        own = {name: value for name, value in os.environ.items() if not OF_A_RANK.fullmatch(name)}
        return subprocess.Popen(
            words, env=own | told, stdin=stdin, stdout=stdout, stderr=stdout, start_new_session=True
        )

    def _say_told(self) -> None:
        if self._word is not None:
            with suppress(OSError):
                os.write(self._word, TOLD)
            os.close(self._word)
            self._word = None

    def _warn(self, event: str, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: the command of log.on.{event} is not started, and the run goes on: {why}")


def facts_of(step: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what commands are told of a step, by its record or the last one before."""
    return {"step": step} | {name: record.get(name, math.nan) for name in ("loss", "grad_norm")}
