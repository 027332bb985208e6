"""A sample of a run's records, with equal chances, of the first ones: what a plan looks at of data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from zero3d.config import Config
from zero3d.config.sources import parts_of
from zero3d.data.files import find_sources, function_of
from zero3d.data.records import Record, read

FIRST = 20_000  # records of which a sample is drawn
SEED = 1


def sampled(config: Config, many: int) -> list[tuple[Path, Record]]:
    """Return so many records, in an order of chance, each with the folder of its images. Raises DataError, OSError."""
    kept: list[tuple[Path, Record]] = []
    drawn = random.Random(SEED)
    for number, each in enumerate(islice(_records(config), FIRST)):
        place = number if number < many else drawn.randrange(number + 1)
        if place < many:
            kept[place : place + 1] = [each]
    drawn.shuffle(kept)
    return kept


def _records(config: Config) -> Iterator[tuple[Path, Record]]:
    for part in parts_of(config.data.train, config.data.format):
        if function_of(part) or part.weight == 0:
            continue
        place = Path(part.paths[0]).expanduser()
        folder = Path(config.data.images or (place if place.is_dir() else place.parent)).expanduser()
        for source in find_sources(part.paths, part.format, part.split):
            yield from ((folder, record) for record in read(source))
