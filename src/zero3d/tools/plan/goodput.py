"""How often to save: Young's interval, and the share of time that still goes into training.

    every = sqrt(2 x save x MTBF)
    lost  = save / every + every / (2 MTBF)   saving, and on average half an interval that is done again

Source: Young, "A first order approximation to the optimum checkpoint interval" (1974).

MTBF of a cluster = that of one GPU / GPUs. One GPU: 54 days x 24 h x 16,384 H100 / 419 unexpected interruptions
= 50,677 h (Grattafiori et al., "The Llama 3 Herd of Models" (2024), section 3.3.4).
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from zero3d.tools.plan.spec import ClusterSpec, ModelSpec

GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
SAVED_BYTES = 12  # of a trainable parameter: master, m, v; the weight is the master's cast


class Goodput(NamedTuple):
    """Seconds between checkpoints, of a save, between failures; share of time that trains."""

    every: float
    save: float
    mtbf: float
    share: float


def goodput(model: ModelSpec, cluster: ClusterSpec) -> Goodput:
    """Compute how often to save; all nodes write their part at `cluster.disk` bytes per second each."""
    save = SAVED_BYTES * model.trainable / (cluster.disk * cluster.nodes)
    mtbf = GPU_HOURS_BETWEEN_FAILURES * 3600 / cluster.gpus
    every = sqrt(2 * save * mtbf)
    return Goodput(every, save, mtbf, max(0.0, 1 - save / every - every / (2 * mtbf)))
