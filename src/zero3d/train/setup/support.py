"""Finds out what a model supports by the checks that an engine runs, without weights, ranks or data.

    tp          the model's plan is read and a copy is cut, for each number that its heads allow
    pp          the chain of its blocks is found, by a trial of its forward
    ep, sp      its experts are found; attention alone must mix the tokens of a sequence, by a trial
    images      its vision tower runs on a blank image
    packing     documents of one sequence do not see each other
    fused       matrices that are several in one, which tp cuts each by itself
    lora        the layers that PEFT, or else this project, adapts if lora.targets names none
    quantize    layers of a frozen copy are packed, and their bytes in each format counted

Parameters are on the meta device. Each answer is a row; a row that says no has the engine's own words.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3d.config import Lora
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import find_experts
from zero3d.models.adapters import find_targets
from zero3d.models.bases import decoder_of, has_tower, layer_numbers, sees_images
from zero3d.models.blocks import find_blocks
from zero3d.models.codecs import CODECS
from zero3d.models.copies import on_meta
from zero3d.models.image_trial import check_blank_image
from zero3d.models.packing import check_packing, inner_model
from zero3d.models.packing_images import image_packing
from zero3d.models.places import CONFIG, config_json
from zero3d.models.quantised import find_layers
from zero3d.models.quantised_experts import pack_stacks
from zero3d.models.quantised_folders import SETTINGS, check_method, stored_format
from zero3d.pipeline.split import chain_of
from zero3d.sequence.group import check_sequence, has_known_loss, own_loss
from zero3d.sequence.trial import try_rows
from zero3d.spec.formats import FORMATS, NF4
from zero3d.tensor_parallel.parallelize import parallelize, read_styles

MOST_TP = 64
NUMBERED = re.compile(r"\.\d+(?=\.|$)")
APART = "documents of a sequence do not see each other"
PACKED = ("packed_colwise", "packed_rowwise")


class Row(NamedTuple):
    """An answer: yes, no, or None where the question does not arise; the degrees or names; the reason of a no."""

    name: str
    supported: bool | None
    what: str
    refusal: str = ""


class Support(NamedTuple):
    """Lists a model's parts, and the features that it supports."""

    model: str
    parameters: int
    blocks: str
    rows: tuple[Row, ...]


def support_of(model: nn.Module, folder: Path | None = None) -> Support:
    """Ask all checks of a model whose parameters are on the meta device. Its modules are as before afterwards.

    folder  that the model's weights are in, if they are in one
    """
    kinds = Counter(type(model.get_submodule(name)).__name__ for name in find_blocks(model))
    blocks = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    asked = (_tp, _fused, _pp, _ep, _sp, _images, _packing, _lora)
    rows = [_answer(ask.__name__[1:], partial(ask, model)) for ask in asked]
    rows.append(_answer("quantize", partial(_quantize, model, folder)))
    return Support(type(model).__name__, sum(p.numel() for p in model.parameters()), blocks, tuple(rows))


def with_text_part(whole: Support, text: Support | None) -> Support:
    """Return the answers of a whole model, with a row on its language model alone where there is one."""
    if text is None:
        return whole
    can = {row.name for row in whole.rows if row.supported}
    more = [row.name for row in text.rows if row.supported and row.name not in can]
    said = f"model.part=text opens {text.model}: {text.parameters:,} parameters{f', and {_and(more)}' if more else ''}"
    return whole._replace(rows=(*whole.rows, Row("text", True, said)))


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _answer(name: str, ask: Callable[[], Row]) -> Row:
    try:
        return ask()
    except ConfigError as error:
        return Row(name, False, "", str(error))


def _tp(model: nn.Module) -> Row:
    heads = _heads(model)
    works: list[int] = []
    refusal = ""
    for size in _divisors(heads or MOST_TP, MOST_TP):
        try:
            parallelize(on_meta(model), Axis("tp", 0, size), Ledger())
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
    chain, _ = chain_of(model, None)
    return Row("pp", True, f"up to {chain.length} stages of {chain.blocks}")


def _ep(model: nn.Module) -> Row:
    experts = {layer.experts for layer in find_experts(model)}
    if not experts:
        return Row("ep", None, "no experts")
    return Row("ep", True, f"{_listed(list(_divisors(min(experts), min(experts))))} ({min(experts)} experts a layer)")


def _sp(model: nn.Module) -> Row:
    check_sequence(model, 2, 1, "auto")
    inner = inner_model(model)
    if "labels" in inspect.signature(inner.forward).parameters and not has_known_loss(inner):
        raise ConfigError(own_loss(inner))
    heads, attention = try_rows(decoder_of(model)).heads(), _heads(model)
    most = "any" if heads is None else f"up to {heads}, as recurrences have so many heads"
    return Row("sp", True, f"{most}; by heads up to {attention}" if attention else most)


def _images(model: nn.Module) -> Row:
    if not sees_images(model) and has_tower(model):
        raise ConfigError(
            f"{type(model).__name__} takes images, but zero3d does not know how: at stage 3 all ranks must have images "
            "in a micro-batch, or none, and its data come from a loop of one's own."
        )
    if not sees_images(model):
        return Row("images", None, "text alone")
    check_blank_image(model)
    return Row("images", True, "where others have more images in a step, a rank runs the tower on blank ones")


def _packing(model: nn.Module) -> Row:
    if not sees_images(model):
        return Row("packing", True, check_packing(model, exact=True) or APART)
    why = image_packing(model)
    try:
        text = check_packing(model, exact=True) or APART
    except ConfigError as error:
        if why:
            raise
        return Row("packing", True, f"{APART} where they have images; of text alone: {error}")
    return Row(
        "packing", True, f"{text}; those with images are not packed: {why}" if why else f"{text}, with images too"
    )


def _lora(model: nn.Module) -> Row:
    modules, stacked = find_targets(model, Lora(rank=1))
    names = {name.rpartition(".")[2] for name in (*modules, *stacked)}
    return Row("lora", bool(names), ", ".join(sorted(names)))


def _quantize(model: nn.Module, folder: Path | None) -> Row:
    """Return the row of `model.quantize`: how much of a model each format packs, its bytes, a folder's own format."""
    shapes = _packed_shapes(model)
    everything = sum(prod(shape) * many for shape, many in shapes.items())
    if not everything:
        return Row("quantize", False, "", "model.quantize packs linear layers of blocks, and this model has none.")
    share = f"{everything / sum(p.numel() for p in model.parameters()):.1%} of the parameters"
    settings = None if folder is None else config_json(folder / CONFIG).get(SETTINGS)
    if folder is not None and settings is not None:
        method = check_method(settings, folder / CONFIG)
        kept = stored_format(folder)
        what = f"kept as {kept}" if kept else "decoded as they are read"
        return Row("quantize", True, f"{share} can be packed; those of the folder are in {method} already, {what}")
    widths = (
        f"{name} {sum(form.nbytes(shape) * many for shape, many in shapes.items()) / (2 * everything):.2f}x"
        for name, form in FORMATS.items()
    )
    return Row("quantize", True, f"{share}, in {', '.join(widths)} of their bytes in bf16")


def _packed_shapes(model: nn.Module) -> Counter[tuple[int, int]]:
    """Return how many matrices of each shape model.quantize packs where all of a model is frozen."""
    frozen = on_meta(model).requires_grad_(False)
    shapes: Counter[tuple[int, int]] = Counter()
    for layer in find_layers(frozen).values():
        shapes[layer.out_features, layer.in_features] += 1
    for name, stack in pack_stacks(frozen, CODECS[NF4.name], torch.bfloat16).items():
        shapes[stack.shape] += len(frozen.get_parameter(name))
    return shapes


def _heads(model: nn.Module) -> int | None:
    """Return the attention heads of the layer that has fewest."""
    config: Any = getattr(inner_model(model), "config", None)
    return min(layer_numbers(config.get_text_config(), "num_attention_heads"), default=None) if config else None


def _divisors(number: int, most: int) -> Iterator[int]:
    return (size for size in range(2, min(number, most) + 1) if number % size == 0)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
