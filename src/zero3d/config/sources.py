"""Where training data come from: plain paths, which are read as one, or sources with weights, formats and losses.

    data.train: [a.jsonl, b]                                      one source of all files
    data.train: [{path: a.jsonl, weight: 0.7}, {path: b, ...}]    a source each

A list in which any item is a mapping is one of sources; its plain paths are sources, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from zero3d.errors import short

FORMATS = ("auto", "text", "jsonl", "npy", "parquet", "arrow")
ALL = "data"  # the name of what is read as one
FUNCTION = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


class Refused(ValueError):
    """Says what is wrong with a value, where the type it should have does not say it."""


@dataclass(frozen=True)
class DataSource:
    """A file, folder or function of its own, how often it is drawn from beside others, and what it is read as.

    weight  relative to those of the others; None where no source has one: then each counts by its size
    format  None: that of data.format
    """

    path: str
    weight: float | None = None
    format: str | None = None


class Part(NamedTuple):
    """What is read together. `name` is for people and for metrics, unique among the parts.

    split  which one of a folder with several is meant
    """

    name: str
    paths: tuple[str, ...]
    format: str
    weight: float | None = None
    split: str = "train"


def read_sources(value: Any) -> tuple[DataSource, ...]:
    """Return a list of sources. Raises Refused for a mistake in one, ValueError for what is no such list."""
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not any(isinstance(item, (Mapping, DataSource)) for item in items):
        raise ValueError
    sources = tuple(_source(item) for item in items)
    weights = [source.weight for source in sources]
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        bare = next(source for source in sources if source.weight is None)
        raise Refused(
            f"has weights for {len(given)} of {len(weights)} sources: give {short(bare.path)} one, or none any."
        )
    if given and not any(given):
        raise Refused(f"has weights that are all 0 ({len(given)} sources): give one that is above.")
    return sources


def _source(item: Any) -> DataSource:
    if isinstance(item, DataSource):
        item = {field.name: getattr(item, field.name) for field in fields(item)}
    if isinstance(item, str):
        item = {"path": item}
    known = [field.name for field in fields(DataSource)]
    if not isinstance(item, Mapping):
        raise Refused(f"takes paths and {{path, weight, format}}; found {short(item)} among them.")
    if odd := [key for key in item if key not in known]:
        raise Refused(f"has a source with the key {short(odd[0])}: a source has {', '.join(known)}.")
    path, weight, format = (item.get(name) for name in known)
    if not isinstance(path, str) or not path or "\0" in path:
        raise Refused(f"has a source whose path is {short(repr(path))}: give a file, a folder or module:function.")
    if format is not None and format not in FORMATS:
        raise Refused(f"has {short(path)} with the format {short(repr(format))}: take {', '.join(FORMATS)}.")
    return DataSource(path, None if weight is None else _weight(path, weight), format)


def _weight(path: str, weight: Any) -> float:
    try:
        number = math.nan if isinstance(weight, bool) else float(weight)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise Refused(f"has {short(path)} with the weight {short(weight)}: a weight is a number from 0, such as 0.5.")
    return number


def names_function(path: str) -> bool:
    """Return whether a path has the form module:function."""
    return FUNCTION.fullmatch(path) is not None


def parts_of(paths: Sequence[str | DataSource], format: str, split: str = "train") -> list[Part]:
    """Return what is read together: plain paths all, sources and functions each on their own."""
    plain = all(isinstance(path, str) for path in paths)
    if plain and (len(paths) == 1 or not any(names_function(str(path)) for path in paths)):
        return [Part(ALL, tuple(map(str, paths)), format, split=split)]
    sources = [DataSource(path) if isinstance(path, str) else path for path in paths]
    parts: list[Part] = []
    for source in sources:
        stem = source.path.rpartition(":")[2] if names_function(source.path) else _stem(source.path)
        same = sum(part.name == stem or part.name.startswith(f"{stem}~") for part in parts)
        name = f"{stem}~{same + 1}" if same else stem
        parts.append(Part(name, (source.path,), source.format or format, source.weight, split))
    return parts


def _stem(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    return name.partition(".")[0] or name
