"""Regions of cut modules: how activations go in and come out, as one autograd Function and a table of its collectives.

                              forward          backward
    copy_to                   copy             all_reduce       a common input goes into cut modules
    reduce_from               all_reduce       copy             their partial outputs are summed to a common one
    gather_from_slices        all_gather       reduce_scatter   the same two under sequence parallelism, where
    reduce_scatter_to_slices  reduce_scatter   all_gather       activations outside are slices of the sequence
    scatter_to                slice            all_gather       a common tensor becomes slices, one per rank
    gather_from               all_gather       slice            slices become a common tensor
    gather_parts              all_gather       reduce_scatter   ranks use the whole of what each has a part of
    sum_parts                 all_reduce       all_reduce       ranks use the sum of their terms, each for what it has

The names are Megatron-LM's (its f is copy_to and its g reduce_from, Shoeybi et al. 2019; with sequences Korthikanti et
al. 2022). A *common* tensor has the same values on all tp ranks.

q, k and v are given one tensor and must copy it once, so that autograd sums their partial gradients
before one all-reduce: `Regions` remembers the copies until some output is reduced.

Note 1, who keeps the remembered graph alive. A recomputed forward may end before anything is reduced; the backward
of `copy_to` then drops what is remembered. It never runs between q and k.
Note 2, torch.compile sees none of this: identities of tensors would be guards, and a new graph each step.
"""

from __future__ import annotations

import weakref
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.errors import ConfigError
from zero3d.tensor_parallel.channel import Channel

RANKS = 1 << 16  # more than there are; a rank's own seed is a common one times this, plus the rank
SEQUENCE = -2  # dim of [batch, length, hidden]
COLLECTIVES = {
    "copy_to": ("copy", "all_reduce"),
    "reduce_from": ("all_reduce", "copy"),
    "gather_from_slices": ("all_gather", "reduce_scatter"),
    "reduce_scatter_to_slices": ("reduce_scatter", "all_gather"),
    "scatter_to": ("slice", "all_gather"),
    "gather_from": ("all_gather", "slice"),
    "gather_parts": ("all_gather", "reduce_scatter"),
    "sum_parts": ("all_reduce", "all_reduce"),
}


class Conversion(NamedTuple):
    """How a region converts a tensor: `kind` of COLLECTIVES along `dim`, in the ledger under the module's name.

    regions  whose copies its backward drops (Note 1), if any
    """

    kind: str
    dim: int
    name: str
    channel: Channel
    regions: Regions | None = None

    def run(self, t: Tensor, backward: bool) -> Tensor:
        """Return the result of the forward's collective, or of the backward's."""
        collective = COLLECTIVES[self.kind][backward]
        if collective == "copy":
            return t.view_as(t)
        if collective == "all_reduce":
            return self.channel.all_reduce(t, self.name)
        if collective == "slice":
            return self.channel.slice_of(t, self.dim)
        move = self.channel.all_gather if collective == "all_gather" else self.channel.reduce_scatter
        return move(t, self.dim, self.name)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, conversion: Conversion) -> Tensor:
        ctx.conversion = conversion
        return conversion.run(t, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.conversion.regions is not None:
            ctx.conversion.regions.forget()
        return ctx.conversion.run(grads[0], backward=True), None


def convert(t: Tensor, conversion: Conversion) -> Tensor:
    """Return `t` converted; its gradient is converted back."""
    out: Tensor = _Convert.apply(t, conversion)  # type: ignore[no-untyped-call]
    return out


class Copied(NamedTuple):
    """A tensor's copy in the region: valid while the source is alive, unwritten and under the same grad mode."""

    source: weakref.ref[Tensor]
    version: int
    grad: bool
    result: Tensor


class Regions:
    """Converts one model's activations. `sequence`: between blocks they are slices of the sequence where grad is on.

    Without grad nothing is kept for a backward, so there is nothing to save, and generation has any length.
    """

    def __init__(self, channel: Channel, sequence: bool) -> None:
        self.channel, self._sequence = channel, sequence
        self._copies: dict[int, Copied] = {}

    @property
    def by_sequence(self) -> bool:
        """Whether activations outside cut modules are slices of the sequence now."""
        return self._sequence and torch.is_grad_enabled()

    @_disable_dynamo
    def copy_to(self, t: Tensor, name: str, whole: bool = False) -> Tensor:
        """Return a common tensor, or (unless it is `whole`) the one of which `t` is a slice, for cut modules.

        One conversion per tensor: the next call with it returns the same result.
        """
        known = self._copies.get(id(t))
        version = 0 if t.is_inference() else t._version
        if known is not None and known.source() is t and known[1:3] == (version, torch.is_grad_enabled()):
            return known.result
        kind = "gather_from_slices" if self.by_sequence and not whole else "copy_to"
        result = convert(t, Conversion(kind, SEQUENCE, name, self.channel, self))
        self._copies[id(t)] = Copied(weakref.ref(t), version, torch.is_grad_enabled(), result)
        return result

    @_disable_dynamo
    def reduce_from(self, t: Tensor, name: str, whole: bool = False) -> Tensor:
        """Return the sum of the ranks' partial ones, or (unless it is to be `whole`) this rank's slice of the sum."""
        self.forget()
        kind = "reduce_scatter_to_slices" if self.by_sequence and not whole else "reduce_from"
        return convert(t, Conversion(kind, SEQUENCE, name, self.channel))

    @_disable_dynamo
    def scatter_to(self, t: Tensor, name: str) -> Tensor:
        """Return this rank's slice: [batch, length, hidden] -> [batch, length / N, hidden].

        Raises ConfigError for a length that N does not divide.
        """
        length, size = t.shape[SEQUENCE], self.channel.size
        if length % size:
            raise ConfigError(
                f"sequence parallelism splits sequences over tp {size}, and {length} tokens / {size} is not a whole "
                f"number: use sequences of {length - length % size} or {length + -length % size} tokens, or turn it "
                "off."
            )
        return convert(t, Conversion("scatter_to", SEQUENCE, name, self.channel))

    @_disable_dynamo
    def gather_from(self, t: Tensor, name: str, dim: int = SEQUENCE) -> Tensor:
        """Join the ranks' slices along `dim`; all ranks use the result alike, so its gradient is only sliced."""
        return convert(t, Conversion("gather_from", dim, name, self.channel))

    @_disable_dynamo
    def gather_parts(self, t: Tensor, name: str) -> Tensor:
        """Join the ranks' parts along dim 0, for what is a rank's own: gradients of it are summed."""
        return convert(t, Conversion("gather_parts", 0, name, self.channel))

    @_disable_dynamo
    def sum_parts(self, t: Tensor, name: str) -> Tensor:
        """Return the sum of the ranks' terms, for what is a rank's own: gradients of it are summed."""
        return convert(t, Conversion("sum_parts", 0, name, self.channel))

    @_disable_dynamo
    def forget(self) -> None:
        """Drop the remembered copies, and the graphs that hang on them."""
        self._copies.clear()


class RankRandom:
    """Makes random numbers differ between tp ranks from `begin` to `end`; afterwards they are alike again.

    The seed comes from the device's generator, which stands alike on all ranks, so that a recomputed forward
    that starts from the same state draws the same numbers. A recomputation may stop in between: then `end` is
    never called, and the next `begin` forgets it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[torch.Generator, Tensor] | None = None
        self._paused: tuple[torch.Generator, Tensor] | None = None

    @_disable_dynamo
    def begin(self, near: Tensor, on: bool = True) -> None:
        """If `on`, advance the common generator of a tensor's device by one number, and continue with this rank's own.

        A dry run's tensors have no values, and are given no random ones.
        """
        self._before = None
        if not on or isinstance(near, FakeTensor):
            return
        device = near.device
        generator = _generator(device)
        torch.rand((), device=device)  # so that the next call finds another state
        self._before = generator, generator.get_state()
        generator.manual_seed(zlib.crc32(generator.get_state().numpy().tobytes()) * RANKS + self._rank)

    @_disable_dynamo
    def end(self) -> None:
        """Go on with the common numbers, if `begin` was called."""
        before, self._before = self._before, None
        if before is not None:
            before[0].set_state(before[1])

    @_disable_dynamo
    def pause(self, device: torch.device, name: str) -> None:
        """Draw numbers that are alike on all ranks, of `name`'s own, amid a rank's own, until `resume`.

        They follow from the seed alone, which a generator keeps, so that a recomputed block finds them, too.
        """
        generator = _generator(device)
        self._paused = generator, generator.get_state()
        generator.manual_seed(zlib.crc32(name.encode(), generator.initial_seed() // RANKS))

    @_disable_dynamo
    def resume(self) -> None:
        """Go on with the rank's own numbers, if `pause` was called."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused[0].set_state(paused[1])


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
