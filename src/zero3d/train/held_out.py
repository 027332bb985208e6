"""The held-out loss: of all targets, of each source of a mixture beside it, and of averaged weights.

validation_loss          mean over all held-out targets, whatever the weights in training
perplexity               its exponential
validation_loss/NAME     mean over those of one source
ema_validation_loss      the first with averaged weights (train.ema) in place of the trained ones
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from zero3d.config import Config
from zero3d.data.batches import validation_batches
from zero3d.data.mixture import Mixture
from zero3d.data.sequences import IGNORED, Batch, Samples
from zero3d.engine.engine import Engine
from zero3d.memory.arena import device_values
from zero3d.train.criterion import HELD_OUT, OF_AVERAGES
from zero3d.train.metrics import Record

OnDevice = Callable[[Mapping[str, Tensor]], dict[str, Any]]


class HeldOut:
    """Evaluates an engine on held-out sequences. All ranks take part.

    on_device  moves a micro-batch to where the engine computes
    """

    def __init__(self, config: Config, engine: Engine, samples: Samples, micro_batch: int, on_device: OnDevice) -> None:
        self._config, self._engine, self._samples = config, engine, samples
        self._micro_batch, self._on_device = micro_batch, on_device

    def evaluate(self) -> Record:
        """Return all values of an evaluation."""
        found = self._losses()
        found["perplexity"] = math.exp(min(found[HELD_OUT], 700.0))
        if self._engine.averages is not None:
            with self._engine.averaged():
                found[OF_AVERAGES] = self._losses()[HELD_OUT]
        return found

    def _losses(self) -> Record:
        """Return the mean loss of all targets, and of each source's."""
        if not isinstance(self._samples, Mixture):
            return {HELD_OUT: self._mean(map(self._on_device, self._batches(self._samples)))}
        means = {member.name: self._mean_of_source(member.samples) for member in self._samples.members}
        targets = sum(count for _, count in means.values())
        whole = sum(mean * count for mean, count in means.values()) / targets
        return {HELD_OUT: whole, **{f"{HELD_OUT}/{name}": mean for name, (mean, _) in means.items()}}

    def _mean_of_source(self, samples: Samples) -> tuple[float, float]:
        """Return the mean loss of a source's targets, and how many they are on all ranks."""
        counts: list[int] = []

        def counted() -> Iterator[dict[str, Any]]:
            for batch in self._batches(samples):
                counts.append(int((batch["labels"][:, 1:] != IGNORED).sum()))
                yield self._on_device(batch)

        mean, world = self._mean(counted()), self._engine.world
        rows = world.exchange(device_values([float(sum(counts))], self._engine.mesh.device))
        return mean, sum(world.read(rows.flatten(), [1.0]))

    def _mean(self, batches: Iterator[dict[str, Any]]) -> float:
        return self._engine.world.read(self._engine.evaluate(batches).view(1), [0.0])[0]

    def _batches(self, samples: Samples) -> Iterator[Batch]:
        """Yield this rank's micro-batches."""
        dp, limit = self._engine.dp, self._config.evaluate.batches
        return validation_batches(
            samples, self._micro_batch, dp=dp.size, rank=dp.rank, limit=limit, together=self._config.zero.exact
        )
