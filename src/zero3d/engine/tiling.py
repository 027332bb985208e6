"""Tiles of what is too large to be held at once: refuse what cannot be tiled, give a model's parts their tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.chain import model_of
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder
from zero3d.models.tiled_loss import Ranks, defer_logits, find_head
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.vocabulary import has_causal_loss


def check_tiled_loss(model: nn.Module, loss: Callable[..., Any] | None) -> None:
    """Refuse a loss that is not a model's own of the next token. Raises ConfigError."""
    inner = inner_model(model)
    if not has_causal_loss(inner):
        raise ConfigError(
            f"tiled_loss=True computes Hugging Face's loss of the next token (ForCausalLMLoss), and "
            f"{type(inner).__name__} computes none or another one: pass tiled_loss=False (train.tiled_loss=false)."
        )
    if loss is not None:
        raise ConfigError(
            "tiled_loss=True computes the model's own loss without logits, and loss= is a function of its output: "
            "leave one of them out."
        )
    find_head(inner)


def install_tiled_loss(chunks: Mapping[int, nn.Module], axis: Axis, ledger: Ledger, cuts: Mapping[str, Cut]) -> None:
    """Have the chunk that has the head compute its loss tile by tile, after tp has cut it. Raises ConfigError."""
    for chunk in chunks.values():
        inner: Any = inner_model(model_of(chunk))
        if isinstance(inner.get_output_embeddings(), Placeholder):
            continue
        name, head = find_head(inner)
        cut = next((cuts[key] for key, p in chunk.named_parameters() if p is head.weight and key in cuts), None)
        if cut is not None and cut.dim != 0:
            raise ConfigError(
                f"tiled_loss=True needs whole rows of {name}.weight on a rank, and the tensor-parallel plan cuts its "
                f"columns: give {name} colwise_gather_output or replicate, or pass tiled_loss=False."
            )
        defer_logits(inner, None if cut is None else _ranks_of(Channel(axis, ledger), name))


def _ranks_of(channel: Channel, name: str) -> Ranks:
    """Return the tp ranks as those that share out the vocabulary; `name` is the head's in the ledger."""
    return Ranks(
        channel.rank, channel.size, lambda numbers: channel.all_gather(numbers, 0, name).view(channel.size, 2, -1)
    )
