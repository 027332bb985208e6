"""What an evaluation gives: the held-out loss, of averaged weights beside it, and values of a user's own function.

validation_loss          mean over all held-out targets, whatever the weights in training
perplexity               its exponential
validation_loss/NAME     mean over the held-out targets of one source of a mixture
ema_validation_loss      of averaged weights, where train.ema keeps some
NAME                     of evaluate.function (own_values.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from zero3d.config import Config
from zero3d.data.batches import validation_batches
from zero3d.data.mixture import Mixture
from zero3d.data.sequences import Batch, Samples
from zero3d.engine.engine import Engine
from zero3d.memory.arena import device_values
from zero3d.train.criterion import HELD_OUT, OF_AVERAGES
from zero3d.train.metrics import Record
from zero3d.train.own_values import OwnValues


class Evaluations:
    """Evaluates an engine. Every method is called by all ranks together.

    validation   sequences held out, or None
    micro_batch  of them in one forward
    on_device    moves a batch to where the engine computes
    values       of evaluate.function, the last time in this session
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        validation: Samples | None,
        micro_batch: int,
        on_device: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    ) -> None:
        self._config = config
        self._engine = engine
        self._on_device = on_device
        self._validation, self._micro_batch = validation, micro_batch
        self._own = None if config.evaluate.function is None else OwnValues(config.evaluate.function, engine)
        self.values: Mapping[str, float] = {}

    @property
    def any(self) -> bool:
        """Whether there is anything to evaluate."""
        return self._validation is not None or self._own is not None

    def at(self, step: int, taken: Collection[str]) -> Record:
        """Return everything that is to be known after a step. taken: names that its record has already."""
        found: Record = {}
        if self._validation is not None:
            found = self.held_out(self._validation)
            if self._engine.averages is not None:
                with self._engine.averaged():
                    found[OF_AVERAGES] = self.held_out(self._validation)[HELD_OUT]
        if self._own is not None:
            self.values = self._own.at(step, {*taken, *found})
        return found | dict(self.values)

    def held_out(self, held_out: Samples) -> Record:
        """Return the mean loss per target of what is held out and its perplexity, of a mixture also by source."""
        if isinstance(held_out, Mixture):
            return evaluate_sources(self._engine, held_out, self._batches_of, self._on_device)
        mean = self._engine.evaluate(map(self._on_device, self._batches_of(held_out)))
        return held_out_record(self._engine.world.read(mean.view(1), [0.0])[0])

    def _batches_of(self, held_out: Samples) -> Iterator[Batch]:
        """Yield this rank's micro-batches, on the host."""
        mesh, limit, exact = self._engine.mesh, self._config.evaluate.batches, self._engine.policy.exact
        rows, row = mesh.degrees.rows, mesh.row
        return validation_batches(held_out, self._micro_batch, dp=rows, rank=row, limit=limit, together=exact)


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
                counts.append(int(engine.targets.count(batch) or 0))
                yield on_device(batch)

        mean = engine.evaluate(counted())
        losses[member.name] = engine.world.read(mean.view(1), [0.0])[0]
        rows = engine.world.exchange(device_values([float(sum(counts))], engine.mesh.device))
        targets[member.name] = sum(engine.world.read(rows.flatten(), [1.0]))
    whole = sum(losses[name] * targets[name] for name in losses) / sum(targets.values())
    return held_out_record(whole) | {f"{HELD_OUT}/{name}": loss for name, loss in losses.items()}
