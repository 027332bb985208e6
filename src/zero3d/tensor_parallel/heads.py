"""Arguments of attention with an entry for every head, such as ALiBi's slopes: a tp rank takes those of its heads.

    alibi, position_bias    [heads, ., .] or [batch x heads, ., .], [batch, heads, ., .]
    attention_mask          [batch, heads, ., .]; a mask for all heads, [batch, 1, ., .], stays

Models make these tensors once for all layers, from the number of all heads; a plan that only divides numbers of heads
would give every rank the slopes of the first heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.plan import Style
from zero3d.tensor_parallel.shipped import CUTS

ALIBI = ("alibi", "position_bias")
OF_HEADS = (*ALIBI, "attention_mask")


def slice_heads(channel: Channel, heads: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Slice the arguments of an attention of `heads` heads to this rank's: its forward pre-hook."""
    names = _argument_names(module)
    local = [_local(value, name, heads, channel) for name, value in zip(names, args, strict=False)]
    return (*local, *args[len(names) :]), {key: _local(value, key, heads, channel) for key, value in kwargs.items()}


def _argument_names(module: nn.Module) -> list[str]:
    """Return the names of what its class's forward takes, whatever wraps the forward now."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _local(value: Any, name: str, heads: int, channel: Channel) -> Any:
    if name not in OF_HEADS or not isinstance(value, Tensor):
        return value
    if value.dim() == 4:
        return channel.slice_of(value, 1) if value.shape[1] == heads else value
    if value.dim() == 3 and name in ALIBI:
        return channel.slice_of(value.reshape(-1, heads, *value.shape[1:]), 1).flatten(0, 1)
    return value


def check_alibi(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuse an attention that is cut and takes ALiBi, but not the slopes of its own heads. Raises ConfigError."""
    for owner in {name.rpartition(".")[0]: None for name, style in styles.items() if style.kind in CUTS}:
        module = model.get_submodule(owner)
        taken = [name for name in ALIBI if name in _argument_names(module)]
        if taken and (owner not in styles or styles[owner].kind != "own_heads"):
            raise ConfigError(
                f"{owner} is cut over tp and takes {taken[0]}, which has a slope for each of all heads: every rank "
                f"would use the first heads' slopes. Add {owner!r}: 'own_heads:H' to the tensor-parallel plan, with "
                "the number of all heads for H, or leave its matrices whole with 'none'."
            )
