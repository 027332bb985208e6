"""Tokens on disk, made once and memory-mapped by everybody: a folder of the cache.

    CACHE/<key>/
      tokens      uint16 or uint32 [tokens]     all documents, one after another
      targets     uint8 [tokens]                1 where a token is learnt; absent where all are
      offsets     int64 [documents + 1]         where each document starts
      examples    uint8 [documents]             1: kept whole; 0: text, cut into sequences
      image_*     where the model takes images  which each document has (kept_images.py)
      meta.json   counts, a digest of the files above, a seal of meta.json itself

The key is a hash of the files (path, size, time), the tokenizer and the settings, so changed data are
tokenized again. A folder is written under a name of its own (`*.tmp`) and renamed when complete: a
killed build blocks nobody, and of two builders one wins. Building streams: memory does not grow with the data.

A folder that is there is read once more before it is used: one whose digest differs is damaged, is no loss,
and is made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from numpy.typing import NDArray

from zero3d.data.encode import Encoded, Encoder
from zero3d.data.files import Source
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.kept_images import PLACES, ImageWriter, Pictures
from zero3d.data.packing import Documents
from zero3d.data.tokenize import QUIETLY, Tokenizing
from zero3d.data.tokenizers import Tokenizer
from zero3d.errors import FULL, DataError, remedy_of
from zero3d.reading import Unreadable, read_object
from zero3d.stores.cache import DEFAULT

VERSION = 4
UPRIGHT = "upright"  # sizes of images are those after they were turned by their EXIF data
COUNTED = "patches"  # of images are kept
PLACED = "places"  # of records with images are kept
BACKFILL = 1 << 20  # target marks written at once


@dataclass
class Meta:
    """Counts of a store. `skipped` are bad records, `empty` documents without a token, `highest` a token id.

    `across` and `unused` are those of encode.py.
    `digest` is of the tokens, targets and documents: the same wherever the files lay and whenever they were written.
    `seal` is of all the others.
    """

    dtype: str
    files: int
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    skipped: int = 0
    empty: int = 0
    across: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    highest: int = -1
    digest: str = ""
    seal: str = ""

    def sealed(self) -> str:
        """Return what `seal` is where nobody has changed anything."""
        return hashlib.sha256(json.dumps(asdict(replace(self, seal=""))).encode()).hexdigest()[:16]


class TokenStore:
    """A complete folder, memory-mapped. Pickling carries the path: a worker maps it again.

    note    a line for people where it had to be made again
    Raises OSError and ValueError for a folder that is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note: str | None = None
        self.meta = _read_meta(folder / "meta.json")
        self.tokens = _map(folder / "tokens", self.meta.dtype, self.meta.tokens)
        marks = folder / "targets"
        self.targets = _map(marks, "uint8", self.meta.tokens) if marks.exists() else None

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)

    def documents(self) -> Documents:
        """Return where each document lies."""
        offsets = _map(self.folder / "offsets", "int64", self.meta.documents + 1)
        examples = _map(self.folder / "examples", "uint8", self.meta.documents)
        return Documents(numpy.asarray(offsets[:-1]), numpy.asarray(offsets[1:]), examples.astype(bool))


def _read_meta(path: Path) -> Meta:
    """Read a store's counts. Raises ValueError for a file that is not as it was written."""
    entries = read_object(path)
    if set(entries) != {each.name for each in fields(Meta)}:
        raise Unreadable("holds other fields than a store has")
    meta = Meta(**entries)
    if meta.seal != meta.sealed():
        raise Unreadable("is not as it was written")
    return meta


def _map(path: Path, dtype: str, count: int) -> NDArray[Any]:
    return numpy.memmap(path, dtype, "r", shape=(count,))


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer | None,
    *,
    cache: str | None = None,
    skip: bool = False,
    vocabulary: int | None = None,
    verify: bool = True,
    how: Tokenizing = QUIETLY,
    images: ImageTokens | None = None,
) -> TokenStore:
    """Return the tokens of `sources`: found in the cache, or made. Every call with the same data finds the same folder.

    `vocabulary` (else the tokenizer's size) says how wide a token is. `verify` reads all of a folder that is
    there already; without it somebody else has. `how` changes no byte. `images` makes tokens of those that
    conversations have. Raises DataError.
    """
    root = Path(cache or DEFAULT).expanduser()
    size = max(vocabulary or 0, tokenizer.size if tokenizer else 0) or 1 << 32
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    folder = root / _key(sources, tokenizer, dtype, skip, images)
    damaged = folder.exists()
    if not (store := _open(folder, verify)):
        with _cache_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=root))
        try:
            _build(building, sources, Encoder(tokenizer, skip, images=images), dtype, how)
            with _cache_errors(root):
                _commit(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        store = _open(folder)
        if store is not None and damaged:
            store.note = f"the tokens kept in {folder} were damaged: they have been made again"
    if store is None:
        raise DataError(f"{folder} was removed or damaged while it was written: start again, or set data.cache.")
    return store


def _key(
    sources: Sequence[Source], tokenizer: Tokenizer | None, dtype: str, skip: bool, images: ImageTokens | None
) -> str:
    files = []
    for path, format in sources:
        stat = path.stat()
        files.append([str(path), format, stat.st_size, stat.st_mtime_ns])
    parts: list[Any] = [VERSION, files, tokenizer.fingerprint if tokenizer else None, dtype, skip]
    if images is not None:
        parts += [str(images.folder.resolve()), images.vision.fingerprint, UPRIGHT, COUNTED, PLACED]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(folder: Path, verify: bool = True) -> TokenStore | None:
    """Return the store; None if it is absent, or its files are not what they were when it was complete.

    Without `verify` files only have to be long enough.
    """
    try:
        store = TokenStore(folder)
        store.documents()
        if verify and store.meta.digest != _digest(folder):
            return None
    except (OSError, ValueError, TypeError):
        return None
    return store


def _build(folder: Path, sources: Sequence[Source], encoder: Encoder, dtype: str, how: Tokenizing) -> None:
    root = folder.parent
    with ExitStack() as stack:
        with _cache_errors(root):
            writer = stack.enter_context(_Writer(folder, Meta(dtype, files=len(sources)), encoder.takes_images))
        for path, document in how.documents(sources, encoder):
            with _cache_errors(root):
                writer.add(document, path)
        counts, meta = encoder.counts, writer.meta
        meta.skipped, meta.across = counts.skipped, counts.across
        meta.unused = dict(counts.unused.most_common())
        if not meta.tokens:
            names = ", ".join(str(source.path) for source in sources[:3]) + (", ..." if len(sources) > 3 else "")
            left_out = f", {counts.skipped:,} bad records left out" if counts.skipped else ""
            raise DataError(f"no document: {names} hold nothing to train on{left_out}.")
        with _cache_errors(root):
            writer.finish()


def _commit(building: Path, folder: Path) -> None:
    try:
        building.rename(folder)
    except OSError:
        if _open(folder) is None:  # neither ours nor another builder's: what lies there is damaged
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)


@contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        other = "a folder with room" if error.errno in FULL else f"another folder, or {remedy_of(error)}"
        raise DataError(
            f"tokens cannot be kept in {root}: {error.strerror or error}. Set data.cache to {other}."
        ) from error


class _Writer:
    """Appends documents to the files of a store."""

    def __init__(self, folder: Path, meta: Meta, takes_images: bool) -> None:
        self.meta = meta
        self._folder, self._takes_images = folder, takes_images
        self._most = numpy.iinfo(meta.dtype).max
        self._targets: BinaryIO | None = None
        self._started = 0  # the token at which the present document starts

    def __enter__(self) -> _Writer:
        self._files = ExitStack()
        self._tokens = self._create("tokens")
        self._offsets = self._create("offsets")
        self._examples = self._create("examples")
        self._offsets.write(numpy.int64(0).tobytes())
        self._images = ImageWriter(self._create) if self._takes_images else None
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk fails here again; finish() is where it counts
            self._files.close()

    def _create(self, name: str) -> BinaryIO:
        return self._files.enter_context((self._folder / name).open("wb"))

    def add(self, document: Encoded, path: Path) -> None:
        """Append a document, or the next piece of one. Raises DataError for a number that is no token id."""
        ids, meta = document.ids, self.meta
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high > self._most:
                raise DataError(f"{path} holds the token id {low if low < 0 else high}, which no vocabulary has here.")
            meta.highest = max(meta.highest, high)
            self._tokens.write(ids.astype(meta.dtype).tobytes())
            self._mark(document)
            meta.tokens += len(ids)
        if document.last:
            self._end(document.example, document.pictures)

    def _mark(self, document: Encoded) -> None:
        marks = document.targets
        if marks is None:
            self.meta.targets += len(document.ids)
        else:
            self.meta.targets += int(marks.sum(dtype=numpy.int64))
        if marks is not None and self._targets is None:
            self._targets = self._create("targets")
            for start in range(0, self.meta.tokens, BACKFILL):
                self._targets.write(b"\1" * min(BACKFILL, self.meta.tokens - start))
        if self._targets is not None:
            self._targets.write(b"\1" * len(document.ids) if marks is None else marks.tobytes())

    def _end(self, example: bool, pictures: Pictures) -> None:
        if self.meta.tokens == self._started:
            self.meta.empty += 1
            return
        self._started = self.meta.tokens
        self.meta.documents += 1
        self._offsets.write(numpy.int64(self._started).tobytes())
        self._examples.write(bytes([example]))
        if self._images is not None:
            self._images.add(pictures)

    def finish(self) -> None:
        """Write what makes the folder complete."""
        self._files.close()
        self.meta.digest = _digest(self._folder)
        self.meta.seal = self.meta.sealed()
        (self._folder / "meta.json").write_text(json.dumps(asdict(self.meta)))


def _digest(folder: Path) -> str:
    """Hash all files but meta.json, which has the result, and places of records, which decide no token."""
    whole = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in ("meta.json", PLACES):
            with path.open("rb") as file:
                whole.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]
