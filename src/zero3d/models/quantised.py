"""Linear layers of a frozen base in 8 or 4 bits: packed groups in the matrix's place, decoded where it is used.

    q_proj.base_layer.weight    [out, in]                   becomes
    q_proj.base_layer.packed    [rows, columns, bytes]      uint8, frozen: gathered, released, offloaded as bytes

Forward decodes a layer's matrix into the dtype that its inputs have, and keeps the groups for backward, which decodes
again: no more than one matrix is decoded at a time. Gradients are those of nn.Linear, bit for bit. Groups are made
where a weight is read, from as much of it as a rank's slice needs (`PackedSource`).

Packed are linear layers of the blocks all of whose parameters are frozen. Embeddings, norms, heads and whatever lies
outside of the blocks keep the compute dtype, and so do stacked experts, which are no linear layers, and layers that
are tied or have hooks or a forward of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.adapters import AdapterWeights
from zero3d.models.blocks import find_blocks
from zero3d.models.codecs import CODECS, Codec, decode, encode, weights_under
from zero3d.models.names import own_name
from zero3d.models.open import Opened
from zero3d.precision import to_compute
from zero3d.shards.boxes import Box, slices, whole
from zero3d.zero.initial_weights import Source

WEIGHT, PACKED = "weight", "packed"
AT_ONCE = 1 << 22  # weights that are read and encoded at once


class QuantisedLinear(nn.Module):
    """Multiplies by a frozen matrix that is in groups of 8 or 4 bits.

    packed  what `Format.packed_shape` says of [out, in], uint8
    dtype   of `weight`, the decoded matrix for others to read
    full    the shape of the matrix before tp cut it
    """

    def __init__(self, linear: nn.Linear, codec: Codec, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.codec, self.dtype = codec, dtype
        self.full = self.shape
        values = linear.weight.detach()
        self.packed = nn.Parameter(_packed_of(codec, values), requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:
        """The decoded matrix, made anew each time."""
        return self.decoded(self.packed, self.dtype)

    def decoded(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix of its groups."""
        return decode(self.codec, packed, self.shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind, bias = x.device.type, self._parameters["bias"]
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return self.product(x.to(dtype), None if bias is None else bias.to(dtype))
        return self.product(x, bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W' + bias."""
        product: Tensor = _Product.apply(x, self.packed, bias, self)  # type: ignore[no-untyped-call]
        return product

    def check_cut(self, dim: int, size: int) -> None:
        """Refuse a cut of outputs (0) or inputs (1) that would go through groups. Raises ConfigError."""
        form, length = self.codec.format, self.full[dim]
        unit = (form.rows, form.columns)[dim]
        flat = form.columns is not None and len(form.grid(self.full)) == 1
        if unit is None or flat:
            raise ConfigError(
                f"tp cannot cut the {'inputs' if dim else 'outputs'} of a matrix {self.full} in {form.name}, whose "
                f"scales are of {f'{form.columns} weights that go over the end of a row' if flat else 'rows'}: type "
                "mesh.tp=1, another model.quantize, or 'none' for this module in the tensor-parallel plan."
            )
        if length % (unit * size):
            raise ConfigError(
                f"tp {size} cannot cut {length} {'inputs' if dim else 'outputs'} of a matrix in {form.name} at borders "
                f"of its groups of {unit}: {length} / {size} must be a multiple of {unit}. Type a smaller mesh.tp, or "
                "'none' for this module in the tensor-parallel plan."
            )

    def take_part(self, dim: int, size: int) -> None:
        """Take note that this rank has a part of the outputs (0) or of the inputs (1)."""
        if dim == 0:
            self.out_features //= size
        else:
            self.in_features //= size

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.codec.format.name}"


class _Product(torch.autograd.Function):
    """Multiplies by a decoded matrix, and by the same decoded again in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, packed: Tensor, bias: Tensor | None, layer: QuantisedLinear) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.layer = layer  # type: ignore[attr-defined]
        return F.linear(x, layer.decoded(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (packed,), (grad,) = ctx.saved_tensors, grads
        rows = grad.reshape(-1, grad.shape[-1])
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            matrix = ctx.layer.decoded(packed, grad.dtype)
            of_input = (rows @ matrix).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, None, of_bias, None


def quantise(opened: Opened, name: str, dtype: torch.dtype) -> Opened:
    """Put the frozen linear layers of a model's blocks into groups, in place, and return it with their source.

    dtype  that the model computes in

    Raises ConfigError where there is no such layer.
    """
    codec, model = CODECS[name], opened.module
    layers = find_layers(model)
    if not layers:
        raise ConfigError(
            f"model.quantize={name} packs frozen linear layers of blocks, and {type(model).__name__} has none: type "
            "lora.rank=16 for adapters beside them, freeze=layers.0 to freeze some, or model.quantize=null."
        )
    shapes = {f"{own_name(layer)}.{WEIGHT}": linear.weight.shape for layer, linear in layers.items()}
    for layer, linear in layers.items():
        parent, _, local = layer.rpartition(".")
        try:
            packed = QuantisedLinear(linear, codec, dtype)
        except ConfigError as error:
            raise ConfigError(f"model.quantize={name}: {layer}.{WEIGHT} is refused: {error}.") from error
        model.get_submodule(parent)._modules[local] = packed
    if opened.weights is None:
        return opened
    if isinstance(opened.weights, AdapterWeights):
        return replace(opened, weights=opened.weights.over(PackedSource(opened.weights.source, codec, shapes, dtype)))
    return replace(opened, weights=PackedSource(opened.weights, codec, shapes, dtype))


def find_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can be put into packed, by name."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    names: dict[nn.Parameter, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        names[p] = names.get(p, 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(blocks) and type(module) is nn.Linear and _is_plain(module, names)
    }


def _is_plain(linear: nn.Linear, names: Mapping[nn.Parameter, int]) -> bool:
    own = dict(linear.named_parameters())
    hooks = any(value for key, value in vars(linear).items() if "hooks" in key and isinstance(value, dict))
    frozen = all(not p.requires_grad and names[p] == 1 for p in own.values())
    return frozen and WEIGHT in own and own.keys() <= {WEIGHT, "bias"} and not hooks and "forward" not in vars(linear)


def matrix_of(name: str) -> str | None:
    """Return the name of the matrix that a parameter has the groups of; None for any other parameter."""
    head, _, last = name.rpartition(".")
    return f"{head}.{WEIGHT}" if last == PACKED else None


def as_matrices(modules: Iterable[nn.Module], tensors: Mapping[str, Tensor], base: Source | None) -> dict[str, Tensor]:
    """Return tensors with matrices in the place of packed, in the dtype that forward decodes them to.

    modules  that have the layers, with the names of the whole model
    base     has the matrices as they were, by their own names; where it is None they are decoded
    """
    layers = {
        f"{name}.{PACKED}": layer
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, QuantisedLinear)
    }
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        layer, matrix = layers.get(name), matrix_of(name)
        if layer is None or matrix is None:
            found[name] = values
        elif base is None:
            found[matrix] = decode(layer.codec, values, layer.full, layer.dtype)
        else:
            found[matrix] = to_compute(base(matrix, whole(layer.full)).float(), layer.dtype)
    return found


class PackedSource:
    """A `Source` that makes groups of another's weights; by a matrix's own name it gives the matrix as it was.

    shapes  of the matrices, by the names that the other knows
    dtype   that forward decodes them to
    """

    def __init__(self, source: Source, codec: Codec, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._source, self._shapes = source, shapes
        self._codec, self._dtype = codec, dtype

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the parameter."""
        if (matrix := matrix_of(name)) in self._shapes:
            assert matrix is not None
            return self._packed(matrix, box)
        return self._source(name, box)

    def decoded(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of a parameter as forward has them."""
        if name not in self._shapes:
            return self(name, box)
        shape = self._shapes[name]
        packed = self._packed(name, whole(self._codec.format.packed_shape(shape)))
        return decode(self._codec, packed, shape, self._dtype)[slices(box)]

    @property
    def folder(self) -> Path | None:
        """The folder that the other reads."""
        return getattr(self._source, "folder", None)

    def files(self) -> list[Path]:
        """Return the files that hold its tensors."""
        return self._source.files() if hasattr(self._source, "files") else []

    def holds(self, name: str) -> bool:
        """Return whether the files hold a parameter, or the matrix that it packs."""
        return hasattr(self._source, "holds") and bool(self._source.holds(matrix_of(name) or name))

    def close(self) -> None:
        """Let go of files and of the values read last."""
        if hasattr(self._source, "close"):
            self._source.close()

    def _packed(self, name: str, box: Box) -> Tensor:
        """Return a box of a matrix's packed, some rows of them at a time."""
        form, shape = self._codec.format, self._shapes[name]
        (first, last), *rest = box
        columns = rest[0] if len(rest) == 2 else (0, 1)
        step = max(1, AT_ONCE // (form.weights(shape) * (columns[1] - columns[0])))
        parts = []
        for start in range(first, last, step):
            rows = (start, min(start + step, last))
            weights = self._source(name, weights_under(form, shape, rows, columns))
            parts.append(self._encoded(name, weights, rows)[..., slice(*rest[-1])])
        return torch.cat(parts)

    def _encoded(self, name: str, weights: Tensor, rows: tuple[int, int]) -> Tensor:
        try:
            return encode(self._codec, weights, self._shapes[name], rows)
        except ConfigError as error:
            raise ConfigError(f"model.quantize={self._codec.format.name}: {name} is refused: {error}.") from error


def _packed_of(codec: Codec, weights: Tensor) -> Tensor:
    """Return all groups of a matrix, on meta of one on meta."""
    shape = tuple(weights.shape)
    if weights.is_meta:
        return torch.empty(codec.format.packed_shape(shape), dtype=torch.uint8, device="meta")
    return encode(codec, weights, shape, (0, codec.format.grid(shape)[0]))
