"""One row per type that a key may have: its words, how a written value becomes one, its JSON Schema.

    type                  also accepted
    int                   "3", 1e3, 1000.0; in an override also "'3'"
    float                 3, "1e-4" (which YAML 1.1 reads as text)
    bool                  "true", "false", "yes", "no", "on", "off"
    str
    tuple[str, ...]       one text
    tuple[DataSource, ...]  one mapping; paths beside mappings (sources.py)
    tuple[float, float]   a list of two numbers
    Mapping[str, str]     a mapping of texts to texts
    Mapping[str, float | str | bool | None]   a mapping of names to options
    tuple[Mapping[str, str | float], ...]    a list of parameter groups
    None                  "null", "none", "~", "" (where the key may be null)

A union takes the first of its types that fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from zero3d.config.sources import FORMATS, DataSource, Refused, read_sources
from zero3d.errors import SHOWN, short
from zero3d.spec.optimizer import ADAMW, GROUP_NAMES

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULLS = ("null", "none", "~", "")
LARGEST = 2**53  # of whole numbers: those that every JSON reader has
DECIMAL = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")  # what YAML 1.1 and 1.2 agree on
SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")  # 1:30 is 90 in YAML 1.1
ZEROS = re.compile(r"[-+]?0[0-9_]+")  # 010 is 8 in YAML 1.1 and 10 in 1.2
PREFIXED = re.compile(r"[-+]?0(b[01_]+|o[0-7]+)")
LONG, MOST = re.compile(r"[-+]?(0[xbo])?[0-9][0-9_:.]*"), 40  # characters of numbers that anybody means
PARTED = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?|[-+]?0x[0-9a-fA-F_]*_[0-9a-fA-F_]*")


class Kind(NamedTuple):
    """Describes a type as people, Python and JSON Schema see it."""

    words: str
    convert: Callable[[Any], Any]  # raises ValueError, TypeError or OverflowError
    schema: Mapping[str, Any]


def number_meant(text: str) -> str | None:
    """Say what to type for a number that YAML 1.1 and 1.2 read as different ones; None for all other text."""
    digits = text.replace("_", "")
    if len(text) > MOST:
        return None if DECIMAL.fullmatch(text) or not LONG.fullmatch(text) else "type a decimal number"
    if SIXTIES.fullmatch(text):
        whole, *sixties = digits.lstrip("+-").split(":")
        value = float(whole)
        for part in sixties:
            value = 60 * value + float(part)
        return f"type {'-' * text.startswith('-')}{value:.12g} if sixties are meant"
    if digits.lstrip("+-") in ("0x", "0b", "0o"):
        return "type 0"
    if PREFIXED.fullmatch(text):
        return f"type {int(digits, 0)}"
    if ZEROS.fullmatch(text):
        return f"type {int(digits)}, not with a zero before it"
    return f"type {digits}" if PARTED.fullmatch(text) else None


def _whole(value: Any) -> int:
    value = _decimal(value)
    if isinstance(value, bool) or value != int(value) or abs(value) > LARGEST:
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(_decimal(value))):
        raise ValueError
    return number


def _decimal(value: Any) -> Any:
    """Return the number that a text is, perhaps in quotes that a shell has left; all else as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    if not DECIMAL.fullmatch(text):
        raise ValueError
    try:
        return int(text)
    except ValueError:  # 1e3
        return float(text)


def _switch(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in SWITCHES:
        return SWITCHES[value.lower()]
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    """Return text that files and their names can hold: UTF-8 without the character that ends a name."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError
    value.encode()  # raises for half a surrogate pair
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not texts or not all(map(_text, texts)):
        raise ValueError
    return texts


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    first, second = value
    return _number(first), _number(second)


def _table(value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    return {_text(key): _text(item) for key, item in value.items()}


def _groups(value: Any) -> tuple[Mapping[str, str | float], ...]:
    """Return parameter groups: what each matches, and one setting at least that is its own."""
    groups = [value] if isinstance(value, Mapping) else value
    if not isinstance(groups, (list, tuple)) or not groups:
        raise ValueError
    return tuple(map(_group, groups))


def _group(value: Any) -> Mapping[str, str | float]:
    own = {*value} - {"match"} if isinstance(value, Mapping) else set()
    if not own or "match" not in value or not own <= {*GROUP_NUMBERS, "name"} or not _text(value["match"]):
        raise ValueError
    numbers = {name: _number(value[name]) for name in GROUP_NUMBERS if name in value}
    if any(number < 0 for number in numbers.values()) or value.get("name", ADAMW) not in GROUP_NAMES:
        raise ValueError
    return {"match": value["match"], **({"name": value["name"]} if "name" in value else {}), **numbers}


def _options(value: Any) -> Mapping[str, float | str | bool | None]:
    """Return options by name, which may be null."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    return {_text(key): _option(item) for key, item in value.items()}


def _option(value: Any) -> float | str | bool | None:
    if value is None or isinstance(value, bool):
        return value
    try:
        return _number(value)
    except ValueError:
        return _text(value)


OPTIONS = Mapping[str, float | str | bool | None]
GROUPS = tuple[Mapping[str, str | float], ...]
GROUP_NUMBERS = ("lr", "weight_decay")
SOURCE: Mapping[str, Any] = {
    "type": "object",
    "required": ["path"],
    "additionalProperties": False,
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "weight": {"type": ["number", "null"], "minimum": 0},
        "format": {"enum": [*FORMATS, None]},
    },
}
SOURCES: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "string", "minLength": 1}, SOURCE]},
}
KINDS: Mapping[Any, Kind] = MappingProxyType(
    {
        int: Kind("a whole number", _whole, {"type": "integer"}),
        float: Kind("a number", _number, {"type": "number"}),
        bool: Kind("true or false", _switch, {"type": "boolean"}),
        str: Kind("text", _text, {"type": "string"}),
        tuple[str, ...]: Kind(
            "a text or a list of texts",
            _texts,
            {"type": ["string", "array"], "minLength": 1, "minItems": 1, "items": {"type": "string", "minLength": 1}},
        ),
        tuple[DataSource, ...]: Kind("a list of paths and of {path, weight, format}", read_sources, SOURCES),
        tuple[float, float]: Kind(
            "two numbers", _pair, {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "number"}}
        ),
        Mapping[str, str]: Kind(
            "a mapping of texts to texts",
            _table,
            {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}},
        ),
        OPTIONS: Kind(
            "a mapping of names to numbers, texts, truth values or null",
            _options,
            {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": ["number", "string", "boolean", "null"]},
            },
        ),
        GROUPS: Kind(
            f"a list of {{match: text, lr: number, weight_decay: number, name: {' or '.join(GROUP_NAMES)}}} with "
            "one at least, numbers from 0",
            _groups,
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["match"],
                    "minProperties": 2,
                    "additionalProperties": False,
                    "properties": {
                        "match": {"type": "string", "minLength": 1},
                        "name": {"enum": [*GROUP_NAMES]},
                        **{name: {"type": "number", "minimum": 0} for name in GROUP_NUMBERS},
                    },
                },
            },
        ),
    }
)


def convert(value: Any, types: tuple[Any, ...]) -> Any:
    """Return the value as the first of `types` that fits; NoneType among them allows null.

    Raises ValueError; Refused where that says more.
    """
    if NoneType in types and (value is None or (isinstance(value, str) and value.strip().lower() in NULLS)):
        return None
    for kind in (KINDS[member] for member in types if member is not NoneType):
        try:
            return kind.convert(value)
        except Refused:
            raise
        except (ValueError, TypeError, OverflowError):
            continue
    raise ValueError


def describe_value(value: Any) -> str:
    """Return a value as error messages show it: short, and with its type where that is the mistake."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= SHOWN else f"the text {value[:SHOWN]!r}..."
    if isinstance(value, Mapping):
        return "a mapping with " + (", ".join(map(short, list(value)[:3])) or "no keys")
    if isinstance(value, (list, tuple)):
        plain = len(value) <= 4 and all(isinstance(item, (str, int, float)) for item in value)
        return short(list(value)) if plain else f"a list of {len(value)}"
    return short(value)
