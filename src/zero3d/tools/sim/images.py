"""Images in a run without data: as many patches in each sequence as its own would have, or one image of a megapixel.

The tower runs on shapes alone, with values of whole numbers (known.py): many towers read grids and sizes of images.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, image_model, sees_images
from zero3d.models.blocks import find_blocks
from zero3d.models.copies import copy_with
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.images import image_of, patches_of, repeated, sized, tower_output, tower_parameters
from zero3d.models.packing import inner_model
from zero3d.nested import map_tensors, tensors_in
from zero3d.tools.plan.spec import Patches
from zero3d.tools.sim.known import KnownValues
from zero3d.tools.sim.patches import without_values
from zero3d.tools.sim.stand_ins import empty_like

TEXT_ALONE = "as text alone"
FAILS = (
    *(ConfigError, DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError, ValueError),
    *(AttributeError, LookupError, NotImplementedError),
)  # of a forward that does not run without values


@dataclass(frozen=True)
class Images:
    """The images of a sequence.

    inputs    what `forward` takes for one of them [1, ...]
    count     of a sequence; patches, tokens: of all of them
    image     the token that features replace
    kinds     names of what tells tokens of images from others, int64 [sequences, length] each
    blocks    names of the tower's blocks, in the order in which they run
    features  what `get_image_features` returns of them, of shapes alone
    """

    inputs: Mapping[str, Tensor]
    count: int
    patches: int
    tokens: int
    image: int
    kinds: tuple[str, ...]
    blocks: tuple[str, ...]
    features: Any

    @property
    def nbytes(self) -> int:
        """Return the bytes of a sequence's images in a batch."""
        return self.count * sum(t.numel() * t.element_size() for t in self.inputs.values())

    def stand_in(self, model: nn.Module) -> None:
        """Let a copy of the model take features that are there, in the place of running its tower."""

        def fresh(t: Tensor) -> Tensor:
            return torch.empty(t.shape, dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)

        vars(image_model(model))["get_image_features"] = lambda *args, **kwargs: map_tensors(self.features, fresh)

    def of(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what a micro-batch has beside its ids [sequences, length], which get the tokens of images."""
        each = self.tokens // self.count
        for number in range(self.count):  # with a token of text between two
            ids[:, number * (each + 1) : number * (each + 1) + each] = self.image
        shown = (ids == self.image).long()
        return repeated(self.inputs, self.count * len(ids)) | {name: shown.clone() for name in self.kinds}


def with_images(images: Images, sequences: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ids [sequences, length] with images, and what a micro-batch has beside them: real tensors in any mode."""
    with unset_fake_temporarily():
        ids = torch.zeros(sequences, length, dtype=torch.int64)
        return ids, images.of(ids)


def find_images(model: nn.Module, length: int, packed: bool, patches: Patches | None = None) -> Images | None:
    """Return the images of a model's sequences of `length` tokens.

    patches  of a sequence; None: one image of a megapixel where a model takes any size, or of the size that it takes
    None where a model takes no images, where one has no room in a sequence, and where the tower does not run on shapes.
    The model stays as it is. Raises ConfigError where so many patches as were asked for have no room, or no tower.
    """
    if not sees_images(model):
        if patches is not None and patches.asked:
            raise ConfigError(f"--patches {patches.number}: {type(model).__name__} takes no images; leave it out.")
        return None
    try:
        one, count = _images(model, length, patches)
    except ConfigError:
        return None
    try:
        found = _tried(model, one, count, packed)
    except FAILS:
        return None
    features, blocks, tokens = found
    if tokens + count - 1 > length or not tokens:
        if patches is not None and patches.asked:
            raise ConfigError(
                f"--patches {patches.number}: these images have {tokens:,} tokens, and a sequence {length:,}: type "
                f"--seq {tokens + count} or more, or fewer patches."
            )
        return None
    takes = inspect.signature(inner_model(model).forward).parameters
    kinds = tuple(name for name in TOLD_APART if name in takes)
    of_all = count * patches_of(model, one) or tokens  # of two towers a config does not tell
    return Images(one, count, of_all, tokens, image_token(model), kinds, blocks, features)


def image_token(model: nn.Module) -> int:
    """Return the token that features of images replace."""
    config = base_of(model).config
    names = ("image_token_id", "image_token_index")
    return int(next(value for name in names if (value := getattr(config, name, None)) is not None))


def _images(model: nn.Module, length: int, patches: Patches | None) -> tuple[dict[str, Tensor], int]:
    """Return one image and how many of it a sequence has. Raises ConfigError where a config does not tell its form."""
    if not sized(model):
        one = image_of(model)
        own = 1 if patches is not None and patches.tiles else max(1, patches_of(model, one))
        return one, 1 if patches is None else max(1, -(-patches.number // own))
    if patches is None:
        return image_of(model, tokens=length), 1
    return image_of(model, patches=max(1, -(-patches.number // patches.images))), patches.images


def _tried(model: nn.Module, one: Mapping[str, Tensor], count: int, packed: bool) -> tuple[Any, tuple[str, ...], int]:
    """Return features, names of the tower's blocks that made them, and their tokens. Raises one of FAILS."""
    ran: dict[str, None] = {}
    of_tower = set(tower_parameters(model))
    names = [name for name, block in find_blocks(model).items() if of_tower.issuperset(block.parameters())]
    made: list[Any] = []
    dtype = next(model.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in repeated(one, count).items()}
    with FakeTensorMode(allow_non_fake_inputs=True), without_values(packed):
        tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
        copies: dict[nn.Module | Tensor, object] = {t: empty_like(t) for t in tensors}
        run = copy_with(model, copies)
        for name in names:
            run.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.setdefault(name))
        base = image_model(run)
        encode = base.get_image_features

        def encoded(*args: Any, **kwargs: Any) -> Any:
            output = encode(*args, **kwargs)
            made.append(map_tensors(output, _shape))
            return output

        vars(base)["get_image_features"] = encoded
        with KnownValues():
            output = tower_output(run, given)
        tokens = sum(prod(t.shape[:-1]) for t in tensors_in(output.pooler_output))
        return made[0], tuple(ran), tokens


def _shape(t: Tensor) -> Tensor:
    """Return a tensor of this shape outside of the mode."""
    with unset_fake_temporarily():
        return torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)


def said_of(model: nn.Module, images: Images | None) -> str:
    """Return how sequences of a model were run: with images or as text alone; nothing of one that takes no images."""
    if images is not None:
        several = f"{images.count} images" if images.count > 1 else "an image"
        return f"with {several} of {images.patches:,} patches and {images.tokens:,} tokens"
    return TEXT_ALONE if sees_images(model) else ""
