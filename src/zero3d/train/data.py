"""Bytes of the Python standard library as training text: real text on every machine, no download.

    *.py of the library, sorted, without tests     about 12 MB
    every HELD_OUT_EVERY-th file                   held out
    the rest, files separated by a zero byte       trained on: windows drawn by (rank, step)

A token is a byte; byte 0, which no source file contains, starts and ends a file.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.errors import DataError

VOCABULARY = 256
SEPARATOR = 0
HELD_OUT_EVERY = 50
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Batch = dict[str, Tensor]


class Corpus(NamedTuple):
    """Flat byte streams, uint8."""

    files: int
    train: Tensor
    held_out: Tensor


def read_corpus(folder: Path | None = None) -> Corpus:
    """The library's text (or that of another folder). Raises DataError when there is too little."""
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    paths = sorted(path for path in folder.rglob("*.py") if not SKIPPED & set(path.relative_to(folder).parts))
    held_out = paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        raise DataError(
            f"{folder} holds {len(paths)} Python files, and the demo needs the standard library's sources as text "
            f"(at least {HELD_OUT_EVERY} files): run it with a Python that has them."
        )
    chosen = set(held_out)
    return Corpus(len(paths), _stream(path for path in paths if path not in chosen), _stream(held_out))


def _stream(paths: Iterable[Path]) -> Tensor:
    separator = bytes([SEPARATOR])
    text = bytearray(separator)
    for path in paths:
        text += path.read_bytes() + separator
    return torch.frombuffer(text, dtype=torch.uint8)


def training_batch(corpus: Corpus, rank: int, step: int, size: int, length: int) -> Batch:
    """`size` windows of `length` bytes, other ones on each rank and step, the same in every run."""
    generator = torch.Generator().manual_seed((step << 20) + rank)
    starts = torch.randint(corpus.train.numel() - length, (size,), generator=generator)
    return _windows(corpus.train, starts, length)


def held_out_batches(corpus: Corpus, count: int, size: int, length: int) -> list[Batch]:
    """`count` batches of windows spread evenly over the held-out files."""
    starts = torch.linspace(0, corpus.held_out.numel() - length, count * size).long()
    return [_windows(corpus.held_out, part, length) for part in torch.split(starts, size)]


def _windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    ids = torch.stack([text[start : start + length] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def encode(text: str) -> Tensor:
    """Token ids [1, length] of a prompt."""
    return torch.tensor([list(text.encode())])


def decode(ids: Tensor) -> str:
    """Printable text of token ids [length]; what cannot be shown becomes a replacement character."""
    text = bytes(token for token in ids.tolist() if token != SEPARATOR).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
