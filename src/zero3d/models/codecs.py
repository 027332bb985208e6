"""Weights to groups of 8 and 4 bits and back; the table of formats is in spec/formats.py.

    read     a box of a matrix's groups, from what reads boxes of its weights
    decode   all groups -> the matrix: code x scale in fp32, then torch's cast

Scales are the largest magnitude of a group, over what the largest code stands for. A group of zeros decodes to zeros;
one with a weight that is not finite is refused. The arithmetic of nf4 is that of bitsandbytes, bit for bit: weights
times the reciprocal of their maximum, to the nearest of 16 levels; at the end of a matrix that 64 does not divide, over
the maximum. Levels: Dettmers et al., "QLoRA" (2023), appendix E. Codes of maxima (nf4-double): Dettmers, "8-bit
approximations for parallelism in deep learning" (2016), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.memory.scratch import group_elements
from zero3d.precision import is_finite
from zero3d.shards.boxes import Box, slices, whole
from zero3d.spec.formats import FORMATS, FP8, INT8, NF4, NF4_DOUBLE, SCALE, DoubleFormat, Format

Shape = tuple[int, ...]
Reader = Callable[[Box], Tensor]  # gives the weights in a box of a matrix

READ_AT_ONCE = 1 << 22  # weights that are read and encoded at once
LEAST = 1e-38  # of a maximum that is divided by
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LARGEST_INT8, LARGEST_FP8 = 127.0, 448.0


class Codec(NamedTuple):
    """Encodes the weights of a format into groups, and decodes them.

    encode  weights [..., w] in fp32, and how many of the last group there are -> (codes uint8, scales [..., 1])
    values  codes -> fp32, before the scale
    factor  by which code x scale is multiplied, too; None: scales are over what the largest code stands for
    """

    format: Format
    encode: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    values: Callable[[Tensor], Tensor]
    factor: float | None = None

    def read(self, reader: Reader, shape: Shape, box: Box) -> Tensor:
        """Return a box of a matrix's groups, some rows of them at a time. Raises ConfigError for what is not finite."""
        form, ((first, last), *rest) = self.format, box
        columns = rest[0] if len(rest) == 2 else (0, 1)
        step = max(1, READ_AT_ONCE // (form.weights(shape) * (columns[1] - columns[0])))
        parts = []
        for start in range(first, last, step):
            rows = (start, min(start + step, last))
            weights = reader(weights_under(form, shape, rows, columns))
            parts.append(encode(self, weights, shape, rows)[..., slice(*rest[-1])])
        return torch.cat(parts)

    def decode(self, packed: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a matrix [out, in] of its groups; fp32 for no more than some rows of groups at a time."""
        form, grid = self.format, self.format.grid(shape)
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        width = form.weights(shape) * prod(grid[1:])
        step = _rows_at_once(packed.device, width)
        for first in range(0, grid[0], step):
            part = packed[first : first + step]
            values = self.values(part[..., :-SCALE].contiguous()).mul_(_as_fp32(part[..., -SCALE:]))
            if self.factor is not None:
                values.mul_(self.factor)
            if len(grid) == 1:
                flat = out.view(-1)[first * width : (first + step) * width]
                flat.copy_(values.view(-1)[: len(flat)])
            else:
                laid = values.view(len(values), grid[1], form.rows, -1)
                matrix = laid.transpose(1, 2).reshape(len(values) * form.rows, -1)
                target = out[first * form.rows : first * form.rows + len(matrix)]
                target.copy_(matrix[: len(target), : shape[1]])
        return out


class DoubleCodec(NamedTuple):
    """Encodes the weights of a format and their scales, and decodes them.

    single  the codec of the weights, in groups of one row
    """

    format: DoubleFormat
    single: Codec

    def read(self, reader: Reader, shape: Shape, box: Box) -> Tensor:
        """Return a part of a matrix's run: of all weights where it has some of their scales, else of those under it.

        Raises ConfigError for weights that are not finite.
        """
        ((start, stop),), form, runs = box, self.format, self.format.runs(shape)
        size = form.columns * self.single.format.bits // 8  # bytes of codes with one scale
        ends = min(stop, runs.maxima)
        first, last = (0, form.blocks(shape)) if stop > runs.maxima else (start // size, -(-ends // size))
        codes, scales, step = [torch.empty(0, dtype=torch.uint8)], [], READ_AT_ONCE // form.columns
        for block in range(first, last, step):
            blocks = (block, min(block + step, last))
            weights = _finite(reader(_whole_rows(shape, form.columns, blocks)), form.name)
            encoded, largest = self.single.encode(*_flat_groups(weights, shape, form.columns, blocks))
            from_here = block * size
            codes.append(encoded.view(-1)[max(start - from_here, 0) : max(ends - from_here, 0)])
            scales.append(largest.view(-1))
        if stop > runs.maxima:
            codes.append(self._run_of(torch.cat(scales))[max(start - runs.maxima, 0) : stop - runs.maxima])
        return torch.cat(codes)

    def _run_of(self, scales: Tensor) -> Tensor:
        """Return what lies behind the codes of the weights.

        The mean is taken in one thread's order: torch sums in another with more, and ranks have different numbers.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        mean = scales.mean()
        torch.set_num_threads(threads)
        last = len(scales) % self.format.maxima or self.format.maxima
        rest = F.pad(scales - mean, (0, self.format.maxima - last)).view(-1, self.format.maxima)
        scaled, largest = _scaled(rest, last)
        codes = _nearest(scaled, torch.tensor(LEVELS_OF_MAXIMA)).view(-1)[: len(scales)]
        return torch.cat([codes, _as_bytes(largest).view(-1), _as_bytes(mean.view(1)).view(-1)])

    def decode(self, packed: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a matrix [out, in] of its run; fp32 for some blocks at a time, and for all scales."""
        form, runs, columns = self.format, self.format.runs(shape), self.format.columns
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        known = _kept(_maxima, torch.float32, packed)[packed[runs.maxima : runs.scales].int()]
        last = len(known) % form.maxima or form.maxima
        groups = F.pad(known, (0, form.maxima - last)).view(-1, form.maxima)
        scales = groups.mul_(_as_fp32(packed[runs.scales : runs.mean])[:, None]).add_(_as_fp32(packed[runs.mean :]))
        scales, size = scales.view(-1, 1), columns * self.single.format.bits // 8
        step = _rows_at_once(packed.device, columns)
        for first in range(0, form.blocks(shape), step):
            codes = packed[first * size : min((first + step) * size, runs.maxima)]
            values = self.single.values(F.pad(codes, (0, -len(codes) % size))).view(-1, columns)
            flat = out.view(-1)[first * columns : (first + step) * columns]
            flat.copy_(values.mul_(scales[first : first + len(values)]).view(-1)[: len(flat)])
        return out


def _rows_at_once(device: torch.device, width: int) -> int:
    """Return how many rows of so many weights are decoded at once."""
    return max(1, group_elements(device.type) // width)


def _as_fp32(stored: Tensor) -> Tensor:
    """Return numbers [..., k] in fp32 of their bytes [..., 4 k], which may lie anywhere."""
    return stored.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _as_bytes(scales: Tensor) -> Tensor:
    """Return the bytes of numbers in fp32."""
    return scales.contiguous().view(torch.uint8)


# --- codes ----------------------------------------------------------------------------------------


def _scaled(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Return groups over their maxima, and these [..., 1], as bitsandbytes computes them."""
    largest = weights.abs().amax(-1, keepdim=True)
    scaled = (weights * (1.0 / largest.clamp(min=LEAST))).clamp(-1, 1)
    if last < weights.shape[-1]:  # the last group is not full
        largest[-1] = largest[-1].clamp(min=LEAST)
        scaled[-1] = (weights[-1] / largest[-1]).clamp(-1, 1)
    return scaled, largest


def _nearest(scaled: Tensor, levels: Tensor) -> Tensor:
    """Return the numbers of the levels that are nearest."""
    return torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


def _dynamic_levels() -> tuple[float, ...]:
    """Return the 256 levels of maxima: 7 decimal exponents, the larger of which have the finer steps; 0; and 1."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        borders = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (10 ** (exponent - 6) * ((borders[:-1] + borders[1:]) / 2)).tolist()
        levels += [*middles, *(-middle for middle in middles)]
    return tuple(sorted(levels))


LEVELS_OF_MAXIMA = _dynamic_levels()


@cache
def _maxima(device: torch.device) -> Tensor:
    """Return the levels of maxima as a tensor."""
    return torch.tensor(LEVELS_OF_MAXIMA, device=device)


def _kept(table: Callable[[torch.device], Tensor], dtype: torch.dtype, for_codes: Tensor) -> Tensor:
    """Return a table by byte on the device of codes, made once; without values in a dry run, where codes have none."""
    if isinstance(for_codes, FakeTensor):
        return for_codes.new_empty(1 << 8, dtype=dtype)
    return table(for_codes.device)


def _encode_nf4(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    scaled, largest = _scaled(weights, last)
    codes = _nearest(scaled, torch.tensor(LEVELS, device=weights.device))
    return (codes[..., ::2] << 4) | codes[..., 1::2], largest


def _values_nf4(codes: Tensor) -> Tensor:
    return _kept(_pairs, torch.int64, codes)[codes.int()].view(torch.float32)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return by byte the two levels that it stands for, as one number of 64 bits each."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels).view(torch.int64).view(-1)


def _encode_int8(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    scales = weights.abs().amax(-1, keepdim=True) / LARGEST_INT8
    return (weights / scales.clamp(min=LEAST)).round().to(torch.int8).view(torch.uint8), scales


def _values_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


def _encode_fp8(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    scales = weights.abs().amax(-1, keepdim=True) / LARGEST_FP8
    scaled = (weights / scales.clamp(min=LEAST)).clamp(-LARGEST_FP8, LARGEST_FP8)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def _values_fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


SINGLE_NF4 = Codec(NF4, _encode_nf4, _values_nf4)
CODECS: Mapping[str, Codec | DoubleCodec] = MappingProxyType(
    {
        codec.format.name: codec
        for codec in (
            SINGLE_NF4,
            DoubleCodec(NF4_DOUBLE, SINGLE_NF4),
            Codec(INT8, _encode_int8, _values_int8),
            Codec(FP8, _encode_fp8, _values_fp8),
        )
    }
)
assert CODECS.keys() == FORMATS.keys()
MAXIMA_INT8 = Codec(INT8, _encode_int8, _values_int8, 1 / LARGEST_INT8)  # of LLM.int8, whose scales are the maxima


# --- matrices -------------------------------------------------------------------------------------


def weights_under(form: Format, shape: Shape, rows: tuple[int, int], columns: tuple[int, int]) -> Box:
    """Return the box of a matrix [out, in] that rows and columns of its grid of groups are made of.

    Where groups go over the end of rows: whole rows, the first of which begins no later than the groups.
    """
    grid = form.grid(shape)
    if form.columns is None:
        return rows, (0, shape[1])
    if len(grid) == 1:
        return _whole_rows(shape, form.columns, rows)
    sizes = (form.rows, form.columns)
    down, across = (
        (start * size, min(stop * size, end))
        for (start, stop), size, end in zip((rows, columns), sizes, shape, strict=True)
    )
    return down, across


def _whole_rows(shape: Shape, columns: int, groups: tuple[int, int]) -> Box:
    """Return the box of a matrix's rows in which groups lie that go over their ends."""
    first, last = (number * columns for number in groups)
    return (first // shape[1], min(-(-last // shape[1]), shape[0])), (0, shape[1])


def _flat_groups(values: Tensor, shape: Shape, columns: int, groups: tuple[int, int]) -> tuple[Tensor, int]:
    """Return the groups [groups, columns] that lie in whole rows, and how many weights the last one has."""
    before = groups[0] * columns % shape[1]
    flat = values.reshape(-1)[before : before + (groups[1] - groups[0]) * columns]
    last = flat.numel() % columns or columns
    return F.pad(flat, (0, columns - last)).view(-1, columns), last


def encode(codec: Codec, weights: Tensor, shape: Shape, rows: tuple[int, int]) -> Tensor:
    """Return the groups of a part of a matrix [out, in], in their grid.

    weights  what `weights_under` says, for `rows` of the grid
    Raises ConfigError for weights that are not finite.
    """
    form = codec.format
    values, last = _finite(weights, form.name), form.weights(shape)
    if form.columns is not None and len(form.grid(shape)) == 2:
        values = tiles(values, form)
    elif form.columns is not None:
        values, last = _flat_groups(values, shape, form.columns, rows)
    codes, scales = codec.encode(values, last)
    return torch.cat([codes, _as_bytes(scales)], dim=-1)


def tiles(values: Tensor, form: Format) -> Tensor:
    """Return the tiles [down, across, rows x columns] of a matrix, with zeros behind its edges."""
    assert form.columns is not None
    values = F.pad(values, (0, -values.shape[1] % form.columns, 0, -values.shape[0] % form.rows))
    down, across = values.shape[0] // form.rows, values.shape[1] // form.columns
    return values.reshape(down, form.rows, across, form.columns).transpose(1, 2).flatten(2)


def _finite(weights: Tensor, name: str) -> Tensor:
    """Return weights in fp32. Raises ConfigError for such as are not finite."""
    values = weights.float()
    if not bool(is_finite(values)):
        raise ConfigError(f"it has weights that are NaN or infinite, and {name} has none of these")
    return values


def packed_of(codec: Codec | DoubleCodec, weights: Tensor) -> Tensor:
    """Return all groups of a matrix, on meta of one on meta. Raises ConfigError for weights that are not finite."""
    shape = tuple(weights.shape)
    packed = codec.format.packed_shape(shape)
    if weights.is_meta:
        return torch.empty(packed, dtype=torch.uint8, device="meta")
    return codec.read(lambda box: weights[slices(box)], shape, whole(packed))
