"""Fills in what a file leaves out and the model decides, so that a file of any one section, or key, is a run.

    data.length     the default, or the model's positions where these are fewer
    data.tokenizer  bytes, where the data are text and the model is no folder, which would bring a tokenizer

Typed steps displace a file's epochs, and the other way round: that is said, too.

A value that is given stays as it is, and is refused where it does not fit. A folder that holds no tokenizer stays an
error: its model may know the tokens of another one. No torch: names of files and a config.json are read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.config import Config, given_keys, load
from zero3d.config.read import EITHER
from zero3d.data.files import named_formats
from zero3d.data.tokenizers import BYTES, check_tokenizer
from zero3d.errors import ConfigError, DataError
from zero3d.models.places import folder_of, is_called, named_positions
from zero3d.models.presets import PRESETS

LENGTH, TOKENIZER = "data.length", "data.tokenizer"


class Filled(NamedTuple):
    """Holds a configuration with what the model decides, and a line for each such key."""

    config: Config
    lines: Sequence[str]


def load_filled(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Filled:
    """Read and check a configuration, as `load` does, and fill in what it leaves out. Raises ConfigError."""
    config, given = load(source, overrides), given_keys(source, overrides)
    filled = fill_in(config, given)
    return filled._replace(lines=[*_displaced(source, given), *filled.lines])


def _displaced(source: str | Path | Mapping[str, Any] | None, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for a file's epochs that typed steps have displaced, or the other way round."""
    with suppress(ConfigError):
        for name, of_file in given_keys(source).items():
            other = EITHER.get(name)
            if other is not None and name not in given and given.get(other) is not None and of_file is not None:
                yield f"{other}: {given[other]:g}, as typed; {name} {of_file:g} of the file does not count"


def fill_in(config: Config, given: Collection[str]) -> Filled:
    """Fill in what is not among the given keys. A model or data that cannot be read are left to who checks them."""
    lines = []
    with suppress(ConfigError, DataError):
        positions = named_positions(config.model)
        if LENGTH not in given and positions is not None and positions < config.data.length:
            lines.append(
                f"{LENGTH}: {positions:,}, the model's positions, since none is given ({config.data.length:,} is the "
                "default)"
            )
            config = replace(config, data=replace(config.data, length=positions))
    with suppress(ConfigError, DataError):
        if _lacks_tokenizer(config):
            config = replace(config, data=replace(config.data, tokenizer=BYTES))
            lines.append(f"{TOKENIZER}: {BYTES}, since the data are text and the model brings no tokenizer")
    return Filled(config, lines)


def _lacks_tokenizer(config: Config) -> bool:
    """Return whether text has no tokenizer, and the model is a preset, a config.json or a function without one."""
    path = config.model.path
    brings_none = path in PRESETS or os.path.isfile(path) or is_called(config.model)
    if config.data.tokenizer is not None or not brings_none:
        return False
    if all(format == "npy" for format in named_formats(config.data).values()):
        return False
    try:
        check_tokenizer(None, folder_of(config.model))
    except ConfigError:
        return True
    return False
