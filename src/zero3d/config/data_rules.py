"""What section `data` asks for that cannot be, across its keys."""

from __future__ import annotations

from collections.abc import Iterator

from zero3d.config.sections import Config
from zero3d.config.sources import DataSource
from zero3d.errors import short


def data_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that this run cannot have, and why."""
    data = config.data
    for source in data.validation if isinstance(data.validation, tuple) else ():
        if isinstance(source, DataSource) and source.weight is not None:
            text = f"data.validation has {short(source.path)} with a weight, and all of it is evaluated: leave it out."
            yield "data.validation", text
    if data.group_by_length and data.packing:
        text = (
            "data.group_by_length puts sequences of similar length into a batch, and packed ones all have data.length:"
        )
        yield "data.group_by_length", f"{text} type data.packing=false, too."
