"""A JSON of DeepSpeed's together with the caller's own file and overrides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero3d.config import Config, given_keys, load
from zero3d.config.keys import KEYS
from zero3d.errors import ConfigError, short
from zero3d.ways.deepspeed.document import Document, read_document
from zero3d.ways.deepspeed.optimizer_kinds import IN_RUNS, IN_TRAINER
from zero3d.ways.deepspeed.translate import ADAM, Translation, Value, translate

YOURS, DEFAULT, PLANNED = "yours", "zero3d's default", "the planner"
THEIRS = "DeepSpeed's default, and a Trainer's"  # of what is auto
SAME = ("optimizer.betas", "optimizer.eps", "optimizer.weight_decay")  # an auto that is the same in a Trainer


@dataclass(frozen=True)
class Row:
    """A key of ours that a JSON is about: its value, and where that is from."""

    ours: str
    value: Any
    theirs: str
    source: str


@dataclass(frozen=True)
class Merged:
    """What a JSON and the caller make together. tree: of a file of ours."""

    document: Document
    translation: Translation
    tree: dict[str, Any]
    rows: tuple[Row, ...]

    def leaves(self, ours: str) -> bool:
        """Say whether a key is "auto" and the caller gives it no value."""
        return any(row.ours == ours and row.source == DEFAULT for row in self.rows)


def merged(
    path: Path,
    source: Path | None,
    overrides: Sequence[str],
    below: Path | None = None,
    planned: Mapping[str, Any] = MappingProxyType({}),
) -> Merged:
    """Put a file's values beside those of the caller's file and overrides. Raises ConfigError."""
    where = f"{source} and the overrides" if source and overrides else str(source or "the overrides")
    return together(read_document(path), given_keys(source, overrides), where, below, planned, IN_RUNS)


def together(
    document: Document,
    given: Mapping[str, Any],
    where: str,
    below: Path | None = None,
    planned: Mapping[str, Any] = MappingProxyType({}),
    kinds: Collection[str] = IN_TRAINER,
) -> Merged:
    """Put a JSON's values beside the caller's. Raises ConfigError, one for all that contradict each other.

    given    the caller's values by our keys; where: what they are called
    below    a file whose keys the JSON and the caller replace, such as the demo's
    kinds    of optimizers that are taken
    planned  values of the planner for keys that are "auto" and to which the caller gives none
    """
    translation = translate(document, kinds)
    contradictions = [
        f"{value.key} ({ours}) is {_shown(value.value)} there and {_shown(given[ours])} here"
        for ours, value in translation.values.items()
        if value.strong and ours in given and given[ours] != value.value
    ]
    chosen = given.get("precision")
    if translation.precisions and chosen is not None and chosen not in translation.precisions:
        keys = translation.autos["precision"]
        contradictions.append(f"{keys} (precision) leave {' and '.join(translation.precisions)}, and {chosen} is here")
    if contradictions:
        raise ConfigError(
            f"{document.name} contradicts {where}: {'; '.join(contradictions)}. Make them equal, or write auto in the "
            "JSON."
        )
    rows = [
        replace(row, value=planned[row.ours], source=PLANNED) if row.source == DEFAULT and row.ours in planned else row
        for row in _rows(translation, given)
    ]
    values = dict(given) | {row.ours: row.value for row in rows if row.source != YOURS}
    if below is not None:
        values = {key: value for key, value in given_keys(below).items() if not _portions(key, values)} | values
    return Merged(document, translation, tree_of(values), tuple(rows))


def load_merged(
    path: Path,
    source: Path | None,
    overrides: Sequence[str],
    below: Path | None = None,
    planned: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Config, Merged]:
    """Return the configuration of a run by a JSON (`merged`). Raises ConfigError."""
    made = merged(path, source, overrides, below, planned)
    return load(made.tree), made


def _portions(key: str, values: dict[str, Any]) -> bool:
    """Say whether a key is of the batch equation, or of how long a run is, of which there are others."""
    batch, long = {"train.batch", "train.micro_batch", "train.accumulate"}, {"train.steps", "train.epochs"}
    return any(key in group and group & values.keys() for group in (batch, long))


def _rows(translation: Translation, given: Mapping[str, Any]) -> list[Row]:
    rows = [_row(ours, value, given) for ours, value in translation.values.items()]
    for ours, theirs in translation.autos.items():
        if ours in given:
            rows.append(Row(ours, given[ours], theirs, YOURS))
        else:
            rows.append(Row(ours, *_by_default(ours, theirs, translation)))
    return sorted(rows, key=lambda row: [*KEYS].index(row.ours))


def _by_default(ours: str, theirs: str, translation: Translation) -> tuple[Any, str, str]:
    """Return what a key is that is auto and that nobody gives: its value, DeepSpeed's key, where the value is from."""
    plain = KEYS[ours].default
    if ours in SAME:
        return ADAM[ours], theirs, THEIRS
    if ours == "precision" and translation.precisions[0] != plain:
        return (
            translation.precisions[0],
            theirs,
            f"auto, the first of what that leaves: {', '.join(translation.precisions)}",
        )
    return plain, theirs, DEFAULT


def _row(ours: str, value: Value, given: Mapping[str, Any]) -> Row:
    if value.strong:
        return Row(ours, value.value, value.key, "the JSON")
    if ours in given:
        return Row(ours, given[ours], value.key, YOURS)
    return Row(ours, value.value, value.key, "DeepSpeed's default")


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as the tree of a file."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


def _shown(value: Any) -> str:
    return "null" if value is None else short(repr(value))
