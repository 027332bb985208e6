"""The model card of an export: README.md, what the weights were made of and how, for people and for the Hub.

    front matter   license, base_model, datasets, library_name, tags: what the Hub reads, and only names that it knows
    table          base, data, steps, tokens, mesh, stage, precision, losses, versions
    table          settings that change bits, where they are not the usual ones (`resume_contract.unusual`)
    last line      the digest of what is above: by it an export knows its own card, and one that somebody has changed

A card says what the export knows; a row whose value is not known is left out. Names of data are those of the run's
file, of paths of a host only the last part: nothing that they hold is read.

A README.md that is not as an export has left it is never replaced.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zero3d.checkpoint.base_licence import Licence, licence_of
from zero3d.checkpoint.resume_contract import unusual
from zero3d.checkpoint.source_commit import described_commit
from zero3d.distributed.degrees import AXES, FOLDS
from zero3d.errors import short
from zero3d.reading import Unreadable, read_bytes
from zero3d.stores.urls import is_url

CARD = "README.md"
ADAPTER_CONFIG, CONFIG = "adapter_config.json", "config.json"
BUCKETS = ("s3", "s3a", "gs", "gcs", "hf")  # protocols whose URLs have a bucket's name where others have a host's
LATER = " from here on"  # of a run that goes on with other settings
END = re.compile(rb"\n<!-- zero3d wrote this page, sha256 ([0-9a-f]{64}) -->\n\Z")
CACHED = re.compile(r"(?:^|/)(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/")  # a folder of the Hub's cache
IN_HUB = re.compile(r"hf://(?:datasets/)([\w.-]+/[\w.-]+?)(?:[@/].*)?")


class Card(NamedTuple):
    """Says what an export knows of its weights; None, and what is empty, is not known.

    base         place of the weights that training began with, as the run's file has it
    base_folder  the folder that may say its licence
    data         places of the training data, each with its weight; held_out: of the data for evaluations
    steps        that were applied, and tokens: of all ranks together
    losses       by what they are of; those that are not finite are left out
    about        what the bits of the run depend on (`state.EngineState.about`)
    """

    base: str | None = None
    base_folder: Path | None = None
    data: Mapping[str, float | None] = {}
    held_out: Sequence[str] = ()
    steps: int | None = None
    tokens: int | None = None
    losses: Mapping[str, float] = {}
    about: Mapping[str, Any] = {}

    def of_engine(self, about: Mapping[str, Any], steps: int, base: Path | None) -> Card:
        """Return the card with what an engine knows, or a checkpoint of it."""
        known = self._replace(about=about, steps=steps)
        return known if self.base is not None or base is None else known._replace(base=str(base), base_folder=base)


NO_CARD = Card()


def write_card(folder: Path, card: Card) -> None:
    """Write the card of an export, unless a README.md is there that no export has written so. Raises OSError."""
    file = folder / CARD
    if not file.exists() or is_card(file):
        file.write_bytes(_sealed(_text(card, folder)))


def is_card(file: Path) -> bool:
    """Return whether a file is a card as an export has left it."""
    try:
        return is_sealed(read_bytes(file))
    except (OSError, Unreadable):
        return False


def is_sealed(data: bytes) -> bool:
    """Return whether these bytes are a card as an export has left it."""
    end = END.search(data)
    return end is not None and hashlib.sha256(data[: end.start()]).hexdigest().encode() == end[1]


def _sealed(text: str) -> bytes:
    data = text.encode()
    return data + f"\n<!-- zero3d wrote this page, sha256 {hashlib.sha256(data).hexdigest()} -->\n".encode()


# --- the text -------------------------------------------------------------------------------------


def _text(card: Card, folder: Path) -> str:
    """Return the card of a folder, which says by its files what loads it."""
    licence = licence_of(card.base_folder)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    loads = "peft" if is_adapter else "transformers" if (folder / CONFIG).is_file() else None
    front = yaml.safe_dump(_front_matter(card, licence, loads), sort_keys=False, allow_unicode=True)
    lines = [f"---\n{front}---", f"# {'An adapter' if is_adapter else 'Weights'} trained with zero3d"]
    lines.append(_table(("trained with", ""), _rows(card, licence)))
    if changed := unusual(card.about):
        lines.append("Settings that change bits, where they are not the usual ones:")
        shown = ((c.name, _code(c.now), _code(c.was), _escaped(c.why.removesuffix(LATER))) for c in changed)
        lines.append(_table(("setting", "here", "usually", "what differs"), shown))
    return "\n\n".join(lines) + "\n"


def _front_matter(card: Card, licence: Licence | None, loads: str | None) -> dict[str, Any]:
    """Return what the Hub reads: names that it does not know would be refused, or be those of somebody else."""
    datasets = [name for place in card.data if (name := hub_name(place)) is not None]
    base = None if card.base is None else hub_name(str(card.base_folder or card.base))
    return {
        **({} if licence is None else licence.keys),
        **({} if base is None else {"base_model": base}),
        **({"datasets": list(dict.fromkeys(datasets))} if datasets else {}),
        **({} if loads is None else {"library_name": loads}),
        "tags": ["zero3d"],
    }


def _rows(card: Card, licence: Licence | None) -> Iterator[tuple[str, str]]:
    """Yield what is known, each with its name."""
    about = card.about
    if card.base is not None:
        yield "base", _code(told_place(card.base))
    if licence is not None:
        yield "licence of the base", _escaped(licence.words)
    if card.data:
        weighted = ((told_place(place), weight) for place, weight in card.data.items())
        yield "data", ", ".join(f"{_code(name)}{'' if w is None else f' (weight {w:g})'}" for name, w in weighted)
    if card.held_out:
        yield "held-out data", ", ".join(_code(told_place(place)) for place in card.held_out)
    if card.steps is not None:
        yield "steps", f"{card.steps:,}"
    if card.tokens is not None:
        yield "tokens", f"{card.tokens:,}"
    if all(axis in about for axis in AXES):
        degrees = " x ".join(f"{axis} {about[axis]}" for axis in AXES)
        folds = [f"{fold.name} {about[fold.name]}" for fold in FOLDS if about.get(fold.name, fold.usual) != fold.usual]
        yield "mesh", _escaped(", of dp: ".join(filter(None, (degrees, ", ".join(folds)))))
    for name in ("stage", "precision"):
        if name in about:
            yield ("ZeRO stage" if name == "stage" else name), _escaped(str(about[name]))
    for name, loss in card.losses.items():
        if math.isfinite(loss):
            yield f"{name} loss", f"{loss:.4f}"
    yield "zero3d", ", ".join(filter(None, (str(sys.modules["zero3d"].__version__), described_commit())))
    for name in ("torch", "library"):
        if about.get(name):
            yield ("model's library" if name == "library" else name), _escaped(str(about[name]))


def told_place(place: str) -> str:
    """Return a place as a file names it; of one on this host's disk, or behind a host's name, only the last part."""
    cached = CACHED.search(f"{place}/")
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    if is_url(place):
        protocol, _, path = place.partition("://")
        path = re.split(r"[?#]", path)[0]
        return f"{protocol}://{path}" if protocol in BUCKETS and "@" not in path.split("/")[0] else _last(path)
    return _last(place) if place.startswith(("/", "~", "..")) else place


def hub_name(place: str) -> str | None:
    """Return the Hub's name of a place in its cache, or of its data by URL; None where the place does not say it."""
    if (cached := CACHED.search(f"{place}/")) is not None:
        return f"{cached[1]}/{cached[2]}"
    return None if (found := IN_HUB.fullmatch(place)) is None else found[1]


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _code(value: object) -> str:
    """Return a value as code in a cell of a table: no mark of Markdown in it counts."""
    text = short(value).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _escaped(text: str) -> str:
    """Return words for a cell of a table, in which no mark counts."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", short(text))
