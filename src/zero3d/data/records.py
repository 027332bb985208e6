"""Files to records: what a document is before it has tokens.

    Text        the whole file, or the key `text`           every token is a target
    Completion  the keys `prompt` and `completion`          the completion's tokens are
    Chat        the key `messages`: [{role, content}, ...]  the assistant's tokens are
    Pictured    the same with images, or LLaVA's            the assistant's tokens are
                `image` and `conversations`
    Row         an array of token ids                       every token is

Both kinds of chats have more keys (chat_keys.py). A record says which of its keys were not looked at (`unused`).

A record that cannot be used is a BadRecord, which says file and line; whoever reads decides whether
it ends the run. Nothing here holds more than one piece of a file.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import BadZipFile

import numpy
from numpy.typing import NDArray

from zero3d.data import chat_keys
from zero3d.data.chat_keys import Malformed, Options, calls_tools, message_of, options_of, with_system, without_nulls
from zero3d.data.columns import NoColumn, columns_of, read_rows
from zero3d.data.conversations import Images, Messages, from_llava, from_messages, has_images, unused_of_parts
from zero3d.data.files import Source
from zero3d.data.json_list import LONGEST, list_items
from zero3d.errors import DataError, short

PIECE = 1 << 18  # characters of a text file that are tokenized at once
LONG = 1 << 20  # characters of a record from which it is tokenized in such pieces
ROWS = 1 << 20  # tokens of an array that are read at once
LOOK = 64  # bytes in which a list begins
SHOWN = 8  # keys of a record in a message
KEYS = ("text", "prompt", "completion", "messages")
COLUMNS = (*KEYS, "conversations", "image", "images", *chat_keys.KEYS)
NESTED = ("messages", "conversations", *chat_keys.KEYS)  # in a table they have the keys of all rows


class Text(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    place: str
    first: bool = True
    last: bool = True
    unused: tuple[str, ...] = ()


class Completion(NamedTuple):
    """A prompt and what is learnt to follow it."""

    prompt: str
    completion: str
    place: str
    unused: tuple[str, ...] = ()


class Chat(NamedTuple):
    """A conversation of {role, content} messages, and what the template gets beside them."""

    messages: Messages
    place: str
    options: Options = {}  # noqa: RUF012
    unused: tuple[str, ...] = ()


class Pictured(NamedTuple):
    """A conversation of {role, content} messages, whose contents are lists of parts, and its images."""

    messages: Messages
    images: Images
    place: str
    options: Options = {}  # noqa: RUF012
    unused: tuple[str, ...] = ()


class Row(NamedTuple):
    """Ids of a 2-D array's row (a whole document), or a piece of a 1-D array's stream."""

    ids: NDArray[Any]
    place: str
    stream: bool
    last: bool = True


class BadRecord(NamedTuple):
    """A record that cannot be used, and why."""

    why: str
    place: str


Record = Text | Completion | Chat | Pictured | Row | BadRecord
Passed = Callable[[int], None]


def read(source: Source, passed: Passed = lambda read: None) -> Iterator[Record]:
    """Yield the records of one file. Raises DataError for what no line is to blame for.

    passed  called with how many bytes more have been read
    """
    try:
        if source.format in ("parquet", "arrow"):
            yield from _rows(source, passed)
        else:
            yield from {"text": _text, "jsonl": _lines, "npy": _array}[source.format](source.path, passed)
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror or error}.") from error


def has_pictures(source: Source) -> bool:
    """Say whether the first record of a file of records is a conversation with images."""
    return isinstance(first_record(source), Pictured)


def has_chats(source: Source) -> bool:
    """Return whether the first record of a file is a conversation without images."""
    return isinstance(first_record(source), Chat)


def first_record(source: Source) -> Record | None:
    """Return the first record of a file of records; None where there is none, or the file cannot be read."""
    if source.format not in ("jsonl", "parquet", "arrow"):
        return None
    try:
        return next(read(source), None)
    except DataError:  # told where it is read
        return None


def _text(path: Path, passed: Passed) -> Iterator[Record]:
    """Yield a file as one document, a long one in pieces that end with a line."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            piece, first = file.read(PIECE) + file.readline(PIECE), True
            while piece:
                passed(len(piece))
                ahead = file.read(PIECE) + file.readline(PIECE)
                yield Text(piece, str(path), first, last=not ahead)
                piece, first = ahead, False
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{_undecodable_line(path)} is not UTF-8 text: {error.reason}.") from None


def read_text(path: Path) -> str:
    """Return a whole text file. Raises OSError, DataError."""
    return "".join(record.text for record in _text(path, lambda read: None) if isinstance(record, Text))


def _undecodable_line(path: Path) -> int:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


def _lines(path: Path, passed: Passed) -> Iterator[Record]:
    with path.open("rb") as file:
        if file.read(LOOK).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            yield from _list(path, passed)
            return
        file.seek(0)
        for number, (raw, length) in enumerate(raw_lines(file), 1):
            place = f"{path}:{number}"
            passed(length)
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if length > LONGEST:
                yield too_long(place)
            elif raw.strip():
                value = parse_line(raw, place)
                yield from _in_pieces(value if isinstance(value, BadRecord) else record_of(value, place))


def raw_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line and its length; of one that is longer than any record the beginning alone."""
    while raw := file.readline(LONGEST + 1):
        length, end = len(raw), raw
        while length > LONGEST and not end.endswith(b"\n") and (end := file.readline(PIECE)):
            length += len(end)
        yield raw, length


def too_long(place: str) -> BadRecord:
    """Return what is said of a line that is longer than any record."""
    return BadRecord(
        f"a line of more than {LONGEST:,} bytes, which no record is: write it as several, or as a text file", place
    )


def _in_pieces(record: Record) -> Iterator[Record]:
    """Yield a long text as a text file's pieces: what is tokenized at once has a bound, whatever a record has."""
    if not isinstance(record, Text) or len(record.text) <= LONG:
        yield record
        return
    text, start = record.text, 0
    while start < len(text):
        stop = _end_of_piece(text, start)
        unused = () if start else record.unused
        yield Text(text[start:stop], record.place, first=not start, last=stop == len(text), unused=unused)
        start = stop


def _end_of_piece(text: str, start: int) -> int:
    """Return where a piece ends: behind a line, else before a blank, else anywhere."""
    least, most = start + PIECE, start + 2 * PIECE
    if (line := text.find("\n", least, most)) >= 0:
        return line + 1
    return blank if (blank := text.find(" ", least, most)) >= 0 else min(most, len(text))


def parse_line(raw: bytes, place: str) -> dict[str, Any] | BadRecord:
    """Return the object that a line of a jsonl file holds, or why it is none."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(f"not UTF-8: {error.reason} at byte {error.start} of the line", place)
    except json.JSONDecodeError as error:
        return BadRecord(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}", place)
    except ValueError as error:  # a number of more digits than Python converts
        return BadRecord(f"not a record: {str(error).partition(';')[0]}", place)
    except RecursionError:
        return BadRecord("not a record: nested too deeply", place)
    if not isinstance(value, dict):
        return BadRecord(f"expected one JSON object per line, found a {type(value).__name__}", place)
    return value


def _list(path: Path, passed: Passed) -> Iterator[Record]:
    """Yield the records of a file that is one JSON list."""
    for number, value in enumerate(list_items(path, passed), 1):
        place = f"{path}:record {number}"
        if isinstance(value, dict):
            yield from _in_pieces(record_of(value, place))
        else:
            yield BadRecord(f"expected a list of JSON objects, found a {type(value).__name__}", place)


def _rows(source: Source, passed: Passed) -> Iterator[Record]:
    path, number = source.path, 0
    try:
        unread = tuple(name for name in columns_of(path, source.format) if name not in COLUMNS)
        for rows in read_rows(path, source.format, COLUMNS, passed):
            for value in rows:
                number += 1
                yield from _in_pieces(record_of(row_of(value), f"{path}:row {number}", unread))
    except NoColumn as error:
        raise DataError(f"{path}: {wanted_keys(error.columns)}") from None


def _array(path: Path, passed: Passed) -> Iterator[Record]:
    array = _open_array(path)
    if array.ndim == 1:
        for start in range(0, len(array), ROWS):
            passed(array[start : start + ROWS].nbytes)
            yield Row(array[start : start + ROWS], str(path), stream=True, last=start + ROWS >= len(array))
    else:
        for number, row in enumerate(array, 1):
            passed(row.nbytes)
            yield Row(row, f"{path}:row {number}", stream=False)


def _open_array(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, BadZipFile) as error:
        raise DataError(f"{path} is not an npy array that can be read: {error}") from error
    if not isinstance(array, numpy.ndarray):
        raise DataError(f"{path} is a zip of arrays, as numpy.savez writes: write its token ids with numpy.save.")
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{path} holds {array.dtype} of shape {list(array.shape)}; token ids are integers, "
            "one stream [tokens] or one sequence per row [rows, tokens]."
        )
    return array


def check_rows(sources: Sequence[Source], length: int) -> None:
    """Refuse arrays whose rows are longer than a sequence: they were cut already. Raises DataError."""
    for source in sources:
        if source.format == "npy":
            shape = _open_array(source.path).shape
            if len(shape) == 2 and shape[1] > length:
                raise DataError(
                    f"{source.path} has rows of {shape[1]:,} tokens, which do not fit data.length={length:,}: "
                    f"set data.length={shape[1]}, or give one stream [tokens]."
                )


def row_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table as a line would have it."""
    return {key: without_nulls(entry) if key in NESTED else entry for key, entry in value.items()}


def record_of(value: Mapping[str, Any], place: str, unread: tuple[str, ...] = ()) -> Record:
    """Return the record in an object with known keys; keys that are null do not count.

    unread  other keys that it has
    """
    value = {key: entry for key, entry in value.items() if entry is not None}
    try:
        if has_images(value) or "messages" in value:
            return _chat_of(value, place, unread)
    except Malformed as error:
        return BadRecord(str(error), place)
    keys = ("prompt", "completion") if "prompt" in value and "completion" in value else ("text",)
    if keys[0] not in value:
        return BadRecord(wanted_keys(value), place)
    for key in keys:
        if why := _bad_text(value[key]):
            return BadRecord(f"{key} {why}", place)
    unused = (*(key for key in value if key not in keys), *unread)
    if keys == ("text",):
        return Text(value["text"], place, unused=unused)
    return Completion(value["prompt"], value["completion"], place, unused)


def _chat_of(value: Mapping[str, Any], place: str, unread: tuple[str, ...]) -> Record:
    """Return a conversation with its options. Raises Malformed."""
    if not has_images(value) and (why := _bad_messages(value["messages"])):
        return BadRecord(why, place)
    options = options_of(value)
    turns = ("conversations", "image") if "conversations" in value else ("messages", "images")
    used = {*turns, *chat_keys.KEYS} - ({"documents"} - options.keys())
    unused = (*(key for key in value if key not in used), *unread)
    if "conversations" in value:
        return Pictured(*from_llava(value), place, options, unused)
    if has_images(value):
        messages, images = from_messages(value["messages"], value.get("images"), value)
        return Pictured(messages, images, place, options, (*unused, *sorted(unused_of_parts(value["messages"]))))
    messages = [message_of(index, message) for index, message in enumerate(value["messages"])]
    return Chat(with_system(messages, value), place, options, unused)


def wanted_keys(keys: Any) -> str:
    """Say what keys there are and which are wanted."""
    names = ", ".join(map(short, list(keys)[:SHOWN])) or "none"
    return f"the keys are {names}; expected text, or prompt and completion, or messages, or image and conversations."


def _bad_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"is a {type(value).__name__}, not a string"
    if len(value) > LONGEST:
        return f"has {len(value):,} characters, and a record has at most {LONGEST:,}: write it as several"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "holds half a surrogate pair, which no text has"
    return None


def _bad_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages is not a list of {role, content}"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {index} has no role"
        content = message.get("content")
        if why := _bad_text(content) if content is not None or not calls_tools(message) else None:
            return f"content of message {index} {why}"
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is the assistant's, so there is nothing to learn"
    return None
