"""The data of a run, from its configuration: what is trained on, what is held out, and what to tell people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zero3d.config import Data
from zero3d.data.files import Source, find_sources
from zero3d.data.packing import Documents, hold_out
from zero3d.data.records import check_rows
from zero3d.data.sequences import Sequences
from zero3d.data.store import TokenStore, prepare
from zero3d.data.tokenizers import Tokenizer, check_vocabulary
from zero3d.errors import DataError


@dataclass(frozen=True)
class DataSet:
    """Sequences to train on and to evaluate on. `notes` are lines for people."""

    train: Sequences
    validation: Sequences | None
    tokenizer: Tokenizer | None
    notes: list[str]


def needs_tokenizer(data: Data) -> bool:
    """Return whether any file is something else than arrays of token ids."""
    return any(source.format != "npy" for source in _sources(data))


def open_data(
    data: Data, tokenizer: Tokenizer | None, vocabulary: int | None = None, multiple: int = 1, verify: bool = True,
    made: Callable[[], None] = lambda: None,
) -> DataSet:  # fmt: skip
    """Tokenize what is not in the cache yet, divide it, and plan the sequences.

    Call it on one rank of each machine first and then on the others, which find the cache and need not `verify` it
    once more. `vocabulary` is the model's, if known; micro-batches are padded to a `multiple` of tokens. `made` is
    called with every document that is tokenized. Raises DataError and ConfigError.
    """
    if vocabulary is not None and tokenizer is not None:
        check_vocabulary(tokenizer, vocabulary)
    store = _store(data, data.train, tokenizer, vocabulary, verify, made)
    documents, notes = store.documents(), [store.note]
    held_out: tuple[TokenStore, Documents] | None = None
    if isinstance(data.validation, tuple):
        other = _store(data, data.validation, tokenizer, vocabulary, verify, made)
        held_out = other, other.documents()
        notes.append(other.note)
    elif data.validation:
        documents, end, note = hold_out(documents, data.validation)
        held_out = store, end
        notes.append(note)
    train = _sequences(data, store, documents, tokenizer, multiple)
    validation = _sequences(data, *held_out, tokenizer, multiple) if held_out else None
    lines = [*_describe("training", train, store), *(note for note in notes if note is not None)]
    if held_out and validation:
        lines += _describe("validation", validation, held_out[0] if held_out[0] is not store else None)
    return DataSet(train, validation, tokenizer, lines)


def _sources(data: Data) -> list[Source]:
    paths = data.train + (data.validation if isinstance(data.validation, tuple) else ())
    return find_sources(paths, data.format)


def _store(
    data: Data, paths: tuple[str, ...], tokenizer: Tokenizer | None, vocabulary: int | None, verify: bool,
    made: Callable[[], None],
) -> TokenStore:  # fmt: skip
    sources = find_sources(paths, data.format)
    check_rows(sources, data.length)
    store = prepare(
        sources, tokenizer, cache=data.cache, skip=data.skip_bad_lines, vocabulary=vocabulary, verify=verify, made=made
    )
    if vocabulary is not None:
        check_vocabulary(None, vocabulary, store.meta.highest)
    return store


def _sequences(
    data: Data, store: TokenStore, documents: Documents, tokenizer: Tokenizer | None, multiple: int
) -> Sequences:
    pad = tokenizer.pad if tokenizer else 0
    sequences = Sequences(store, documents, data.length, data.packing, pad, multiple)
    if not len(sequences):
        raise DataError(
            f"nothing to learn: {sequences.documents:,} documents make no sequence with a target "
            f"({sequences.dropped:,} dropped, {sequences.truncated:,} truncated to data.length={data.length})."
        )
    return sequences


def _describe(name: str, sequences: Sequences, store: TokenStore | None) -> Iterator[str]:
    """Yield a line on what there is, then one on what is missing.

    store   whose counts are told, too; None where another line has them
    """
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
        (sequences.truncated, "example", f"truncated to {sequences.length} tokens"),
        (sequences.dropped, "sample", "without a target dropped"),
    ]
    losses = [f"{_number(count, noun)} {fate}" for count, noun, fate in missing if count]
    if losses:
        yield f"{name}: {'; '.join(losses)}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
