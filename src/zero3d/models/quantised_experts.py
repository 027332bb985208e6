"""Stacked experts of a frozen base in 8 or 4 bits: groups of each expert's matrix, decoded for a layer's forward.

    experts.down_proj    [experts, out, in]         becomes, under the same name
                         [experts, ...groups]       uint8, frozen: ep and tp divide it as they divide the weights

A layer's forward decodes its stacks and lets go of them at its end; backward runs it again, from the groups. So the
experts of no more than one layer are decoded at a time, and their products are computed a third time.

Packed are frozen parameters [experts, ., .] of modules in blocks that are called experts, by their name or their class.
Experts that have adapters of their own keep the compute dtype: what they multiply by is a new stack in each forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.models.codecs import Codec, DoubleCodec, packed_of
from zero3d.models.names import WRAPPED
from zero3d.spec.formats import Format

EXPERTS = "expert"  # in the name of a module, or of its class


class Stack(NamedTuple):
    """How a parameter of a layer's experts is packed: each matrix by itself.

    shape  of a matrix, as this rank has it
    dtype  that the model computes in
    uncut  the shape before tp cut it; None where it did not
    """

    codec: Codec | DoubleCodec
    shape: tuple[int, int]
    dtype: torch.dtype
    uncut: tuple[int, int] | None = None

    @property
    def full(self) -> Stack:
        """The stack before tp cut it."""
        return self if self.uncut is None else Stack(self.codec, self.uncut, self.dtype)

    def part(self, dim: int, size: int) -> Stack:
        """Return the stack of which a rank has one of `size` parts of the rows (0) or the columns (1)."""
        rows, columns = self.shape
        cut = (rows // size, columns) if dim == 0 else (rows, columns // size)
        return self._replace(shape=cut, uncut=self.full.shape)

    def decode(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrices [experts, out, in] of their groups."""
        if not self._one_below_another:
            return torch.stack([self.codec.decode(each, self.shape, dtype) for each in packed])
        experts, (rows, columns) = len(packed), self.shape
        return self.codec.decode(packed.flatten(0, 1), (experts * rows, columns), dtype).view(experts, rows, columns)

    @property
    def _one_below_another(self) -> bool:
        """Whether the groups of all experts are those of one matrix in which these lie one below another."""
        form = self.codec.format
        if not isinstance(form, Format) or self.shape[0] % form.rows:
            return False
        return form.columns is None or len(form.grid(self.shape)) == 2 or prod(self.shape) % form.columns == 0


class DecodedExperts:
    """The forward of a layer's experts, which finds matrices where the layer has groups of them.

    stacks  by the local names of parameters
    """

    def __init__(self, module: nn.Module, stacks: Mapping[str, Stack]) -> None:
        self.stacks = dict(stacks)
        self._module, self._inner = module, module.forward

    @_disable_dynamo
    def __call__(self, *given: Any, **named: Any) -> Tensor:
        hidden = next(value for value in (*given, *named.values()) if isinstance(value, Tensor))
        if torch.is_grad_enabled() and hidden.requires_grad:
            computed: Tensor = checkpoint(self._run, hidden, *given, use_reentrant=False, **named)
            return computed
        return self._run(hidden, *given, **named)

    def _run(self, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with self._decoded(dtype):
            computed: Tensor = self._inner(*given, **named)
        return computed

    @contextmanager
    def _decoded(self, dtype: torch.dtype) -> Iterator[None]:
        """Let the layer read matrices in the place of their groups."""
        parameters: dict[str, Any] = self._module._parameters
        packed = {key: parameters[key] for key in self.stacks}
        parameters.update({key: stack.decode(packed[key], dtype) for key, stack in self.stacks.items()})
        try:
            yield
        finally:
            parameters.update(packed)


def pack_stacks(model: nn.Module, codec: Codec | DoubleCodec, dtype: torch.dtype) -> dict[str, Stack]:
    """Put the frozen stacks of experts in a model's blocks into groups, in place; return them by name.

    Raises ConfigError for weights that are not finite.
    """
    made: dict[str, Stack] = {}
    for name, module in _experts(model):
        stacks: dict[str, Stack] = {}
        for key, p in list(module.named_parameters(recurse=False)):
            if p.dim() != 3 or p.requires_grad:
                continue
            stacks[key] = made[f"{name}.{key}"] = Stack(codec, (p.shape[1], p.shape[2]), dtype)
            try:
                groups = torch.stack([packed_of(codec, each) for each in p.detach()])
            except ConfigError as error:
                raise ConfigError(f"model.quantize={codec.format.name}: {name}.{key} is refused: {error}.") from error
            module._parameters[key] = nn.Parameter(groups, requires_grad=False)
        if stacks:
            module.forward = DecodedExperts(module, stacks)
    return made


def _experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules in blocks that are called experts and have no adapters, with their names."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.startswith(blocks)
        and WRAPPED not in name.split(".")
        and EXPERTS in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    ]


def stacks_of(module: nn.Module) -> dict[str, Stack]:
    """Return how a module's parameters are packed, to be changed where they are cut; nothing of any other module."""
    forward: Any = vars(module).get("forward")
    forward = getattr(forward, "inner", forward)  # ep puts its own around it
    return forward.stacks if isinstance(forward, DecodedExperts) else {}
