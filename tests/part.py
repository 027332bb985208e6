"""A part of the tests, chosen by a commit's hash: another one for every commit, the same one for the same.

The hash puts cases into an order; those that still fit are taken until the part is full, by recorded seconds. What alone
takes longer than a part is left to `make test-all`. CI runs two parts: one of the long tests, and one of all cases, long or
not, of ROOMS as on another CPU (`cpus.py`).
"""

from collections.abc import Mapping
from hashlib import sha256

BUDGET = 180.0  # seconds of all workers: two of them are done in a minute and a half
AT_MOST = 60.0  # seconds that a case counts for: the dear ones get their turn, too
ROOMS = (  # packages whose tests hold what a CPU computes beside what another way of computing it gives
    "zero", "engine", "sequence", "pipeline", "tensor_parallel", "expert_parallel", "checkpoint", "ways",
)  # fmt: skip


def part_of(cases: Mapping[str, float], commit: str) -> set[str]:
    """Those of the cases, seconds by the name that pytest gives them, that a commit's hash chooses."""
    left, chosen = BUDGET, set()
    for name in sorted(cases, key=lambda name: sha256(f"{commit} {name}".encode()).digest()):
        seconds = cases[name]
        if min(seconds, AT_MOST) <= left and seconds < BUDGET:
            left -= min(seconds, AT_MOST)
            chosen.add(name)
    return chosen
