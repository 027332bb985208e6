"""Threads that call what they are given, for tiers: used and given back wherever garbage is collected. No torch.

An engine is part of cycles, so that its tiers may go in any thread, between any two of its instructions: inside
another executor's `submit`, or while a new thread starts. The standard library's executors take a lock of the whole
process there, and their threads are joined, which takes another: whoever holds one of them would wait for ever.
These share nothing with others, and nobody joins them then: who wants to know that a call is over waits for its future.
At the end of the process they are joined, before torch and the interpreter are taken apart; calls that come later are
made by whoever has them.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

T = TypeVar("T")
_Queue = SimpleQueue[tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]] | None]


class Threads:
    """Owns threads that call what they are given, in the order in which it comes; they end with it, or at `close`."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: _Queue = SimpleQueue()
        serving = [
            _Serving(target=_serve, args=(self._queue,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in serving:
            thread.start()
        self.close = weakref.finalize(self, _end, self._queue, count)
        self.close.atexit = False
        atexit.register(_join, self.close, serving, self._queue)

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread call it, and return what will have its result; after `close` it is called here."""
        future: Future[T] = Future()
        if self.are_there:
            self._queue.put((future, call, arguments))
        else:
            _make(future, call, arguments)
        return future

    @property
    def are_there(self) -> bool:
        """Whether they have not been told to end."""
        return self.close.alive


def unwaited(action: Callable[[], object]) -> None:
    """Call what waits for such threads: here or, where one of them collects the garbage, in a thread of its own."""
    if isinstance(current_thread(), _Serving):
        Thread(target=action, name="zero3d-last").start()
    else:
        action()


class _Serving(Thread):
    """One of somebody's `Threads`."""


def _serve(queue: _Queue) -> None:
    while (given := queue.get()) is not None:
        _make(*given)
        del given  # or it would keep it until the next one comes


def _make(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(call(*arguments))
    except BaseException as error:  # noqa: BLE001  comes out of the future
        future.set_exception(error)


def _join(close: Callable[[], object], serving: Sequence[Thread], queue: _Queue) -> None:
    close()
    for thread in serving:
        thread.join()
    with suppress(Empty):
        while (given := queue.get_nowait()) is not None:  # it came while they ended
            _make(*given)


def _end(queue: _Queue, count: int) -> None:
    for _ in range(count):
        queue.put(None)
