"""Cases, by number: each is judged by itself, within a limit, and what it must not do is seen and stopped.

A case's number is the seed of all that is random in it: `--seed N --count 1` is that case again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 60.0  # seconds for one case: the slowest take below one
SHOWN = 20  # failures that are told in full
EXECUTES = frozenset(
    ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
     "pickle.find_class", "ctypes.dlopen", "socket.connect", "socket.bind")
)  # fmt: skip
CHANGES = {  # what each is given: the places of paths, and of the open folder that each is relative to (-1: none)
    "os.remove": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "os.mkdir": ((0, 2),), "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
Result = dict[str, Any]


class Hang(BaseException):
    """A case took too long. No Exception, so that none takes it for an error of its own."""


class Executed(BaseException):
    """A case started something, or wrote outside of its folder."""


class Guard:
    """Sees what this process does while a case is judged: nothing is started, nothing outside `folder` is changed.

    Python keeps an audit hook as long as the process lives: one guard is enough for all cases.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.watching = str(folder.resolve()), False
        self.found: list[str] = []
        sys.dont_write_bytecode = True  # of what is imported on first use
        sys.addaudithook(self._hook)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch, inside. Raises Executed at the end, too: the case may have caught the first one."""
        self.found, self.watching = [], True
        try:
            yield
        finally:
            self.watching = False
        if self.found:
            raise Executed(self.found[0])

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event == "open":
            path, _, flags = values
            writes = isinstance(flags, int) and flags & WRITING
            bad = bool(writes) and not self._inside(path)
        else:
            pairs = [(values[path], -1 if at is None else values[at]) for path, at in CHANGES.get(event, ())]
            bad = event in EXECUTES or not all(self._inside(*pair) for pair in pairs)
        if bad:
            self.found.append(f"{event} {values!r:.200}")
            raise Executed(self.found[0])

    def _inside(self, path: Any, folder: int = -1) -> bool:
        if isinstance(path, int):  # a descriptor: its open was seen
            return True
        if folder != -1:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        # Not resolved: a link may lead outside, and is what somebody opens.
        return os.path.realpath(os.fsdecode(path)).startswith((self.folder, os.devnull))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang where what is inside takes longer."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise Hang(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(part: str, numbers: range, folder: Path, case: Callable[[int], str]) -> Result:
    """Run all cases; `case` returns in a word what became of it, and raises for what must not be.

    Returns {"rows": {outcome: count}, "failures": [{"seed", "why", "again"}], "seconds", "targets"}.
    """
    guard, outcomes, failures, begun = Guard(folder), Counter[str](), [], time.monotonic()
    case(numbers[0])  # what is imported on first use is there
    for number in numbers:
        try:
            with limited(LIMIT), guard.watch():
                outcome = case(number)
            outcomes[outcome] += 1
        except (Exception, Hang, Executed) as error:  # noqa: BLE001 (whatever it is, it is the case's result)
            failures.append(failure(part, number, error))
    return {
        "rows": {outcome: {"cases": count} for outcome, count in sorted(outcomes.items())},
        "failures": failures,
        "seconds": round(time.monotonic() - begun, 1),
        "targets": [none_failed(len(failures), len(numbers))],
    }


def failure(part: str, seed: int, error: BaseException) -> Result:
    """Describe what must not be, and how to see it again; the first ones are told at once."""
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
    again = f"python benchmarks/faults.py --parts {part} --seed {seed} --count 1"
    return {"seed": seed, "why": f"{type(error).__name__}: {error}{cause}"[:2000], "again": again}


def none_failed(failed: int, cases: int) -> Result:
    """Return the one target of every part."""
    return {"what": f"failures in {cases} cases", "reached": failed, "target": 0, "met": failed == 0}
