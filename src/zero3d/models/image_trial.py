"""Sequences with images for a run without weights, whose vision tower is not run again.

A tower of half a billion parameters takes seconds for an image on a CPU, even of zeros. So features of large ones are
made of shapes alone, where they read no values but those of whole numbers (sizes, grids, places), and stand for what
they would return.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, image_model, model_of, sees_images
from zero3d.models.copies import copy_with, without_weights
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.images import (
    _line,
    image_inputs,
    no_blank_image,
    read_features,
    repeated,
    takes_blank_image,
    tower_output,
    tower_parameters,
    trial_image,
)
from zero3d.models.packing import inner_model
from zero3d.nested import map_tensors, tensors_in

SEQUENCES, TEXT = 2, 3  # sequences of a trial, and tokens of each beside its image's
SMALL = 10**11  # parameters x numbers of an image of a tower that runs sooner by values than by shapes
KNOWN = 1 << 16  # whole numbers of a tensor whose values are kept where others have shapes alone
WHOLE = (torch.int64, torch.int32, torch.bool)
ARANGE, FILLED = torch.ops.aten.arange, (torch.ops.aten.zeros, torch.ops.aten.ones, torch.ops.aten.full)
READS_VALUES = DataDependentOutputException, DynamicOutputShapeException


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
        tried = _tried(model, inputs, modules)
    except Exception as error:  # any error of its own, quoted
        line = _line(error)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
        raise ConfigError(
            f"the vision tower of {type(model).__name__}, called with {shapes}, raises {type(error).__name__}: "
            f"{line}. Pass pp=1."
        ) from error
    features = tried.features
    tokens = sum(prod(t.shape[:-1]) for t in tensors_in(features.pooler_output)) // SEQUENCES
    base = base_of(model)
    ids = torch.zeros(SEQUENCES, tokens + TEXT, dtype=torch.long, device="cpu")
    ids[:, 1 : 1 + tokens] = base.config.image_token_id
    takes = inspect.signature(inner_model(model).forward).parameters
    kinds = {name: (ids == base.config.image_token_id).long() for name in TOLD_APART if name in takes}
    return TrialImages(ids, inputs | kinds, features, tried.ran)


def check_blank_image(model: nn.Module) -> None:
    """Refuse a model whose vision tower does not run on a blank image: it is run once without weights. ConfigError."""
    if not sees_images(model) or takes_blank_image(model):
        return
    try:
        _tried(model, image_inputs(model, smallest=True), ())
    except READS_VALUES:
        return  # in a dry run, which says so itself
    except Exception as error:  # any error of its own, quoted
        raise no_blank_image(model, error) from error


class _ByShapes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes shapes alone of floating numbers, and values of few whole ones: towers read an image's size and grid."""

    def known(self, t: Tensor) -> Any:
        """Return a tensor whose values are read where it is computed with."""
        return self.fake_tensor_converter.from_real_tensor(self, t, make_constant=True)

    def may_turn_const(self, t: Tensor) -> bool:
        """Return whether a result's values are kept."""
        return t.dtype in WHOLE and t.numel() <= KNOWN and type(t) is Tensor and t.device.type != "meta"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `func`; what makes whole numbers of none, such as arange, is known."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is ARANGE or (packet in FILLED and kwargs.get("dtype") in WHOLE):
            with no_dispatch():
                made: Tensor = func(*args, **kwargs)
            if self.may_turn_const(made):
                return self.known(made)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Reached(Exception):
    """Ends a forward at its language model."""


def not_taken(model: nn.Module, inputs: dict[str, Tensor], tokens: int, image: int, quick: bool = False) -> str | None:
    """Return what a model finds wrong with an image for which there are so many tokens `image`; None where nothing.

    The shapes of its features tell where they are as many. Else the model's own forward decides, up to its language
    model, without weights: some have more features than tokens. quick: nothing is found where that takes long.
    """
    shapes = {name: t for name, t in inputs.items() if name not in TOLD_APART}
    found = ""
    try:
        takes = inspect.signature(base_of(model).get_image_features).parameters
        given = {name: t for name, t in shapes.items() if name in takes}
        features = _tried(model, given, (), quick=quick).features.pooler_output
        made = sum(prod(t.shape[:-1]) for t in tensors_in(features))
        if made == tokens:
            return None
        found = f"makes {made:,} feature{'' if made == 1 else 's'} of it"
    except READS_VALUES:
        return None
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


class TowerUse(NamedTuple):
    """Says how a model uses what its language model does not have, or has read before: empty where that is not known.

    order      numbers of parameters by name, in the order in which a forward comes to them; others come behind
    per_image  modules that run more often for two images than for one: projectors, image by image
    """

    order: Mapping[str, int] = {}
    per_image: Set[nn.Module] = frozenset()


def tower_use(model: nn.Module, strict: bool = False) -> TowerUse:
    """Run a model's tower on one blank image and on two, without weights; return what it uses, and when.

    Nothing is known of a tower that reads values in a dry run. strict: one that fails is an error.
    """
    if not sees_images(model):
        return TowerUse()
    whole = model_of(model)
    names = dict(whole.named_modules())
    try:
        one = image_inputs(model, smallest=True)
        first, second = (_tried(whole, repeated(one, count), names, graph=True) for count in (1, 2))
    except READS_VALUES:
        return TowerUse()
    except Exception:  # any error of its own
        if strict:
            raise
        return TowerUse()
    often = Counter(second.ran) - Counter(first.ran)
    return TowerUse(_order_of_use(whole, first), {names[name] for name in often})


def _order_of_use(model: nn.Module, tried: _Tried) -> dict[str, int]:
    """Return the order in which a forward comes to parameters of the input embeddings, and of the tower behind them.

    A module's place is that of its first call. What no feature is made of has no gradient, and comes first: a backward
    comes to it last.
    """
    tower, entered = set(tower_parameters(model).values()), set(image_model(model).get_input_embeddings().parameters())
    called = {name: number for number, name in reversed(list(enumerate(tried.ran, 1)))}
    order: dict[str, int] = {}
    for name, p in model.named_parameters():
        if p in entered:
            order[name] = 0
        elif name in tower:
            around = name.split(".")[:-1]
            of_modules = (called.get(".".join(around[:depth])) for depth in range(len(around), 0, -1))
            order[name] = next(filter(None, of_modules), 0) if name in tried.read else 0
    return order


class _Tried(NamedTuple):
    """Has what a trial of a tower has found.

    features  zeros in their shape
    ran       names of the modules that ran, of those asked for
    read      names of the parameters that features are made of, if asked for
    """

    features: Any
    ran: tuple[str, ...]
    read: Set[str] = frozenset()


def _tried(
    model: nn.Module, inputs: dict[str, Tensor], modules: Iterable[str], graph: bool = False, quick: bool = False
) -> _Tried:
    """Run a tower, a large one by shapes alone where it reads no values of pixels.

    graph  tell what features are made of
    quick  raise one of READS_VALUES where that takes long
    """
    small = sum(p.numel() for p in tower_parameters(model)) * max(t.numel() for t in inputs.values()) <= SMALL
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which writes callstacks of what is only tried
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return _features(model, inputs, modules, not small, graph)
    except READS_VALUES:
        if small or quick:
            raise
        return _features(model, inputs, modules, False, graph)
    finally:
        log.setLevel(level)


def _features(model: nn.Module, inputs: dict[str, Tensor], modules: Iterable[str], shapes: bool, graph: bool) -> _Tried:
    """Run a tower; `shapes`: without computing any but whole numbers."""
    ran: list[str] = []
    trial = copy_with(model, without_weights(model)).eval()
    for name in modules:
        trial.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    dtype = next(trial.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    dry = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
    mode = _ByShapes(allow_non_fake_inputs=True) if shapes and not dry else None
    if mode is not None:
        given = {name: mode.known(t) if mode.may_turn_const(t) else t for name, t in given.items()}
    with mode or nullcontext(), torch.set_grad_enabled(graph):
        features = tower_output(trial, given)
    leaves = _leaves(read_features(trial, features)) if graph else set()
    read = {name for name, p in trial.named_parameters() if p in leaves}
    return _Tried(map_tensors(features, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu")), tuple(ran), read)


def _leaves(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return what a backward from these tensors comes to."""
    found: set[Tensor] = set()
    left = [t.grad_fn for t in tensors]
    seen = set(left)
    while left:
        node = left.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        nodes = {each for each, _ in node.next_functions} - seen
        seen |= nodes
        left += nodes
    return found
