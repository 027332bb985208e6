"""Ends what takes too long in Python, such as a template of others that loops over one conversation and no other.

A thread looks from time to time at how much of a processor the other one has taken since it began, and has it raise.
Seconds are those of that thread alone: a process that was stopped, or waits for others, has taken none.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class TookTooLong(BaseException):
    """Is raised where something is ended: no Exception, so that nobody handles it on its way."""


class Patience:
    """Lets each thread of the interpreter take so many seconds at a time. Pickling carries the seconds.

    began  the threads that are at it, by number, and since when in seconds of their own
    told   those that have been told to raise, and may not have yet
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began: dict[int, float] = {}
        self.told: set[int] = set()
        self.lock = threading.Lock()
        self._process = 0  # in which a thread looks: a fork has none

    def __reduce__(self) -> tuple[type[Patience], tuple[float]]:
        return Patience, (self.seconds,)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Raise TookTooLong inside, in this thread, after too many seconds."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.lock = threading.Lock()
            self.began = {}
            self.told = set()
            threading.Thread(target=_watch, args=(weakref.ref(self), self.seconds / 4), daemon=True).start()
        self.began[threading.get_ident()] = time.thread_time()
        try:
            try:
                yield
            finally:
                self._end()
        except TookTooLong:
            self._end()  # it may have come while that was under way
            raise

    def _end(self) -> None:
        """Forget this thread; what it was to raise and has not yet is raised here, and handled."""
        thread = threading.get_ident()
        with self.lock:
            self.began.pop(thread, None)
            told = thread in self.told
            self.told.discard(thread)
        if told:
            with suppress(TookTooLong):
                for _ in range(100):  # it comes between two instructions
                    pass


def _watch(patience: weakref.ref[Patience], pause: float) -> None:
    while (mine := patience()) is not None:
        with mine.lock:  # no thread of `began` ends meanwhile
            for thread, began in mine.began.copy().items():
                if _seconds_of(thread) - began > mine.seconds:
                    mine.told.add(thread)
                    _raise_in(thread, TookTooLong)
        del mine
        time.sleep(pause)


def _seconds_of(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have a thread raise this with its next instruction.

    To take that back (NULL) would leave the interpreter of Python 3.11 looking for it at every call for ever.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
