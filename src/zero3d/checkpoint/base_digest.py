"""A digest of the weights in a folder of safetensors, by which a checkpoint knows the base that it is of. No torch.

    tensors, by name    name, dtype, shape, and of the bytes BLOCKS blocks of BLOCK_BYTES, the first and the last
                        among them; all bytes where there are no more of them

It does not depend on how tensors are spread over files. It takes seconds where all bytes of a large model would take
minutes, and what it proves is as much less: two folders with one digest have tensors of the same names, dtypes and
shapes, and the same bytes in all blocks that were looked at. Weights that were trained on differ in nearly every one
of them. That single bytes elsewhere are the same it does not prove, nor who wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from zero3d.errors import ConfigError

BLOCKS, BLOCK_BYTES = 16, 4096
DIGITS = 32  # of XXH3 in 128 bits


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of all tensors in these safetensors files, in hexadecimal digits. Raises ConfigError."""
    by_name = {name: (path, entry) for path in files for name, entry in _entries(path)}
    hasher = xxhash.xxh3_128()
    for name in sorted(by_name):
        path, (start, stop, described) = by_name[name]
        hasher.update(f"{name!r} {described}\0".encode())
        for block in _blocks(path, start, stop):
            hasher.update(block)
    return hasher.hexdigest()


def _entries(path: Path) -> Iterator[tuple[str, tuple[int, int, str]]]:
    """Yield of each tensor in a file where its bytes begin and end, and its dtype and shape."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            yield name, (start, stop, f"{entry['dtype']} {entry['shape']}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy it again.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: copy it again.") from error


def _blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of a file between two places that are looked at. Raises ConfigError where they are not there."""
    places, size = [start], stop - start
    if size > BLOCKS * BLOCK_BYTES:
        size = BLOCK_BYTES
        places = [start + (stop - start - size) * i // (BLOCKS - 1) for i in range(BLOCKS)]
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place)
                block = file.read(size)
                if len(block) < size:
                    raise ConfigError(f"{path} ends before byte {place + size:,}, where a tensor ends: copy it again.")
                yield block
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy it again.") from error
