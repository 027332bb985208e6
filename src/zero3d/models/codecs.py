"""Weights to groups of 8 and 4 bits and back; the table of formats is in spec/formats.py.

    read     a box of a matrix's groups, from what reads boxes of its weights
    decode   all groups -> the matrix: code x scale in fp32, then torch's cast; of nf4 by bitsandbytes' kernel where it
             is installed and gives the same bits

Scales are the largest magnitude of a group, over what the largest code stands for. A group of zeros decodes to zeros;
one with a weight that is not finite is refused. The arithmetic of nf4 is that of bitsandbytes, bit for bit: weights
times the reciprocal of their maximum, to the nearest of 16 levels; at the end of a matrix that 64 does not divide, over
the maximum. Levels: Dettmers et al., "QLoRA" (2023), appendix E. Codes of maxima (nf4-double): Dettmers, "8-bit
approximations for parallelism in deep learning" (2016), section 3.
"""

from __future__ import annotations

import importlib
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
from zero3d.spec.formats import FORMATS, FP8, INT8, NF4, NF4_DOUBLE, SCALE, DoubleFormat, Format, Runs

Shape = tuple[int, ...]
Reader = Callable[[Box], Tensor]  # gives the weights in a box of a matrix

READ_AT_ONCE = 1 << 22  # weights that are read and encoded at once
IN_ONE_CALL = 1 << 24  # weights of a matrix that a kernel decodes at once, which first copies their codes: 9 MB
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
    kernel  a library's, as `_by_library` says
    """

    format: Format
    encode: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    values: Callable[[Tensor], Tensor]
    factor: float | None = None
    kernel: Callable[[Tensor, Tensor, torch.dtype], Tensor | None] | None = None

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
        """Return a matrix [out, in] of its groups."""
        groups = packed.flatten(0, -2)
        if self.format.rows > 1:
            return self._decode_tiles(groups, shape, dtype)
        return self.decode_parts(groups[:, :-SCALE], _as_fp32(groups[:, -SCALE:]), shape, dtype)

    def decode_parts(self, codes: Tensor, scales: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a matrix of the codes [groups, bytes] and scales [groups, 1] of groups that follow one another in it.

        Scratch is that of some groups at a time: fp32, or copies of their codes. A kernel returns its own tensor,
        which is copied into the matrix; a matrix of at most IN_ONE_CALL weights is that tensor, without a copy.
        """
        width = self.format.weights(shape)
        if self.kernel is not None and len(codes) * width <= IN_ONE_CALL:
            decoded = self.kernel(codes, scales, dtype)
            if decoded is not None:
                return decoded[: prod(shape)].view(shape)
        out = torch.empty(shape, dtype=dtype, device=codes.device)
        step = _groups_at_once(codes.device, width)
        for first in range(0, len(codes), step):
            values = self._decode_groups(codes[first : first + step], scales[first : first + step], dtype)
            flat = out.view(-1)[first * width : (first + step) * width]
            flat.copy_(values.view(-1)[: len(flat)])
        return out

    def _decode_groups(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of groups: in the dtype by the library's kernel, where it is taken, else in fp32."""
        decoded = None if self.kernel is None else self.kernel(codes, scales, dtype)
        if decoded is not None:
            return decoded
        values = self.values(codes).mul_(scales)
        return values if self.factor is None else values.mul_(self.factor)

    def _decode_tiles(self, groups: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a matrix of groups that are tiles of it; in fp32 for no more than some rows of tiles at a time."""
        rows, (down, across) = self.format.rows, self.format.grid(shape)
        groups = groups.view(down, across, -1)
        out = torch.empty(shape, dtype=dtype, device=groups.device)
        step = _groups_at_once(groups.device, self.format.weights(shape) * across)
        for first in range(0, down, step):
            part = groups[first : first + step]
            codes = part[..., :-SCALE].view(len(part), across, rows, -1).transpose(1, 2)  # as the weights lie
            values = self.values(codes).mul_(_as_fp32(part[..., -SCALE:])[:, None])
            target = out[first * rows : (first + step) * rows]
            target.copy_(values.view(len(part) * rows, -1)[: len(target), : shape[1]])
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
        """Return a matrix [out, in] of its run."""
        runs, size = self.format.runs(shape), self.format.columns * self.single.format.bits // 8
        codes = packed[: runs.maxima]
        if runs.maxima % size:
            codes = F.pad(codes, (0, -runs.maxima % size))
        return self.single.decode_parts(codes.view(-1, size), self._scales(packed, runs), shape, dtype)

    def _scales(self, packed: Tensor, runs: Runs) -> Tensor:
        """Return the scales [blocks, 1] of a matrix's run."""
        known = _looked_up(_maxima, torch.float32, packed[runs.maxima : runs.scales])
        last = len(known) % self.format.maxima or self.format.maxima
        groups = F.pad(known, (0, self.format.maxima - last)).view(-1, self.format.maxima)
        groups.mul_(_as_fp32(packed[runs.scales : runs.mean])[:, None]).add_(_as_fp32(packed[runs.mean :]))
        return groups.view(-1, 1)[: len(known)]


def _groups_at_once(device: torch.device, width: int) -> int:
    """Return how many groups, or rows of groups, of so many weights are decoded at once."""
    return max(1, group_elements(device.type) // width)


def _as_fp32(stored: Tensor) -> Tensor:
    """Return numbers [..., k] in fp32 of their bytes [..., 4 k], which are copied unless they lie as numbers do."""
    if torch.compiler.is_compiling() or not _lies_as_numbers(stored):  # graphs break where offsets are asked for
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view(torch.float32)


def _lies_as_numbers(stored: Tensor) -> bool:
    *others, last = stored.stride()
    return last == 1 and not any(bytes_on % SCALE for bytes_on in (stored.storage_offset(), *others))


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


def _nearest_of_few(scaled: Tensor, levels: Tensor) -> Tensor:
    """Return what `_nearest` does, counting borders one by one: for 16 levels in less than half its time.

    Scratch: 1 byte a number beside the result, where `_nearest` takes 4.
    """
    borders = ((levels[:-1] + levels[1:]) / 2).tolist()
    codes = torch.full(scaled.shape, len(borders), dtype=torch.uint8, device=scaled.device)
    for border in borders:
        codes -= (scaled <= border).view(torch.uint8)
    return codes


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


def _looked_up(table: Callable[[torch.device], Tensor], dtype: torch.dtype, codes: Tensor) -> Tensor:
    """Return the entries of a table by byte for codes [..., k], in the order of codes.

    Tables are made once for a device; in a dry run, where codes have no values, there is none.
    """
    dry = isinstance(codes, FakeTensor)
    entries = codes.new_empty(1 << 8, dtype=dtype) if dry else table(codes.device)
    return entries.index_select(0, codes.int().flatten()).view(codes.shape)  # as an index it takes ten times as long


def _encode_nf4(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    scaled, largest = _scaled(weights, last)
    codes = _nearest_of_few(scaled, torch.tensor(LEVELS))
    return (codes[..., ::2] << 4) | codes[..., 1::2], largest


def _values_nf4(codes: Tensor) -> Tensor:
    return _looked_up(_pairs, torch.complex64, codes).view(torch.float32)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return by byte the two levels that it stands for, as one complex number: one entry is looked up for both."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.view_as_complex(torch.cartesian_prod(levels, levels))


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
    return _looked_up(_e4m3, torch.float32, codes)


@cache
def _e4m3(device: torch.device) -> Tensor:
    """Return by byte the number that it stands for: on CPUs torch's cast takes three times as long as a table."""
    return torch.arange(1 << 8, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


# --- bitsandbytes' kernel -------------------------------------------------------------------------

NORMAL = 2.0**-122  # a scale whose product with any level but 0 is no subnormal number


def _by_library(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return weights [blocks x 64] of blocks of nf4 by bitsandbytes' kernel; None where ours is to be taken.

    codes   [groups, 32] and scales [groups, 1] in fp32

    Kernels round numbers below 2^-126 to zero: on CPUs with instructions for bf16, and on cards. On CPUs groups that
    may have some are left to ours. On cards they are not looked for, which would make the host wait for each layer.
    """
    without_values = codes.is_meta or isinstance(codes, FakeTensor) or torch.compiler.is_compiling()
    if without_values or not _has_kernel(codes.device, dtype):
        return None
    scales = scales.contiguous()
    if codes.device.type == "cpu" and not _give_normal_numbers(scales):
        return None
    return _kernel(codes, scales, dtype)


def _give_normal_numbers(scales: Tensor) -> bool:
    """Return whether products of all scales but 0 are normal numbers. A second look is only needed where one is 0."""
    least = float(scales.min())
    if least == 0:
        least = float(scales.where(scales != 0, 1.0).min())
    return least >= NORMAL


def _kernel(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the kernel decodes. Each block is a row of its own here, since its blocks end where rows do."""
    size, dequantize = NF4_DOUBLE.columns, torch.ops.bitsandbytes.dequantize_4bit
    decoded: Tensor = dequantize(codes.contiguous(), scales, size, NF4.name, (scales.numel(), size), dtype)
    return decoded.view(-1)


@cache
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether bitsandbytes is installed and decodes every code on a device to the same bits as this module."""
    codes = torch.arange(1 << 8, dtype=torch.uint8, device=device).view(-1, NF4_DOUBLE.columns // 2)
    scales = torch.linspace(0.5, 1.0, len(codes), device=device)[:, None]
    try:
        importlib.import_module("bitsandbytes")
        found = _kernel(codes, scales, dtype)
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError):  # built for other devices, or too old
        return False
    return found.equal((_values_nf4(codes) * scales).to(dtype).view(-1))


SINGLE_NF4 = Codec(NF4, _encode_nf4, _values_nf4, kernel=_by_library)
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
