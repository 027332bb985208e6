"""What model.path names, told by names of files: what training would refuse after torch is imported. No torch.

a folder            has a config.json, and weights unless model.init=random
a config.json       is JSON
a preset            is one of those in presets.py
module:function     is looked at by who imports it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero3d.config import Model
from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short
from zero3d.models.presets import PRESETS
from zero3d.reading import Unreadable, read_object

CONFIG = "config.json"
HEADS = ("num_attention_heads", "num_key_value_heads")  # of a config
POSITIONS = ("max_position_embeddings", "n_positions")  # by both names of transformers
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (".bin", ".pt", ".pth", ".safetensors")
SHOWN, FILES, EXAMPLES = 5, 3, 3  # names in a message: of all files, of files of weights, of presets
FETCH = "zero3d downloads nothing: fetch a model (hf download NAME --local-dir FOLDER) and give its folder."


def check_model_path(model: Model) -> None:
    """Refuse a model that is not there. Raises ConfigError."""
    path = model.path
    if not (os.path.isdir(path) or os.path.isfile(path) or path in PRESETS or ":" in path):
        raise no_model(path)
    if os.path.exists(path):  # a Path's own raises for long names
        config_json(config_file(Path(path)))
    if os.path.isdir(path) and model.init != "random":
        check_weights(Path(path))


def is_called(model: Model) -> bool:
    """Say whether a function makes the module, and nothing else does."""
    return not os.path.exists(model.path) and model.path not in PRESETS and ":" in model.path


def has_base(model: Model) -> bool:
    """Return whether an adapter's base is somewhere: in a folder of weights, or where a function has its model from."""
    return is_called(model) or (os.path.isdir(model.path) and model.init != "random")


def folder_of(model: Model) -> str | None:
    """Return the folder that may hold the model's tokenizer, or None."""
    if os.path.isdir(model.path):
        return model.path
    return str(Path(model.path).parent) if os.path.isfile(model.path) else None


def config_file(path: Path) -> Path:
    """Return the config.json that a folder has, or that the path is itself. Raises ConfigError."""
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        names = sorted(entry.name for entry in path.iterdir())[:SHOWN]
        raise ConfigError(
            f"{path} has no config.json (it has {', '.join(names) or 'nothing'}): give a folder written by "
            "save_pretrained."
        )
    return file


def config_json(file: Path) -> dict[str, Any]:
    """Return what a config.json says. Raises ConfigError."""
    try:
        return read_object(file)
    except Unreadable as error:
        raise ConfigError(f"{file} is not a config that transformers knows: it {error}.") from error


def named_positions(model: Model) -> int | None:
    """Return the longest sequence that a config.json or a preset names; None where it names none."""
    known = text_config(model)
    number = next((known[name] for name in POSITIONS if name in known), None)
    return number if isinstance(number, int) else None


def text_config(model: Model) -> Mapping[str, Any]:
    """Return what a config.json or a preset says of the language model; nothing where that is nowhere."""
    known = config_json(config_file(Path(model.path))) if os.path.exists(model.path) else PRESETS.get(model.path, {})
    text = known.get("text_config", known)
    return text if isinstance(text, dict) else {}


def check_heads(key: str, heads: int, tp: int) -> None:
    """Refuse to cut a head in two. `key`: what the model's config calls the number of heads. Raises ConfigError."""
    if heads % tp:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"tp={tp} cannot split {key}={heads}: {heads} / {tp} is not a whole number. Pass a tp that divides it "
            f"({', '.join(divisors)}), or leave attention whole with style 'none' (mesh.tp_plan)."
        )


def check_rows(what: str, rows: int, tp: int) -> None:
    """Refuse to share the tokens of a vocabulary out unevenly. `what`: the table, or a config's key. ConfigError."""
    if rows % tp:
        raise ConfigError(
            f"tp={tp} cannot split {what}: {rows} / {tp} is not a whole number. Pad it before training: "
            f"model.resize_token_embeddings(pad_to_multiple_of={tp}) makes them {rows + -rows % tp}; or keep embedding "
            "and head whole with 'replicate' in the tensor-parallel plan (mesh.tp_plan)."
        )


def check_weights(folder: Path, or_new: bool = True) -> None:
    """Refuse a folder without safetensors. or_new: whether the model could begin with new ones. Raises ConfigError."""
    if (folder / INDEX).is_file() or (folder / ONE_FILE).is_file():
        return
    files = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHTS)
    has = f"it has {', '.join(files[:FILES])}, and only {ONE_FILE} or its index is read" if files else "it has none"
    new = ", or start from new ones with model.init=random" * or_new
    raise ConfigError(f"{folder} has no weights ({has}): save it with save_pretrained{new}.")


def no_model(path: str) -> ConfigError:
    """Return the error for a path that names nothing."""
    near = nearest(path, PRESETS)
    hint = f" Did you mean {near!r}?" if near else ""
    return ConfigError(
        f"model.path {short(path)!r} is not a folder, a config.json, a preset or module:function.{hint} {FETCH} "
        f"{presets()}."
    )


def presets() -> str:
    """Name a few presets, and where all of them are."""
    return f"Presets begin with random weights: {', '.join(list(PRESETS)[:EXAMPLES])}, ... (zero3d models lists all)"
