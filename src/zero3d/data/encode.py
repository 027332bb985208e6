"""Records to documents of tokens, many at once: a fast tokenizer uses all cores for one call.

Text        [what starts a text] text EOS                   all are targets
Completion  [what starts a text] prompt | completion EOS    those right of |
Chat        what the template makes of it                   the assistant's
Pictured    the same, with the tokens of its images         the assistant's
Row         its ids                                         all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from zero3d.data.chat import ChatTemplate
from zero3d.data.conversations import Malformed, from_messages
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.kept_images import Pictures
from zero3d.data.records import BadRecord, Chat, Completion, Pictured, Record, Row, Text
from zero3d.data.tokenizers import ByteTokenizer, Tokenizer
from zero3d.errors import ConfigError, DataError

RECORDS, CHARACTERS = 1024, 1 << 20  # tokenized at once, at most: a fast tokenizer needs 130 bytes a character
SKIP = "Correct it, or leave such records out with data.skip_bad_lines=true."


class Encoded(NamedTuple):
    """A document, or a piece of one that `last` says has more to come.

    ids      [n]   token ids
    targets  [n]   1 where a token is learnt; None where all are
    example  whether it is kept whole, not cut into sequences
    pictures its images
    """

    ids: NDArray[Any]
    targets: NDArray[numpy.uint8] | None
    example: bool
    last: bool
    pictures: Pictures = Pictures()


class Encoder:
    """Encodes records; counts those it left out because `skip` allowed it (otherwise they are a DataError).

    remedy  what such an error says to do
    images  what makes tokens of images; without it there are none
    """

    def __init__(
        self, tokenizer: Tokenizer | None, skip: bool = False, remedy: str = SKIP, images: ImageTokens | None = None
    ) -> None:
        self.skipped = 0
        self._images = images
        self._remedy = remedy
        self._given = tokenizer
        self._skip = skip
        self._template: ChatTemplate | None = None

    @property
    def takes_images(self) -> bool:
        """Whether records may have images."""
        return self._images is not None

    @property
    def of_bytes(self) -> bool:
        """Whether bytes are the tokens."""
        return isinstance(self._given, ByteTokenizer)

    def encode(self, batch: Sequence[Record]) -> Iterator[Encoded]:
        """Yield the documents of a batch of records, in their order."""
        texts, rest = (iter(self._tokens(batch, starts)) for starts in (True, False))
        for record in batch:
            match record:
                case Text():
                    ids = next(texts if record.first else rest) + (self._end() if record.last else [])
                    yield Encoded(_ids(ids), None, example=False, last=record.last)
                case Completion():
                    yield _completion(next(texts), next(rest) + self._end())
                case Row():
                    yield Encoded(record.ids, None, example=not record.stream, last=record.last)
                case Chat() if self._images is not None:
                    yield from self._chat_of_parts(record)
                case Chat():
                    yield from self._chat(record)
                case Pictured():
                    yield from self._pictured(record)
                case BadRecord():
                    self._leave_out(record)

    def _tokens(self, batch: Sequence[Record], starts: bool) -> list[list[int]]:
        texts = [text for text, first in _texts(batch) if first is starts]
        try:
            return self._tokenizer.encode(texts, starts) if texts else []
        except DataError as error:
            raise self._told(batch, starts, error) from error

    def _told(self, batch: Sequence[Record], starts: bool, error: DataError) -> DataError:
        """Return the error of a tokenizer with the place of the record that it fails on, if it does so alone."""
        for record in batch:
            try:
                for text in (text for text, first in _texts([record]) if first is starts):
                    self._tokenizer.encode([text], starts)
            except DataError as own:
                return DataError(f"{record.place}: {own}")
        return error

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given is None:
            raise ConfigError("the data are text and need a tokenizer: set data.tokenizer to a folder, or to bytes.")
        return self._given

    def _end(self) -> list[int]:
        return [] if self._tokenizer.eos is None else [self._tokenizer.eos]

    def _chat(self, record: Chat) -> Iterator[Encoded]:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        try:
            ids, targets = self._template.encode(record.messages)
        except DataError as error:
            raise DataError(f"{record.place}: {error}") from error
        except ValueError as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            yield Encoded(_ids(ids), numpy.asarray(targets, numpy.uint8), example=True, last=True)

    def _chat_of_parts(self, record: Chat) -> Iterator[Encoded]:
        """Encode a chat of texts as those with images are: by the processor's template."""
        try:
            messages, images = from_messages(record.messages)
        except Malformed as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            yield from self._pictured(Pictured(messages, images, record.place))

    def _pictured(self, record: Pictured) -> Iterator[Encoded]:
        if self._images is None:
            raise ConfigError(
                f"{record.place} is a conversation with images, and the model takes none, or data.tokenizer is not its "
                "own: give model.path a folder of a vision-language model with its processor."
            )
        try:
            ids, targets, pictures = self._images.encode(record.messages, record.images)
        except DataError as error:
            raise DataError(f"{record.place}: {error}") from error
        except ValueError as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            yield Encoded(_ids(ids), numpy.asarray(targets, numpy.uint8), True, True, pictures)

    def _leave_out(self, bad: BadRecord) -> None:
        if not self._skip:
            raise DataError(f"{bad.place}: {bad.why.removesuffix('.')}. {self._remedy}")
        self.skipped += 1


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records as many at once as are tokenized together."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += sum(len(text) for text, _ in _texts([record]))
        if len(batch) == RECORDS or characters >= CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _texts(batch: Iterable[Record]) -> Iterator[tuple[str, bool]]:
    """Yield each text that is tokenized, and whether it starts a document."""
    for record in batch:
        if isinstance(record, Text):
            yield record.text, record.first
        elif isinstance(record, Completion):
            yield record.prompt, True
            yield record.completion, False


def _completion(prompt: list[int], completion: list[int]) -> Encoded:
    targets = numpy.zeros(len(prompt) + len(completion), numpy.uint8)
    targets[len(prompt) :] = 1
    return Encoded(_ids(prompt + completion), targets, example=True, last=True)


def _ids(ids: list[int]) -> NDArray[Any]:
    return numpy.asarray(ids, numpy.int64)
