"""A stream of weights on every rank, where each of them feeds a server: buckets of rank 0 are broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from zero3d.distributed.agreement import exchange_texts
from zero3d.engine.engine import Engine
from zero3d.weights.buckets import Bucket, whole


def everywhere(
    engine: Engine, dtype: str | None = None, bucket_bytes: int | str = "256MB", adapters: str = "merged"
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors on every rank, each verified there, as the caller's own; all ranks iterate.

    Options are those of `Engine.stream_weights`. Moves the stream's bytes to every other rank.
    """
    for name, tensor in whole(_shared(engine, dtype, bucket_bytes, adapters)):
        yield name, tensor.to(engine.mesh.device, copy=True)


def _shared(engine: Engine, dtype: str | None, bucket_bytes: int | str, adapters: str) -> Iterator[Bucket]:
    """Yield rank 0's buckets on all ranks; each takes a broadcast."""
    memory = torch.empty(0, dtype=torch.uint8)
    for bucket in engine.stream_weights(dtype, bucket_bytes, adapters):
        first = engine.mesh.rank == 0
        text = json.dumps([bucket.nbytes, bucket.header()]) if first else ""
        nbytes, header = json.loads(exchange_texts(engine.world, text)[0])
        if memory.numel() < nbytes and not first:
            memory = torch.empty(nbytes, dtype=torch.uint8)
        shared = bucket.memory if first else memory
        engine.world.broadcast(shared[:nbytes], "a bucket")
        yield bucket if first else Bucket.of(bucket.number, shared, nbytes, header)
