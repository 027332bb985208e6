"""Finds out what a model supports by the checks that an engine runs, without weights, ranks or data.

    tp          the model's plan is read and a copy is cut, for each number that its heads allow
    pp          the chain of its blocks is found, by a trial of its forward
    ep, sp      its experts are found; attention alone must mix the tokens of a sequence, by a trial
    images      its vision tower runs on a blank image
    packing     documents of one sequence do not see each other
    fused       matrices that are several in one, which tp cuts each by itself
    lora        what PEFT, or else this project, adapts where lora.targets names nothing

Parameters are on the meta device. Each answer is a row; a row that says no has the engine's own words.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import find_experts
from zero3d.models.adapters import ALL, all_linear, default_targets
from zero3d.models.bases import layer_numbers, sees_images
from zero3d.models.blocks import find_blocks
from zero3d.models.chain import find_chain
from zero3d.models.image_trial import check_blank_image
from zero3d.models.packing import check_packing, inner_model
from zero3d.sequence.group import check_sequence
from zero3d.tensor_parallel.parallelize import parallelize, read_styles

MOST_TP = 64
NUMBERED = re.compile(r"\.\d+(?=\.|$)")
PACKED = ("packed_colwise", "packed_rowwise")


class Row(NamedTuple):
    """An answer: yes, no, or None where the question does not arise; what degrees or names; why not."""

    name: str
    supported: bool | None
    what: str
    refusal: str = ""


class Support(NamedTuple):
    """Lists what a model is made of, and what it supports."""

    model: str
    parameters: int
    blocks: str
    rows: tuple[Row, ...]


def support_of(model: nn.Module) -> Support:
    """Ask all checks of a model whose parameters are on the meta device. Its modules are as before afterwards."""
    kinds = Counter(type(model.get_submodule(name)).__name__ for name in find_blocks(model))
    blocks = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    rows = []
    for ask in (_tp, _fused, _pp, _ep, _sp, _images, _packing, _lora):
        try:
            rows.append(ask(model))
        except ConfigError as error:
            rows.append(Row(ask.__name__[1:], False, "", str(error)))
    return Support(type(model).__name__, sum(p.numel() for p in model.parameters()), blocks, tuple(rows))


def _tp(model: nn.Module) -> Row:
    heads = _heads(model)
    works: list[int] = []
    refusal = ""
    for size in _divisors(heads or MOST_TP, MOST_TP):
        try:
            parallelize(copy.deepcopy(model).to("meta"), Axis("tp", 0, size), Ledger())
        except ConfigError as error:
            refusal = refusal or str(error)
        else:
            works.append(size)
    return Row("tp", bool(works), _listed(works), "" if works else refusal)


def _fused(model: nn.Module) -> Row:
    try:
        styles = read_styles(model, None)
    except ConfigError:
        return Row("fused", None, "")  # tp has said why
    fused = {NUMBERED.sub(".*", name): style.blocks for name, style in styles.items() if style.kind in PACKED}
    return Row(
        "fused", True if fused else None, ", ".join(f"{name} ({blocks} in one)" for name, blocks in fused.items())
    )


def _pp(model: nn.Module) -> Row:
    chain = find_chain(model)
    return Row("pp", True, f"up to {chain.length} stages of {chain.blocks}")


def _ep(model: nn.Module) -> Row:
    experts = {layer.experts for layer in find_experts(model)}
    if not experts:
        return Row("ep", None, "no experts")
    return Row("ep", True, f"{_listed(list(_divisors(min(experts), min(experts))))} ({min(experts)} experts a layer)")


def _sp(model: nn.Module) -> Row:
    check_sequence(model, 2, 1, "auto")
    return Row("sp", True, f"any; by heads up to {_heads(model)}")


def _images(model: nn.Module) -> Row:
    if not sees_images(model):
        return Row("images", None, "text alone")
    check_blank_image(model)
    return Row("images", True, "ranks without an image in a step run the tower on a blank one")


def _packing(model: nn.Module) -> Row:
    check_packing(model)
    return Row("packing", True, "documents of a sequence do not see each other")


def _lora(model: nn.Module) -> Row:
    targets = default_targets(model)
    names = {name.rpartition(".")[2] for name in (all_linear(model) if targets == (ALL,) else targets)}
    return Row("lora", bool(names), ", ".join(sorted(names)))


def _heads(model: nn.Module) -> int | None:
    """Return the attention heads of the layer that has fewest."""
    config: Any = getattr(inner_model(model), "config", None)
    return min(layer_numbers(config.get_text_config(), "num_attention_heads"), default=None) if config else None


def _divisors(number: int, most: int) -> Iterator[int]:
    return (size for size in range(2, min(number, most) + 1) if number % size == 0)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
