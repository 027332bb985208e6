"""Two checkpoints held against each other: every state, bit by bit and range by range, whatever meshes have saved them.

states   masters, moments, frozen weights and buffers, and the optimizer's scalars: these make two checkpoints equal;
         of frozen weights that were left out the digest of their base
beside   step, mesh, options, schedule, place in the data, random states: listed, and no word on equality
hash     of each one's states: the same on any mesh, and no engine's fingerprint, which hashes units as they are cut
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.checkpoint.manifest import BUFFER, FROZEN, STREAM
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.precision import dtype_name
from zero3d.shards.boxes import Shape

ABSENT = "(none)"
FACTS = ("format", "step", "mesh", "about", "optimizer", "scheduler", "loss_scale", "exact", "loop", "base")


class TensorDifference(NamedTuple):
    """Says how a state differs: where both have it in one shape, how many elements, the largest difference and where.

    kind     values, shape, dtype, base (it was left out of both), or only in a, only in b
    largest  infinite where one of two different values is not finite
    """

    name: str
    state: str
    kind: str
    a: Any = None
    b: Any = None
    differing: int = 0
    elements: int = 0
    largest: float = 0.0
    at: Shape = ()


class Comparison(NamedTuple):
    """Holds all that differs between two checkpoints.

    tensors  that were compared
    facts    name -> what each of them says
    hashes   of their states
    """

    tensors: int
    differences: list[TensorDifference]
    facts: dict[str, tuple[Any, Any]]
    hashes: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether all states are the same bit for bit."""
        return not self.differences


def compare(a: StoredStates, b: StoredStates) -> Comparison:
    """Compare two checkpoints tensor by tensor. Raises CheckpointError."""
    hashes = hashlib.sha256(), hashlib.sha256()
    differences: list[TensorDifference] = []
    named = sorted({(name, state) for each in (a, b) for name, states in each.states.items() for state in states})
    for name, state in named:
        differences += _compare_state(a, b, name, state, hashes)
    buffers = list(_buffers(a, b))
    for name, one, other in buffers:
        differences += _compare_buffer(name, one, other, hashes)
    differences += _compare_bases(a, b, hashes)
    for key in sorted({*a.scalars, *b.scalars}):
        values = a.scalars.get(key), b.scalars.get(key)
        if values[0] != values[1]:
            differences.append(TensorDifference("optimizer", key, "values", *values, differing=1, elements=1))
        for hashed, value in zip(hashes, values, strict=True):
            hashed.update(f"{key}={value!r}\0".encode())
    digests = hashes[0].hexdigest()[:16], hashes[1].hexdigest()[:16]
    return Comparison(len(named) + len(buffers), differences, dict(_facts(a, b)), digests)


# --- states -------------------------------------------------------------------------------------


def _compare_state(
    a: StoredStates, b: StoredStates, name: str, state: str, hashes: tuple[hashlib._Hash, hashlib._Hash]
) -> Iterator[TensorDifference]:
    """Yield how one state differs, if it does; hash both sides on the way."""
    described = [
        (each.parameters[name].shape, each.states[name][state]) if state in each.states.get(name, {}) else None
        for each in (a, b)
    ]
    for hashed, there in zip(hashes, described, strict=True):
        if there is not None:
            hashed.update(f"{state}:{name} {there}\0".encode())
    kind, values = _kind(*described)
    empty: Iterator[tuple[int, Tensor]] = iter(())
    sides = [each.chunks(name, state) if there else empty for each, there in zip((a, b), described, strict=True)]
    pairs = zip_longest(*sides)
    if kind in ("", "dtype") and described[0] is not None:
        shape = described[0][0]
        found = _Differing(shape)
        for one, other in pairs:
            _hash(hashes, one, other)
            found.add(one[0], one[1], other[1])
        if found.count or kind:
            yield TensorDifference(
                name, state, kind or "values", *values, found.count, prod(shape), found.largest, found.at
            )
        return
    for one, other in pairs:
        _hash(hashes, one, other)
    yield TensorDifference(name, state, kind, *values)


def _hash(hashes: tuple[hashlib._Hash, hashlib._Hash], *sides: tuple[int, Tensor] | None) -> None:
    for hashed, side in zip(hashes, sides, strict=True):
        if side is not None:
            hashed.update(_bytes(side[1]))


def _bytes(values: Tensor) -> memoryview:
    data: memoryview = values.contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def _kind(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> tuple[str, tuple[Any, Any]]:
    """Return how two tensors differ by their shapes and dtypes, and what each has; "" where they do not."""
    if one is None or other is None:
        return ("only in b" if one is None else "only in a"), (None, None)
    if one[0] != other[0]:
        return "shape", (one[0], other[0])
    if one[1] != other[1]:
        return "dtype", (dtype_name(one[1]), dtype_name(other[1]))
    return "", (None, None)


class _Differing:
    """Counts elements that differ in a bit, and remembers the place of the largest difference."""

    def __init__(self, shape: Shape) -> None:
        self.count, self.largest = 0, 0.0
        self.at: Shape = ()
        self._shape, self._first = shape, True

    def add(self, start: int, one: Tensor, other: Tensor) -> None:
        """Take a flat range of both, which begins at element `start`."""
        if one.dtype == other.dtype:
            if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                return
            same = _by_element(one) == _by_element(other)
            differs = ~(same.all(-1) if same.dim() > 1 else same)
        else:
            wide = _wide(one), _wide(other)
            differs = ~((wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan()))
        self.count += int(differs.sum())
        where = differs.nonzero().view(-1)
        if not len(where):
            return
        apart = (_wide(one[where]) - _wide(other[where])).abs().nan_to_num(nan=inf, posinf=inf)
        index = int(apart.argmax())
        if self._first or float(apart[index]) > self.largest:
            self.largest, self.at = float(apart[index]), _place(start + int(where[index]), self._shape)
            self._first = False


def _by_element(values: Tensor) -> Tensor:
    """Return the bytes of each element."""
    return values.view(torch.uint8).view(values.numel(), -1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _place(element: int, shape: Shape) -> Shape:
    """Return the indices of an element of a row-major tensor."""
    indices = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        indices.append(index)
    return tuple(reversed(indices))


def _compare_bases(
    a: StoredStates, b: StoredStates, hashes: tuple[hashlib._Hash, hashlib._Hash]
) -> Iterator[TensorDifference]:
    """Yield what was left out of one alone, or of both with other bases; hash what was left out."""
    digests = [(each.manifest.value("base") or {}).get("digest") for each in (a, b)]
    out = [set(each.manifest.left_out) for each in (a, b)]
    for hashed, digest, names in zip(hashes, digests, out, strict=True):
        for name in sorted(names):
            hashed.update(f"{name} of {digest}\0".encode())
    if digests[0] != digests[1]:
        for name in sorted(out[0] & out[1]):
            yield TensorDifference(name, FROZEN, "base", digests[0], digests[1])


# --- buffers ------------------------------------------------------------------------------------


def _buffers(a: StoredStates, b: StoredStates) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield buffers by name: rank by rank on the same mesh, else those of the first rank that has each."""
    if a.manifest.mesh == b.manifest.mesh:
        for rank, (one, other) in enumerate(zip(a.own, b.own, strict=True)):
            for name in sorted({*one.buffers, *other.buffers}):
                yield (
                    f"{name} of rank {rank}",
                    a.own_tensor(rank, f"{BUFFER}{name}") if name in one.buffers else None,
                    b.own_tensor(rank, f"{BUFFER}{name}") if name in other.buffers else None,
                )
        return
    holders = [
        {name: rank for rank, own in reversed(list(enumerate(each.own))) for name in own.buffers} for each in (a, b)
    ]
    for name in sorted({*holders[0], *holders[1]}):
        tensors = [
            each.own_tensor(held[name], f"{BUFFER}{name}") if name in held else None
            for each, held in zip((a, b), holders, strict=True)
        ]
        yield name, tensors[0], tensors[1]


def _compare_buffer(
    name: str, one: Tensor | None, other: Tensor | None, hashes: tuple[hashlib._Hash, hashlib._Hash]
) -> Iterator[TensorDifference]:
    described = [None if each is None else (tuple(each.shape), each.dtype) for each in (one, other)]
    kind, values = _kind(*described)
    if kind:
        yield TensorDifference(name, "buffer", kind, *values)
    elif one is not None and other is not None:
        found = _Differing(tuple(one.shape))
        found.add(0, one.reshape(-1), other.reshape(-1))
        if found.count:
            yield TensorDifference(
                name, "buffer", "values", None, None, found.count, one.numel(), found.largest, found.at
            )


# --- what is beside the states --------------------------------------------------------------------


def _facts(a: StoredStates, b: StoredStates) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what the manifests say otherwise, by dotted name, and random states that differ."""
    one, other = ({name: each.manifest.value(name) for name in FACTS} for each in (a, b))
    flat = dict(_flat("", one)), dict(_flat("", other))
    for name in {**flat[0], **flat[1]}:
        if not name.startswith("optimizer.scalars"):
            values = flat[0].get(name, ABSENT), flat[1].get(name, ABSENT)
            if values[0] != values[1]:
                yield name, values
    if a.manifest.mesh != b.manifest.mesh:
        return
    for rank, (mine, theirs) in enumerate(zip(a.own, b.own, strict=True)):
        same = mine.python_rng == theirs.python_rng and mine.streams == theirs.streams
        keys = mine.streams if same else ()
        if not same or any(
            not torch.equal(a.own_tensor(rank, f"{STREAM}{key}"), b.own_tensor(rank, f"{STREAM}{key}")) for key in keys
        ):
            yield f"random states of rank {rank}", ("its own", "others")


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of mappings and lists in mappings by dotted name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for index, item in enumerate(value):
            yield from _flat(f"{name}[{index}]", item)
    else:
        yield name, value
