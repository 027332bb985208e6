"""Folders whose matrices are in 8 or 4 bits already: taken as they are, or refused by name.

    quant_method    beside `weight`, in the files                                 becomes
    bitsandbytes    weight [n/2, 1], .absmax, .quant_state.bitsandbytes__nf4      nf4, its groups put together
                    the same with .nested_absmax                                  nf4-double, its run put together
                    weight [out, in] int8, SCB [out]                              int8, whose scales are maxima
    fp8             weight [out, in] e4m3, weight_scale_inv [out/rows, in/columns]  fp8 in blocks of that size
    mxfp4           *_blocks [experts, out, in/32, 16], *_scales                  decoded, by transformers' function

No value is rounded again: what is decoded has the bits that the library decodes. A box of groups is made of boxes of
the files' tensors, so that a rank reads its own slice alone. Whoever asks for values gets the decoded matrix.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from zero3d.errors import ConfigError, short
from zero3d.models.codecs import CODECS, LEVELS, LEVELS_OF_MAXIMA, MAXIMA_INT8, Codec, DoubleCodec, tiles
from zero3d.models.files import Files
from zero3d.models.kept import DECODED, KeptTensor
from zero3d.models.places import CONFIG, config_json
from zero3d.shards.boxes import Box, intersect, slices, whole
from zero3d.spec.formats import FP8, NF4, NF4_DOUBLE, SCALE, Format

WEIGHT = "weight"
SETTINGS = "quantization_config"
COLUMNS = NF4_DOUBLE.columns  # of nf4, with and without
STATE = ".quant_state.bitsandbytes__"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}  # by dtypes, as safetensors calls them
Shape = tuple[int, ...]


class Tensors(Protocol):
    """Has tensors by their keys: those of files, or of a module."""

    def names(self) -> Collection[str]:
        """Return the keys of all tensors."""

    def shape(self, key: str) -> Shape:
        """Return the shape of a tensor."""

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor, as safetensors calls it."""

    def box(self, key: str, box: Box) -> Tensor:
        """Return the values in a box of a tensor."""

    def tensor(self, key: str) -> Tensor:
        """Return a tensor."""


class Stored(NamedTuple):
    """A matrix [out, in] that a folder has in groups.

    read  gives the bytes in a box of `codec.format.packed_shape(shape)`
    """

    codec: Codec | DoubleCodec
    shape: Shape
    read: Callable[[Box], Tensor]

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix."""
        return self.codec.decode(self.read(whole(self.codec.format.packed_shape(self.shape))), self.shape, dtype)


class Experts(NamedTuple):
    """Stacked matrices that a folder has in a format that nothing here computes with: decoded as they are read.

    decode  gives the matrices of experts, from the first to the last
    """

    shape: Shape
    decode: Callable[[int, int], Tensor]


Found = tuple[dict[str, Stored | Experts], set[str]]  # by the key of a matrix; and the keys of all that is beside them


def open_files(folder: Path) -> Files | QuantisedFiles:
    """Return the tensors of a folder: of one in 8 or 4 bits with whole matrices in their place. Raises ConfigError."""
    file = folder / CONFIG
    settings = config_json(file).get(SETTINGS) if file.is_file() else None
    if settings is None:
        return Files(folder)
    return QuantisedFiles(Files(folder), settings, file)


def check_method(settings: Any, file: Path) -> str:
    """Return how a folder's weights were quantised. Raises ConfigError for methods that are not taken."""
    method, four, kind = (
        settings.get(key) if isinstance(settings, Mapping) else getattr(settings, key, None)
        for key in ("quant_method", "load_in_4bit", "bnb_4bit_quant_type")
    )
    name = str(getattr(method, "value", method))
    if four and kind in (None, "fp4"):  # BitsAndBytesConfig's default
        raise ConfigError(
            f"{file} has a quantization_config of bitsandbytes' fp4, and its nf4 is taken: give the folder that it was "
            "made from, with model.quantize=nf4."
        )
    if name in FINDERS:
        return name
    raise ConfigError(
        f"{file} has a quantization_config ({short(name)}), whose weights no library here decodes: "
        f"{', '.join(FINDERS)} are taken as they are. Give the folder that it was made from, with model.quantize=nf4, "
        "save it dequantised (transformers' model.dequantize(), then save_pretrained), or use model.init=random for "
        "new weights."
    )


def stored_format(path: Path) -> str | None:
    """Return the format that a folder's matrices are in, by its config.json alone; None where they are in none.

    Raises ConfigError for bitsandbytes' fp4.
    """
    file = path / CONFIG
    settings = config_json(file).get(SETTINGS) if os.path.isfile(file) else None  # a Path's own raises for long names
    if not isinstance(settings, Mapping):
        return None
    if settings.get("quant_method") != "bitsandbytes":
        return "fp8" if settings.get("quant_method") == "fp8" else None
    check_method(settings, file)
    four = NF4_DOUBLE if settings.get("bnb_4bit_use_double_quant") else NF4
    return "int8" if settings.get("load_in_8bit") else four.name


class QuantisedFiles:
    """A folder's tensors, with matrices in the place of what they are stored as.

    stored  has the groups of those that a layer can compute with
    """

    def __init__(self, files: Files, settings: Any, file: Path) -> None:
        self._files = files
        try:
            self._matrices, self._beside = FINDERS[check_method(settings, file)](files, settings)
        except ConfigError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{files.folder} has other tensors than the quantization_config of {file} says "
                f"({type(error).__name__}: {error}): copy it again."
            ) from error
        self._latest: tuple[str, Tensor] | None = None

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._files.folder

    def names(self) -> Collection[str]:
        """Return the keys of all tensors, without what is beside matrices."""
        hidden = self._beside | self._matrices.keys()
        return [*(key for key in self._files.names() if key not in hidden), *self._matrices]

    def paths(self) -> list[Path]:
        """Return the files."""
        return self._files.paths()

    def shape(self, key: str) -> Shape:
        """Return the shape of a tensor."""
        return self._matrices[key].shape if key in self._matrices else self._files.shape(key)

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor."""
        return "F32" if key in self._matrices else self._files.dtype(key)

    def box(self, key: str, box: Box) -> Tensor:
        """Return the values in a box of a tensor; of a matrix, which is decoded whole, in fp32."""
        found = self._matrices.get(key)
        if found is None:
            return self._files.box(key, box)
        if isinstance(found, Experts):
            first, last = box[0]
            return found.decode(first, last)[(slice(None), *slices(box[1:]))]
        if self._latest is None or self._latest[0] != key:
            self._latest = None
            self._latest = (key, found.decoded())
        return self._latest[1][slices(box)]

    def tensor(self, key: str) -> Tensor:
        """Return a tensor."""
        return self.box(key, whole(self.shape(key))) if key in self._matrices else self._files.tensor(key)

    def as_stored(self, key: str) -> KeptTensor:
        """Return where the bytes of a tensor are, or what decodes a matrix: an export has those of 16 bits."""
        if key not in self._matrices:
            return self._files.as_stored(key)
        shape = self.shape(key)
        return KeptTensor("BF16", shape, prod(shape) * DECODED.itemsize, key, None, read=self.tensor)

    def stored(self, key: str) -> Stored | None:
        """Return a matrix in its groups; None where the folder has none."""
        found = self._matrices.get(key)
        return found if isinstance(found, Stored) else None

    def close(self) -> None:
        """Let go of the open file and of the matrix that was decoded last."""
        self._files.close()
        self._latest = None


# --- bitsandbytes -------------------------------------------------------------------------------


def find_bitsandbytes(tensors: Tensors, settings: Any = None) -> Found:
    """Return the matrices of layers in 4 and 8 bits."""
    matrices: dict[str, Stored | Experts] = {}
    beside: set[str] = set()
    for key in tensors.names():
        name, _, last = key.rpartition(".")
        if STATE in key:
            weight, _, kind = key.partition(STATE)
            matrices[weight] = _in_four_bits(tensors, weight, kind)
            beside |= {key, *(f"{weight}.{name}" for name in BESIDE)}
        elif last == "SCB":
            matrices[f"{name}.{WEIGHT}"] = _in_eight_bits(tensors, f"{name}.{WEIGHT}", key)
            beside |= {key, f"{name}.weight_format"}
    return matrices, beside


def _in_four_bits(tensors: Tensors, key: str, kind: str) -> Stored:
    """Return a matrix of bitsandbytes' Linear4bit. Raises ConfigError for other layouts than that of NF4."""
    said = json.loads(bytes(tensors.tensor(f"{key}{STATE}{kind}").tolist()))
    shape, nested = tuple(said["shape"]), "nested_offset" in said
    same = [(kind, "nf4"), (said["blocksize"], COLUMNS), (tensors.tensor(f"{key}.quant_map").tolist(), _fp32(LEVELS))]
    if nested:
        same.append((said["nested_blocksize"], NF4_DOUBLE.maxima))
        same.append((tensors.tensor(f"{key}.nested_quant_map").tolist(), list(LEVELS_OF_MAXIMA)))
    if any(found != wanted for found, wanted in same) or len(shape) != 2:
        scales = f" and one for {said['nested_blocksize']} scales" if nested else ""
        raise ConfigError(
            f"{key} is in bitsandbytes' {kind} with a scale for {said['blocksize']} weights{scales}; what is taken is "
            f"its nf4 with a scale for {COLUMNS} weights, and one for {NF4_DOUBLE.maxima} scales where these are "
            "quantised, too: quantise the full-precision folder with model.quantize=nf4, or load it with "
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'), whose default is fp4."
        )
    blocks = -(-prod(shape) // COLUMNS)
    _check(tensors, key, -(-prod(shape) // 2))
    _check(tensors, f"{key}.absmax", blocks * (1 if nested else SCALE))
    if nested:
        mean = torch.tensor([said["nested_offset"]], dtype=torch.float32).view(torch.uint8)
        return Stored(CODECS[NF4_DOUBLE.name], shape, partial(_run, tensors, key, shape, mean))
    return Stored(CODECS[NF4.name], shape, partial(_groups, tensors, key, shape))


def _check(tensors: Tensors, key: str, wanted: int) -> None:
    """Refuse a tensor of other bytes than its matrix needs. Raises ValueError."""
    found = prod(tensors.shape(key)) * BYTES[tensors.dtype(key)]
    if found != wanted:
        raise ValueError(f"{key} has {found} bytes, and its matrix needs {wanted}")


def _fp32(values: Collection[float]) -> list[float]:
    return torch.tensor(tuple(values)).tolist()


def _bytes(tensors: Tensors, key: str, first: int, last: int) -> Tensor:
    """Return bytes of a tensor [k] or [k, 1], whose dtype may have several."""
    size = BYTES[tensors.dtype(key)]
    rest = whole(tensors.shape(key)[1:])
    start = first // size
    part = tensors.box(key, ((start, -(-last // size)), *rest)).contiguous().view(-1).view(torch.uint8)
    return part[first - start * size : last - start * size]


def _groups(tensors: Tensors, key: str, shape: Shape, box: Box) -> Tensor:
    """Return a box of the groups of NF4."""
    (first, last), *rest = box
    across, size = prod(NF4.grid(shape)[1:]), COLUMNS * NF4.bits // 8
    first, last = first * across, last * across
    codes = _bytes(tensors, key, first * size, min(last * size, -(-prod(shape) // 2)))
    codes = F.pad(codes, (0, (last - first) * size - len(codes))).view(-1, size)
    scales = _bytes(tensors, f"{key}.absmax", first * SCALE, last * SCALE).view(-1, SCALE)
    groups = torch.cat([codes, scales], -1).view(-1, *NF4.grid(shape)[1:], size + SCALE)
    return groups[(slice(None), *slices(tuple(rest)))]


def _run(tensors: Tensors, key: str, shape: Shape, mean: Tensor, box: Box) -> Tensor:
    """Return a part of the run of NF4 with double quantisation."""
    runs = NF4_DOUBLE.runs(shape)
    parts = [torch.empty(0, dtype=torch.uint8)]
    names = (key, f"{key}.absmax", f"{key}.nested_absmax")
    for name, start, stop in zip(names, (0, runs.maxima, runs.scales), runs[:3], strict=True):
        if (common := intersect(box, ((start, stop),))) is not None:
            ((first, last),) = common
            parts.append(_bytes(tensors, name, first - start, last - start))
    ((first, last),) = box
    parts.append(mean[max(first - runs.mean, 0) : max(last - runs.mean, 0)])
    return torch.cat(parts)


def _in_eight_bits(tensors: Tensors, key: str, maxima: str) -> Stored:
    """Return a matrix of bitsandbytes' Linear8bitLt, without what it does to activations."""

    def read(box: Box) -> Tensor:
        rows, columns = box
        codes = tensors.box(key, (rows, whole(shape)[1])).view(torch.uint8)
        scales = tensors.box(maxima, (rows,)).float().view(-1, 1)
        return torch.cat([codes, scales.view(torch.uint8)], -1)[:, slice(*columns)]

    shape = tensors.shape(key)
    _check(tensors, maxima, shape[0] * BYTES[tensors.dtype(maxima)])
    return Stored(MAXIMA_INT8, shape, read)


# --- transformers' own ----------------------------------------------------------------------------


def _find_fp8(tensors: Tensors, settings: Any) -> Found:
    """Return the matrices in e4m3 with a scale for each block."""
    rows, columns = settings["weight_block_size"]
    codec = CODECS["fp8"]
    assert isinstance(codec, Codec)
    codec = codec._replace(format=FP8._replace(rows=rows, columns=columns))
    matrices: dict[str, Stored | Experts] = {}
    beside = {key for key in tensors.names() if key.endswith(".activation_scale")}
    for key in tensors.names():
        weight = key.removesuffix("_scale_inv")
        if weight == key:
            continue
        if tensors.dtype(weight) != "F8_E4M3" or tensors.dtype(key) not in ("F32", "BF16"):
            raise ConfigError(
                f"{weight} is {tensors.dtype(weight)} with scales in {tensors.dtype(key)}, and e4m3 with scales in "
                "fp32 or bf16 is taken: give the full-precision folder, with model.quantize=fp8."
            )
        blocks = prod(codec.format.grid(tensors.shape(weight)))
        _check(tensors, key, blocks * BYTES[tensors.dtype(key)])
        matrices[weight] = Stored(codec, tensors.shape(weight), partial(_blocks, tensors, weight, codec.format))
        beside.add(key)
    return matrices, beside


def _blocks(tensors: Tensors, key: str, form: Format, box: Box) -> Tensor:
    """Return a box of the blocks of fp8."""
    assert form.columns is not None
    rows, columns, inside = box
    sizes = zip((rows, columns), (form.rows, form.columns), tensors.shape(key), strict=True)
    weights = tensors.box(key, tuple((first * size, min(last * size, end)) for (first, last), size, end in sizes))
    codes = tiles(weights.view(torch.uint8), form)
    scales = tensors.box(f"{key}_scale_inv", (rows, columns)).float().contiguous()
    return torch.cat([codes, scales[..., None].view(torch.uint8)], -1)[..., slice(*inside)]


def _find_mxfp4(tensors: Tensors, settings: Any) -> Found:
    """Return stacked experts in blocks of 32 weights of 4 bits."""
    matrices: dict[str, Stored | Experts] = {}
    beside: set[str] = set()
    for key in tensors.names():
        name = key.removesuffix("_blocks")
        if name != key:
            experts, out, blocks, size = tensors.shape(key)
            matrices[name] = Experts((experts, blocks * size * 2, out), partial(_of_mxfp4, tensors, name))
            beside |= {key, f"{name}_scales"}
    return matrices, beside


def _of_mxfp4(tensors: Tensors, name: str, first: int, last: int) -> Tensor:
    """Return the matrices of some experts."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts = [
        tensors.box(key, ((first, last), *whole(tensors.shape(key)[1:])))
        for key in (f"{name}_blocks", f"{name}_scales")
    ]
    decoded: Tensor = convert_moe_packed_tensors(*parts)
    return decoded


FINDERS: Mapping[str, Callable[[Tensors, Any], Found]] = MappingProxyType(
    {"bitsandbytes": find_bitsandbytes, "fp8": _find_fp8, "mxfp4": _find_mxfp4}
)
