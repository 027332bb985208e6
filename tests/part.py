"""A part of the long tests, chosen by a commit's hash: another one for every commit, the same one for the same.

The hash puts all cases into an order; those that still fit are taken until the part is full, by recorded seconds. What
alone takes longer than a part is left to `make test-all`.
"""

from collections.abc import Iterable
from hashlib import sha256

from durations import seconds_of

BUDGET = 180.0  # seconds of all workers: two of them are done in a minute and a half
AT_MOST = 60.0  # seconds that a case counts for: the dear ones get their turn, too


def part_of(names: Iterable[str], commit: str) -> set[str]:
    """The cases, as pytest names them, that a commit's hash chooses."""
    left, chosen = BUDGET, set()
    for name in sorted(names, key=lambda name: sha256(f"{commit} {name}".encode()).digest()):
        seconds = seconds_of(name, long=True)
        if min(seconds, AT_MOST) <= left and seconds < BUDGET:
            left -= min(seconds, AT_MOST)
            chosen.add(name)
    return chosen
