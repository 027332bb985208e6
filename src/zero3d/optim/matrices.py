"""How a parameter is seen as matrices: one, a stack of them, or several that are fused. Pure integers, no torch.

[A, B]              a matrix                        [experts, A, B]   one for each expert
[out, in, h, w]     of a convolution: [out, in h w]

fused along its outputs     sizes (4, 2, 2), one behind the other    q q q q k k v v
                            sizes (2, 1, 1), in turn                 q q k v q q k v      head by head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod, sqrt

from zero3d.errors import ConfigError

NONE, EQUAL, SIZES, IN_TURN = "none", "equal", "sizes", "in_turn"
STYLES = f"{NONE}, {EQUAL}:2, {SIZES}:256,64,64, {IN_TURN}:64,64,64"

STEPS = 5  # of Newton-Schulz

Range = tuple[int, int, tuple[int, int]]  # of a flat matrix: start, stop, shape of the matrix that it is part of


@dataclass(frozen=True)
class Split:
    """Several matrices in one: dimension `dim` is runs of these sizes, again and again.

    One that is whole has one size.
    """

    dim: int
    sizes: tuple[int, ...]

    def parts(self, shape: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the shapes of the matrices of one that is [A, B]."""
        again = shape[self.dim] // sum(self.sizes)
        return [(again * size, shape[1]) if self.dim == 0 else (shape[0], again * size) for size in self.sizes]

    def owners(self, shape: tuple[int, int]) -> list[int]:
        """Return for every place along `dim` the number of the matrix that it belongs to."""
        run = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        return run * (shape[self.dim] // len(run))


@dataclass(frozen=True)
class Form:
    """How a parameter is seen.

    stacked  it is [experts, A, B]
    split    what each of its matrices is fused of; None where that is nothing
    """

    stacked: bool = False
    split: Split | None = None

    def matrices(self, shape: Sequence[int]) -> int:
        """Return how many matrices of `shape_of` a parameter of this shape has."""
        return shape[0] if self.stacked else 1

    def shape_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of each, those that it is fused of together."""
        inner = tuple(shape[1:] if self.stacked else shape)
        return inner[0], prod(inner[1:])

    def parts(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shapes of what each is fused of."""
        whole = self.shape_of(shape)
        return [whole] if self.split is None else self.split.parts(whole)


def ranges(
    shape: tuple[int, int], dim: int, owners: Sequence[int], parts: Sequence[tuple[int, int]]
) -> Iterator[Range]:
    """Yield the flat ranges of a matrix [A, B], each with the shape of the fused matrix that it belongs to, in order.

    dim, owners  along which dimension matrices are fused, and the number of the matrix at each of its places
    parts        shapes of the whole matrices, of which this may be one tp rank's part
    """
    columns = shape[1]
    runs = [(parts[number], len(list(run))) for number, run in groupby(owners)]
    if len(set(parts)) == 1:
        yield 0, prod(shape), parts[0]
    elif dim == 0:
        stops = list(accumulate(length * columns for _, length in runs))
        for start, stop, (part, _) in zip([0, *stops], stops, runs, strict=False):
            yield start, stop, part
    else:
        for row in range(shape[0]):
            at = row * columns
            for part, length in runs:
                yield at, at + length, part
                at += length


def read_split(name: str, style: str, shape: tuple[int, int], dim: int) -> Split | None:
    """Return what a style says of a parameter whose matrices are [A, B], fused along `dim`. Raises ConfigError.

    none                   one matrix
    equal:N                N of one size, one behind the other: heads, gate and up
    sizes:256,64,64        of these sizes, one behind the other: q, k and v
    in_turn:64,64,64       so many of each, again and again: q, k and v of every head
    """
    kind, _, numbers = str(style).partition(":")
    given = [int(number) for number in numbers.split(",") if number.strip().isdecimal()]
    well = len(given) == len(numbers.split(",")) and all(given)
    if kind not in (NONE, EQUAL, SIZES, IN_TURN) or (kind == NONE) == well or (kind == EQUAL and len(given) != 1):
        raise ConfigError(f"optimizer.split: {name}: unknown style {style!r}. Known are {STYLES}.")
    length = shape[dim]
    if kind == NONE or (kind == EQUAL and given == [1]):
        return None
    unit = given[0] if kind == EQUAL else sum(given)
    if length % unit or (kind == SIZES and length != unit):
        raise ConfigError(
            f"optimizer.split: {name}: {style} does not fit its {length} outputs ({length} "
            f"{'/' if kind != SIZES else 'and not'} {unit}): give sizes that do."
        )
    return Split(dim, (length // unit,) * unit if kind == EQUAL else tuple(given))


def operations(rows: int, columns: int, steps: int = STEPS) -> int:
    """Return the floating-point operations that make one matrix orthogonal: three products in each step."""
    short, long = sorted((rows, columns))
    return steps * 2 * (2 * short * short * long + short**3)


def made_besides(rows: int, columns: int) -> int:
    """Return the elements that making a matrix orthogonal takes beside it: two like it, and two Gram matrices."""
    short = min(rows, columns)
    return 2 * (rows * columns + short * short)


def adjusted(rows: int, columns: int, adjust_lr: str) -> float:
    """Return the factor of the learning rate for a matrix.

    original         sqrt(max(1, rows / columns)): steps of one spectral norm (Jordan et al. 2024)
    match_rms_adamw  0.2 sqrt(max(rows, columns)): AdamW's root mean square, whose learning rate and weight decay carry
                     over (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2)
    """
    return sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * sqrt(max(rows, columns))
