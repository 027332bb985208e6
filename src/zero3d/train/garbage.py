"""When Python looks for objects that only refer to each other: between steps, on all ranks after the same ones.

Python's collector runs when a rank has made enough objects, which on every rank is at another moment, and goes through
all objects that there are, while the other ranks of a collective wait. Here it leaves alone what there was before the
first step (`gc.freeze`), and runs every `EVERY` steps.

A step of zero3d's own leaves no such cycle with a tensor in it, at any stage and under every schedule; one of a user's
own module may, whose memory is free again after `EVERY` steps at most.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Few, since cycles of a user's own are held for so long. A collection of what is made after the first steps takes 0.2
# to 0.7 ms, and one of everything 0.2 s (a small Llama, November 2026).
EVERY = 10


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Keep Python's automatic collection off inside the block, and yield what to call after each step, by its number.

    Where it was off before, a caller has chosen: nothing is collected here. Where objects were frozen before, no more
    are, since they could only be thawed together. Afterwards all is as it was.
    """
    if not gc.isenabled():
        yield lambda step: None
        return
    freezes = gc.get_freeze_count() == 0
    settled = False

    def collect() -> None:
        gc.collect()
        if freezes:
            gc.freeze()

    def after(step: int) -> None:
        nonlocal settled
        if step % EVERY:
            return
        if settled:
            gc.collect()
        else:  # the first steps have compiled blocks and made optimizer states
            collect()
            settled = True

    gc.disable()
    try:
        collect()
        yield after
    finally:
        if freezes:
            gc.unfreeze()
        gc.enable()
