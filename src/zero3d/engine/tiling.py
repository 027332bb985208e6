"""Tiles of matrices that are too large to be held at once: gives a model's parts their tiles, or refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3d.activations.compilation import is_compiled
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.bases import model_of
from zero3d.models.blocks import computed_in
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder
from zero3d.models.tiled_loss import Ranks, defer_logits, find_head
from zero3d.models.tiles import cut_rows, describe_tiles, tile_embedding, tile_linear, tile_rows, tiles_of
from zero3d.shards.cuts import Cut, Tile
from zero3d.spec.sizes import decimal, parse_size
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.styles import Unbiased
from zero3d.tensor_parallel.vocabulary import LocalEmbedding, has_causal_loss

# --- the loss ------------------------------------------------------------------------------------


def check_tiled_loss(model: nn.Module, loss: Callable[..., Any] | None) -> None:
    """Refuse a loss that is not a model's own of the next token. Raises ConfigError."""
    inner = inner_model(model)
    if not has_causal_loss(inner):
        raise ConfigError(
            f"tiled_loss=True computes Hugging Face's next-token loss (ForCausalLMLoss), and "
            f"{type(inner).__name__} has no loss or another one: pass tiled_loss=False (train.tiled_loss=false)."
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
        weight = tiles[0].weight if (tiles := tiles_of(head)) else head.weight
        cut = next((cuts[key] for key, p in chunk.named_parameters() if p is weight and key in cuts), None)
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


# --- matrices ------------------------------------------------------------------------------------


class Budget(NamedTuple):
    """What of a matrix may be gathered at once. nbytes: of one tile, in the dtype that it is computed in."""

    nbytes: int
    dtype: torch.dtype


def parse_budget(value: int | str | None) -> int | None:
    """Return the bytes of a gather_budget, None for none. Raises ConfigError."""
    return None if value is None else parse_size(value, "gather_budget")


class User(NamedTuple):
    """A module that has a parameter, as one of its own with this name."""

    name: str
    module: nn.Module
    local: str

    @property
    def full(self) -> str:
        return f"{self.name}.{self.local}" if self.name else self.local


def tile_layers(chunks: Mapping[int, nn.Module], budget: Budget, tied: Collection[str], warns: bool) -> dict[str, Tile]:
    """Cut weights of linear layers and embeddings above the budget into tiles, in place.

    tied   names of parameters shared with another pipeline stage; they stay whole
    warns  say which layers are above the budget and stay whole, and why
    Returns the tiles, by name: the part of a parameter that each is. Raises ConfigError where a row is above the
    budget, or a block is compiled.
    """
    tiles: dict[str, Tile] = {}
    left: list[str] = []
    for chunk in chunks.values():
        cast_of = computed_in(chunk, budget.dtype)
        compiled = tuple(f"{name}." if name else "" for name, m in chunk.named_modules() if is_compiled(m))
        for p, users in _users(chunk).items():
            first = users[0]
            width = cast_of(first.full, p).itemsize
            if p.numel() * width <= budget.nbytes:
                continue
            if why := "tied to another pipeline stage" if first.full in tied else _whole(users):
                left.append(f"{first.full} ({decimal(p.numel() * width)}, {why})")
                continue
            if first.name.startswith(compiled):
                raise ConfigError(
                    f"gather_budget gathers the weight of {first.name} in tiles, and the module is compiled: pass "
                    "train.compile=false, or leave gather_budget out."
                )
            tiles |= _tile(p, users, p.shape[1] * width, budget.nbytes)
    if left and warns:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(f"gathered whole, above gather_budget: {', '.join(left[:3])}{more}.", stacklevel=7)
    return tiles


def _users(chunk: nn.Module) -> dict[nn.Parameter, list[User]]:
    """Return the modules that have each parameter, in model order."""
    users: dict[nn.Parameter, list[User]] = {}
    for name, module in chunk.named_modules():
        for local, p in module.named_parameters(recurse=False):
            users.setdefault(p, []).append(User(name, module, local))
    return users


def _whole(users: Sequence[User]) -> str | None:
    """Say why a parameter stays whole; None for one that only linear layers and embeddings have, as their weight."""
    for _, module, local in users:
        forward = vars(module).get("forward")
        if type(module) not in (nn.Linear, nn.Embedding) or local != "weight":
            return f"of {type(module).__name__}, neither a linear layer nor an embedding"
        if forward is not None and not isinstance(forward, (Unbiased, LocalEmbedding)):
            return "a forward that is not the layer's own"
        if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq or module.max_norm):
            return "an embedding whose lookups depend on all rows"
    return None


def _tile(p: nn.Parameter, users: Sequence[User], row_bytes: int, budget: int) -> dict[str, Tile]:
    rows = tile_rows(p.shape[0], row_bytes, budget)
    if not rows:
        raise ConfigError(
            f"gather_budget={budget:,} bytes is less than one row of {users[0].full}, {row_bytes:,} bytes "
            f"({p.shape[1]:,} numbers): type {row_bytes:,} or more."
        )
    parts = cut_rows(p, rows)
    for _, module, _ in users:
        if isinstance(module, nn.Linear):
            tile_linear(module, parts, adds_bias=not isinstance(module.forward, Unbiased))
        else:
            assert isinstance(module, nn.Embedding)
            forward: Any = module.forward
            lookup = tile_embedding(module, parts)
            if isinstance(forward, LocalEmbedding):
                forward.lookup = lookup
            else:
                module.forward = lookup  # type: ignore[method-assign, assignment]
    return describe_tiles(users[0].name, tuple(p.shape), rows)
