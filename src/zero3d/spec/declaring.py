"""Declares a key of a section once, and writes settings as their caller types them. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.errors import ConfigError, short
from zero3d.spec.bits import Bits

Write = Callable[[str, Any], str]  # how the caller types a setting
KEYWORDS = {  # of keys outside of zero, offload and mesh, and of one whose name an Engine has for something else
    "zero.weights": "weight_shards",
    "optimizer.name": "optimizer",
    "optimizer.clip_norm": "clip_norm",
    "train.expert_bias_rate": "expert_bias_rate",
    "health.replay": "replay",
    "train.accumulate": "accumulate",
    "train.ema": "ema",
    "model.linear": "linear",
    "model.quantize": "quantize",
}


class Advice(NamedTuple):
    """Says how advice on a plan takes a key (tools/plan/what_if.py, tools/plan/relief.py, tools/plan/links.py).

    tried   the value that is tried where a plan has the default; where it has another, the default is
    where   plans in which that may change anything; what rules refuse is left out in any case
    rounds  some of its values round what is sent or kept more than its default does
    reset   keys that then get these values
    """

    tried: Any = None
    where: Callable[[Any], bool] = lambda plan: False
    rounds: bool = False
    reset: Mapping[str, Any] = MappingProxyType({})


NO_ADVICE = Advice()
BOUNDS = ("least", "most", "above", "below")


def key(
    default: Any,
    text: str,
    *,
    bits: str | Bits | None,
    choices: tuple[str, ...] = (),
    axis: str = "",
    in_plan: bool | str = True,
    said: str = "",
    keyword: str = "",
    advice: Advice = NO_ADVICE,
    **bounds: float,
) -> Any:
    """Declare a field: its default, what it means, what is allowed, and whether bits change with it.

    bits        why the bits of a run change with its value, or with a fact that it decides (`spec/bits.py`); None where
                they do not
    choices     the allowed words; K in "every:K" stands for a whole number from 1
    axis        without which (degree 1) it has no effect
    in_plan     whether a plan has it, or its keyword there if that is not the field's name
    said        in a few words, for tables of plans: what it is where it is not by default, with {} for the value
    keyword     what it means as a keyword of an Engine, where the text speaks to those who write files
    advice      what advice on a plan tries of it, where the planner has no rule of its own for it
    bounds      least, most: closed; above, below: open
    """
    assert bounds.keys() <= set(BOUNDS), f"bounds are {', '.join(BOUNDS)}, not {', '.join(bounds)}"
    limits = dict.fromkeys(BOUNDS) | bounds
    reason = Bits(bits, usual=default) if isinstance(bits, str) else bits
    metadata = {"text": text, "bits": reason, "choices": choices, **limits}
    metadata |= {"axis": axis, "in_plan": in_plan, "said": said, "keyword": keyword, "advice": advice}
    return field(default=default, metadata=metadata)


def whole_numbers(section: type, name: str) -> range:
    """Return the numbers that a key of a section may be, which has a least and a most."""
    (bounds,) = (each.metadata for each in fields(section) if each.name == name)
    return range(bounds["least"], bounds["most"] + 1)


def keyword_of(section: str, name: str) -> str:
    """Return an Engine's keyword for a key of a section."""
    return KEYWORDS.get(f"{section}.{name}", name)


def noted_as(section: str, name: str) -> str:
    """Return the name under which checkpoints note a key's value: of an Engine's keyword that, else as in a file."""
    dotted = f"{section}.{name}" if section else name
    return name if section in ("zero", "offload", "mesh") else KEYWORDS.get(dotted, dotted)


def as_noted(value: Any) -> str | int | None:
    """Return a key's value as a checkpoint notes it: a text, a whole number or nothing."""
    if value is None or isinstance(value, (str, int)):
        return value
    return json.dumps(dict(value), sort_keys=True, default=str) if isinstance(value, Mapping) else repr(value)


def check_choices(section: str, record: Any, write: Write) -> None:
    """Raise ConfigError where a field of a section is none of the words that it may be."""
    for each in fields(record):
        value, choices = getattr(record, each.name), each.metadata["choices"]
        if choices and value is not None and value not in choices:
            asked = write(f"{section}.{each.name}", short(value) if isinstance(value, str) else value)
            raise ConfigError(f"{asked} is unknown: type one of {', '.join(choices)}.")


def in_file(key: str, value: Any) -> str:
    """Write a setting as in a file or an override: zero.exact=true."""
    words = {True: "true", False: "false", None: "null"}
    return f"{key}={words[value] if isinstance(value, (bool, type(None))) else value}"


def as_keyword(key: str, value: Any) -> str:
    """Write a setting as a keyword of an Engine: exact=True. Those of offload are keys of a mapping: as in a file."""
    section, _, name = key.rpartition(".")
    if section == "offload":
        return in_file(key, value)
    told = {"true": True, "false": False, "null": None}.get(value, value) if isinstance(value, str) else value
    number = isinstance(told, str) and told.isdigit()
    return f"{KEYWORDS.get(key, name)}={told if number else repr(told)}"
