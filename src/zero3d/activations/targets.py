"""Which modules are recomputed or compiled: a model's repeated blocks, and what mixes tokens in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.recurrences import is_mixer
from zero3d.models.wrappers import unwrap

Blocks = Mapping[str, nn.Module]
NAMES = ("attn", "attention", "mlstm_layer")  # how names of modules end that mix tokens


def blocks_of(model: nn.Module, blocks: Blocks | None, option: str) -> Blocks:
    """Return `blocks`, or where none are given the model's. Raises ConfigError where `option` finds none."""
    if blocks is None:
        blocks = find_blocks(unwrap(model))
    if not blocks:
        raise ConfigError(
            f"{option} needs the model's repeated blocks, and {type(model).__name__} has no list of two or more "
            "blocks: pass blocks={'name': module, ...}, or activations=none."
        )
    return blocks


def mixers_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules inside a block that mix tokens, with their names there: attention, recurrences.

    Attention is told by its name or its class, and so is xLSTM's layer; other mixers by what they have.
    """
    for name, child in module.named_children():
        if type(child).__name__.endswith("Attention") or name.endswith(NAMES) or is_mixer(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", mixer) for inner, mixer in mixers_in(child))
