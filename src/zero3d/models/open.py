"""From `model.path` to a module and its weights.

a folder with config.json     weights by slices out of its safetensors (models/load.py), or new ones
a config.json, a preset       new weights (models/build.py)
module:function               whatever nn.Module the function returns, with its own weights
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from zero3d.config import Model
from zero3d.config.own_code import LONGEST, imported, in_one_line
from zero3d.config.sections import TEXT
from zero3d.errors import ConfigError, Zero3dError, short
from zero3d.models.build import RandomWeights, build
from zero3d.models.foreign_code import no_foreign_code, refuse_code
from zero3d.models.kept import Kept
from zero3d.models.load import FileWeights
from zero3d.models.parts import choose
from zero3d.models.places import CONFIG, config_file, config_json, is_called, no_model
from zero3d.models.presets import PRESETS
from zero3d.models.quantised_folders import SETTINGS, check_method
from zero3d.spec.offload import AUTO
from zero3d.zero.initial_weights import Source

LAYERS = re.compile(r"(^|_)(layer|block|depth)s?$")  # how keys end that hold numbers of layers
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Opened:
    """A module that is to be trained.

    weights  values of its parameters, which are on meta; None if it has its own
    folder   where it came from, when that may hold a tokenizer
    notes    lines for people
    """

    module: nn.Module
    weights: Source | None
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def open_model(model: Model, seed: int = 0) -> Opened:
    """Build the module on this rank without its weights. Raises ConfigError."""
    if is_called(model):
        return Opened(call(model.path), None)
    bare = open_bare(model)
    if not os.path.isdir(model.path) or model.init == "random":
        return replace(bare, weights=RandomWeights(bare.module, seed))
    weights = FileWeights(Path(model.path), bare.module, model.part == TEXT)
    why = f" by model.part={TEXT}" if model.part == TEXT else ""
    if weights.kept is not None:
        bare = replace(bare, notes=(*bare.notes, _said(weights.kept)))
    unused = (
        [f"{len(weights.unused)} tensors of {model.path} are not used{why}, first {weights.unused[0]}"]
        if weights.unused
        else []
    )
    return replace(bare, weights=weights, notes=(*bare.notes, *unused))


def open_bare(model: Model) -> Opened:
    """Build the module of a folder, a config.json or a preset, without any weights. Raises ConfigError."""
    path = Path(model.path)
    if os.path.isdir(path):  # a Path's own raises for long names
        config = read_config(path)
        settings = vars(config).pop(SETTINGS, None)  # which an export in the compute dtype would not have
        if settings is not None and model.init != "random":
            check_method(settings, path / CONFIG)
        module = build(config, _named(model.attn), path / CONFIG, model.part)
        if model.init != "random":
            _read_generation_config(path, module)
        return Opened(module, None, path, _notes(config, path / CONFIG, model.part))
    if os.path.isfile(path) or model.path in PRESETS:
        file = path if path.is_file() else None
        config = preset(model.path) if file is None else read_config(file)
        module = build(config, _named(model.attn), file, model.part)
        return Opened(module, None, None if file is None else file.parent, _notes(config, file, model.part))
    raise no_model(model.path)


def _notes(config: Any, file: Path | None, part: str) -> tuple[str, ...]:
    """Return what is to be said of the class that a config was opened as."""
    note = choose(config, part).note
    return (f"{file}: {note}",) if note and file is not None else ()


def _said(kept: Kept) -> str:
    return (
        f"{len(kept.tensors)} tensors of {kept.folder} are kept, not trained (heads for further tokens, first "
        f"{next(iter(kept.tensors))}): an export of all weights has them as they are, an adapter's has none"
    )


def _named(attn: str | None) -> str | None:
    """Return an implementation of attention that is asked for by name; None leaves the choice to transformers."""
    return None if attn == AUTO else attn


def positions(model: Model) -> int | None:
    """Return the longest sequence by the model's config; None without a limit, or where a function makes the model.

    Raises ConfigError.
    """
    path = Path(model.path)
    exists = os.path.exists(path)
    if not exists and model.path not in PRESETS:
        return None
    config = read_config(path) if exists else preset(model.path)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def preset(name: str) -> Any:
    """Return the transformers config of a preset."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**PRESETS[name])


def read_config(path: Path) -> Any:
    """Read the transformers config of a folder or a config.json. Raises ConfigError."""
    from transformers import AutoConfig

    file = config_file(path)
    _check_sizes(config_json(file), file)
    refuse_code(file)
    try:
        with no_foreign_code():
            return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # odd values fail wherever they are first used
        raise ConfigError(f"{file} is not a config that transformers knows: {_in_one_line(error)}") from error


def _check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Refuse numbers of layers with which a model would be built for ever. Raises ConfigError."""
    entries: list[tuple[str, Any]] = list(config.items())
    while entries:
        key, value = entries.pop()
        if isinstance(value, Mapping):  # of text, of vision
            entries += value.items()
        elif isinstance(value, list):  # of stages
            entries += [(key, item) for item in value]
        elif isinstance(value, int) and value > MOST_LAYERS and LAYERS.search(key):
            raise ConfigError(f"{file}: {key} is {short(value)}, but at most {MOST_LAYERS:,} layers can be built.")


def _read_generation_config(folder: Path, module: nn.Module) -> None:
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not os.path.lexists(file):
        return
    refuse_code(file)
    try:
        with no_foreign_code():
            module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # odd values fail wherever they are first used
        raise ConfigError(
            f"transformers cannot read {file}: {_in_one_line(error)}. Correct it, or remove it."
        ) from error


def _in_one_line(error: Exception) -> str:
    """Return the text of an error of transformers, in one line of bounded length."""
    line = str(error).strip().splitlines()[0] if isinstance(error, OSError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {line[:LONGEST]}"


def call(path: str) -> nn.Module:
    """Call `module:function` for a module; the current directory is searched, too. Raises ConfigError."""
    attribute, function = imported("model.path", path), path.partition(":")[2]
    try:
        module = attribute() if callable(attribute) else attribute
    except Zero3dError:
        raise
    except Exception as error:
        raise ConfigError(f"model.path {short(path)!r}: {function}() raised {in_one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{path} returned {type(module).__name__}: it must return a torch.nn.Module.")
    return module
