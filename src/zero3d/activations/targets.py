"""Which modules are recomputed or compiled: a model's repeated blocks, and the attention modules in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks

Blocks = Mapping[str, nn.Module]


def blocks_of(model: nn.Module, blocks: Blocks | None, asked: str) -> Blocks:
    found = find_blocks(model) if blocks is None else blocks
    if not found:
        raise ConfigError(
            f"{asked} needs the model's repeated blocks, and {type(model).__name__} has no list of two or more blocks: "
            "pass blocks={'name': module, ...}, or activations=none."
        )
    return found


def attentions_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost attention modules inside a block, with their names there."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("Attention") or name.endswith(("attn", "attention")):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", found) for inner, found in attentions_in(child))
