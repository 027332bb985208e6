"""A Hugging Face model without its weights, and new weights for it.

build          the module of a config: parameters on the meta device, buffers real
RandomWeights  a `Source` of freshly initialised parameters, the same for every dp degree
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero3d.config.sections import WHOLE
from zero3d.errors import ConfigError, short
from zero3d.models.blocks import find_blocks
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.parts import choose
from zero3d.shards.boxes import Box, slices

# By name: transformers puts functions of its own in the place of torch's.
FILLS = {"normal_", "uniform_", "fill_", "zero_"} | {name for name in vars(nn.init) if name.endswith("_")}
MAKES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
LARGE = 1 << 28  # elements
CHECK = re.compile(r"^\[enforce fail at [^]]*\] .*?\. (.*?\.)( .*)?$")


def build(config: Any, attn: str | None = None, file: Path | None = None, part: str = WHOLE) -> nn.Module:
    """Build the model of a transformers config, with its towers where it has some; or its language model alone.

    Parameters are on meta, and tied as the config says; buffers are computed by the model's own constructor. Costs
    next to no memory and no download. `file` is the config's, for errors to name. Raises ConfigError.
    """
    options = {} if attn is None else {"attn_implementation": attn}
    try:
        choice = choose(config, part)
        with parameters_on_meta(), no_foreign_code(), offline():
            model: nn.Module = choice.auto.from_config(choice.config, trust_remote_code=False, **options)
    except ConfigError:
        raise
    except Exception as error:  # any error of the model's own, quoted
        name = f"{type(config).__name__}{'' if file is None else f' of {file}'}"
        attention = "" if attn is None else f" with attn={short(repr(attn))}"
        raise ConfigError(f"{name} cannot be built{attention}: {_first_line(error)}") from error
    return model


@contextmanager
def offline() -> Iterator[None]:
    """Keep the Hub's libraries from downloading inside: kernels of attention are taken from its cache alone."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    """Return the first line of an error; of one of torch's checks the sentence behind place and condition."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CHECK.sub(r"\1", line)[:300]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Drop the data of parameters when a module registers them; initialisers then have nothing to do."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with _NoFills():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _NoFills(TorchFunctionMode):
    """Skips the initialisation of tensors without data, which would take three quarters of a build's time.

    A new stack of matrices that is too large for a buffer becomes a parameter: a layer's experts may be more than a
    machine has room for, so it has no data from the beginning.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAKES and not kwargs.get("device"):
            sizes = args[0] if args and isinstance(args[0], Sequence) else args
            if len(sizes) > 2 and all(isinstance(size, int) for size in sizes) and prod(sizes) >= LARGE:
                return func(*args, **{**kwargs, "device": "meta"})
        if getattr(func, "__name__", "") in FILLS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


class RandomWeights:
    """New weights for a model on meta, by its own `_init_weights`, one block (or embedding, or head) at a time.

    The random stream of a block follows from `seed` and its name, so that the weights do not
    depend on the dp degree, and no rank ever holds more than one block of them.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = copy.deepcopy(model), seed
        blocks = find_blocks(model)
        self._owner = {}
        for name, _ in model.named_parameters():
            around = (block for block in blocks if name.startswith(block + "."))
            self._owner[name] = next(around, name.rpartition(".")[0])
        self._latest: tuple[str | None, dict[str, Tensor]] = (None, {})  # owner and its weights

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the parameter."""
        owner = self._owner[name]
        if self._latest[0] != owner:
            self._latest = (owner, self._make(owner))
        return self._latest[1][name][slices(box)]

    def _make(self, owner: str) -> dict[str, Tensor]:
        module = copy.deepcopy(self._model.get_submodule(owner)).to_empty(device="cpu")
        digest = hashlib.sha256(f"{self._seed}:{owner}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for p in module.parameters():
                p.fill_(math.nan)
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            module.apply(self._initialiser(owner))
        made = {f"{owner}.{name}" if owner else name: p.detach() for name, p in module.named_parameters()}
        own = [name for name in made if self._owner.get(name) == owner]  # others are initialised with their own module
        if left := [name for name in own if made[name].isnan().any()]:
            raise ConfigError(
                f"{type(self._model).__name__}'s _init_weights gives {len(left)} of {len(own)} parameters no "
                f"values, first {left[0]!r}: pass a model with weights of its own, or a newer transformers."
            )
        return made

    def _initialiser(self, owner: str) -> Callable[[nn.Module], None]:
        """Return `_init_weights` of the nearest model around `owner`."""
        path = owner.split(".") if owner else []
        for depth in range(len(path), -1, -1):
            around = self._model.get_submodule(".".join(path[:depth]))
            initialise: Callable[[nn.Module], None] | None = getattr(around, "_init_weights", None)
            if initialise is not None:
                return initialise
        raise ConfigError(f"{type(self._model).__name__} has no _init_weights: pass a module with its own weights.")
