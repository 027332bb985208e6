"""What an evaluation gives: the held-out loss, of averaged weights beside it, and values of a user's own function.

validation_loss, perplexity, validation_loss/NAME    of the weights (held_out.py)
ema_validation_loss                                  of their averages, where train.ema keeps some
NAME                                                 of evaluate.function (own_values.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from zero3d.config import Config
from zero3d.data.batches import validation_batches
from zero3d.data.mixture import Mixture
from zero3d.data.sequences import Batch, Samples
from zero3d.engine.engine import Engine
from zero3d.train.criterion import HELD_OUT, OF_AVERAGES
from zero3d.train.held_out import evaluate_sources, held_out_record
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
        self, config: Config, engine: Engine, validation: Samples | None, micro_batch: int,
        on_device: Callable[[Mapping[str, Tensor]], dict[str, Any]],
    ) -> None:  # fmt: skip
        self._config, self._engine, self._on_device = config, engine, on_device
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
        dp, limit, exact = self._engine.dp, self._config.evaluate.batches, self._config.zero.exact
        return validation_batches(held_out, self._micro_batch, dp=dp.size, rank=dp.rank, limit=limit, together=exact)
