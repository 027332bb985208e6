"""The held-out loss: of all targets, and of each source of a mixture beside it.

validation_loss          mean over all held-out targets, whatever the weights in training
perplexity               its exponential
validation_loss/NAME     mean over those of one source
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from zero3d.data.mixture import Mixture
from zero3d.data.sequences import IGNORED, Batch, Samples
from zero3d.engine.engine import Engine
from zero3d.memory.arena import device_values
from zero3d.train.criterion import HELD_OUT
from zero3d.train.metrics import Record


def held_out_record(loss: float) -> Record:
    """Return the values of an evaluation with this loss."""
    return {HELD_OUT: loss, "perplexity": math.exp(min(loss, 700.0))}


def evaluate_sources(
    engine: Engine,
    held_out: Mixture,
    batches_of: Callable[[Samples], Iterator[Batch]],
    on_device: Callable[[Mapping[str, Tensor]], dict[str, Any]],
) -> Record:
    """Return the values of an evaluation of a mixture. All ranks take part.

    batches_of  this rank's micro-batches of a source, on the host
    """
    losses: dict[str, float] = {}
    targets: dict[str, float] = {}
    for member in held_out.members:
        counts: list[int] = []

        def counted(samples: Samples = member.samples, counts: list[int] = counts) -> Iterator[dict[str, Any]]:
            for batch in batches_of(samples):
                counts.append(int((batch["labels"][:, 1:] != IGNORED).sum()))
                yield on_device(batch)

        mean = engine.evaluate(counted())
        losses[member.name] = engine.world.read(mean.view(1), [0.0])[0]
        rows = engine.world.exchange(device_values([float(sum(counts))], engine.mesh.device))
        targets[member.name] = sum(engine.world.read(rows.flatten(), [1.0]))
    whole = sum(losses[name] * targets[name] for name in losses) / sum(targets.values())
    return held_out_record(whole) | {f"{HELD_OUT}/{name}": loss for name, loss in losses.items()}
