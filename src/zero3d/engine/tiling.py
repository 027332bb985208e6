"""Tiles of what is too large to be held at once: refuse what cannot be tiled, give a model's parts their tiles."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3d.activations.compilation import is_compiled
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.memory.budget import decimal, parse_size
from zero3d.models.blocks import computed_in
from zero3d.models.chain import model_of
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder
from zero3d.models.tiled_loss import Ranks, defer_logits, find_head
from zero3d.models.tiles import tile_linear, tile_rows
from zero3d.pipeline.schedules import Schedule
from zero3d.shards.cuts import Cut, Tile
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.styles import Unbiased
from zero3d.tensor_parallel.vocabulary import has_causal_loss

# --- the loss ------------------------------------------------------------------------------------


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
        weight = head._parameters.get("weight")  # none of its own where it is in tiles, and then not tied
        full = next((key for key, p in chunk.named_parameters() if p is weight), f"{_name_in(chunk, head)}.weight")
        cut = cuts.get(full)
        if cut is not None and cut.dim != 0:
            raise ConfigError(
                f"tiled_loss=True needs whole rows of {name}.weight on a rank, and the tensor-parallel plan cuts its "
                f"columns: give {name} colwise_gather_output or replicate, or pass tiled_loss=False."
            )
        defer_logits(inner, None if cut is None else _ranks_of(Channel(axis, ledger), name))


def _name_in(chunk: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {m: name for name, m in chunk.named_modules()}
    return names[module]


def _ranks_of(channel: Channel, name: str) -> Ranks:
    """Return the tp ranks as those that share out the vocabulary; `name` is the head's in the ledger."""
    return Ranks(
        channel.rank, channel.size, lambda numbers: channel.all_gather(numbers, 0, name).view(channel.size, 2, -1)
    )


# --- linear layers -------------------------------------------------------------------------------


class Budget(NamedTuple):
    """What of a linear layer may be gathered at once. nbytes: of one tile, in the dtype that it is computed in."""

    nbytes: int
    dtype: torch.dtype


def parse_budget(value: int | str | None) -> int | None:
    """Return the bytes of a gather_budget, None for none. Raises ConfigError."""
    return None if value is None else parse_size(value, "gather_budget")


def release_within_budget(release: str, schedule: Schedule) -> str:
    """Return when tiles are released at stage 3 ("auto": after every use). Raises ConfigError where they would stay."""
    if release == "every_step":
        raise ConfigError(
            "gather_budget gathers a few tiles at a time, and release='every_step' keeps all that were gathered until "
            "the step ends: leave release out, or gather_budget."
        )
    if schedule.splits_backward:
        raise ConfigError(
            f"gather_budget with schedule {schedule.name!r}, whose weight phase needs all weights of a model chunk "
            "gathered: pass schedule='1f1b' or 'interleaved', or leave gather_budget out."
        )
    return "every_use"


def tile_layers(chunks: Mapping[int, nn.Module], budget: Budget, tied: Collection[str], warns: bool) -> dict[str, Tile]:
    """Cut the weights of linear layers that are above the budget into tiles, in place; return what tiles are of them.

    tied   names of parameters that another pipeline stage has, too; they stay whole
    warns  say which layers are above the budget and stay whole, and why
    Raises ConfigError where a row is above the budget, or a block is compiled.
    """
    tiles: dict[str, Tile] = {}
    left: list[str] = []
    for chunk in chunks.values():
        cast_of, users = computed_in(chunk, budget.dtype), _users(chunk)
        compiled = tuple(f"{name}." if name else "" for name, m in chunk.named_modules() if is_compiled(m))
        for name, module in list(chunk.named_modules()):
            for local, p in list(module.named_parameters(recurse=False)):
                full = f"{name}.{local}" if name else local
                width = cast_of(full, p).itemsize
                if p.numel() * width <= budget.nbytes:
                    continue
                if why := _whole(module, local, users[p] > 1 or full in tied):
                    left.append(f"{full} ({decimal(p.numel() * width)}, {why})")
                    continue
                if name.startswith(compiled):
                    raise ConfigError(
                        f"gather_budget has {name} gather its weight tile by tile, and it is compiled: pass "
                        "train.compile=false, or leave gather_budget out."
                    )
                tiles |= _tile(name, module, p.shape[1] * width, budget.nbytes)
    if left and warns:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(f"gathered whole, above gather_budget: {', '.join(left[:3])}{more}.", stacklevel=7)
    return tiles


def _users(chunk: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that have a parameter."""
    return Counter(p for module in chunk.modules() for p in module.parameters(recurse=False))


def _whole(module: nn.Module, local: str, tied: bool) -> str | None:
    """Say why a parameter stays whole; None for the weight of a linear layer whose forward is its own."""
    if isinstance(module, nn.Embedding):
        return "an embedding, whose rows are looked up"
    if type(module) is not nn.Linear or local != "weight":
        return f"of {type(module).__name__}, no linear layer"
    if tied:
        return "tied to a parameter of another module"
    forward = vars(module).get("forward")
    return None if forward is None or isinstance(forward, Unbiased) else "its forward is not its own"


def _tile(name: str, linear: nn.Module, row_bytes: int, budget: int) -> dict[str, Tile]:
    assert isinstance(linear, nn.Linear)
    rows = tile_rows(linear.weight.shape[0], row_bytes, budget)
    if not rows:
        raise ConfigError(
            f"gather_budget={budget:,} bytes is less than one row of {name}.weight, {row_bytes:,} bytes "
            f"({linear.weight.shape[1]:,} numbers): type {row_bytes:,} or more."
        )
    return tile_linear(name, linear, rows, adds_bias=not isinstance(linear.forward, Unbiased))
