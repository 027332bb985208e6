"""Refuses a job where it is submitted, before it waits in a queue, for what every rank would refuse.

    model      a preset, or a folder that is here: weights, type, heads, blocks, positions, attention
    data       files that are here; the default text is refused for a model of another vocabulary
    tokenizer  its files, and its size beside the model's vocabulary

A path that is not here may be on the machines that train, unless one here, or a preset, has nearly its name: then it is
a mistake. What is elsewhere, and own code, is returned as not checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from zero3d.config import Config
from zero3d.config.hints import LIKE, nearest
from zero3d.data.files import FILL_ME, STDLIB, check_path, function_of, named_formats, parts_of_data
from zero3d.data.tokenizers import BYTES, OF_BYTES, check_length, check_tokenizer, check_vocabulary, load_tokenizer
from zero3d.errors import ConfigError, short
from zero3d.models.places import check_model_path, folder_of, is_called, named_positions, text_config
from zero3d.models.presets import PRESETS
from zero3d.stores.urls import is_url
from zero3d.tools.cli.preflight import check_attention, check_chats, check_model_type, check_tp

TRAIN = "data.train"


def check_submission(config: Config, given: Collection[str]) -> list[str]:
    """Refuse what all ranks would; return what cannot be looked at here. given: keys of the file and the overrides.

    Raises ConfigError and DataError.
    """
    return [*_check_model(config), *_check_data(config, given), *_check_tokenizer(config)]


def _check_model(config: Config) -> Iterator[str]:
    path = config.model.path
    if is_called(config.model):
        yield f"model.path={short(path)}, which ranks import"
    elif _is_elsewhere(path, () if os.sep in path else PRESETS):
        yield f"model.path={short(path)}, which is not on this machine"
    else:
        check_model_path(config.model)
        check_model_type(config)
        check_tp(config)
        check_attention(config)
        check_length(config.data.length, named_positions(config.model))
        blocks, pp = text_config(config.model).get("num_hidden_layers"), config.mesh.pp or 1
        if isinstance(blocks, int) and blocks < pp:
            raise ConfigError(f"mesh.pp={pp} cuts {path} into {pp} stages, and it has {blocks} blocks: lower mesh.pp.")


def _check_data(config: Config, given: Collection[str]) -> Iterator[str]:
    if TRAIN not in given and _vocabulary(config) > OF_BYTES:
        raise ConfigError(
            f"{TRAIN} is missing, and its default, the text of Python's standard library, is for trials: name the data "
            f"that {config.model.path} is to learn from, with {TRAIN}=FILES."
        )
    here = not _is_elsewhere(config.model.path) and not _is_elsewhere(config.data.tokenizer or "")
    for part in parts_of_data(config.data):
        if function := function_of(part):
            yield f"data of {short(function)}, which ranks import"
            continue
        for path in part.paths:
            if is_url(path):
                yield f"data in {short(path)}, which ranks read over the network"
            elif _is_elsewhere(path):
                yield f"data in {short(path)}, which is not on this machine"
            else:
                check_path(path, part.format)
                continue
            here = False
    if here:
        check_chats(config)


def _check_tokenizer(config: Config) -> Iterator[str]:
    name = config.data.tokenizer
    if name == FILL_ME:
        raise ConfigError(
            f"data.tokenizer={FILL_ME} stands for a folder: name the one of the model's tokenizer, or leave it out for "
            "token ids in .npy files."
        )
    if name is not None and _is_elsewhere(name):
        yield f"data.tokenizer={short(name)}, which is not on this machine"
    elif name is not None or (folder_of(config.model) and _has_text(config)):
        check_tokenizer(name, folder_of(config.model))
        if known := _vocabulary(config):
            check_vocabulary(load_tokenizer(name, folder_of(config.model)), known)


def _has_text(config: Config) -> bool:
    return any(format != "npy" for format in named_formats(config.data).values())


def _vocabulary(config: Config) -> int:
    """Return the vocabulary that a preset or a config.json names; 0 where none is to be read."""
    readable = config.model.path in PRESETS or os.path.exists(config.model.path)
    known = text_config(config.model).get("vocab_size") if readable else None
    return known if isinstance(known, int) else 0


def _is_elsewhere(path: str, others: Iterable[str] = ()) -> bool:
    """Return whether a path may be where the job runs: it is not here, and no name here or in `others` is like it."""
    place = Path(path).expanduser()
    if path in ("", STDLIB, BYTES, FILL_ME) or path in PRESETS or os.path.exists(place):
        return False
    with suppress(OSError):  # a folder that is not there, or may not be listed
        others = [*others, *(other.name for other in place.parent.iterdir())]
    return nearest(place.name, list(others), cutoff=LIKE) is None
