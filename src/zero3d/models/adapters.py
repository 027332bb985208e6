"""LoRA: PEFT's adapters beside a model's frozen matrices, put in before anything has values.

    model.layers.0.self_attn.q_proj.weight                  a matrix [out, in] becomes
    model.layers.0.self_attn.q_proj.base_layer.weight       itself, frozen
    model.layers.0.self_attn.q_proj.lora_A.default.weight   [rank, in], random
    model.layers.0.self_attn.q_proj.lora_B.default.weight   [out, rank], zero: the model starts as it was

Modules are PEFT's own (`inject_adapter_in_model`): the model's class and the names of all else stay. Hu et al., "LoRA"
(2021); rsLoRA: Kalajdzievski (2023); DoRA: Liu et al. (2024). Cost per matrix: rank x (in + out) parameters of 16 bytes
and the frozen matrix in the compute dtype.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.config import Lora
from zero3d.config.sections import ALL_LINEAR, GAUSSIAN
from zero3d.errors import ConfigError, short
from zero3d.models.blocks import find_blocks
from zero3d.models.build import parameters_on_meta
from zero3d.models.freezing import train_only
from zero3d.models.kept import Kept
from zero3d.models.names import check_patterns, is_named, matches, own_name
from zero3d.models.open import Opened
from zero3d.models.recurrences import is_mixer, read_by_mixers, read_past
from zero3d.models.saved_adapters import SavedAdapter
from zero3d.shards.boxes import Box, slices, whole
from zero3d.zero.initial_weights import Source

ALL = ALL_LINEAR
MARK = "lora_"  # in the names of all parameters that PEFT's LoRA adds
LINEAR = ("Linear", "Conv1D")  # nn.Linear and transformers' transposed one
# Mixers of these kinds of models, by transformers' names: kernels read their weights past the modules, in_proj's alone
# not. PEFT refuses adapters on out_proj and conv1d; on x_proj they would do nothing where such a kernel runs.
FUSED_MIXERS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
IN_PROJ, READ_BY_KERNELS = "in_proj", ("out_proj", "conv1d", "x_proj", "dt_proj")
# PEFT imports bitsandbytes, which warns of a kernel for CPUs that is not installed: nothing here would run it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_adapters(opened: Opened, choice: Lora, seed: int, saved: SavedAdapter | None = None) -> Opened:
    """Return the model with adapters and all else frozen but `train_also`; their values follow from `seed` and names.

    saved  has an adapter's values, in the place of new ones, for a model whose own come from a source
    Raises ConfigError: targets that name nothing, a method that PEFT refuses, a model that has adapters already.
    """
    model = opened.module
    if any(MARK in name for name, _ in model.named_parameters()):
        raise ConfigError("lora.rank asks for adapters, but the model has some already: leave one of the two out.")
    modules, stacked = find_targets(model, choice)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    check_patterns("lora.train_also", choice.train_also or (), names)
    on_meta = any(p.is_meta for p in model.parameters())
    with parameters_on_meta() if on_meta else _seeded(seed), without_advice():
        _inject(model, _options(choice, modules, stacked), choice)
    train_only(model, (f"*.{MARK}*", *(choice.train_also or ())))
    if opened.weights is None:
        return opened
    deviation = 1 / (choice.rank or 1) if choice.init == GAUSSIAN else None
    return replace(opened, weights=AdapterWeights(opened.weights, model, seed, deviation, saved))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model with adapters compute inside as its base does: for evaluation, since no adapter has a gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def find_targets(model: nn.Module, choice: Lora) -> tuple[list[str], list[str]]:
    """Return the names of linear layers, embeddings and convolutions, and of stacked matrices, that get an adapter.

    As PEFT does, goes on without a target that names nothing beside others that do, but warns. Raises ConfigError where
    none does, and where one names only modules that can have no adapter.
    """
    patterns = choice.targets or default_targets(model)
    kept = choice.train_also or ()
    if [pattern.lower() for pattern in patterns] == [ALL]:
        modules = [name for name in all_linear(model) if not is_named(name, kept)]
        if not modules:
            raise ConfigError(f"lora.targets: the blocks of {type(model).__name__} have no linear layers.")
        return modules, []
    candidates = {name: module for name, module in model.named_modules() if _adaptable(module)}
    blocks = find_blocks(model)
    matrices = [
        name for name, p in model.named_parameters() if p.dim() == 3 and any(name.startswith(f"{b}.") for b in blocks)
    ]
    _check_targets(model, patterns, [*candidates, *matrices])
    modules = [name for name in candidates if is_named(name, patterns) and not is_named(name, kept)]
    stacked = [name for name in matrices if is_named(name, patterns) and not is_named(name, kept)]
    if past := sorted(read_past(model).intersection(modules)):
        by_mixer = past[0] in read_by_mixers(model)
        raise ConfigError(
            f"lora.targets has {past[0]}, whose weight its {'mixer' if by_mixer else 'module'} reads past it, so that "
            f"an adapter there would do nothing: leave {past[0].rpartition('.')[2]} out"
            f"{f', and take {IN_PROJ}' if by_mixer else ''}."
        )
    if stacked and (choice.dropout or choice.dora):
        asked = f"lora.dropout={choice.dropout:g}" if choice.dropout else "lora.dora=true"
        raise ConfigError(
            f"lora.targets has stacked experts ({stacked[0]}), whose adapters are added to the matrix itself, but "
            f"{asked} needs an adapter's input: leave one of the two out."
        )
    if not modules and not stacked:
        raise ConfigError(
            f"lora.targets: all that {short(', '.join(patterns))} names is in lora.train_also, which trains it in full."
        )
    return modules, stacked


def _check_targets(model: nn.Module, patterns: Collection[str], adaptable: Collection[str]) -> None:
    """Refuse targets as `find_targets` says, and warn of those that it goes on without."""
    lost = [pattern for pattern in patterns if not any(matches(name, pattern) for name in adaptable)]
    for pattern in lost:
        if pattern.lower() == ALL:
            raise ConfigError(
                f"lora.targets: {ALL} must be the only entry: leave the other names out, or list all names."
            )
        other = next((module for name, module in model.named_modules() if name and matches(name, pattern)), None)
        if other is not None:
            raise ConfigError(
                f"lora.targets: {short(pattern)!r} names modules that cannot have an adapter, such as a "
                f"{type(other).__name__}: linear layers, embeddings and 2-D convolutions can."
            )
    for pattern in lost:
        try:
            check_patterns("lora.targets", [pattern], adaptable)
        except ConfigError as error:
            if len(lost) == len(patterns):
                raise
            warnings.warn(f"{error} It is left out, as PEFT does: the others have adapters.", stacklevel=2)


def default_targets(model: nn.Module) -> tuple[str, ...]:
    """Return the names that PEFT's table has for this kind of model, else `all-linear`.

    Where the table has attention's layers alone of a model whose other blocks are mixers of Mamba, in_proj is added.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    kind = _kind(model)
    found = TABLE.get(kind, (ALL,))
    if not isinstance(found, str):
        more = (IN_PROJ,) if kind in FUSED_MIXERS and not {ALL, IN_PROJ} & set(found) else ()
        return (*found, *more)
    named = (name for name, module in model.named_modules() if re.fullmatch(found, name) and _adaptable(module))
    return tuple(named) or (ALL,)


def all_linear(model: nn.Module) -> list[str]:
    """Return the linear layers of the blocks: of the language model's alone where a model has other towers.

    Those of mixers that an adapter would not reach are left out.
    """
    find: Callable[[], nn.Module] | None = getattr(model, "get_decoder", None)
    decoder = model if find is None else find()
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    inside = [block for block in find_blocks(model) if block.startswith(f"{name}." if name else "")]
    out = _out_of_reach(model)
    linear = (
        (f"{block}.{local}" if local else block)
        for block in inside
        for local, module in model.get_submodule(block).named_modules()
        if type(module).__name__ in LINEAR
    )
    return [layer for layer in linear if layer not in out]


def _kind(model: nn.Module) -> Any:
    return getattr(getattr(model, "config", None), "model_type", None)


def _out_of_reach(model: nn.Module) -> set[str]:
    """Return the linear layers whose weights something reads past them: the module that has them, or a kernel."""
    found = read_past(model)
    if _kind(model) in FUSED_MIXERS:
        mixers = (name for name, module in model.named_modules() if is_mixer(module))
        found |= {f"{mixer}.{layer}".lstrip(".") for mixer in mixers for layer in READ_BY_KERNELS}
    return found


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d)) or type(module).__name__ in LINEAR


def _options(choice: Lora, modules: Iterable[str], stacked: Iterable[str]) -> Any:
    """Return PEFT's configuration."""
    from peft import LoraConfig

    rank = choice.rank or 1
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if choice.alpha is None else choice.alpha,
        target_modules=list(modules),
        target_parameters=list(stacked) or None,
        lora_dropout=choice.dropout,
        use_rslora=choice.rslora,
        use_dora=choice.dora,
        init_lora_weights=choice.init or True,
    )


def _inject(model: nn.Module, options: Any, choice: Lora) -> None:
    from peft import inject_adapter_in_model

    from zero3d.models.stacked_adapters import keep_parameters

    try:
        inject_adapter_in_model(options, model)
        keep_parameters(model)
    except Exception as error:  # whatever PEFT does not take, in its own words
        line = " ".join(str(error).split())[:300]
        raise ConfigError(f"lora: PEFT refuses rank {choice.rank} for this model: {line}") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep PEFT's warnings back, on names, transposed layers and merging: they ask nothing of anybody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class AdapterWeights:
    """A `Source` of a model with adapters: the model's own values from its source, adapters' made by name.

    saved  has matrices of an adapter that goes on, in the place of new ones. Raises ConfigError where the model has no
           parameter for one of them

    The random stream of a matrix follows from `seed` and its name: equal at every dp, tp and pp. As PEFT initialises:
    A uniform in +-1/sqrt(in) (Kaiming with a = sqrt 5), or normal with a `deviation` where one is given; of embeddings
    B normal; the other zero. DoRA's magnitude is the norm of each row of the frozen matrix.
    """

    def __init__(
        self,
        source: Source,
        model: nn.Module,
        seed: int,
        deviation: float | None = None,
        saved: SavedAdapter | None = None,
    ) -> None:
        self._source, self._seed = source, seed
        self._deviation, self._saved = deviation, saved
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if saved is not None:
            saved.check_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        self._transposed = {name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", False)}
        self._latest: tuple[str, Tensor] | None = None

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the parameter."""
        if MARK not in name:
            return self._source(own_name(name), box)
        if self._latest is None or self._latest[0] != name:
            self._latest = (name, self._make(name))
        return self._latest[1][slices(box)]

    def original(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the model's own parameter, a matrix as it was before it was quantised."""
        values: Tensor = getattr(self._source, "original", self._source)(own_name(name), box)
        return values

    @property
    def source(self) -> Source:
        """The source of the model's own values."""
        return self._source

    def over(self, source: Source) -> AdapterWeights:
        """Return the same adapters over another source of the model's own values."""
        made = copy.copy(self)
        made._source, made._latest = source, None
        return made

    @property
    def folder(self) -> Path | None:
        """The folder that frozen weights come from; None where they are new ones."""
        return getattr(self._source, "folder", None)

    @property
    def kept(self) -> Kept | None:
        """The folder's tensors that exports of all weights carry on."""
        return getattr(self._source, "kept", None)

    def files(self) -> list[Path]:
        """Return the folder's files of weights."""
        return self._source.files() if hasattr(self._source, "files") else []

    def holds(self, name: str) -> bool:
        """Say whether the folder's files have the values of a parameter."""
        return hasattr(self._source, "holds") and MARK not in name and bool(self._source.holds(own_name(name)))

    def close(self) -> None:
        """Let go of files and of the values made last."""
        self._latest = None
        if hasattr(self._source, "close"):
            self._source.close()

    def _make(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if self._saved is not None:
            return self._saved.matrix(name, shape)
        layer, _, kind = name.partition(f".{MARK}")
        if kind.startswith("magnitude_vector"):
            return self._magnitude(layer)
        values = torch.zeros(shape)
        generator = torch.Generator().manual_seed(self._stream(name))
        if kind.startswith("A.") and self._deviation is not None:
            values.normal_(std=self._deviation, generator=generator)
        elif kind.startswith("A."):
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        elif kind.startswith("embedding_B."):
            values.normal_(generator=generator)
        return values

    def _stream(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:7], "big")

    def _magnitude(self, layer: str) -> Tensor:
        """Return the norm of each row of a layer's frozen matrix, read whole, as forward has it."""
        matrix = f"{layer}.base_layer.weight"
        read = getattr(self._source, "decoded", self._source)
        values = read(own_name(matrix), whole(self._shapes[matrix])).float()
        rows: Tensor = torch.linalg.vector_norm(values.T if layer in self._transposed else values, dim=1)
        return rows
