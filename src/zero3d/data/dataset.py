"""The data of a run, from its configuration: what is trained on, what is held out, and what to tell people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy

from zero3d.config import Data
from zero3d.config.sources import ALL, Part, parts_of
from zero3d.data.encode import RULE
from zero3d.data.files import HELD_OUT, find_sources, function_of, parts_of_data
from zero3d.data.image_sequences import ImageSequences, ImageSource
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.images import Vision
from zero3d.data.mixture import Member, Mixture
from zero3d.data.own import ImageItems, Items, OwnData, OwnSamples
from zero3d.data.packing import Documents, Ints, hold_out
from zero3d.data.records import check_rows
from zero3d.data.sequences import Samples, Sequences
from zero3d.data.store import TokenStore, prepare
from zero3d.data.streamed import StreamedRecords
from zero3d.data.tokenize import QUIETLY, Tokenizing
from zero3d.data.tokenizers import Tokenizer, check_vocabulary
from zero3d.errors import ConfigError, DataError, short

SHOWN = 8  # keys in a line
ACROSS = (
    "with a token that is both the end of its prompt and the beginning of its answer, which is not learned (let the "
    "answer begin with the blank, not the prompt end with it)"
)


@dataclass(frozen=True)
class DataSet:
    """Samples to train on and to evaluate on. `notes` are lines for people.

    rule  by which records are tokenized when a batch needs them (encode.py); None where there are no such, and what
          identifies the samples tells their tokens
    """

    train: Samples
    validation: Samples | None
    tokenizer: Tokenizer | None
    notes: list[str]
    rule: int | None = None


def needs_tokenizer(data: Data) -> bool:
    """Return whether anything has no token ids yet."""
    for part in parts_of_data(data):
        if function := function_of(part):
            if "input_ids" not in OwnData(function).item(0):
                return True
        elif any(source.format != "npy" for source in find_sources(part.paths, part.format, part.split)):
            return True
    return False


def open_data(
    data: Data,
    tokenizer: Tokenizer | None,
    vocabulary: int | None = None,
    multiple: int = 1,
    verify: bool = True,
    vision: Vision | None = None,
    how: Tokenizing = QUIETLY,
    micro_batch: int = 1,
) -> DataSet:
    """Tokenize what is not in the cache yet, divide it, and plan the sequences.

    Call it on one rank of each machine first and then on the others, which find the cache and need not `verify` it
    once more. `vocabulary` is the model's, if known; micro-batches are padded to a `multiple` of tokens. `vision` is
    the processor of a model that takes images; `how` says who hears of tokenizing. A micro-batch of `micro_batch`
    sequences has at most data.patches patches. Raises DataError and ConfigError.
    """
    if vocabulary is not None and tokenizer is not None:
        check_vocabulary(tokenizer, vocabulary)
    patches = None if data.patches is None else data.patches // micro_batch
    if patches == 0:
        raise ConfigError(
            f"data.patches={data.patches} / train.micro_batch={micro_batch} leaves a sequence no patch: type "
            f"data.patches={micro_batch} at least, or a smaller micro-batch."
        )
    how = replace(how, processes=data.processes)
    opener = _Opener(data, tokenizer, vocabulary, multiple, verify, vision, how, patches, micro_batch)
    fraction = 0.0 if isinstance(data.validation, tuple) else data.validation
    sources = [opener.open(part, fraction) for part in parts_of(data.train, data.format)]
    trained = [source for source in sources if source.part.weight != 0]
    lines = [line for source in trained for line in _describe("training", source.part, source.train, source.store)]
    lines += [note for source in sources for note in source.notes]
    train = _together([Member(source.part.name, source.train, source.part.weight) for source in trained])
    if isinstance(train, Mixture):
        lines += train.describe()
    held_out = [Member(source.part.name, source.held_out) for source in sources if source.held_out]
    if isinstance(data.validation, tuple):
        for part in parts_of(data.validation, data.format, HELD_OUT):
            source = opener.open(part)
            lines += [*source.notes, *_describe("validation", part, source.train, source.store)]
            held_out.append(Member(part.name, source.train))
    else:
        for source in sources:
            lines += _describe("validation", source.part, source.held_out, None) if source.held_out else []
    rule = RULE if any(source.ruled for source in trained) else None
    return DataSet(train, _together(held_out) if held_out else None, tokenizer, lines, rule)


def _together(members: list[Member]) -> Samples:
    return members[0].samples if len(members) == 1 else Mixture(members)


class _Source(NamedTuple):
    """A part as samples.

    store  where its tokens are kept; None where items are taken one by one
    ruled  whether those were tokenized by a rule, as far as was looked
    """

    part: Part
    train: Samples
    held_out: Samples | None
    store: TokenStore | None
    notes: list[str]
    ruled: bool = False


@dataclass(frozen=True)
class _Opener:
    """Opens parts with what `open_data` was given."""

    data: Data
    tokenizer: Tokenizer | None
    vocabulary: int | None
    multiple: int
    verify: bool
    vision: Vision | None
    how: Tokenizing
    patches: int | None
    rows: int

    def open(self, part: Part, fraction: float = 0.0) -> _Source:
        """Open a part, with a fraction of it held out."""
        if function := function_of(part):
            return self._one_by_one(part, OwnData(function), fraction)
        if self.data.streaming:
            return self._one_by_one(part, self._stream(part), fraction)
        images = self._images(part)
        store = self._store(part, images)
        documents, end, notes = _divide(store.documents(), fraction)
        train = self._sequences(store, documents, images)
        held_out = None if end is None else self._sequences(store, end, images)
        return _Source(part, train, held_out, store, ([] if store.note is None else [store.note]) + notes)

    def _stream(self, part: Part) -> StreamedRecords:
        sources = find_sources(part.paths, part.format, part.split)
        if self.data.skip_bad_lines:
            raise ConfigError(
                "data.streaming reads a record when a batch needs it, so bad ones are not known before and not left "
                "out: set data.skip_bad_lines or data.streaming to false."
            )
        return StreamedRecords(sources, self.how.made)

    def _one_by_one(self, part: Part, own: Items, fraction: float) -> _Source:
        """Take items by index, of a function or of files; the first and the last are looked at."""
        if self.data.packing:
            raise ConfigError(f"data.train={own.name} gives items one by one, each a sequence: set data.packing=false.")
        if self.data.patches is not None:
            raise ConfigError(
                f"data.train={own.name} gives items one by one, and how many patches an image has is not known before: "
                "leave data.patches out."
            )
        images, every = self._images(part, files=False), numpy.arange(own.count)
        documents, end, notes = _divide(Documents(every, every + 1, numpy.ones(own.count, bool)), fraction)
        whole, held_out = (
            None if chosen is None else self._items(own, chosen.starts, images) for chosen in (documents, end)
        )
        assert whole is not None
        for index in {0, len(whole) - 1}:
            whole[index]
        if unused := {**whole.counts.unused, **dict.fromkeys(own.unread, own.count)}:
            notes.append(_unused(unused))
        return _Source(part, whole, held_out, None, notes, bool(whole.counts.ruled))

    def _items(self, own: Items, indices: Ints, images: ImageTokens | None) -> OwnSamples:
        of = own, indices, self.data.length, self.tokenizer
        if images is None:
            return OwnSamples(*of, vocabulary=self.vocabulary, multiple=self.multiple)
        return ImageItems(*of, vocabulary=self.vocabulary, multiple=self.multiple, images=images)

    def _images(self, part: Part, files: bool = True) -> ImageTokens | None:
        """Return what makes tokens of images: of data.images, else of the folder in which the data are."""
        if self.vision is None or self.tokenizer is None:
            return None
        place = Path(part.paths[0]).expanduser()
        folder = self.data.images or (place if place.is_dir() else place.parent)
        return ImageTokens(self.tokenizer, self.vision, Path(folder).expanduser(), files)

    def _store(self, part: Part, images: ImageTokens | None) -> TokenStore:
        sources = find_sources(part.paths, part.format, part.split)
        check_rows(sources, self.data.length)
        store = prepare(
            sources,
            self.tokenizer,
            cache=self.data.cache,
            skip=self.data.skip_bad_lines,
            vocabulary=self.vocabulary,
            verify=self.verify,
            how=self.how,
            images=images,
        )
        if self.vocabulary is not None:
            check_vocabulary(None, self.vocabulary, store.meta.highest)
        return store

    def _sequences(self, store: TokenStore, documents: Documents, images: ImageTokens | None) -> Sequences:
        data, pad = self.data, self.tokenizer.pad if self.tokenizer else 0
        if images is None:
            sequences = Sequences(store, documents, data.length, data.packing, pad, self.multiple)
        else:
            skip, apart = data.skip_bad_lines, data.group_by_modality
            source = ImageSource(images.folder, images.vision, skip, apart, self.patches, self.rows)
            sequences = ImageSequences(store, documents, data.length, data.packing, pad, self.multiple, source)
        if not len(sequences):
            cut = f"{sequences.truncated:,} truncated to data.length={data.length}"
            unfit = f"; images of {sequences.unfit:,} more do not fit: {sequences.limits}" if sequences.unfit else ""
            raise DataError(
                f"nothing to learn: {sequences.documents:,} documents make no sequence with a target "
                f"({sequences.dropped:,} dropped, {cut}{unfit})."
            )
        return sequences


def _divide(documents: Documents, fraction: float) -> tuple[Documents, Documents | None, list[str]]:
    """Split off a fraction, if there is one, with the line that says how."""
    if not fraction:
        return documents, None, []
    kept, end, note = hold_out(documents, fraction)
    return kept, end, [note]


def _describe(what: str, part: Part, sequences: Samples, store: TokenStore | None) -> Iterator[str]:
    """Yield a line on what there is, then one on what is missing.

    store   whose counts are told, too; None where another line has them
    """
    name = f"{what} {part.name}" if part.name != ALL else what
    if not isinstance(sequences, Sequences):
        yield f"{name}: {_number(len(sequences), 'item')} of {part.paths[0]}, of at most {sequences.length} tokens"
        return
    tokens, targets = sequences.count()
    files = f"{_number(store.meta.files, 'file')}, " if store else ""
    full = f" ({tokens / (len(sequences) * sequences.length):.1%} full)" if sequences.packing else ""
    yield (
        f"{name}: {files}{_number(sequences.documents, 'document')}, {tokens:,} tokens ({targets:,} targets), "
        f"{_number(len(sequences), 'sequence')} of {'' if sequences.packing else 'at most '}{sequences.length}{full}"
    )
    missing = [
        (store.meta.skipped if store else 0, "bad record", "left out"),
        (store.meta.empty if store else 0, "empty document", "left out"),
        (store.meta.across if store else 0, "example", ACROSS),
        (sequences.truncated, "example", f"truncated to {sequences.length} tokens"),
        (sequences.dropped, "sample", "without a target dropped"),
        (sequences.unfit, "sample", f"whose images do not fit dropped ({sequences.limits})"),
    ]
    losses = [f"{_number(count, noun)} {fate}" for count, noun, fate in missing if count]
    if losses:
        yield f"{name}: {'; '.join(losses)}"
    if store and store.meta.unused:
        yield f"{name}: {_unused(store.meta.unused)}"


def _unused(counts: Mapping[str, int]) -> str:
    """Return the line on keys that nobody looks at."""
    shown = ", ".join(f"{short(key)} ({_number(count, 'record')})" for key, count in [*counts.items()][:SHOWN])
    more = f" and {len(counts) - SHOWN:,} more" if len(counts) > SHOWN else ""
    return f"not used: {'the keys' if len(counts) > 1 else 'the key'} {shown}{more}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
