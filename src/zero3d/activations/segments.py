"""Segments of consecutive blocks of which only the first one's input is kept (Chen et al. 2016).

    forward    x0 -> block 0 -> x1 -> block 1 -> x2 -> block 2        K = 3
               kept: x0, and of every call its other arguments and the random state
               what autograd saves inside the blocks is a Blank: nothing
    backward   the first Blank that is asked for: blocks 0, 1, 2 are called again, from x0 and
               under the same random states, and every Blank of the segment is filled
               a node that has run drops its Blanks; the last one drops x0

The model's own loop calls the blocks, so there is no function to wrap: a segment grows call by
call. A call joins the open segment if it is given the very tensor (by identity and version) that the
last call returned; else, and after K calls, a new segment begins. A model that does something between
two blocks therefore gets shorter segments, never wrong ones.

Note 1, two calls. The last block of a segment, whose backward asks, has its weights gathered. A replay of
the others goes through their `__call__`, for an engine's hooks gather weights there; but a block is given
the recorded arguments, whatever its hooks make of them.
Note 2, ownership. A graph owns its Blanks, they own the segment; the recorder only looks on. What
is never run backward dies with its graph.
Note 3, kept tensors are saved by a node of autograd: a later write in place is an error there, and
saved-tensor hooks around the model (offload, meters) see them.
Note 4, hooks live as long as the graph that was made under them: what a hook holds must not hold that
graph, or nobody ever frees it.
Note 5, what blocks write for one another, such as the keys and values that layers share in one dict: a call
keeps what was in it before, and a replay writes to a copy. Readers keep what they were given, so that its
gradient goes to the writer's own graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero3d.errors import ConfigError
from zero3d.nested import map_tensors, own_containers, tensors_in
from zero3d.rng import set_torch_rng, torch_rng

Forward = Callable[..., Any]


class Meta(NamedTuple):
    """What a recomputed tensor must share with the one it replaces."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> Meta:
        return cls(t.shape, t.dtype, t.device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} on {self.device}"


class Blank:
    """Stands in autograd's graph for a tensor that was not kept; `value` once it has been recomputed."""

    __slots__ = ("__weakref__", "meta", "segment", "value")

    def __init__(self, segment: Segment, meta: Meta) -> None:
        self.segment, self.meta = segment, meta
        self.value: Tensor | None = None


@dataclass
class Call:
    """One block's call.

    forward  the block's own
    nest     its (args, kwargs); tensors in it mean nothing
    sources  for each tensor in the nest: which output of the call before it was, or None if it is kept
    keeper   an empty tensor whose node keeps the others: in torch 2.11 the node lives no longer than it
    blanks   what autograd saved inside, in order
    """

    name: str
    block: nn.Module
    forward: Forward
    nest: Any
    sources: list[int | None]
    keeper: Tensor
    device: torch.device
    rng: tuple[Tensor, ...]
    autocast: list[tuple[str, torch.dtype, bool]]
    blanks: list[weakref.ref[Blank]] = field(default_factory=list)

    @property
    def linked(self) -> bool:
        """It was given an output of the call before."""
        return any(source is not None for source in self.sources)

    def arguments(self, outputs: list[Tensor]) -> Any:
        """(args, kwargs) again; `outputs` are those of the call before."""
        kept, sources = iter(self.keeper.grad_fn.saved_tensors), iter(self.sources)  # type: ignore[union-attr]

        def restore(_: Tensor) -> Tensor:
            source = next(sources)
            if source is not None:
                return outputs[source]
            t: Tensor = next(kept)
            return t.detach().requires_grad_(t.requires_grad)

        return map_tensors(own_containers(self.nest), restore)


@dataclass
class Segment:
    """Calls that are recomputed together. last: the outputs of the last one, and their versions."""

    calls: list[Call] = field(default_factory=list)
    last: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)

    def outputs(self) -> dict[int, int]:
        """id of each tensor the last call returned, if it is alive and nobody has written to it, to its position."""
        last = ((ref(), version) for ref, version in self.last)
        return {id(t): i for i, (t, version) in enumerate(last) if t is not None and t._version == version}


def record(name: str, block: nn.Module, forward: Forward, args: Any, kwargs: Any, outputs: Mapping[int, int]) -> Call:
    """What a call must keep to be repeated: all but the `outputs` of the call before."""
    sources: list[int | None] = []
    kept: list[Tensor] = []
    nothing = torch.empty(0)

    def strip(t: Tensor) -> Tensor:
        sources.append(outputs.get(id(t)))
        if sources[-1] is None:
            kept.append(t)
        return nothing

    nest = map_tensors(own_containers((args, kwargs)), strip)  # Note 5
    devices = (t.device for t in tensors_in((args, kwargs)))
    device = next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))
    keeper: Tensor = _Keep.apply(torch.empty(0, requires_grad=True), *kept)  # type: ignore[no-untyped-call]
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {"cpu", device.type}
    ]
    return Call(name, block, forward, nest, sources, keeper, device, torch_rng(device), autocast)


class Recorder:
    """Runs the blocks of one model, cut into segments of `length` calls."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._open: weakref.ref[Segment] | None = None  # Note 2
        self._replay: Replay | None = None

    @property
    def replaying(self) -> bool:
        """A backward is calling the blocks."""
        return self._replay is not None

    def __call__(self, name: str, block: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """The block's own `forward`, recorded; or replayed, if a replay is under way."""
        if self._replay is not None:
            return self._replay.run()
        segment = (self._open() if self._open is not None else None) or Segment()
        self._open = None  # an exception ends the segment
        call = record(name, block, forward, args, kwargs, segment.outputs())
        if segment.calls and not call.linked:
            segment = Segment()

        def pack(t: Tensor) -> Blank:
            blank = Blank(segment, Meta.of(t))
            call.blanks.append(weakref.ref(blank))
            return blank

        with saved_tensors_hooks(pack, self._unpack):
            output = forward(*args, **kwargs)
        segment.calls.append(call)
        segment.last = [(weakref.ref(t), t._version) for t in tensors_in(output)]
        if len(segment.calls) < self.length:
            self._open = weakref.ref(segment)
        return output

    def _unpack(self, blank: Blank) -> Tensor:
        if blank.value is None:
            with torch.enable_grad(), _rng_put_back(blank.segment.calls):
                outputs: list[Tensor] = []
                for call in blank.segment.calls:
                    outputs = self._again(call, outputs, last=call is blank.segment.calls[-1])
        if blank.value is None:
            raise ConfigError("A block raised in the forward of this loss, so its backward has nothing to recompute.")
        return blank.value

    def _again(self, call: Call, outputs: list[Tensor], last: bool) -> list[Tensor]:
        args, kwargs = call.arguments(outputs)
        self._replay = replay = Replay(call, args, kwargs, last)
        try:
            with ExitStack() as stack:
                stack.enter_context(suppress(Enough))
                for kind, dtype, enabled in call.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                set_torch_rng(call.device, call.rng)
                if last:  # Note 1
                    replay.run()
                else:
                    call.block(*args, **kwargs)
            return replay.outputs
        finally:
            self._replay = None
            replay.outputs = []  # Note 4


class Enough(Exception):
    """Every blank of a segment is filled: its last multiplication need not run (a fifth of a Llama block's)."""


@dataclass
class Replay:
    """One call, run again to fill its blanks. last: of its segment, so nobody needs its outputs."""

    call: Call
    args: Any
    kwargs: Any
    last: bool
    outputs: list[Tensor] = field(default_factory=list)
    saved: int = 0

    def run(self) -> Any:
        """The block's own forward on the recorded arguments."""
        with saved_tensors_hooks(self._fill, lambda t: t):
            output = self.call.forward(*self.args, **self.kwargs)
        if self.saved != len(self.call.blanks):
            raise self._differs(f"{len(self.call.blanks)} tensors", f"{self.saved}")
        self.outputs = list(tensors_in(output))
        return output

    def _fill(self, t: Tensor) -> Tensor:
        position, self.saved = self.saved, self.saved + 1
        if position < len(self.call.blanks):
            blank = self.call.blanks[position]()
            if blank is not None:
                if blank.meta != Meta.of(t):
                    raise self._differs(str(blank.meta), str(Meta.of(t)))
                blank.value = t.detach()
        if self.last and self.saved == len(self.call.blanks):
            raise Enough
        return t.detach()

    def _differs(self, first: str, second: str) -> ConfigError:
        return ConfigError(
            f"{self.call.name} did not compute the same when it was recomputed: its forward saved {first}, its "
            f"recomputation {second}. Make its forward depend on its arguments only, or pass activations=none."
        )


class Recomputed:
    """A module's forward whose interior is dropped, and computed again when the backward needs it."""

    def __init__(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        self._name, self._module, self._recorder = name, module, recorder
        self._forward = module.forward

    @property
    def replaying(self) -> bool:
        """Whether a recomputation is calling the blocks, with the arguments they had behind their hooks."""
        return self._recorder.replaying

    @property
    def every(self) -> int:
        """How many modules of a kind are recomputed together."""
        return self._recorder.length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.replaying and not (torch.is_grad_enabled() and self._module.training):
            return self._forward(*args, **kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {key: self._without_cache(value) for key, value in kwargs.items()}
        return self._recorder(self._name, self._module, self._forward, args, kwargs)

    def _without_cache(self, value: Any) -> Any:
        if not hasattr(value, "get_seq_length"):  # what tells a Hugging Face cache
            return value
        length = int(value.get_seq_length())
        if length > 0:
            raise ConfigError(
                f"{self._name} was given a cache of {length} keys in training, which recomputation would write to "
                "twice: pass use_cache=False, or activations=none."
            )
        return None


class _Keep(torch.autograd.Function):
    """Keeps tensors for `Call.arguments`; never runs backward (Note 3)."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        """`start` needs a gradient, so that there is a node."""
        ctx.save_for_backward(*tensors)
        return start.new_empty(0)


@contextmanager
def _rng_put_back(calls: list[Call]) -> Iterator[None]:
    devices = {call.device for call in calls}
    before = {device: torch_rng(device) for device in devices}
    try:
        yield
    finally:
        for device, states in before.items():
            set_torch_rng(device, states)
