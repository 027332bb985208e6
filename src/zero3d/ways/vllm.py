"""vLLM's weight transfer, fed by an engine: `WeightSource`s that vLLM's side of a trainer takes.

    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(..., rank=engine.mesh.rank), client=HTTPVLLMWeightSyncClient(url), source=source(engine)
    )
    trainer.send_weights()              # on every rank, after a step

    NCCL     rank 0 broadcasts to the server's workers                       source(engine)
    IPC      each rank shares memory of its card with the worker beside it   source(engine, every_rank=True)

The interface is that of vLLM 0.29 to 0.32: `metadata()` says what comes, iterating brings it, on every rank alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from zero3d.distributed.agreement import exchange_texts
from zero3d.engine.engine import Engine
from zero3d.ways.everywhere import everywhere
from zero3d.weights.buckets import whole


def source(
    engine: Engine,
    dtype: str | None = "bf16",
    bucket_bytes: int | str = "256MB",
    adapters: str = "merged",
    every_rank: bool = False,
) -> EngineSource:
    """Return an engine's weights as vLLM takes them; options of `Engine.stream_weights`.

    every_rank  all ranks get the tensors, as vLLM's IPC engine wants them: the stream is broadcast
    """
    return EngineSource(engine, (dtype, bucket_bytes, adapters), every_rank)


class EngineSource(WeightSource):  # type: ignore[misc]
    """Streams an engine's weights on every iteration, unit by unit, each tensor verified.

    Rank 0, which is vLLM's sender, has the tensors, on the device where it computes; other ranks take part in gathers
    and have none, unless `every_rank` was asked for.
    """

    def __init__(self, engine: Engine, options: tuple[str | None, int | str, str], every_rank: bool) -> None:
        self._engine, self._options = engine, options
        self._every_rank = every_rank
        self._metadata: list[ParamMeta] = []

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of all tensors in their order, on every rank; the first call streams once."""
        if not self._metadata:
            found = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in self._whole()]
            rows = json.loads(exchange_texts(self._engine.world, json.dumps(found))[0])
            self._metadata = [ParamMeta(name, getattr(torch, kind), tuple(shape)) for name, kind, shape in rows]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which are the caller's own; all ranks iterate to the end together."""
        if self._every_rank:
            yield from everywhere(self._engine, *self._options)
            return
        for name, tensor in self._whole():
            yield name, tensor.to(self._engine.mesh.device, copy=True)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        return whole(self._engine.stream_weights(*self._options))
