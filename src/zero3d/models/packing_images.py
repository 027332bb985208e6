"""Decides whether a model keeps packed documents with images apart, by a trial (packing_trial.py).

    first    nine tokens of text, an image                    images touch where documents do, and stand at other
    second   an image, five of text, an image, four of text   places in each: blocks that run on, or are looked up at
    third    seven of text                                    the place of another document, show

Another image must move its own document, too. Images are small, wider than high where the model takes such, with random
pixels.
What does not run here is not packed: nothing is read in source code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.models.bases import base_of, sees_images
from zero3d.models.document_masks import MADE, TOLD_APART, blocks_of
from zero3d.models.document_positions import DocumentPositions
from zero3d.models.images import image_features, trial_image
from zero3d.models.packing import SEEDS, Key, given_in_training, inner_model, is_varlen, key_of, tell, why_at_once
from zero3d.models.packing_trial import (
    FIRST_ID,
    TOKEN,
    Document,
    Documents,
    Leak,
    Untried,
    changed,
    copied,
    judge,
    random_ids,
)

IMAGE = None  # in the place of a number of tokens of text
FLEX = "flex_attention"
LAYOUTS = ((9, IMAGE), (IMAGE, 5, IMAGE, 4), (7,))
_found: dict[Key, str] = {}


def image_packing(model: nn.Module) -> str | None:
    """Return why documents with images cannot be packed for a model, None where they can; tried once for each kind.

    In a dry run, whose tensors have no values, nothing is tried.
    """
    inner = inner_model(model)
    if not sees_images(inner):
        return f"zero3d does not know the form of the images that {type(inner).__name__} takes"
    if why := why_at_once(inner):
        return why
    attention = inner.config.get_text_config()._attn_implementation  # type: ignore[union-attr, operator]
    if blocks_of(inner) and attention == FLEX:
        return f"masks of documents with images are made for {' and '.join(MADE)} attention, and this is {attention}"
    if isinstance(torch.empty(0), FakeTensor):
        return None
    key = key_of(inner)
    if key is None or key not in _found:
        found = _tried(inner)
        if key is None:
            return found or None
        _found[key] = found
    return _found[key] or None


def _tried(model: nn.Module) -> str:
    """Return why, "" where documents are kept apart. Tries one block of each kind, and all where that does not run."""
    name, said = type(model).__name__, ""
    for few in (True, False):
        try:
            leak = _with_blocks(model, few)
        except Exception as error:  # noqa: BLE001 (any error of its own, quoted)
            line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            said = line if isinstance(error, Untried) else f"{type(error).__name__}: {line}"
        else:
            return f"{name} lets documents with images see each other ({leak.words})" if leak else ""
    return f"that {name} keeps documents with images apart could not be tried ({said})"


def _with_blocks(model: nn.Module, few: bool) -> Leak | None:
    """Try a model; raises what its forward raises. A leak shows with any weights, a router's tie with some."""
    varlen = is_varlen(model)
    leak: Leak | None = None
    for seed in SEEDS:
        with copied(model, varlen, few, seed) as trial:
            tell(trial)
            leak = judge(trial, given_in_training(trial, varlen, rows=1), _documents(trial, seed))
        if leak is None:
            return None
    return leak


def _documents(model: nn.Module, seed: int) -> Documents:
    """Return documents with images, and the first with another token and another image."""
    generator = torch.Generator().manual_seed(seed)
    one = trial_image(model)
    tokens = sum(prod(t.shape[:-1]) for t in image_features(model, one))
    image: int = base_of(model).config.image_token_id
    takes = inspect.signature(model.forward).parameters
    kinds = [name for name in TOLD_APART if name in takes]

    def document(layout: Sequence[int | None]) -> Document:
        ids = torch.cat([_segment(model, count, tokens, image, generator) for count in layout], 1)
        told = {name: (ids == image).long() for name in kinds}
        return {"input_ids": ids} | told | _images(one, layout.count(IMAGE), generator)

    each = [document(layout) for layout in LAYOUTS]
    other = each[0] | _images(one, LAYOUTS[0].count(IMAGE), generator)
    positions = DocumentPositions.of(model)
    place = _places if positions is None else partial(_own_positions, positions)
    return Documents(each, {TOKEN: changed(each[0]), "image": other}, place)


def _segment(model: nn.Module, count: int | None, tokens: int, image: int, generator: torch.Generator) -> Tensor:
    """Return tokens of text, or those of an image [1, ..]."""
    if count is IMAGE:
        return torch.full((1, tokens), image)
    ids = random_ids(model, 1, count, generator)
    return torch.where(ids == image, FIRST_ID - 1, ids)


def _images(one: Document, count: int, generator: torch.Generator) -> Document:
    """Return what a forward takes of so many images with random pixels."""

    def drawn(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator) if t.is_floating_point() else t

    images = [{name: drawn(t) for name, t in one.items()} for _ in range(count)]
    return {name: torch.cat([image[name] for image in images]) for name in (one if images else ())}


def _places(document: Document) -> Tensor:
    return torch.arange(document["input_ids"].shape[1])


def _own_positions(positions: DocumentPositions, document: Document) -> Tensor:
    """Return positions [4, L] as a data worker makes them."""
    kinds = {name: t[0] for name, t in document.items() if name in TOLD_APART}
    images = {name: t for name, t in document.items() if name not in ("input_ids", *TOLD_APART)}
    return positions(document["input_ids"][0], kinds, images)
