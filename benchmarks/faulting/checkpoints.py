"""Damaged checkpoints: refused by an error that names the file and changes nothing, or loaded as they were saved.

Every second case is of a checkpoint that two ranks saved, in boxes and files of their own. What is done to it, and what
a load is held to, is the tests' (tests/damage.py, tests/damaged.py).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from damaged import Live, clean, damaged_load, saved_at
from pool import RankPool

from faulting.cases import Result, judge

COUNT = 20_000


def measure(arguments: argparse.Namespace) -> Result:
    """Load that many."""
    folder = arguments.scratch / "checkpoints"
    sources = []
    with RankPool() as pool:
        for world in (1, 2):
            made = folder / f"of-{world}"
            made.mkdir(parents=True)
            saved, later, _ = pool.run(world, saved_at, made)[0]
            sources.append((Path(saved), Path(later)))
    live = Live(folder / "live")
    kept = [(saved, later, clean(live, saved)) for saved, later in sources]
    kinds: Counter[str] = Counter()

    def case(number: int) -> str:
        try:
            what, message = damaged_load(live, number, *kept[number % 2], folder)
        except BaseException:
            live.prepare()  # the next case finds it as it should be
            raise
        kinds[what] += 1
        return "refused" if message else "loaded as saved"

    numbers = range(arguments.seed, arguments.seed + (arguments.count or COUNT))
    return judge("checkpoints", numbers, folder, case) | {"kinds": dict(sorted(kinds.items()))}
