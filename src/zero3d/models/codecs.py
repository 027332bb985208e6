"""Weights to groups of 8 and 4 bits and back; the table of formats is in spec/formats.py.

    encode   weights [..., w] of groups, fp32      -> groups [..., bytes], uint8
    decode   groups                                -> weights, fp32: code x scale

Scales are the largest magnitude of a group, over what the largest code stands for. A group of zeros decodes to zeros;
one with a weight that is not finite is refused. The arithmetic of nf4 is that of bitsandbytes, bit for bit: weights
times the reciprocal of their maximum, to the nearest of 16 levels; at the end of a matrix that 64 does not divide, over
the maximum. Levels: Dettmers et al., "QLoRA" (2023), appendix E.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.precision import is_finite
from zero3d.shards.boxes import Box
from zero3d.spec.formats import FORMATS, FP8, INT8, NF4, SCALE, Format

AT_ONCE = {"cpu": 1 << 18}  # weights that are decoded at once, so that fp32 stays in a core's cache
AT_ONCE_ELSEWHERE = 1 << 24
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
    """

    format: Format
    encode: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    values: Callable[[Tensor], Tensor]


def _encode_nf4(weights: Tensor, last: int) -> tuple[Tensor, Tensor]:
    largest = weights.abs().amax(-1, keepdim=True)
    scaled = (weights * (1.0 / largest.clamp(min=LEAST))).clamp(-1, 1)
    if last < weights.shape[-1]:  # the last group is not full
        largest[-1] = largest[-1].clamp(min=LEAST)
        scaled[-1] = (weights[-1] / largest[-1]).clamp(-1, 1)
    levels = torch.tensor(LEVELS, device=weights.device)
    codes = torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
    return (codes[..., ::2] << 4) | codes[..., 1::2], largest


def _values_nf4(codes: Tensor) -> Tensor:
    return _pairs(codes.device)[codes.int()].view(torch.float32)


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


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.format.name: codec
        for codec in (
            Codec(NF4, _encode_nf4, _values_nf4),
            Codec(INT8, _encode_int8, _values_int8),
            Codec(FP8, _encode_fp8, _values_fp8),
        )
    }
)
assert CODECS.keys() == FORMATS.keys()


# --- matrices -------------------------------------------------------------------------------------


def weights_under(form: Format, shape: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int]) -> Box:
    """Return the box of a matrix [out, in] that rows and columns of its grid of groups are made of.

    Where groups go over the end of rows: whole rows, the first of which begins no later than the groups.
    """
    grid = form.grid(shape)
    if form.columns is None:
        return rows, (0, shape[1])
    if len(grid) == 1:
        first, last = (number * form.columns for number in rows)
        return (first // shape[1], min(-(-last // shape[1]), shape[0])), (0, shape[1])
    sizes = (form.rows, form.columns)
    down, across = (
        (start * size, min(stop * size, end))
        for (start, stop), size, end in zip((rows, columns), sizes, shape, strict=True)
    )
    return down, across


def encode(codec: Codec, weights: Tensor, shape: tuple[int, ...], rows: tuple[int, int]) -> Tensor:
    """Return the groups of a part of a matrix [out, in], in their grid.

    weights  what `weights_under` says, for `rows` of the grid
    Raises ConfigError for weights that are not finite.
    """
    form = codec.format
    values, last = weights.float(), form.weights(shape)
    if not bool(is_finite(values)):
        raise ConfigError(f"it has weights that are NaN or infinite, and {form.name} has none of these")
    if form.columns is not None and len(form.grid(shape)) == 2:
        values = F.pad(values, (0, -values.shape[1] % form.columns, 0, -values.shape[0] % form.rows))
        down, across = values.shape[0] // form.rows, values.shape[1] // form.columns
        values = values.reshape(down, form.rows, across, form.columns).transpose(1, 2).flatten(2)
    elif form.columns is not None:
        before = rows[0] * form.columns - rows[0] * form.columns // shape[1] * shape[1]
        flat = values.reshape(-1)[before : before + (rows[1] - rows[0]) * form.columns]
        last = flat.numel() % form.columns or form.columns
        values = F.pad(flat, (0, form.columns - last)).view(-1, form.columns)
    codes, scales = codec.encode(values, last)
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=-1)


def decode(codec: Codec, packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a matrix [out, in] of its groups; fp32 for no more than some rows of groups at a time."""
    form, grid = codec.format, codec.format.grid(shape)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    width = form.weights(shape) * prod(grid[1:])
    step = max(1, AT_ONCE.get(packed.device.type, AT_ONCE_ELSEWHERE) // width)
    for first in range(0, grid[0], step):
        part = packed[first : first + step]
        codes = part[..., :-SCALE].contiguous()
        scales = part[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = codec.values(codes).mul_(scales)
        if len(grid) == 1:
            flat = out.view(-1)[first * width : (first + step) * width]
            flat.copy_(values.view(-1)[: len(flat)])
        else:
            tiles = values.view(len(values), grid[1], form.rows, -1)
            matrix = tiles.transpose(1, 2).reshape(len(values) * form.rows, -1)
            target = out[first * form.rows : first * form.rows + len(matrix)]
            target.copy_(matrix[: len(target), : shape[1]])
    return out
