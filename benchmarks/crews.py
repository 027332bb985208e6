"""Process groups that take turns: one computes while the others wait, asleep.

    this process                       crew: the ranks of one process group
    crew.ask("step", name, turn) ----> every rank calls its member's `step(name, turn)`
    [answer of rank 0, 1, ...]   <---- and sends back what that returns
                                       until the next order a rank sleeps in a read of its pipe

Variants that cannot share processes (DeepSpeed's) are compared this way: all crews are there from
the start, and `ask` returns when every rank has answered, so no two crews compute at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ranks import Start, started, wait_for
from torch.multiprocessing.spawn import ProcessContext

GLANCE_S = 1.0  # how often a crew that does not answer is looked at for deaths


class Crew:
    """Ranks that wait for orders; made by `crew`."""

    def __init__(self, context: ProcessContext, pipes: list[Connection], timeout_s: float) -> None:
        self._context = context
        self._pipes = pipes
        self._timeout_s = timeout_s

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's member; their answers in rank order.

        Raises what a rank raised, with its traceback, or TimeoutError.
        """
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self.answers(method)

    def answers(self, method: str) -> list[Any]:
        """Wait for one answer of every rank."""
        deadline = time.monotonic() + self._timeout_s
        for pipe in self._pipes:
            while not pipe.poll(GLANCE_S):
                self._context.join(timeout=0)  # raises if a rank has died
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{method} on {len(self._pipes)} ranks took over {self._timeout_s:g} s")
        return [pipe.recv() for pipe in self._pipes]

    def dismiss(self) -> None:
        """Let the ranks end."""
        for pipe in self._pipes:
            pipe.send(None)


@contextmanager
def crew(start: Start, build: Callable[..., Any], *arguments: Any) -> Iterator[Crew]:
    """A crew whose ranks have built their members, `build(device, *arguments)`; it ends with the block."""
    pipes = [Pipe() for _ in range(start.ranks)]
    theirs = [their for _, their in pipes]
    with started(start, obey, theirs, build, arguments) as (context, _):
        waiting = Crew(context, [ours for ours, _ in pipes], start.timeout_s)
        waiting.answers("building")
        yield waiting
        waiting.dismiss()
        wait_for(context, "ending", start)


def obey(device: torch.device, pipes: list[Connection], build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """On every rank: build the member, then answer orders until there are no more."""
    pipe = pipes[dist.get_rank()]
    member = build(device, *arguments)
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        method, given = order
        pipe.send(getattr(member, method)(*given))
