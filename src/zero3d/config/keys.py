"""Every key of the configuration by its dotted name, with its type and range, made from the sections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from zero3d.config.hints import nearest
from zero3d.config.kinds import KINDS, NULLS, OPTIONS, convert, describe_value, number_meant
from zero3d.config.sections import Config
from zero3d.config.sources import Refused
from zero3d.spec.bits import Bits
from zero3d.spec.declaring import Advice

NUMBERS = (int, float, tuple[float, float])  # what bounds are about
TABLE = Mapping[str, str]


@dataclass(frozen=True)
class Key:
    """Describes one setting."""

    name: str  # dotted: zero.stage
    types: tuple[Any, ...]  # the members of its union, rows of KINDS or NoneType
    default: Any
    text: str
    bits: Bits | None
    choices: tuple[str, ...]
    least: float | None
    most: float | None
    above: float | None
    below: float | None
    axis: str
    in_plan: bool | str  # `spec.declaring.key`, and the next ones
    said: str
    keyword: str
    advice: Advice

    @property
    def wants(self) -> str:
        """What it takes, in words: a whole number from 0 to 3."""
        return ", or ".join("null" if kind is NoneType else self._words(kind) for kind in self.types)

    def _words(self, kind: Any) -> str:
        if self.choices and kind in (str, tuple[str, ...]):
            unit = " (K a whole number from 1)" if any(":K" in choice for choice in self.choices) else ""
            *most, last = self.choices
            words = f"{', '.join(most)} or {last}{unit}" if most else last
            return words if kind is str else f"{words}, or a list of them"
        if self.choices and kind == TABLE:
            *most, last = self.choices
            return f"a mapping of {', '.join(most)} or {last} to texts"
        return KINDS[kind].words + (self._range() if kind in NUMBERS else "")

    def _range(self) -> str:
        bounds = ((" from", self.least), (" above", self.above), (" to", self.most), (" and below", self.below))
        return "".join(
            f"{word} {bound:,}" if isinstance(bound, int) else f"{word} {bound:g}"
            for word, bound in bounds
            if bound is not None
        )

    def read(self, value: Any) -> Any:
        """Return the value converted to the key's type and checked. Raises ValueError with the whole message."""
        try:
            read = convert(value, self.types)
        except Refused as error:
            raise ValueError(f"{self.name} {error}") from None
        except ValueError:
            raise ValueError(self._refusal(value)) from None
        if not self._allows(read):
            raise ValueError(self._refusal(value))
        return read

    def _allows(self, value: Any) -> bool:
        if value is None or isinstance(value, bool):
            return True
        if isinstance(value, Mapping):
            return not self.choices or value.keys() <= {*self.choices}
        if isinstance(value, str):
            return not self.choices or re.fullmatch(self.pattern, value) is not None
        items = value if isinstance(value, tuple) else (value,)
        if self.choices and not all(item in self.choices for item in items if isinstance(item, str)):
            return False
        return all(self._within(number) for number in items if isinstance(number, (int, float)))

    def _within(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    @property
    def pattern(self) -> str:
        """The choices as a regular expression that needs to match as a whole."""
        return "|".join(re.escape(choice).replace(":K", ":[1-9][0-9]*") for choice in self.choices)

    def _refusal(self, value: Any) -> str:
        words = value if isinstance(value, (list, tuple, Mapping)) else (value,)
        wrong = next((word for word in words if isinstance(word, str) and word not in self.choices), "")
        near = nearest(wrong, self.choices) if wrong not in NULLS else None
        meant = number_meant(value.strip()) if isinstance(value, str) else None
        hint = f" Did you mean {near}?" if near else f" {meant[0].upper()}{meant[1:]}." if meant else ""
        if str in self.types and not self.choices and isinstance(value, (bool, int, float)):
            hint = f" Put it in quotes: YAML reads it as a {'truth value' if isinstance(value, bool) else 'number'}."
        return f"{self.name} takes {self.wants}; found {describe_value(value)}.{hint}"


def _keys() -> Iterator[Key]:
    for prefix, section in (("", Config), *((f"{name}.", section) for name, section in SECTIONS.items())):
        hints = get_type_hints(section)
        for field in dataclasses.fields(section):
            if field.name not in SECTIONS or prefix:
                hint = hints[field.name]
                types = get_args(hint) if isinstance(hint, UnionType) else (hint,)
                yield Key(f"{prefix}{field.name}", types, field.default, **field.metadata)


SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        name: hint
        for name, hint in get_type_hints(Config).items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }
)
KEYS: Mapping[str, Key] = MappingProxyType({key.name: key for key in _keys()})


def takes_list(key: Key) -> bool:
    """Say whether commas in an override of it make a list."""
    return any(get_origin(kind) is tuple for kind in key.types)


def takes_table(key: Key) -> bool:
    """Say whether braces in an override of it make a mapping."""
    return any(get_origin(kind) is Mapping for kind in key.types)


def takes_names(key: Key) -> bool:
    """Return whether single entries of a key's mapping can be overridden, as in log.on.end=COMMAND."""
    return OPTIONS in key.types or (TABLE in key.types and bool(key.choices))


def value_of(config: Config, name: str) -> Any:
    """Return the value of a dotted key."""
    return attrgetter(name)(config)
