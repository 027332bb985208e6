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
