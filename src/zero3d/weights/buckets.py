"""Tensors on their way, in buckets: flat memory that is filled, read and filled again.

    bucket    [ a | b | c, first part ]   [ c, the rest | d ]   ...       each tensor begins at a multiple of ALIGN
    header    for each: name, dtype, shape, where it begins here, bytes, where the part begins in the tensor, checksum

A tensor that is larger than what a bucket has left goes in parts, one a bucket. Its checksum, the XXH3 in 64 bits of
all of its bytes, comes with the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from zero3d.errors import ConfigError, StreamError

ALIGN = 64  # bytes, of which the width of every dtype is a divisor
BLOCK_BYTES = 1 << 18  # that a core's cache holds, so that a checksum is taken of bytes that are there
LEAST = 1 << 12  # bytes of a bucket


class Part(NamedTuple):
    """Describes a tensor, or consecutive elements of one.

    tensor    a view into the bucket: in the tensor's shape where it is all of it, else [n]
    shape     of the whole tensor
    offset    where the part begins among the tensor's elements
    checksum  of the whole tensor; "" where other parts follow
    """

    name: str
    tensor: Tensor
    checksum: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def whole(self) -> bool:
        """Return whether this is all of the tensor."""
        return self.tensor.numel() == prod(self.shape)


class Bucket(NamedTuple):
    """Holds parts of tensors in one piece of memory.

    number  from 0, in the order of a stream
    memory  [bytes] uint8, of which `nbytes` are used
    """

    number: int
    memory: Tensor
    nbytes: int
    parts: Sequence[Part]

    def header(self) -> list[list[Any]]:
        """Return what a receiver needs beside the memory, as JSON values."""
        start = self.memory.data_ptr()
        return [
            [
                part.name,
                str(part.tensor.dtype).removeprefix("torch."),
                list(part.shape),
                part.tensor.data_ptr() - start if part.tensor.numel() else 0,
                part.tensor.numel(),
                part.offset,
                part.checksum,
            ]
            for part in self.parts
        ]

    @classmethod
    def of(cls, number: int, memory: Tensor, nbytes: int, header: Sequence[Sequence[Any]]) -> Bucket:
        """Return the bucket that a header describes. Raises StreamError where that is none."""
        return cls(number, memory, nbytes, [_part(memory[:nbytes], row) for row in header])


def _part(memory: Tensor, row: Sequence[Any]) -> Part:
    name, kind, shape, start, count, offset, checksum = row
    dtype, nbytes = getattr(torch, kind, None), memory.numel()
    if not isinstance(dtype, torch.dtype) or start + count * dtype.itemsize > nbytes or offset + count > prod(shape):
        raise StreamError(f"{name!r} is announced as {count} elements of {kind} at byte {start:,} of {nbytes:,}.")
    view = memory[start : start + count * dtype.itemsize].view(dtype)
    whole = count == prod(shape)
    return Part(name, view.view(shape) if whole else view, checksum, tuple(shape), offset)


class Packer:
    """Fills buckets with tensors, one memory after the other.

    Whoever takes a bucket has used it up when the memory comes again: with two of them, when the next but one is asked
    for.

    known      checksums of tensors that are left out where they still have them
    checksums  of all tensors that have been fed
    unchanged  how many of them were left out
    """

    def __init__(self, memories: Sequence[Tensor], known: Mapping[str, str] = MappingProxyType({})) -> None:
        self._memories, self._known = memories, known
        self.checksums: dict[str, str] = {}
        self.unchanged = 0
        self._number = 0
        self._parts: list[Part] = []
        self._used = 0

    def feed(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Iterator[Bucket]:
        """Copy tensors into buckets and yield those that are full; the last one stays open.

        dtype  that those of floating numbers get; None keeps theirs
        """
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if name in self._known and checksum(tensor, kind) == self._known[name]:
                self.checksums[name] = self._known[name]
                self.unchanged += 1
            else:
                yield from self._put(name, tensor, kind)

    def flush(self) -> Iterator[Bucket]:
        """Yield the bucket that is open, if anything is in it."""
        if self._parts:
            yield self._close()

    @property
    def _memory(self) -> Tensor:
        return self._memories[self._number % len(self._memories)]

    def _put(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[Bucket]:
        flat, shape, done = tensor.detach().reshape(-1), tuple(tensor.shape), 0
        hasher = xxhash.xxh3_64()
        while True:
            room = (self._memory.numel() - self._used) // dtype.itemsize
            count = min(room, flat.numel() - done)
            last = done + count == flat.numel()
            if count or last:
                view = self._memory[self._used : self._used + count * dtype.itemsize].view(dtype)
                _copy(view, flat[done : done + count], hasher)
                whole = count == flat.numel()
                digest = hasher.hexdigest() if last else ""
                self._parts.append(Part(name, view.view(shape) if whole else view, digest, shape, done))
                self._used += -(-count * dtype.itemsize // ALIGN) * ALIGN
                done += count
            if last:
                self.checksums[name] = digest
                return
            yield self._close()

    def _close(self) -> Bucket:
        memory = self._memory
        bucket = Bucket(self._number, memory, min(self._used, memory.numel()), self._parts)
        self._number += 1
        self._parts, self._used = [], 0
        return bucket


def _copy(into: Tensor, values: Tensor, hasher: xxhash.xxh3_64) -> None:
    """Copy values, and take what they are there into the checksum, while a cache has them."""
    step = max(1, BLOCK_BYTES // into.dtype.itemsize)
    raw = into.view(torch.uint8).numpy().data if into.device.type == "cpu" else b""
    for number in range(-(-into.numel() // step)):
        block = slice(number * step, (number + 1) * step)
        into[block].copy_(values[block])
        hasher.update(raw[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


def checksum(tensor: Tensor, dtype: torch.dtype) -> str:
    """Return the checksum that a tensor would be sent with in a dtype; block by block, without a copy of it."""
    flat, hasher, step = tensor.detach().reshape(-1), xxhash.xxh3_64(), max(1, BLOCK_BYTES // dtype.itemsize)
    for start in range(0, flat.numel(), step):
        hasher.update(flat[start : start + step].to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class Assembler:
    """Makes whole tensors of the parts of buckets, and verifies each by its checksum.

    count, nbytes  of the tensors that have come
    """

    def __init__(self) -> None:
        self.count, self.nbytes = 0, 0
        self._open: dict[str, tuple[Tensor, int, xxhash.xxh3_64]] = {}

    def unpack(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are whole with a bucket, in its memory where they came in one part.

        Raises StreamError where parts do not follow one another, or bytes are others than were sent.
        """
        for part in bucket.parts:
            values, come, hasher = self._open.pop(part.name, (part.tensor, 0, xxhash.xxh3_64()))
            if come != part.offset:
                raise StreamError(f"{part.name!r} goes on at element {part.offset:,}, and {come:,} have come.")
            flat = part.tensor.reshape(-1)
            if not part.whole:
                if not come:
                    values = torch.empty(part.shape, dtype=flat.dtype, device=flat.device)
                values.view(-1)[come : come + flat.numel()].copy_(flat)
            hasher.update(flat.contiguous().view(torch.uint8).cpu().numpy().data)
            if come + flat.numel() < prod(part.shape):
                self._open[part.name] = values, come + flat.numel(), hasher
                continue
            if hasher.hexdigest() != part.checksum:
                raise StreamError(
                    f"{part.name!r} has arrived with the checksum {hasher.hexdigest()}, and was sent with "
                    f"{part.checksum}: a machine or a link changes bytes."
                )
            self.count, self.nbytes = self.count + 1, self.nbytes + values.nbytes
            yield part.name, values

    @property
    def missing(self) -> list[str]:
        """Return the names of tensors of which parts are missing."""
        return list(self._open)


def whole(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of a stream, each verified; in a bucket's memory where they came in one part."""
    assembler = Assembler()
    for bucket in buckets:
        yield from assembler.unpack(bucket)
    if assembler.missing:
        raise StreamError(f"the stream has ended, and parts of {', '.join(assembler.missing)} are missing.")


def check_bucket_bytes(nbytes: int) -> int:
    """Return the bytes of a bucket as a multiple of ALIGN. Raises ConfigError where it is too small."""
    if nbytes < LEAST:
        raise ConfigError(f"bucket_bytes={nbytes:,} is less than a bucket has: type {LEAST:,} or more.")
    return nbytes // ALIGN * ALIGN
