"""What a run's file and records say for the model card of its export (`checkpoint/model_card.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero3d.checkpoint.model_card import Card
from zero3d.config import Config, Data
from zero3d.config.sources import DataSource
from zero3d.models.places import has_base
from zero3d.reading import Unreadable, open_regular, parse_object
from zero3d.train.criterion import HELD_OUT, OF_AVERAGES

LOSS = "loss"


def run_card(config: Config, base: Path | None, tokens: Any, record: Mapping[str, Any], averages: bool) -> Card:
    """Return the card of a run's weights.

    base      the model's folder, where it is one
    tokens    of all ranks together; None, or no number, is not known
    record    of the last step before the export; empty where it is not known
    averages  the averages of the weights are exported (train.ema)
    """
    began = config.model.path if has_base(config.model) else None
    wanted = {"training": LOSS, "held-out": OF_AVERAGES if averages else HELD_OUT}
    losses = {name: float(record[key]) for name, key in wanted.items() if isinstance(record.get(key), int | float)}
    return Card(
        base=began,
        base_folder=None if began is None else base,
        data=dict(_sources(config.data.train)),
        held_out=_held_out(config.data),
        tokens=tokens if isinstance(tokens, int) else None,
        losses=losses,
    )


def record_of(metrics: Path, step: int) -> Mapping[str, Any]:
    """Return the last record of a step in metrics.jsonl; an empty one where there is none."""
    found: Mapping[str, Any] = {}
    try:
        with open_regular(metrics) as file:
            for line in file:
                try:
                    record = parse_object(line.decode(errors="replace"))
                except Unreadable:  # of a run that was killed while it wrote
                    continue
                found = record if record.get("step") == step else found
    except (OSError, Unreadable):
        return {}
    return found


def _sources(sources: Iterable[DataSource | str]) -> Iterable[tuple[str, float | None]]:
    return ((each, None) if isinstance(each, str) else (each.path, each.weight) for each in sources)


def _held_out(data: Data) -> list[str]:
    if isinstance(data.validation, tuple):
        return [name for name, _ in _sources(data.validation)]
    return [f"{data.validation:.3g} of the documents of each source"] if data.validation else []
