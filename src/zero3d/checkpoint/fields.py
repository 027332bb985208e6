"""Values out of a JSON file, each taken by name, type and range: whatever is wrong names file and field.

JSON itself is read strictly (`reading.parse_json`): no key comes twice.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any, NamedTuple, NoReturn

from zero3d.errors import SHOWN, CheckpointError, short
from zero3d.reading import Unreadable, parse_json

LARGEST = 1 << 53  # whole numbers up to here survive any JSON reader
USE_ANOTHER = "The checkpoint is damaged: use another step-N."


class Field(NamedTuple):
    """Holds a value and where it stands: `file`, and in it `name`, such as optimizer.groups[0].lr.

    What a method returns has the type that it names; anything else raises CheckpointError with file and name.
    """

    file: str
    name: str
    value: Any

    def refuse(self, expected: str) -> NoReturn:
        """Raise CheckpointError: the value is not what is `expected`."""
        name = (self.name or "all of it") if len(self.name) <= 4 * SHOWN else f"{self.name[: 4 * SHOWN]}..."
        raise CheckpointError(f"{self.file}: {name} is {quote(self.value)}, but should be {expected}. {USE_ANOTHER}")

    def has(self, key: str) -> bool:
        """Say whether there is such an entry, and it is not null."""
        return self.entries().get(key) is not None

    def entries(self) -> dict[str, Any]:
        """Return the value as a mapping."""
        if not isinstance(self.value, dict):
            self.refuse("a mapping")
        return self.value

    def entry(self, key: str) -> Field:
        """Return one entry of a mapping, which must have it."""
        entries = self.entries()
        if key not in entries:
            where = f"{self.name} has" if self.name else "there is"
            raise CheckpointError(f"{self.file}: {where} no {quote(key)}. {USE_ANOTHER}")
        return Field(self.file, f"{self.name}.{quote_name(key)}".lstrip("."), entries[key])

    def items(self) -> list[tuple[str, Field]]:
        """Return all entries of a mapping."""
        return [(key, self.entry(key)) for key in self.entries()]

    def rows(self, length: int | None = None) -> list[Field]:
        """Return the entries of a list, of which there must be `length`."""
        if not isinstance(self.value, list):
            self.refuse("a list")
        if length is not None and len(self.value) != length:
            raise CheckpointError(
                f"{self.file}: {self.name} has {len(self.value)} entries, but should have {length}. {USE_ANOTHER}"
            )
        return [Field(self.file, f"{self.name}[{i}]", value) for i, value in enumerate(self.value)]

    def integer(self, least: int = 0, most: int = LARGEST) -> int:
        """Return a whole number of this range."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(f"a whole number from {least}{f' to {most}' if most != LARGEST else ''}")
        return value

    def number(self, least: float = -inf) -> float:
        """Return a finite number from `least`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value) or value < least:
            self.refuse(f"a finite number{f' from {least:g}' if least != -inf else ''}")
        return float(value)

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            self.refuse("a text")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def one_of(self, *allowed: Any) -> Any:
        """Return one of these values, of the same type."""
        if not any(type(self.value) is type(value) and self.value == value for value in allowed):
            self.refuse(" or ".join(map(quote, allowed[:3])) + (" or another of its kind" if allowed[3:] else ""))
        return self.value


def parse_fields(text: bytes, file: str) -> Field:
    """Return the value of a JSON file. Raises CheckpointError."""
    try:
        return Field(file, "", parse_json(text, unique_keys=True))
    except Unreadable as error:
        raise CheckpointError(f"{file} {error}. {USE_ANOTHER}") from None


def quote(value: Any) -> str:
    """Return a value as messages quote it: on one line and short, whatever it holds."""
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    return short(ascii(value) if isinstance(value, str) else value)


def _finite(value: float) -> bool:
    return isfinite(value) if isinstance(value, float) else abs(value) <= 10**300


def quote_name(key: str) -> str:
    """Return a name as messages quote it: without quotes where it is an ordinary one."""
    return key if key.isascii() and key.isprintable() and len(key) <= SHOWN else quote(key)
