"""Images in a run without data: one in each sequence, where a model's vision tower runs without values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from zero3d.errors import ConfigError
from zero3d.models.bases import sees_images
from zero3d.models.copies import copy_with
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.images import image_features, image_inputs
from zero3d.models.packing import inner_model
from zero3d.tools.sim.patches import without_values
from zero3d.tools.sim.stand_ins import empty_like

TEXT_ALONE = "as text alone"


class Images(NamedTuple):
    """An image for each sequence of a micro-batch.

    inputs   what `forward` takes for one image [1, ...]
    tokens   of the language model that it takes the place of
    kinds    names of what tells these from others, int64 [sequences, length] each
    """

    inputs: Mapping[str, Tensor]
    tokens: int
    kinds: tuple[str, ...]

    def of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what a micro-batch has beside its ids [sequences, length]."""
        images = {name: t.repeat(len(ids), *[1] * (t.dim() - 1)) for name, t in self.inputs.items()}
        return images | {name: torch.zeros_like(ids) for name in self.kinds}


def find_images(model: nn.Module, length: int, packed: bool) -> Images | None:
    """Return the images of a model's sequences of `length` tokens.

    None where it takes none, where sequences are packed (which have none), where an image has no room in one, and
    where the tower reads values (LLaVA-Next, Idefics3, Qwen2-VL, Qwen2.5-VL) or does not run on it. The model stays as
    it is.
    """
    if packed or not sees_images(model):
        return None
    try:
        inputs = image_inputs(model)
    except ConfigError:
        return None
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    with FakeTensorMode(allow_non_fake_inputs=True), without_values(packed):
        copies: dict[nn.Module | Tensor, object] = {t: empty_like(t) for t in tensors}
        dtype = next(model.parameters()).dtype
        given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
        try:
            features = image_features(copy_with(model, copies), given)
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError, ValueError):
            return None
    tokens = sum(prod(t.shape[:-1]) for t in features)
    takes = inspect.signature(inner_model(model).forward).parameters
    kinds = tuple(name for name in TOLD_APART if name in takes)
    return Images(inputs, tokens, kinds) if tokens <= length else None


def said_of(model: nn.Module, images: Images | None) -> str:
    """Return how sequences of a model were run: with images or as text alone; nothing of one that takes no images."""
    if images is not None:
        return f"with an image of {images.tokens:,} tokens"
    return TEXT_ALONE if sees_images(model) else ""
