"""The items of a file that is one JSON list, one after another: of the file an item and a piece are held."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zero3d.errors import DataError

PIECE = 1 << 20  # characters read at once
LONGEST = 1 << 26  # characters of an item
BLANKS = re.compile(r"\s+")


def list_items(path: Path, passed: Callable[[int], None] = lambda read: None) -> Iterator[Any]:
    """Yield the items of a list. Raises DataError where it ends too early or is damaged, behind which item.

    passed  called with the length of each piece that is read
    """
    number = 0
    with path.open(encoding="utf-8-sig") as file:

        def more(characters: int) -> str:
            piece = file.read(characters)
            passed(len(piece))
            return piece

        try:
            for value in _items(more):
                number += 1
                yield value
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is a JSON list that ends or is damaged behind record {number}: {str(error)[:200]}. Copy it "
                "again."
            ) from error


def _items(more: Callable[[int], str]) -> Iterator[Any]:
    """Yield the items of a list that comes in pieces; ValueError where it is none.

    What is read is cut off only where more is: an item costs its own length, whatever is held behind it.
    """
    decode = json.JSONDecoder().raw_decode
    text, at, first = more(PIECE).lstrip(), 1, True
    while True:
        while (at := _behind_blanks(text, at)) == len(text) and (piece := more(PIECE)):
            text, at = piece, 0
        if text[at : at + 1] == "]":
            return
        if not first:
            if text[at : at + 1] != ",":
                raise ValueError(f"expected a comma or ], found {text[at : at + 1]!r}")
            at += 1
        first = False
        while True:
            at = _behind_blanks(text, at)
            try:
                value, stop = decode(text, at)
                if stop < len(text) or isinstance(value, (dict, list, str)):  # else a number that may go on
                    break
            except json.JSONDecodeError:
                if len(text) - at > LONGEST:
                    raise ValueError(f"an item has more than {LONGEST:,} characters") from None
                stop = -1
            if piece := more(max(PIECE, len(text) - at)):
                text, at = text[at:] + piece, 0
            elif stop < 0:
                decode(text, at)  # raises again
            else:
                break
        yield value
        at = stop


def _behind_blanks(text: str, at: int) -> int:
    """Return where the next character is that is no blank."""
    found = BLANKS.match(text, at)
    return at if found is None else found.end()
