"""What each step takes of a rank's own time, without its waits for others: by it slow ranks are found. No torch.

on a CPU           without all time inside of calls that wait for peers, whatever the part
on an accelerator  without the parts in which the stream meets peers; ranks of one tp group, which meet inside of a
                   forward, are as slow as their slowest
"""

from __future__ import annotations

from collections import deque

from zero3d.zero.step_parts import BUBBLE, BY_HOST, COMPUTE, DATA, GATHERS, MEETINGS, OWN, PARTS, REDUCTIONS, OwnStep

KEPT = 64  # steps


class OwnSeconds:
    """Adds up the parts of a step. `steps` has the last ones."""

    def __init__(self, of_device: bool) -> None:
        self.steps: deque[OwnStep] = deque(maxlen=KEPT)
        self._of_device = of_device
        self._parts, self._waits = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    def add(self, part: str, seconds: float) -> None:
        """Add what a part took."""
        self._parts[part] += seconds

    def wait(self, part: str, seconds: float) -> None:
        """Add what of it was spent in calls that wait for peers."""
        self._waits[part] += seconds

    def end_step(self, number: int) -> None:
        """Keep the step, and begin the next."""
        parts, waits = self._parts, self._waits
        own, waited = {COMPUTE: 0.0, DATA: 0.0, BY_HOST: 0.0}, 0.0
        for part, kind in OWN.items():
            if not self._of_device:
                own[kind] += parts[part] - waits[part]
                waited += waits[part]
            elif part not in MEETINGS:
                own[kind] += parts[part]
        if self._of_device:
            waited = parts[GATHERS] + parts[REDUCTIONS] + parts[BUBBLE]
        self.steps.append(OwnStep(number, own[COMPUTE], own[DATA], own[BY_HOST], waited))
        self._parts, self._waits = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
