"""Linear layers of a frozen base in 8 or 4 bits: packed groups in the matrix's place, decoded where it is used.

    q_proj.base_layer.weight    [out, in]                   becomes
    q_proj.base_layer.packed    [rows, columns, bytes]      uint8, frozen: gathered, released, offloaded as bytes

Forward decodes a layer's matrix into the dtype that its inputs have, and keeps the groups for backward, which decodes
again: no more than one matrix is decoded at a time. Gradients are those of nn.Linear, bit for bit. Groups are made
where a weight is read, from as much of it as a rank's slice needs (`PackedSource`).

Packed are linear layers of the blocks all of whose parameters are frozen, and frozen stacks of experts
(quantised_experts.py). Embeddings, norms, heads and whatever lies outside of the blocks keep the compute dtype, and so
do layers that are tied or have hooks or a forward of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from zero3d.errors import ConfigError
from zero3d.models.adapters import AdapterWeights
from zero3d.models.blocks import find_blocks
from zero3d.models.codecs import CODECS, Codec, DoubleCodec, packed_of
from zero3d.models.kept import Kept
from zero3d.models.load import FileWeights
from zero3d.models.names import own_name
from zero3d.models.open import Opened
from zero3d.models.quantised_experts import pack_stacks, stacks_of
from zero3d.models.quantised_folders import Stored
from zero3d.models.recurrences import read_past
from zero3d.precision import to_compute
from zero3d.shards.boxes import Box, slices, whole
from zero3d.zero.initial_weights import Source

WEIGHT, PACKED = "weight", "packed"
AnyCodec = Codec | DoubleCodec


class QuantisedLinear(nn.Module):
    """Multiplies by a frozen matrix that is in groups of 8 or 4 bits.

    packed  what `Format.packed_shape` says of [out, in], uint8; those of `linear` where they are not given
    dtype   of `weight`, the decoded matrix for others to read
    full    the shape of the matrix before tp cut it
    """

    def __init__(self, linear: nn.Linear, codec: AnyCodec, dtype: torch.dtype, packed: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.codec, self.dtype = codec, dtype
        self.full = self.shape
        made = packed_of(codec, linear.weight.detach()) if packed is None else packed
        self.packed = nn.Parameter(made, requires_grad=False)
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
        return self.codec.decode(packed, self.shape, dtype)

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
            of_input = (rows @ matrix).view(*grad.shape[:-1], matrix.shape[1])
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, None, of_bias, None


class Matrix(NamedTuple):
    """A matrix [out, in] that is packed.

    stored   gives a box of its groups, where its folder has it in groups already
    stacked  there is one for each expert in a parameter, which has their groups under its own name
    """

    codec: AnyCodec
    shape: tuple[int, ...]
    stored: Callable[[Box], Tensor] | None = None
    stacked: bool = False


def quantise(opened: Opened, name: str | None, dtype: torch.dtype) -> Opened:
    """Put the frozen linear layers of a model's blocks into groups, in place, and return it with their source.

    name   the format; None: of those alone that the folder has in groups already, which always stay in theirs
    dtype  that the model computes in

    Raises ConfigError where there is no such layer, or the folder has groups of another format.
    """
    model, weights = opened.module, opened.weights
    source = weights.source if isinstance(weights, AdapterWeights) else weights
    stored = source.stored if isinstance(source, FileWeights) and source.has_groups else None
    if name is None and stored is None:
        return opened
    layers = _formats(find_layers(model), name, stored)
    stacks = {} if name is None else pack_stacks(model, CODECS[name], dtype)
    if not layers and not stacks and name is not None:
        raise ConfigError(
            f"model.quantize={name} packs frozen linear layers of blocks, and {type(model).__name__} has none: type "
            "lora.rank=16 for adapters beside them, freeze=layers.0 to freeze some, or model.quantize=null."
        )
    for layer, matrix in layers.items():
        parent, _, local = layer.rpartition(".")
        linear = model.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        try:
            packed = QuantisedLinear(linear, matrix.codec, dtype)
        except ConfigError as error:
            raise ConfigError(f"model.quantize={name}: {layer}.{WEIGHT} is refused: {error}.") from error
        model.get_submodule(parent)._modules[local] = packed
    if weights is None or source is None:
        return opened
    matrices = {f"{own_name(layer)}.{WEIGHT}": each for layer, each in layers.items()}
    matrices |= {own_name(stack): Matrix(each.codec, each.shape, stacked=True) for stack, each in stacks.items()}
    groups = PackedSource(source, matrices, dtype)
    return replace(opened, weights=weights.over(groups) if isinstance(weights, AdapterWeights) else groups)


def _formats(
    layers: Mapping[str, nn.Linear], name: str | None, stored: Callable[[str], Stored | None] | None
) -> dict[str, Matrix]:
    """Return what becomes of each layer's matrix. Raises ConfigError as `quantise` says."""
    found = {}
    for layer, linear in layers.items():
        shape = tuple(linear.weight.shape)
        groups = None if stored is None else stored(f"{own_name(layer)}.{WEIGHT}")
        if groups is not None and name not in (None, groups.codec.format.name):
            raise ConfigError(
                f"model.quantize={name}: the folder has {layer} in {groups.codec.format.name} already, and it stays as "
                "it is: leave model.quantize out, or give the folder that it was made from."
            )
        if groups is not None:
            found[layer] = Matrix(groups.codec, shape, groups.read)
        elif name is not None:
            found[layer] = Matrix(CODECS[name], shape)
    return found


def find_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can be put into packed, by name."""
    blocks, past = tuple(f"{name}." for name in find_blocks(model)), read_past(model)
    names: dict[nn.Parameter, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        names[p] = names.get(p, 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(blocks) and name not in past and type(module) is nn.Linear and _is_plain(module, names)
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
    if not any(values.dtype == torch.uint8 for values in tensors.values()):  # as all that is packed is
        return dict(tensors)
    named = [pair for module in modules for pair in module.named_modules()]
    layers = {f"{name}.{PACKED}": layer for name, layer in named if isinstance(layer, QuantisedLinear)}
    stacks = {f"{name}.{key}": stack for name, layer in named for key, stack in stacks_of(layer).items()}
    read: Source | None = getattr(base, "original", base)
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        layer, stack, matrix = layers.get(name), stacks.get(name), matrix_of(name)
        if stack is not None:
            full = stack.full
            box = whole((len(values), *full.shape))
            found[name] = full.decode(values, full.dtype) if read is None else _cast(read(name, box), full.dtype)
        elif layer is None or matrix is None:
            found[name] = values
        elif read is None:
            found[matrix] = layer.codec.decode(values, layer.full, layer.dtype)
        else:
            found[matrix] = _cast(read(matrix, whole(layer.full)), layer.dtype)
    return found


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights of a folder as an engine without quantised layers has them."""
    return to_compute(values.float(), dtype)


class PackedSource:
    """A `Source` that makes groups of another's weights; by a matrix's own name it gives the matrix as it was.

    matrices  that are packed, by the names that the other knows
    dtype     that forward decodes them to
    """

    def __init__(self, source: Source, matrices: Mapping[str, Matrix], dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._matrices = matrices

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the parameter."""
        matrix = matrix_of(name)
        if matrix in self._matrices:
            assert matrix is not None
            return self._packed(matrix, box)
        if name in self._matrices and self._matrices[name].stacked:
            return torch.stack([self._packed(name, box[1:], expert) for expert in range(*box[0])])
        return self.original(name, box)

    def original(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of a parameter, matrices as they were; as decoded where a folder has groups."""
        if name in self._matrices and self._matrices[name].stored is not None:
            return self.decoded(name, box)
        return self._source(name, box)

    def decoded(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of a parameter as forward has them."""
        if name not in self._matrices:
            return self(name, box)
        codec, shape, _, stacked = self._matrices[name]
        everything = whole(codec.format.packed_shape(shape))
        if not stacked:
            return codec.decode(self._packed(name, everything), shape, self._dtype)[slices(box)]
        packed = (self._packed(name, everything, expert) for expert in range(*box[0]))
        return torch.stack([codec.decode(each, shape, self._dtype)[slices(box[1:])] for each in packed])

    @property
    def folder(self) -> Path | None:
        """The folder that the other reads."""
        return getattr(self._source, "folder", None)

    @property
    def kept(self) -> Kept | None:
        """The folder's tensors that exports of all weights carry on."""
        return getattr(self._source, "kept", None)

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

    def _packed(self, name: str, box: Box, expert: int | None = None) -> Tensor:
        """Return a box of a matrix's groups, or of an expert's."""
        codec, shape, stored, _ = self._matrices[name]
        if stored is not None:
            return stored(box)

        def read(weights: Box) -> Tensor:
            if expert is None:
                return self._source(name, weights)
            return self._source(name, ((expert, expert + 1), *weights))[0]

        try:
            return codec.read(read, shape, box)
        except ConfigError as error:
            raise ConfigError(f"model.quantize={codec.format.name}: {name} is refused: {error}.") from error
