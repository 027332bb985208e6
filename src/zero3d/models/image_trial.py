"""Sequences with images for a run without weights, whose vision tower is not run again.

A tower of half a billion parameters takes seconds for an image on a CPU, even of zeros. So its features are made of
shapes alone, where it reads no values, and stand for what it would return.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, model_of, sees_images
from zero3d.models.copies import copy_with, without_weights
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.images import (
    _line,
    image_inputs,
    no_blank_image,
    repeated,
    takes_blank_image,
    tower_output,
    trial_image,
)
from zero3d.models.packing import inner_model
from zero3d.nested import map_tensors, tensors_in

SEQUENCES, TEXT = 2, 3  # sequences of a trial, and tokens of each beside its image's


class TrialImages(NamedTuple):
    """Sequences of an image each.

    ids       [SEQUENCES, tokens of an image + TEXT]
    inputs    what `forward` takes beside them
    features  what `get_image_features` returns of these, all zeros
    ran       names of the modules that make them, of those asked for
    """

    ids: Tensor
    inputs: dict[str, Tensor]
    features: Any
    ran: tuple[str, ...]


def trial_images(model: nn.Module, modules: Iterable[str]) -> TrialImages | None:
    """Return sequences with a small image each (`trial_image`); None of a model that takes no images.

    Raises ConfigError where its tower does not run on them.
    """
    if not sees_images(model):
        return None
    inputs = repeated(trial_image(model), SEQUENCES)
    try:
        features, ran = _tried(model, inputs, modules)
    except Exception as error:  # any error of its own, quoted
        line = _line(error)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
        raise ConfigError(
            f"the vision tower of {type(model).__name__}, called with {shapes}, raises {type(error).__name__}: "
            f"{line}. Pass pp=1."
        ) from error
    tokens = sum(prod(t.shape[:-1]) for t in tensors_in(features.pooler_output)) // SEQUENCES
    base = base_of(model)
    ids = torch.zeros(SEQUENCES, tokens + TEXT, dtype=torch.long, device="cpu")
    ids[:, 1 : 1 + tokens] = base.config.image_token_id
    takes = inspect.signature(inner_model(model).forward).parameters
    kinds = {name: (ids == base.config.image_token_id).long() for name in TOLD_APART if name in takes}
    return TrialImages(ids, inputs | kinds, features, ran)


def check_blank_image(model: nn.Module) -> None:
    """Refuse a model whose vision tower does not run on a blank image: it is run once without weights. ConfigError."""
    if not sees_images(model) or takes_blank_image(model):
        return
    try:
        _tried(model, image_inputs(model, smallest=True), ())
    except (DataDependentOutputException, DynamicOutputShapeException):
        return  # in a dry run, which says so itself
    except Exception as error:  # any error of its own, quoted
        raise no_blank_image(model, error) from error


class _Reached(Exception):
    """Ends a forward at its language model."""


def not_taken(model: nn.Module, inputs: dict[str, Tensor], tokens: int, image: int) -> str | None:
    """Return what a model finds wrong with an image for which there are so many tokens `image`; None where nothing.

    The shapes of its features tell where they are as many. Else the model's own forward decides, up to its language
    model, without weights: some have more features than tokens.
    """
    shapes = {name: t for name, t in inputs.items() if name not in TOLD_APART}
    found = ""
    try:
        takes = inspect.signature(base_of(model).get_image_features).parameters
        features = _tried(model, {name: t for name, t in shapes.items() if name in takes}, ())[0].pooler_output
        made = sum(prod(t.shape[:-1]) for t in tensors_in(features))
        if made == tokens:
            return None
        found = f"makes {made:,} feature{'' if made == 1 else 's'} of it"
    except Exception as error:  # noqa: BLE001 (any error of its own, quoted)
        found = f"raises {type(error).__name__}: {_line(error)}"
    trial = copy_with(model, without_weights(model)).eval()
    base = base_of(trial)
    reader = base.get_encoder() if base.config.is_encoder_decoder else base.get_decoder()
    if reader is base:
        return None
    reader.register_forward_pre_hook(_reached, prepend=True)
    dtype = next(trial.parameters()).dtype
    ids = torch.full((1, tokens + TEXT), image)
    ids[:, :1], ids[:, 1 + tokens :] = 0, 0
    names = inspect.signature(inner_model(trial).forward).parameters
    kinds = {name: (ids == image).long() for name in TOLD_APART if name in names}
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in shapes.items()}
    try:
        with torch.no_grad():
            trial(input_ids=ids, **given, **kinds)
    except _Reached:
        return None
    except Exception:  # noqa: BLE001 (told in numbers above)
        return found
    return None


def _reached(*_: object) -> None:
    raise _Reached


def called_per_image(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a tower that run more often for two images than for one: projectors, image by image.

    None in a dry run of a tower that reads values.
    """
    if not sees_images(model):
        return set()
    one, whole = image_inputs(model, smallest=True), model_of(model)
    names = dict(whole.named_modules())
    try:
        first, second = (Counter(_tried(whole, repeated(one, count), names)[1]) for count in (1, 2))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return set()
    return {module for name, module in names.items() if second[name] > first[name]}


def _tried(model: nn.Module, inputs: dict[str, Tensor], modules: Iterable[str]) -> tuple[Any, tuple[str, ...]]:
    """Return features and which of these modules ran, by shapes alone where the tower reads no values."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which writes callstacks of what is only tried
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return _features(model, inputs, modules, shapes=True)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return _features(model, inputs, modules, shapes=False)
    finally:
        log.setLevel(level)


def _features(
    model: nn.Module, inputs: dict[str, Tensor], modules: Iterable[str], shapes: bool
) -> tuple[Any, tuple[str, ...]]:
    """Return zeros in the shape of features, and which of these modules ran; `shapes`: without computing any."""
    ran: list[str] = []
    trial = copy_with(model, without_weights(model)).eval()
    for name in modules:
        trial.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    dtype = next(trial.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    dry = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
    with FakeTensorMode(allow_non_fake_inputs=True) if shapes and not dry else nullcontext(), torch.no_grad():
        features = tower_output(trial, given)
    return map_tensors(features, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu")), tuple(ran)
