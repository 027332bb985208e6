"""Segments of consecutive blocks: only the input of a segment's first block is kept (Chen et al. 2016).

    forward    x0 -> block 0 -> x1 -> block 1 -> x2 -> block 2        K = 3
               kept: x0, and of every call its other arguments and the random state
               in the place of what autograd would save inside the blocks: MissingTensors
    backward   the first MissingTensor that autograd reads: blocks 0, 1, 2 are called again, from x0 and
               under the same random states, and every MissingTensor of the segment is filled in
               a node that has run drops its MissingTensors; the last one drops x0

The model's own loop calls the blocks, so there is no function to wrap: a segment grows call by
call. A call joins the open segment if it is given the very tensor (by identity and version) that the
last call returned; else, and after K calls, a new segment begins. A model that does something between
two blocks therefore gets shorter segments, never wrong ones.

Note 1, two calls. When the backward of a segment's last block reads a MissingTensor, the block's weights are gathered,
unless backward entered it otherwise than through its outputs. A replay of the others goes through their `__call__`, for
an engine's hooks gather weights there; but a block is given the recorded arguments, whatever its hooks make of them.
Note 2, ownership. A graph owns its MissingTensors, they own the segment; the recorder only looks on. What
is never run backward dies with its graph.
Note 3, kept tensors are saved by a node of autograd: a later write in place is an error there, and
saved-tensor hooks around the model (offload, meters) see them.
Note 4, hooks live as long as the graph made under them: an object held by a hook must not hold that graph, or nobody
ever frees it.
Note 5, values that blocks write for one another, such as keys and values that layers share in one dict: a call keeps
the dict's earlier contents, and a replay writes to a copy. Readers keep the tensors that they were given, so that their
gradients go to the writer's own graph.
Note 6, the first argument that needs a gradient is a call's input. It may be kept as something smaller
(`kept_inputs.py`), which is saved in its place and made the input again by a replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero3d.activations.buffers import Before, as_before, buffers_of, written
from zero3d.errors import ConfigError
from zero3d.models.packed_documents import Told, during, told
from zero3d.nested import map_tensors, own_containers, tensors_in
from zero3d.rng import set_torch_rng, torch_rng
from zero3d.zero.weights import is_placeholder

Forward = Callable[..., Any]


class Kept(Protocol):
    """An input that is kept otherwise than as it is (Note 6)."""

    def taken(self) -> Tensor:
        """Return what autograd saves in its place, once."""

    def restore(self, part: Tensor) -> Tensor:
        """Return the input, a leaf, from what was saved."""


Keep = Callable[[Tensor, str], Kept | None]  # (input, the module's name); None: as it is


class TensorMeta(NamedTuple):
    """Shape, dtype and device, in which a recomputed tensor must equal the one that was not kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> TensorMeta:
        """Return those of a tensor."""
        return cls(t.shape, t.dtype, t.device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} on {self.device}"


class MissingTensor:
    """Stands in autograd's graph for a tensor that was not kept; `value` is there once it has been recomputed."""

    __slots__ = ("__weakref__", "meta", "segment", "value")

    def __init__(self, segment: Segment, meta: TensorMeta) -> None:
        self.segment, self.meta = segment, meta
        self.value: Tensor | None = None


@dataclass
class BlockCall:
    """One block's call, with all that repeats it.

    forward  the block's own
    nest     its (args, kwargs), with an empty tensor in the place of each
    sources  for each tensor in the nest: the number of the earlier call's output that it was, or None if it is kept
    keeper   an empty tensor whose node keeps the others: in torch 2.11 the node lives no longer than it
    missing  what autograd saved inside, in order
    input    its place among the kept tensors and its kept form, if it is kept otherwise (Note 6)
    buffers  the ones that it wrote, with their earlier values
    told     what functions that mix tokens were told of its forward
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
    told: Told | None
    missing: list[weakref.ref[MissingTensor]] = field(default_factory=list)
    input: tuple[int, Kept] | None = None
    buffers: list[Before] = field(default_factory=list)

    @property
    def linked(self) -> bool:
        """Whether it was given an output of the call before."""
        return any(source is not None for source in self.sources)

    def arguments(self, outputs: list[Tensor]) -> Any:
        """Return (args, kwargs) as they were; `outputs` are those of the call before."""
        kept = enumerate(self.keeper.grad_fn.saved_tensors)  # type: ignore[union-attr]
        sources, (place, given) = iter(self.sources), self.input or (None, None)

        def restore(_: Tensor) -> Tensor:
            source = next(sources)
            if source is not None:
                return outputs[source]
            at, t = next(kept)
            return given.restore(t) if given and at == place else t.detach().requires_grad_(t.requires_grad)

        return map_tensors(own_containers(self.nest), restore)


@dataclass
class Segment:
    """Calls that are recomputed together. last: the outputs of the last one, and their versions."""

    calls: list[BlockCall] = field(default_factory=list)
    last: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)

    def outputs(self) -> dict[int, int]:
        """Return positions in the last call's output by id of tensor, for tensors that are alive and unwritten."""
        last = ((ref(), version) for ref, version in self.last)
        return {id(t): i for i, (t, version) in enumerate(last) if t is not None and t._version == version}


def record(
    name: str,
    block: nn.Module,
    forward: Forward,
    args: Any,
    kwargs: Any,
    outputs: Mapping[int, int],
    keep: Keep | None = None,
) -> BlockCall:
    """Keep what a call needs to be repeated: all but the `outputs` of the call before. keep: its input, otherwise."""
    sources: list[int | None] = []
    kept: list[Tensor] = []
    nothing = torch.empty(0)
    first = next((t for t in tensors_in((args, kwargs)) if t.requires_grad), None) if keep is not None else None
    input: tuple[int, Kept] | None = None

    def strip(t: Tensor) -> Tensor:
        nonlocal input
        sources.append(outputs.get(id(t)))
        if sources[-1] is None:
            if t is first and input is None and keep is not None and (otherwise := keep(t, name)) is not None:
                input, t = (len(kept), otherwise), otherwise.taken()
            kept.append(t)
        return nothing

    nest = map_tensors(own_containers((args, kwargs)), strip)  # Note 5
    devices = (t.device for t in tensors_in((args, kwargs)))
    device = next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))
    keeper: Tensor = _Keep.apply(torch.empty(0, requires_grad=True), *kept)  # type: ignore[no-untyped-call]
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {"cpu", device.type}
    ]
    return BlockCall(
        name, block, forward, nest, sources, keeper, device, torch_rng(device), autocast, told(), input=input
    )


class Recorder:
    """Runs the blocks of one model, cut into segments of `length` calls.

    keep    their inputs, otherwise (Note 6)
    revive  is shown what a node is about to read: it may be a weight that an engine has released since
    """

    revive: Callable[[Tensor], None] | None = None

    def __init__(self, length: int) -> None:
        self.length = length
        self.keep: Keep | None = None
        self._open: weakref.ref[Segment] | None = None  # Note 2
        self._replay: Replay | None = None

    @property
    def replaying(self) -> bool:
        """Whether a backward is calling the blocks."""
        return self._replay is not None

    def __call__(self, name: str, block: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run the block's own `forward` and record it; or replay it, if a replay is under way."""
        if self._replay is not None:
            return self._replay.run()
        segment = (self._open() if self._open is not None else None) or Segment()
        self._open = None  # an exception ends the segment
        call = record(name, block, forward, args, kwargs, segment.outputs(), self.keep)
        if segment.calls and not call.linked:
            segment = Segment()

        def pack(t: Tensor) -> MissingTensor:
            absent = MissingTensor(segment, TensorMeta.of(t))
            call.missing.append(weakref.ref(absent))
            return absent

        before = buffers_of(block)
        with saved_tensors_hooks(pack, self._unpack):
            output = forward(*args, **kwargs)
        call.buffers = written(before)
        segment.calls.append(call)
        segment.last = [(weakref.ref(t), t._version) for t in tensors_in(output)]
        if len(segment.calls) < self.length:
            self._open = weakref.ref(segment)
        return output

    def _unpack(self, absent: MissingTensor) -> Tensor:
        if absent.value is None:
            with torch.enable_grad(), _same_random_state_after(absent.segment.calls):
                outputs: list[Tensor] = []
                for call in absent.segment.calls:
                    outputs = self._repeat(call, outputs, last=call is absent.segment.calls[-1])
        if absent.value is None:
            raise ConfigError("A block raised in the forward of this loss, so its backward has nothing to recompute.")
        if self.revive is not None:
            self.revive(absent.value)
        return absent.value

    def _repeat(self, call: BlockCall, outputs: list[Tensor], last: bool) -> list[Tensor]:
        args, kwargs = call.arguments(outputs)
        self._replay = replay = Replay(call, args, kwargs, last)
        try:
            with ExitStack() as stack:
                stack.enter_context(suppress(AllFilled))
                stack.enter_context(during(call.told))
                for kind, dtype, enabled in call.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                set_torch_rng(call.device, call.rng)
                stack.enter_context(as_before(call.buffers))
                if last and not any(map(is_placeholder, call.block.parameters())):  # Note 1
                    replay.run()
                else:
                    call.block(*args, **kwargs)
            return replay.outputs
        finally:
            self._replay = None
            replay.outputs = []  # Note 4


class AllFilled(Exception):
    """Every missing tensor of a segment is filled in: its last product need not run (a fifth of a Llama block's)."""


@dataclass
class Replay:
    """One call that is run again to fill in its missing tensors. last: of its segment, so nobody needs its outputs."""

    call: BlockCall
    args: Any
    kwargs: Any
    last: bool
    outputs: list[Tensor] = field(default_factory=list)
    saved: int = 0

    def run(self) -> Any:
        """Run the block's own forward on the recorded arguments."""
        with saved_tensors_hooks(self._fill, lambda t: t):
            output = self.call.forward(*self.args, **self.kwargs)
        if self.saved != len(self.call.missing):
            raise self._differs(f"{len(self.call.missing)} tensors", f"{self.saved}")
        self.outputs = list(tensors_in(output))
        return output

    def _fill(self, t: Tensor) -> Tensor:
        position, self.saved = self.saved, self.saved + 1
        if position < len(self.call.missing):
            absent = self.call.missing[position]()
            if absent is not None:
                if absent.meta != TensorMeta.of(t):
                    raise self._differs(str(absent.meta), str(TensorMeta.of(t)))
                absent.value = t.detach()
        if self.last and self.saved == len(self.call.missing):
            raise AllFilled
        return t.detach()

    def _differs(self, first: str, second: str) -> ConfigError:
        return ConfigError(
            f"{self.call.name} did not compute the same when it was recomputed: its forward saved {first}, its "
            f"recomputation {second}. Make its forward depend on its arguments only, or pass activations=none."
        )


class Recomputed:
    """Calls a module's forward, drops its interior, and computes that again when the backward needs it.

    inner  the module's forward inside, which a recomputation calls
    """

    def __init__(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        self._name = name
        self._module = module
        self.recorder = recorder
        self.inner: Forward = module.forward

    @property
    def replaying(self) -> bool:
        """Whether a recomputation is calling the blocks, with the arguments they had behind their hooks."""
        return self.recorder.replaying

    @property
    def every(self) -> int:
        """How many modules are recomputed together."""
        return self.recorder.length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.replaying and not (torch.is_grad_enabled() and self._module.training):
            return self.inner(*args, **kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {key: self._without_cache(value) for key, value in kwargs.items()}
        return self.recorder(self._name, self._module, self.inner, args, kwargs)

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
    """Holds tensors for `BlockCall.arguments`; never runs backward (Note 3)."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        """Save the tensors. `start` needs a gradient, so that there is a node."""
        ctx.save_for_backward(*tensors)
        return start.new_empty(0)


@contextmanager
def _same_random_state_after(calls: list[BlockCall]) -> Iterator[None]:
    """Restore the random states of the calls' devices at the end."""
    devices = {call.device for call in calls}
    before = {device: torch_rng(device) for device in devices}
    try:
        yield
    finally:
        for device, states in before.items():
            set_torch_rng(device, states)
