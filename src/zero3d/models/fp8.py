"""Linear layers that multiply in fp8, by torchao's training conversion: which ones, and why not the others.

    weight                     bf16: gathered, released, reduced and saved as without
    x W', dy W, dy' x          both factors are scaled and rounded to 8 bits, the product is bf16 again

A converted layer has the name, the parameters and the bias of the one before; scales are made anew in every product and
kept nowhere. So masters, reductions, checkpoints and exports are those of bf16, and recomputed blocks have the same
bits.

What stays in bf16: layers outside of the blocks (heads, projectors), routers of experts, sizes that 16 does not divide,
layers with hooks or a forward of their own, what a model keeps in fp32. Stacked experts are no linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3d.errors import ConfigError, short
from zero3d.models.blocks import computed_in, find_blocks

FP8 = "fp8"
LEAST = (8, 9)  # compute capability
MULTIPLE = 16  # of both sizes of a matrix
ROUTERS = ("gate", "router", "classifier", "shared_expert_gate")  # their scores choose, so their rounding would, too


class Layers(NamedTuple):
    """Names of a model's linear layers: of those that multiply in fp8, and why the others do not, by name."""

    chosen: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        reasons: dict[str, dict[str, None]] = {}
        for name, why in self.left.items():
            reasons.setdefault(why, {})[_last(name)] = None
        others = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        names = ", ".join(dict.fromkeys(map(_last, self.chosen)))
        total = len(self.chosen) + len(self.left)
        return (
            f"linear layers in fp8: {len(self.chosen)} of {total}, by torchao {_version()}: {names}; in bf16: "
            f"{others or 'none'}; losses are not bitwise those of bf16"
        )


def check_linear(asked: Any, model: nn.Module, device: torch.device) -> None:
    """Refuse fp8 where there are no such products, or nothing that would have them. Raises ConfigError."""
    if asked is None:
        return
    if asked != FP8:
        raise ConfigError(
            f"linear={short(repr(asked))} is unknown: pass 'fp8', or None to leave linear layers unchanged."
        )
    if (why := refuse_device(device)) is not None:
        raise ConfigError(f"linear='fp8' (model.linear=fp8) multiplies in fp8, but {why}: leave it out.")
    if find_spec("torchao") is None:
        raise ConfigError(
            "linear='fp8' (model.linear=fp8) needs torchao, which is not installed: pip install torchao, or leave it "
            "out."
        )
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "linear='fp8' (model.linear=fp8) is not supported with adapters (lora.rank): their matrices are small, "
            "and the weights beside them are merged in bf16. Leave one of the two out."
        )
    if not find_layers(model).chosen:
        raise ConfigError(
            f"linear='fp8' (model.linear=fp8): {type(model).__name__} has no linear layer in repeated blocks whose "
            f"sizes {MULTIPLE} divides: leave it out."
        )


def refuse_device(device: torch.device) -> str | None:
    """Return why a device cannot multiply in fp8; None where it can."""
    if device.type != "cuda":
        return f"a {device.type} device has no fp8 matrix products"
    found = torch.cuda.get_device_capability(device)
    if found >= LEAST:
        return None
    needs, has = (".".join(map(str, each)) for each in (LEAST, found))
    return f"{torch.cuda.get_device_name(device)} has compute capability {has} where {needs} is needed"


def find_layers(model: nn.Module) -> Layers:
    """Return which linear layers of a model multiply in fp8, and why others do not."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    cast_of = computed_in(model, torch.bfloat16)
    chosen: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        kept = isinstance(module.weight, nn.Parameter) and cast_of(f"{name}.weight", module.weight) == torch.float32
        why = "kept in fp32" if kept else _why_not(name, module, blocks)
        if why is None:
            chosen.append(name)
        else:
            left[name] = why
    return Layers(tuple(chosen), left)


def _why_not(name: str, linear: nn.Linear, blocks: tuple[str, ...]) -> str | None:
    if not name.startswith(blocks):
        return "outside of the blocks"
    if _last(name) in ROUTERS:
        return "routers"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"{MULTIPLE} does not divide their sizes"
    hooks = any(value for key, value in vars(linear).items() if "hooks" in key and isinstance(value, dict))
    return "hooks or a forward of their own" if hooks or "forward" in vars(linear) else None


def use_fp8(model: nn.Module) -> Layers:
    """Put layers that multiply in fp8 in the places of a model's linear layers. Raises ConfigError.

    Scales are of whole matrices; an inner size that 16 does not divide, as of tokens, is padded in the product.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = find_layers(model)
    chosen, before = set(layers.chosen), list(model.named_parameters())
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in chosen, config=Float8LinearConfig(pad_inner_dim=True)
    )
    after = list(model.named_parameters())
    if [name for name, _ in after] != [name for name, _ in before] or any(
        one is not other for (_, one), (_, other) in zip(after, before, strict=True)
    ):
        raise ConfigError(
            f"torchao {_version()} has replaced parameters, which checkpoints would miss: install one whose "
            "convert_to_float8_training keeps them, such as 0.18."
        )
    return layers


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _version() -> str:
    try:
        return version("torchao")
    except PackageNotFoundError:  # a checkout on the path
        return "without a version"
