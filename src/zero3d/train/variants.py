"""The runs of a comparison: words with several values, spanned to their product. No torch.

word                         what it is
---------------------------  -----------------------------------------------------------------
zero.stage=0,1,2,3           an axis of four values
train.steps=20               an override of every run
data.train=a.txt,b.txt       an override of every run: the key takes a list itself
evaluate.prompt=[a, b]       an override of every run: a comma inside brackets does not split
zero.stage=0,1 zero.stage=2  refused: an axis and something else of the same key
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from zero3d.config import Config
from zero3d.config.keys import KEYS, takes_list
from zero3d.errors import ConfigError
from zero3d.train.setup.left_out import load_filled

MOST = 32  # runs one after another are days
COMMA = re.compile(r",(?![^\[]*\])")  # outside brackets
QUIET = (  # nothing of it is compared
    "checkpoint.export=false",
    "checkpoint.verify=false",
    "checkpoint.to=null",
    "evaluate.prompt=null",
)


class Axis(NamedTuple):
    """Holds a key and its values as they were typed."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """Describes one run. values: one of each axis, in the order of the axes."""

    axes: tuple[Axis, ...]
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Its own overrides."""
        return [f"{axis.key}={value}" for axis, value in zip(self.axes, self.values, strict=True)]

    @property
    def label(self) -> str:
        """zero.stage=0,precision=bf16"""
        return ",".join(self.words)

    @property
    def folder(self) -> str:
        """Its label as one path component; no two labels share one."""
        return quote(self.label, safe="=,: ")

    def values_except(self, *keys: str) -> tuple[str, ...]:
        """Return the values on all axes but those of `keys`."""
        return tuple(value for axis, value in zip(self.axes, self.values, strict=True) if axis.key not in keys)


def split_axes(words: Sequence[str]) -> tuple[tuple[Axis, ...], list[str]]:
    """Split words into axes and overrides of every run. Raises ConfigError for a key of an axis given again."""
    axes, common = [], []
    first: dict[str, str] = {}
    for word in words:
        key, _, text = (part.strip() for part in word.partition("="))
        values = tuple(value.strip() for value in COMMA.split(text))
        listed = key in KEYS and takes_list(KEYS[key])
        if len(values) > 1 and not listed:
            axes.append(Axis(key, values))
        else:
            common.append(word)
        before = first.setdefault(key, word)
        if before is not word and any(axis.key == key for axis in axes):
            raise ConfigError(f"{key} is given twice, as {before} and {word}: leave one of them out.")
    return tuple(axes), common


def variants(axes: tuple[Axis, ...]) -> list[Variant]:
    """Return the product of the axes, the last one fastest. Raises ConfigError when it is none or too many."""
    if not axes:
        raise ConfigError(
            "zero3d compare compares runs that differ: give a key several values, such as zero.stage=0,1,2,3 or "
            "activations=none,full,every:2."
        )
    runs = [Variant(axes, values) for values in product(*(axis.values for axis in axes))]
    if len(runs) > MOST:
        factors = " x ".join(f"{len(axis.values)} ({axis.key})" for axis in axes)
        raise ConfigError(f"{factors} = {len(runs)} runs; at most {MOST} are compared: leave out some values.")
    return runs


def check_variants(
    runs: Sequence[Variant], common: Sequence[str], source: Callable[[Sequence[str]], Path | None]
) -> list[Config]:
    """Return each run's configuration. Raises ConfigError at the first that cannot be, or that is there already.

    source  the file below a run's overrides
    """
    configs: list[Config] = []
    for variant in runs:
        words = [*common, *variant.words]
        config = load_filled(source(words), words).config
        if config in configs:
            twin = runs[configs.index(config)]
            raise ConfigError(f"{twin.label} and {variant.label} are the same run: leave one of them out.")
        configs.append(config)
    return configs
