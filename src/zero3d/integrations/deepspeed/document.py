"""DeepSpeed's JSON, read and checked key by key: what is left is what asks for something."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short
from zero3d.integrations.deepspeed.keys import DOTTED, IDLE, OPAQUE, REFUSED, SECTIONS

AUTO = "auto"
NAMED = 8  # other problems that are named


class Document(NamedTuple):
    """The values of a JSON by dotted key: those with an effect here, and those without."""

    name: str
    values: dict[str, Any]
    idle: dict[str, Any]


def read_document(path: Path) -> Document:
    """Read a file. Raises ConfigError, one for all keys that are unknown or refused."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {short(str(error))}.") from error
    return document_of(tree, str(path))


def document_of(tree: Any, name: str) -> Document:
    """Check a JSON that is read already. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} is no configuration of DeepSpeed's: a JSON object is wanted.")
    flat: dict[str, Any] = {}
    problems = list(_flatten(tree, "", flat))
    problems += [why for key, value in flat.items() if (why := _refusal(flat, key, value))]
    raise_all(name, problems)
    idle = {key: value for key, value in flat.items() if key in IDLE}
    values = {key: value for key, value in flat.items() if key not in IDLE and key not in REFUSED}
    return Document(name, values, idle)


def raise_all(name: str, problems: list[str]) -> None:
    """Raise one ConfigError for all problems, if there are any."""
    if problems:
        first, *others = problems
        more = "" if not others else f" And {len(others)} more: " + " ".join(others[:NAMED])
        raise ConfigError(f"{name}: {first}{more}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]} is there twice")
    return dict(pairs)


def _flatten(tree: Mapping[str, Any], above: str, flat: dict[str, Any]) -> Iterator[str]:
    """Fill `flat`; yield what is wrong with a key."""
    for key, value in tree.items():
        name = f"{above}{key}"
        if name in OPAQUE or (name in DOTTED and name not in SECTIONS):
            flat[name] = value
        elif name not in SECTIONS:
            yield _unknown(name)
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.", flat)
        elif value not in (None, False):
            yield f"{name} is a section, and has {short(repr(value))}."


def _unknown(name: str) -> str:
    above, _, last = name.rpartition(".")
    everywhere = sorted({*DOTTED, *SECTIONS})
    siblings = {key.rpartition(".")[2]: key for key in everywhere if key.rpartition(".")[0] == above}
    same = [key for key in everywhere if key.rpartition(".")[2] == last]
    near = nearest(last, siblings, 0.6)
    meant = same[0] if same else siblings[near] if near else nearest(name, everywhere)
    return f"{name} is no key of DeepSpeed's." + (f" Did you mean {meant}?" if meant else "")


def _refusal(flat: Mapping[str, Any], key: str, value: Any) -> str | None:
    """Return why a key is refused with this value."""
    row = REFUSED.get(key)
    if row is None or any(value == neutral and type(value) is type(neutral) for neutral in row.neutral):
        return None
    if isinstance(value, Mapping) and not value.get("enabled", bool(value)):
        return None
    if key == "optimizer.params.adam_w_mode" and not flat.get("optimizer.params.weight_decay", 0):
        return None  # without weight decay both are the same
    return f"{key}={short(json.dumps(value))} is refused: {row.why}; use {row.instead}."
