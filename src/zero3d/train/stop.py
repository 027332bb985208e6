"""Stopping well: a signal becomes a request that the training loop answers after its step.

    with StopRequest() as request:
        for step in ...:
            train(step)
            if asked_on_any_rank(request.signal):       # ranks agree first: all save, or none
                save()
                raise Stopped(request.signal, "step 120 is saved in OUT/checkpoints/step-120")

SIGTERM, SIGHUP,   a request, however often they come: schedulers signal every process of a job (Slurm's notice is often
SIGUSR1            SIGUSR1), timeout(1) signals twice, and launchers pass on signals that reached the workers too
at once            if several signals come before Python looks, the lowest number counts as the first
waiting            inside `at_once` no step has to be finished: the first signal raises `Stopped`, also an earlier one
SIGINT             a request; after any request it raises PressedAgain, a KeyboardInterrupt
ignored signals    stay ignored: nohup, background jobs, and workers whose launcher has the terminal
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
BEFORE = "outside of training; what was saved before is still there"


class Stopped(BaseException):
    """Says that the run ended early, with a checkpoint, by a signal; the exit code is 128 + `signal`.

    signal  the number of the signal that asked, the same on all ranks
    where   the saved state and its place, as one phrase: rank 0 shows it

    No Exception, so that no handler of training errors takes it for one.
    """

    def __init__(self, signal: int, where: str) -> None:
        super().__init__(where)
        self.signal = signal


class PressedAgain(KeyboardInterrupt):
    """Says that a user pressed Ctrl-C again; a plain KeyboardInterrupt may be raised by a user's own code."""


class StopRequest:
    """Notes signals while the context is open; `signal` is the first one's number, else None.

    Enter it on the main thread. Old handlers come back at the end.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._old: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._waits = False

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a request end the work inside at once: it may wait for something that never comes.

        Raises Stopped.
        """
        self._waits = True
        try:
            if self.signal is not None:
                raise Stopped(self.signal, BEFORE)
            yield
        finally:
            self._waits = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked data worker: it has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal is None:
            self.signal = number
            if self._waits:
                raise Stopped(number, BEFORE)
        elif number == signal.SIGINT:
            raise PressedAgain
