"""The parts of a step that take time, by name, and what is known of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORWARD, BACKWARD, GATHERS, REDUCTIONS, BUBBLE = "forward", "backward", "gathers", "reductions", "bubble"
UPDATE, OFFLOAD, DATA, EVALUATION, SAVES, OTHER = "update", "offload", "data", "evaluation", "saves", "other"
PARTS = {  # docs/training.md has the same words
    DATA: "the next batch, on the device",
    FORWARD: "forwards, losses among them",
    BACKWARD: "backwards, recomputation among them",
    GATHERS: "compute waits for weights",
    REDUCTIONS: "compute waits for sums of gradients",
    BUBBLE: "compute waits for other pipeline stages",
    UPDATE: "the loss of all ranks, gradients that are left to reduce, their norm, the optimizer",
    OFFLOAD: "compute waits for states that are off the device",
    EVALUATION: "evaluation and generation, with all that happens inside of them",
    SAVES: "checkpoints and exports, with all that happens inside of them",
    OTHER: "the time between: the caller's own code, the engine's bookkeeping",
}
WORDS = {  # in a line
    FORWARD: "forwards",
    BACKWARD: "backwards",
    GATHERS: "waits for gathers",
    REDUCTIONS: "waits for reductions",
    BUBBLE: "waits for other stages",
}
COMPUTE, BY_HOST = "compute", "host"
OWN = {  # of which of a rank's own seconds a part is; a save's are the run's to count, since ranks wait in it
    DATA: DATA,
    FORWARD: COMPUTE,
    BACKWARD: COMPUTE,
    GATHERS: COMPUTE,  # of these, what is no wait: copies and sums
    REDUCTIONS: COMPUTE,
    BUBBLE: COMPUTE,
    UPDATE: COMPUTE,
    OFFLOAD: BY_HOST,
    OTHER: BY_HOST,
}
MEETINGS = (GATHERS, REDUCTIONS, BUBBLE, UPDATE)  # on an accelerator the stream waits for peers inside of these
WHOLE = (EVALUATION, SAVES)  # what happens inside of these is theirs


class PartTime(NamedTuple):
    """Seconds of a part in a step, on the average of all steps but the first.

    seconds               of this rank
    least, mean, largest  over ranks, where they are known
    """

    part: str
    seconds: float
    least: float | None = None
    mean: float | None = None
    largest: float | None = None


class OverRanks(NamedTuple):
    """Seconds of each part in a step: the least, the mean and the largest of all ranks."""

    least: Sequence[float]
    mean: Sequence[float]
    largest: Sequence[float]


class OwnStep(NamedTuple):
    """A rank's own seconds in one step, without its waits for others, without evaluations and saves.

    step   its number among the steps that were measured, from 1
    waits  for other ranks
    """

    step: int
    compute: float
    data: float
    host: float
    waits: float

    @property
    def total(self) -> float:
        """All of its own."""
        return self.compute + self.data + self.host
