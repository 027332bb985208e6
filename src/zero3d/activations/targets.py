"""Which modules are recomputed or compiled: a model's repeated blocks, and the attention modules in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.wrappers import unwrap

Blocks = Mapping[str, nn.Module]


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


def attentions_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost attention modules inside a block, with their names there."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("Attention") or name.endswith(("attn", "attention")):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", attention) for inner, attention in attentions_in(child))
