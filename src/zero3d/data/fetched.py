"""Data in object stores: their files come to this host's cache, and are then read as any others. No torch.

A token store, records by index and memory maps need files, so all of them are fetched before a run begins: by the first
rank of each machine, while the others wait. Hidden objects are left out, as in folders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from zero3d.config import Data
from zero3d.config.sources import DataSource
from zero3d.errors import ConfigError, DataError, short
from zero3d.spec.sizes import decimal, parse_size
from zero3d.stores.cache import fetch_all, folder_of, hold, place_of
from zero3d.stores.store import Store, Stored
from zero3d.stores.urls import is_url

LIMIT_KEY = "data.cache_limit"
DIGITS = 15  # of a digest that fits into a number of 64 bits


@dataclass(frozen=True)
class Fetched:
    """Holds data whose paths are all of this host.

    held    keep what was fetched in the cache while they are open
    digest  of what the stores had; 0 where the data are in none
    """

    data: Data
    held: Sequence[BufferedReader] = ()
    digest: int = 0


def urls_of(data: Data) -> list[tuple[str, str]]:
    """Return the key and the URL of all data that are in stores."""
    parts = [("data.train", data.train), ("data.validation", data.validation)]
    paths = [(key, _path(source)) for key, part in parts if isinstance(part, tuple) for source in part]
    return [(key, path) for key, path in paths if is_url(path)]


def fetch_data(data: Data) -> Fetched:
    """Fetch what is in stores, and return the data with paths of this host. Raises DataError."""
    urls = dict.fromkeys(url for _, url in urls_of(data))
    if not urls:
        return Fetched(data)
    limit, cache = parse_size(data.cache_limit, LIMIT_KEY), folder_of(data.cache)
    listed = {url: objects_of(url) for url in urls}
    total = sum(stored.size for objects in listed.values() for stored in objects.values())
    if total > limit:
        raise ConfigError(
            f"data in object stores are {decimal(total)}, and {LIMIT_KEY} is {data.cache_limit}: they are read from "
            f"this host's disk, so give a larger {LIMIT_KEY}, or less data."
        )
    held: list[BufferedReader] = []
    places: dict[str, Path] = {}
    for url, objects in listed.items():
        try:
            places[url] = place_of(url, objects, cache)
            held.append(hold(places[url].parent))
            fetch_all(places[url], limit)
        except OSError as error:
            _refuse(url, error)

    names = "".join(place.parent.name for place in places.values())
    digest = int(hashlib.sha256(names.encode()).hexdigest()[:DIGITS], 16)
    moved = {"train": _moved(data.train, places)}
    if isinstance(data.validation, tuple):
        moved["validation"] = _moved(data.validation, places)
    return Fetched(replace(data, **moved), held, digest)


def _moved(sources: Sequence[str | DataSource], places: Mapping[str, Path]) -> Any:
    """Return sources with paths of this host."""

    def moved(source: str | DataSource) -> str | DataSource:
        place = places.get(_path(source))
        if place is None:
            return source
        return str(place) if isinstance(source, str) else replace(source, path=str(place))

    return tuple(map(moved, sources))


def _path(source: str | DataSource) -> str:
    return source if isinstance(source, str) else source.path


def objects_of(url: str) -> dict[str, Stored]:
    """Return the objects of data below a URL, without hidden ones. Raises DataError where there is none."""
    try:
        found = Store(url).objects()
    except OSError as error:
        _refuse(url, error)
    objects = {
        name: stored for name, stored in found.items() if not any(part.startswith(".") for part in name.split("/"))
    }
    if not objects:
        raise DataError(f"{short(url)} does not exist: check the URL.")
    return objects


def _refuse(url: str, error: OSError) -> NoReturn:
    raise DataError(f"{short(url)} cannot be read: {error.strerror or error}.") from error
