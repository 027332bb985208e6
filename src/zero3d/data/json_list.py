"""The items of a file that is one JSON list, one after another: of the file an item and a piece are held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zero3d.errors import DataError

PIECE = 1 << 20  # characters read at once
LONGEST = 1 << 26  # characters of an item


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
    """Yield the items of a list that comes in pieces; ValueError where it is none."""
    decode = json.JSONDecoder().raw_decode
    text, first = more(PIECE).lstrip()[1:], True
    while True:
        text = text.lstrip() or more(PIECE).lstrip()
        if text[:1] == "]":
            return
        if not first:
            if text[:1] != ",":
                raise ValueError(f"a comma or ] is wanted, and {text[:1]!r} is there")
            text = text[1:]
        first = False
        while True:
            text, piece = text.lstrip(), ""
            try:
                value, stop = decode(text)
            except json.JSONDecodeError:
                piece = more(max(PIECE, len(text)))
                if not piece or len(text) > LONGEST:
                    raise
                text += piece
            else:
                break
        yield value
        text = text[stop:]
