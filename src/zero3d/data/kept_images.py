"""Which images each document of a token store has: more files of its folder, memory-mapped.

image_names    utf-8 [bytes]        names of all images, one after another
image_starts   int64 [images + 1]   where each name starts
image_sizes    int32 [images, 2]    width and height, as they were when tokens were made
image_counts   int64 [documents + 1]  images before each document
image_ends     int64 [documents]    tokens of a document up to its last image's last
image_patches  int64 [documents]    patches that the processor makes of a document's images, or tiles
image_places   utf-8, a line a document   file and number of its record, as messages name it; not in the store's digest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
from numpy.typing import NDArray

from zero3d.errors import short

Size = tuple[int, int]
FILES = {
    "image_starts": "int64", "image_sizes": "int32", "image_counts": "int64", "image_ends": "int64",
    "image_patches": "int64",
}  # fmt: skip
PLACES = "image_places"
NAMED = 3  # images in a message


class Pictures(NamedTuple):
    """The images of one document. end: its tokens up to the last one's last.

    names    of files where the document is kept; else images in any form (image_files.py)
    patches  that the processor makes of all, or tiles
    place    of its record, as messages name it; "" where `KeptImages.place` tells
    """

    names: tuple[Any, ...] = ()
    sizes: tuple[Size, ...] = ()
    end: int = 0
    patches: int = 0
    place: str = ""

    @property
    def named(self) -> str:
        """Return what a message calls all images: the names of the first files; "" where none has a name."""
        given = [name.get("path") if isinstance(name, Mapping) else name for name in self.names]
        names = [short(name) for name in given if isinstance(name, str) and name]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        return f"with {', '.join(names[:NAMED])}{more}" if names else ""


class ImageWriter:
    """Appends documents' images to a store that is being built."""

    def __init__(self, create: Callable[[str], BinaryIO]) -> None:
        self._names, self._places = create("image_names"), create(PLACES)
        self._files = {name: create(name) for name in FILES}
        self._bytes = self._images = 0
        self._write("image_starts", 0)
        self._write("image_counts", 0)

    def add(self, pictures: Pictures) -> None:
        """Append a document."""
        for name, size in zip(pictures.names, pictures.sizes, strict=True):
            self._bytes += self._names.write(name.encode())
            self._write("image_starts", self._bytes)
            self._write("image_sizes", *size)
        self._images += len(pictures.names)
        self._write("image_counts", self._images)
        self._write("image_ends", pictures.end)
        self._write("image_patches", pictures.patches)
        self._places.write(" ".join(pictures.place.splitlines()).encode(errors="replace") + b"\n")

    def _write(self, name: str, *values: int) -> None:
        self._files[name].write(numpy.asarray(values, FILES[name]).tobytes())


class KeptImages:
    """The images of a store's documents. Pickling carries the path: a worker maps them again.

    Raises OSError and ValueError for a folder that has none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        read: dict[str, NDArray[Any]] = {
            name: numpy.memmap(folder / name, kind, "r")
            for name, kind in FILES.items()
            if (folder / name).stat().st_size
        }
        self._starts = read["image_starts"]
        self._counts = read["image_counts"]
        self.ends, self.patches = read["image_ends"], read["image_patches"]
        self._sizes = read.get("image_sizes", numpy.zeros(0, "int32")).reshape(-1, 2)
        names = folder / "image_names"
        self._names: Any = numpy.memmap(names, "uint8", "r") if names.stat().st_size else numpy.zeros(0, "uint8")

    def __reduce__(self) -> tuple[type[KeptImages], tuple[Path]]:
        return KeptImages, (self._folder,)

    @property
    def has(self) -> NDArray[numpy.bool_]:
        """Whether each document has an image [documents]."""
        return numpy.diff(self._counts) > 0

    def place(self, document: int) -> str:
        """Return where the record of a document is. Reads a file: it is for messages."""
        with suppress(OSError), (self._folder / PLACES).open("rb") as lines:
            return next(islice(lines, document, None), b"").decode(errors="replace").rstrip("\n")
        return ""

    def __getitem__(self, document: int) -> Pictures:
        """Return the images of a document."""
        first, last = (int(count) for count in self._counts[document : document + 2])
        names = [bytes(self._names[self._starts[i] : self._starts[i + 1]]).decode() for i in range(first, last)]
        sizes = [(int(width), int(height)) for width, height in self._sizes[first:last]]
        return Pictures(tuple(names), tuple(sizes), int(self.ends[document]), int(self.patches[document]))


def too_long(kept: KeptImages, documents: Sequence[int], length: int) -> NDArray[numpy.bool_]:
    """Say which documents would lose tokens of an image if they were cut to `length` tokens."""
    ends = numpy.asarray(kept.ends)[numpy.asarray(documents)]
    return numpy.asarray(ends > length)
