"""This rank's model chunks, run by number, and what they take of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zero3d.errors import ConfigError
from zero3d.pipeline.failures import Failures

SumAndWeight = tuple[Tensor, float | Tensor]
Taken = Callable[[Mapping[str, Any]], dict[str, Any]]


class Chunks:
    """This rank's model chunks, and the loss behind the pipeline's last one.

    modules   number -> module, forward(token ids or hidden states, **micro-batch)
    last      number of the pipeline's last chunk, on whatever rank
    loss      (output, micro-batch) -> (sum of losses, weight), of the last chunk's output
    taken     returns what the model takes of a micro-batch; the rest is for the loss
    routes    router logits travel behind hidden states, for the loss of a mixture of experts
    """

    def __init__(
        self,
        modules: Mapping[int, Any],
        last: int,
        failures: Failures,
        loss: Callable[[Any, Any], SumAndWeight],
        taken: Taken,
    ) -> None:
        self.modules, self.last = modules, last
        self._failures = failures
        self._loss = loss
        self._taken = taken
        self._any: Any = next(iter(modules.values()))
        self.routes = bool(getattr(getattr(self._any, "config", None), "output_router_logits", False))

    def run(self, number: int, entering: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """Return a chunk's output for the tensors that enter it and its micro-batch's `inputs`."""
        with self._failures.in_chunk(number):
            return self.modules[number](*entering, **inputs)

    def loss(self, output: Any, batch: Any) -> SumAndWeight:
        """Return the sum of a micro-batch's losses and its weight, from the last chunk's output."""
        with self._failures.in_chunk(self.last):
            return self._loss(output, batch)

    def split_batch(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return token ids, and what else of a micro-batch the model takes. Raises ConfigError."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            raise ConfigError(
                f"a pipeline takes micro-batches that are mappings with 'input_ids', and got a {type(batch).__name__}: "
                "pass {'input_ids': ids, ...} with the names of the model's forward, or pp=1."
            )
        inputs = self._taken(batch)
        routes = inputs.get("output_router_logits")
        if routes is not None and bool(routes) != self.routes:
            raise ConfigError(
                f"a micro-batch says output_router_logits={routes}, and the pipeline was built for {self.routes}: set "
                f"model.config.output_router_logits = {bool(routes)} before zero3d.Engine, and leave it out of the "
                "batches."
            )
        return inputs.pop("input_ids"), inputs

    def ids_shape(self, batches: Sequence[Any]) -> tuple[int, ...]:
        """Return the one shape that the token ids of a step's micro-batches have. Raises ConfigError."""
        shapes = {tuple(self.split_batch(batch)[0].shape) for batch in batches}
        if not shapes:
            raise ConfigError("a pipeline step needs micro-batches, and got none: pass a list of at least one.")
        if len(shapes) > 1:
            raise ConfigError(
                f"micro-batches of a pipeline step must have one shape, and have {sorted(shapes)}: pad them alike, or "
                "leave the last, smaller one out (drop_last)."
            )
        return shapes.pop()

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are; None where neither a config nor an embedding says."""
        config: Any = getattr(self._any, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        tables = [
            (m.num_embeddings * m.embedding_dim, m.num_embeddings)
            for m in self._any.modules()
            if hasattr(m, "num_embeddings")
        ]
        size: int | None = getattr(config, "vocab_size", max(tables, default=(0, None))[1])
        return size
