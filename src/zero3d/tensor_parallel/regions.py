"""Where activations change between the ranks' own and common: one autograd Function, a table of verb pairs.

                forward          backward
    enter       keep             all_reduce         a common input goes into cut modules
    leave       all_reduce       keep               their partial outputs become a common one
    gather      all_gather       reduce_scatter     the same two under sequence parallelism, where
    scatter     reduce_scatter   all_gather         activations outside are chunks of the sequence
    split       chunk            all_gather         a common tensor becomes chunks, one per rank
    join        all_gather       chunk              and chunks a common tensor

Megatron-LM's f is enter and its g is leave (Shoeybi et al. 2019); with sequences Korthikanti et al. 2022.

q, k and v are given one tensor and must enter it once, so that autograd sums their partial gradients
before one all-reduce: `Doors` remembers what entered until something leaves.

Note 1, who keeps the memo's graph alive. A recomputed forward may end before anything leaves; the backward
of `enter` then makes the memo forget. It never runs between q and k.
Note 2, torch.compile sees none of this: identities of tensors would be guards, and a new graph each step.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from zero3d.errors import ConfigError
from zero3d.tensor_parallel.channel import Channel

F = TypeVar("F", bound=Callable[..., Any])
RANKS = 1 << 16  # more than there are; a rank's own seed is a common one times this, plus the rank
SEQUENCE = -2  # dim of [batch, length, hidden]
VERBS = {
    "enter": ("keep", "all_reduce"),
    "leave": ("all_reduce", "keep"),
    "gather": ("all_gather", "reduce_scatter"),
    "scatter": ("reduce_scatter", "all_gather"),
    "split": ("chunk", "all_gather"),
    "join": ("all_gather", "chunk"),
}


def eager(function: F) -> F:
    """Keep a function out of torch.compile's graphs (Note 2)."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Way(NamedTuple):
    """One passage: `kind` of VERBS along `dim`, under the module's name. doors: what to forget (Note 1)."""

    kind: str
    dim: int
    name: str
    channel: Channel
    doors: Doors | None = None

    def go(self, t: Tensor, backward: bool) -> Tensor:
        """The forward's verb, or the backward's."""
        verb = VERBS[self.kind][backward]
        if verb == "keep":
            return t.view_as(t)
        if verb == "all_reduce":
            return self.channel.all_reduce(t, self.name)
        if verb == "chunk":
            return self.channel.chunk(t, self.dim)
        move = self.channel.all_gather if verb == "all_gather" else self.channel.reduce_scatter
        return move(t, self.dim, self.name)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.go(t, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.way.doors is not None:
            ctx.way.doors.forget()
        return ctx.way.go(grads[0], backward=True), None


def cross(t: Tensor, way: Way) -> Tensor:
    """`t` after the passage, with the gradient's passage back."""
    out: Tensor = _Cross.apply(t, way)  # type: ignore[no-untyped-call]
    return out


class Entered(NamedTuple):
    """What became of a tensor: valid while it is alive, unwritten and under the same grad mode."""

    source: weakref.ref[Tensor]
    version: int
    grad: bool
    result: Tensor


class Doors:
    """Enter and leave of one model. `sequence`: between blocks activations are chunks of the sequence, under grad only.

    Without grad nothing is kept for a backward, so there is nothing to save, and generation has any length.
    """

    def __init__(self, channel: Channel, sequence: bool) -> None:
        self.channel, self._sequence = channel, sequence
        self._entered: dict[int, Entered] = {}

    @property
    def by_sequence(self) -> bool:
        """Whether activations outside cut modules are chunks of the sequence now."""
        return self._sequence and torch.is_grad_enabled()

    @eager
    def enter(self, t: Tensor, name: str, whole: bool = False) -> Tensor:
        """A common tensor, or (unless it is `whole`) a chunk of the sequence, for cut modules; once per tensor."""
        known = self._entered.get(id(t))
        version = 0 if t.is_inference() else t._version
        if known is not None and known.source() is t and known[1:3] == (version, torch.is_grad_enabled()):
            return known.result
        kind = "gather" if self.by_sequence and not whole else "enter"
        result = cross(t, Way(kind, SEQUENCE, name, self.channel, self))
        self._entered[id(t)] = Entered(weakref.ref(t), version, torch.is_grad_enabled(), result)
        return result

    @eager
    def leave(self, t: Tensor, name: str, whole: bool = False) -> Tensor:
        """Partial sums -> the sum, or (unless it is to be `whole`) this rank's chunk of it along the sequence."""
        self.forget()
        kind = "scatter" if self.by_sequence and not whole else "leave"
        return cross(t, Way(kind, SEQUENCE, name, self.channel))

    @eager
    def split(self, t: Tensor, name: str) -> Tensor:
        """[batch, length, hidden] -> [batch, length / N, hidden]. Raises ConfigError for a length N does not divide."""
        length, size = t.shape[SEQUENCE], self.channel.size
        if length % size:
            raise ConfigError(
                f"sequence parallelism cuts sequences over tp {size}, and {length} tokens / {size} is not whole: use "
                f"sequences of {length - length % size} or {length + -length % size} tokens, or turn it off."
            )
        return cross(t, Way("split", SEQUENCE, name, self.channel))

    @eager
    def join(self, t: Tensor, name: str, dim: int = SEQUENCE) -> Tensor:
        """The chunks of all ranks along `dim`; all ranks use the result alike, so its gradient is only taken apart."""
        return cross(t, Way("join", dim, name, self.channel))

    @eager
    def forget(self) -> None:
        """Drop what entered, and the graphs that hang on it."""
        self._entered.clear()


class OwnRandom:
    """Random numbers that differ between tp ranks from `begin` to `end`, and are the same again afterwards.

    The seed comes from the device's generator, which stands alike on all ranks, so that a recomputed forward
    that starts from the same state draws the same numbers. A recomputation may stop in between: then `end` is
    never called, and the next `begin` forgets it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: tuple[torch.Generator, Tensor] | None = None
        self._own: tuple[torch.Generator, Tensor] | None = None

    @eager
    def begin(self, device: torch.device, on: bool = True) -> None:
        """If `on`, advance the common generator by one number and continue with this rank's own."""
        self._before = None
        if not on:
            return
        generator = _generator(device)
        torch.rand((), device=device)  # so that the next call finds another state
        self._before = generator, generator.get_state()
        generator.manual_seed(zlib.crc32(generator.get_state().numpy().tobytes()) * RANKS + self._rank)

    @eager
    def end(self) -> None:
        """Go on with the common numbers, if `begin` was called."""
        before, self._before = self._before, None
        if before is not None:
            before[0].set_state(before[1])

    @eager
    def pause(self, device: torch.device, name: str) -> None:
        """Among a rank's own numbers: such as all ranks draw, of `name`'s own, until `resume`.

        They follow from the seed alone, which a generator keeps, so that a recomputed block finds them, too.
        """
        generator = _generator(device)
        self._own = generator, generator.get_state()
        generator.manual_seed(zlib.crc32(name.encode(), generator.initial_seed() // RANKS))

    @eager
    def resume(self) -> None:
        """Go on with the rank's own numbers, if `pause` was called."""
        own, self._own = self._own, None
        if own is not None:
            own[0].set_state(own[1])


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    found: torch.Generator = module.default_generators[index]
    return found
