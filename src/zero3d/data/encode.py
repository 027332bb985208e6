"""Records to documents of tokens, many at once: a fast tokenizer uses all cores for one call.

Text        [what starts a text] text EOS                   all are targets
Completion  [what starts a text] prompt|completion EOS      those right of |
Chat        what the template makes of it                   the assistant's
Pictured    the same, with the tokens of its images         the assistant's
Row         its ids                                         all

A prompt and its completion are one text, as a model sees them. RULE numbers how records become tokens: 1 tokenized both
apart, and left out what chats have beside their messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy
from numpy.typing import NDArray

from zero3d.data.borders import Parted
from zero3d.data.chat import ChatTemplate, Tokens
from zero3d.data.chat_keys import Malformed
from zero3d.data.conversations import as_texts, from_messages
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.kept_images import Pictures
from zero3d.data.records import BadRecord, Chat, Completion, Pictured, Record, Row, Text
from zero3d.data.tokenizers import ByteTokenizer, Tokenizer
from zero3d.errors import ConfigError, DataError

RECORDS, CHARACTERS = 1024, 1 << 20  # tokenized at once, at most: a fast tokenizer needs 130 bytes a character
RULE = 2  # by which records become tokens
SKIP = "Correct it, or leave such records out with data.skip_bad_lines=true."


NO_PICTURES = Pictures()
R = TypeVar("R", Text, Completion)
T = TypeVar("T")


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
    pictures: Pictures = NO_PICTURES


@dataclass
class Counts:
    """Counts records.

    skipped  left out, because that is allowed
    across   with a token that belongs to a prompt and to what follows it
    unused   with a key at which nobody looks, by its name
    ruled    whose tokens follow RULE: all that are more than a text or ids
    """

    skipped: int = 0
    across: int = 0
    ruled: int = 0
    unused: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add those of another encoder."""
        self.skipped += other.skipped
        self.across += other.across
        self.ruled += other.ruled
        self.unused.update(other.unused)


class Encoder:
    """Encodes records and counts. One that cannot be used is left out where `skip` allows it, else a DataError.

    remedy  what such an error says to do
    images  what makes tokens of images; without it there are none
    """

    def __init__(
        self, tokenizer: Tokenizer | None, skip: bool = False, remedy: str = SKIP, images: ImageTokens | None = None
    ) -> None:
        self.counts = Counts()
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
        pairs = iter(self._parted(batch))
        for record in batch:
            if isinstance(record, (Text, Completion, Chat, Pictured)):
                self.counts.unused.update(record.unused)
                self.counts.ruled += not isinstance(record, Text)
            match record:
                case Text():
                    ids = next(texts if record.first else rest) + (self._end() if record.last else [])
                    yield Encoded(_ids(ids), None, example=False, last=record.last)
                case Completion():
                    yield self._completion(next(pairs))
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
        texts = [record for record in batch if isinstance(record, Text) and record.first is starts]
        return _told(texts, lambda some: self._tokenizer.encode([each.text for each in some], starts))

    def _parted(self, batch: Sequence[Record]) -> list[Parted]:
        pairs = [record for record in batch if isinstance(record, Completion)]
        return _told(pairs, lambda some: self._tokenizer.encode_parted([(each[0], each[1]) for each in some]))

    def _completion(self, parted: Parted) -> Encoded:
        ids = parted.ids + self._end()
        targets = numpy.zeros(len(ids), numpy.uint8)
        targets[parted.first :] = 1
        self.counts.across += parted.across
        return Encoded(_ids(ids), targets, example=True, last=True)

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
        template = self._template
        try:
            tokens = template.encode(record.messages, record.options)
        except DataError as error:
            raise DataError(f"{record.place}: {error}") from error
        except ValueError as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            self.counts.unused.update(template.unused(record.messages, record.options))
            yield self._learnt(tokens)

    def _chat_of_parts(self, record: Chat) -> Iterator[Encoded]:
        """Encode a chat of texts as those with images are: by the processor's template."""
        try:
            messages, images = from_messages(record.messages)
        except Malformed as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            yield from self._pictured(Pictured(messages, images, record.place, record.options))

    def _pictured(self, record: Pictured) -> Iterator[Encoded]:
        if self._images is None:
            if record.images or (texts := as_texts(record.messages)) is None:
                raise ConfigError(
                    f"{record.place} is a conversation with images, and the model takes none, or data.tokenizer is not "
                    "its own: give model.path a folder of a vision-language model with its processor."
                )
            yield from self._chat(Chat(texts, record.place, record.options))
            return
        try:
            tokens, pictures = self._images.encode(record.messages, record.images, record.options)
        except DataError as error:
            raise DataError(f"{record.place}: {error}") from error
        except ValueError as error:
            self._leave_out(BadRecord(str(error), record.place))
        else:
            self.counts.unused.update(self._images.unused(record.messages, record.options))
            yield self._learnt(tokens, pictures._replace(place=record.place))

    def _learnt(self, tokens: Tokens, pictures: Pictures = NO_PICTURES) -> Encoded:
        self.counts.across += tokens.across
        return Encoded(_ids(tokens.ids), numpy.asarray(tokens.targets, numpy.uint8), True, True, pictures)

    def _leave_out(self, bad: BadRecord) -> None:
        if not self._skip:
            raise DataError(f"{bad.place}: {bad.why.removesuffix('.')}. {self._remedy}")
        self.counts.skipped += 1


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield records as many at once as are tokenized together."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += _characters(record)
        if len(batch) == RECORDS or characters >= CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(record: Record) -> int:
    """Return how many characters of a record are tokenized together with those of others."""
    match record:
        case Text():
            return len(record.text)
        case Completion():
            return len(record.prompt) + len(record.completion)
    return 0


def _told(records: Sequence[R], encode: Callable[[Sequence[R]], list[T]]) -> list[T]:
    """Return what is made of records together; an error has the place of the one that fails alone."""
    try:
        return encode(records) if records else []
    except DataError:
        for record in records:
            try:
                encode([record])
            except DataError as error:
                raise DataError(f"{record.place}: {error}") from error
        raise


def _ids(ids: list[int]) -> NDArray[Any]:
    return numpy.asarray(ids, numpy.int64)
