"""Find races between the streams of an engine without an accelerator: a happens-before check by vector clocks.

The engine runs on the CPU, on a process group whose other ranks are not there. Every operation, collective, wait and
allocation is put on the stream that an accelerator would give it; two accesses to the same bytes of which one writes
must be ordered by what streams have waited for, or they are a race.

    stream      compute, one per side stream, one per process group (collectives) and per peer of it (messages)
    kernel      every operation that torch dispatches, on the stream that is current
    collective  begins when the current stream has come so far; `wait` lets the stream that is current then wait for it.
                It holds its tensors until that
    memory      the caching allocator has a pool for each stream. A block goes back to the pool of the stream that was
                current when it was allocated, as soon as the host lets go of it; whoever has it next must have waited
                for all that ever touched memory of that pool

The host waits for nothing here, not even where it reads a value: an engine must be right without that. Use:

    with modelled(engine) as model:     # the engine was built on `alone_in(world)`, with `lonely_mesh`
        engine.train_batch(batches)
    model.races, model.allocations

`without` plants a fault, which must be found: "issue" (a side stream does not wait for compute), "join" (compute does
not wait for a side stream), "wait" (nobody waits for collectives).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from instruments.durations import COMPUTE, Machine, Timeline
from zero3d.distributed import algorithms
from zero3d.engine.engine import Engine
from zero3d.expert_parallel.dispatch import Dispatch
from zero3d.memory.arena import Arena
from zero3d.tools.sim.flops import FORMULAS
from zero3d.tools.sim.group import FakeMesh
from zero3d.tools.sim.patches import replaced

FAULTS = ("issue", "join", "wait")
TEMPORARY, LASTING = "temporary", "lasting"  # what the arena did not lend; what was there before
ARRIVED = 0.01  # what absent neighbours in a pipeline send
KEPT = 4096  # buffers that are looked through for dead ones when there are more


class Race(NamedTuple):
    """Two accesses in no order. buffer: its category in the arena; first, then: what they did, on which stream."""

    buffer: str
    first: str
    then: str
    operation: str


class Allocation(NamedTuple):
    """A buffer's category and the stream whose pool it is of."""

    buffer: str
    stream: str


class Access(NamedTuple):
    """Bytes [start, stop) of a buffer, touched on a stream."""

    start: int
    stop: int
    stream: str
    writes: bool


class Buffer:
    """A storage's memory from its allocation until it is freed.

    accesses  of each kind the last one's number on its stream
    before    of every stream the last access to memory of this pool when this was allocated
    """

    def __init__(self, storage: torch.UntypedStorage, stream: str, category: str, before: dict[str, int]) -> None:
        self.reference, self.stream, self.category, self.before = StorageWeakRef(storage), stream, category, before
        self.accesses: dict[Access, int] = {}


class Clocks:
    """How far every stream has come, and how far of the others it has waited for; `timeline`: and when that is."""

    def __init__(self, timeline: Timeline) -> None:
        self._seen: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._timeline = timeline

    def advance(self, stream: str, operation: str = "", seconds: float = 0.0) -> int:
        """Enqueue something, and return its number on the stream."""
        self._seen[stream][stream] += 1
        self._timeline.add(stream, operation, seconds)
        return self._seen[stream][stream]

    def moment(self, stream: str) -> dict[str, int]:
        """Return all that is over when the stream has done what it has now."""
        return dict(self._seen[stream])

    def wait(self, stream: str, moment: dict[str, int]) -> None:
        """Let what a stream is given next come after a moment."""
        for other, number in moment.items():
            self._seen[stream][other] = max(self._seen[stream][other], number)
        self._timeline.ready(stream, moment)

    def news(self, stream: str, moment: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Return what of a moment is not over yet when the stream goes on: of each other one the first and last."""
        seen = self._seen[stream]
        return {other: (seen[other] + 1, number) for other, number in moment.items() if other != stream}

    def precedes(self, stream: str, number: int, other: str) -> bool:
        """Return whether what has this number on `stream` is over before what `other` is given next."""
        return self._seen[other][stream] >= number


class Model:
    """The streams, what they have touched, and the races among that."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.timeline = Timeline(machine or Machine())
        self.clocks = Clocks(self.timeline)
        self.current = [COMPUTE]
        self.category = TEMPORARY  # of what is allocated now
        self.races: Counter[Race] = Counter()
        self.allocations: Counter[Allocation] = Counter()
        self.operations = 0
        self._buffers: dict[int, Buffer] = {}
        self._shared: set[int] = set()  # buffers that another stream than their own has touched
        self._pools: defaultdict[str, dict[str, int]] = defaultdict(dict)

    @property
    def stream(self) -> str:
        """The current stream."""
        return self.current[-1]

    def allocate(self, storage: torch.UntypedStorage, category: str = "") -> Buffer:
        """Give a storage memory of the current stream's pool."""
        for key in [key for key in self._shared if self._buffers[key].reference.expired()]:
            self._free(key)
        if len(self._buffers) > KEPT:
            for key in [key for key, buffer in self._buffers.items() if buffer.reference.expired()]:
                self._free(key)
        buffer = Buffer(storage, self.stream, category or self.category, dict(self._pools[self.stream]))
        self.allocations[Allocation(buffer.category, buffer.stream)] += 1
        self._buffers[storage._cdata] = buffer
        return buffer

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory back to its pool."""
        if storage._cdata in self._buffers:
            self._free(storage._cdata)

    def waits_for(self, stream: str, moment: dict[str, int]) -> None:
        """Let a stream wait for a moment of another one, as it asks to."""
        if stream == COMPUTE:
            self.timeline.waits(self.clocks.news(stream, moment))
        self.clocks.wait(stream, moment)

    def _free(self, key: int) -> None:
        buffer = self._buffers.pop(key)
        if any(access.stream == COMPUTE for access in buffer.accesses):  # not what a side stream has for itself
            self.timeline.needs(((a.stream, number) for a, number in buffer.accesses.items()), by_last=False)
        pool = self._pools[buffer.stream]
        self._shared.discard(key)
        for access, number in buffer.accesses.items():
            if access.stream != buffer.stream:
                pool[access.stream] = max(pool.get(access.stream, 0), number)
        for stream, number in buffer.before.items():
            pool[stream] = max(pool.get(stream, 0), number)

    def _buffer(self, storage: torch.UntypedStorage) -> Buffer:
        known = self._buffers.get(storage._cdata)
        if known is not None and not known.reference.expired():
            return known
        if known is not None:
            self._free(storage._cdata)
        self._buffers[storage._cdata] = before = Buffer(storage, COMPUTE, LASTING, {})
        return before

    def run(
        self,
        operation: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: str = "",
        seconds: float | None = None,
    ) -> None:
        """Enqueue an operation on a stream, the current one by default; by default it lasts as its memory takes."""
        stream, reads, writes = stream or self.stream, list(reads), list(writes)
        if seconds is None:
            seconds = sum(tensor.nbytes for tensor in (*reads, *writes)) / self.timeline.machine.memory
        number = self.clocks.advance(stream, operation, seconds)
        self.operations += 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel() and tensor.untyped_storage().nbytes():
                    self._touch(tensor, stream, writing, number, operation)

    def _touch(self, tensor: Tensor, stream: str, writing: bool, number: int, operation: str) -> None:
        storage = tensor.untyped_storage()
        buffer = self._buffer(storage)
        start = tensor.storage_offset() * tensor.itemsize
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        here = Access(start, start + (last + 1) * tensor.itemsize, stream, writing)
        did = f"{'written' if writing else 'read'} on {stream}"
        for other, count in buffer.before.items():
            if other != stream and not self.clocks.precedes(other, count, stream):
                self.races[Race(buffer.category, f"another buffer used on {other}", did, operation)] += 1
        for access, count in buffer.accesses.items():
            overlaps = access.start < here.stop and here.start < access.stop and (access.writes or writing)
            if overlaps and stream == COMPUTE:
                self.timeline.needs([(access.stream, count)], by_last=True)
            elif overlaps and access.writes and not writing:
                self.timeline.reads(stream, number, (access.stream, count))
            if overlaps and access.stream != stream and not self.clocks.precedes(access.stream, count, stream):
                first = f"{'written' if access.writes else 'read'} on {access.stream}"
                self.races[Race(buffer.category, first, did, operation)] += 1
        buffer.accesses[here] = number
        if stream != buffer.stream:
            self._shared.add(storage._cdata)


# --- what stands for torch's things -----------------------------------------------------------------------------------


class Stream:
    """Stands for a torch.Stream."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self.name = model, name

    def wait_stream(self, other: Stream) -> None:
        self._model.waits_for(self.name, self._model.clocks.moment(other.name))

    def wait_event(self, event: Event) -> None:
        self._model.waits_for(self.name, event.moment)

    def __enter__(self) -> Stream:
        self._model.current.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.current.pop()


class Event:
    """Stands for a torch.Event."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.moment: dict[str, int] = {}

    def record(self, stream: Stream) -> None:
        self.moment = self._model.clocks.moment(stream.name)

    def query(self) -> bool:
        """Return False: nobody learns here what time it is."""
        return False


class Work:
    """Stands for the handle of a collective under way, which holds its tensors."""

    def __init__(self, model: Model, moment: dict[str, int], tensors: Sequence[Tensor]) -> None:
        self._model, self._moment, self._tensors = model, moment, tensors

    def wait(self) -> bool:
        self._model.waits_for(self._model.stream, self._moment)
        self._tensors = ()
        return True


class Collectives:
    """Stands for torch.distributed's calls: absent ranks have what this one has."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def _start(
        self,
        name: str,
        stream: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        waits: bool = False,
        nbytes: float = 0,
    ) -> Work:
        """Start one that sends so many bytes."""
        model = self._model
        model.clocks.wait(stream, model.clocks.moment(model.stream))
        model.run(name, reads, writes, stream, nbytes / model.timeline.machine.link)
        work = Work(model, model.clocks.moment(stream), [*reads, *writes])
        if waits:
            work.wait()
        return work

    def all_gather(self, full: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Work:
        with _disable_current_modes():
            full.view(-1, shard.numel()).copy_(shard.view(1, -1).clone())
        sent = full.nbytes - shard.nbytes
        return self._start("all_gather", _stream_of(group), [shard], [full], not async_op, sent)

    def reduce_scatter(self, out: Tensor, full: Tensor, *_: Any, group: Any = None, async_op: bool = False) -> Work:
        with _disable_current_modes():
            out.copy_(full.view(-1, out.numel())[dist.get_rank(group)])
        sent = full.nbytes - out.nbytes
        return self._start("reduce_scatter", _stream_of(group), [full], [out], not async_op, sent)

    def all_to_all(
        self,
        out: Tensor,
        full: Tensor,
        receives: Sequence[int] | None = None,
        sends: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Work:
        """Give every rank its slot, or so many rows: absent ranks send what this one has for itself, over and over."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        with _disable_current_modes(), torch.no_grad():
            if receives is None or sends is None:
                rows = full.view(size, -1)
                out.view(rows.shape).copy_(rows[rank].clone())
                sent = full.nbytes * (1 - 1 / size)
            else:
                own = torch.split(full, list(sends))[rank].clone()
                for peer, part in enumerate(torch.split(out, list(receives))):
                    part.copy_(own if peer == rank else _as_many(full if not len(own) else own, len(part)))
                sent = full.nbytes - own.nbytes
        return self._start("all_to_all", _stream_of(group), [full], [out], not async_op, sent)

    def all_reduce(self, values: Tensor, *_: Any, group: Any = None, async_op: bool = False) -> Work:
        sent = 2 * values.nbytes * (1 - 1 / dist.get_world_size(group))
        return self._start("all_reduce", _stream_of(group), [], [values], not async_op, sent)

    def broadcast(self, values: Tensor, *_: Any, group: Any = None, async_op: bool = False, **__: Any) -> Work:
        return self._start("broadcast", _stream_of(group), [], [values], not async_op, values.nbytes)

    def messages(self, operations: Sequence[dist.P2POp], *_: Any, **__: Any) -> list[Work]:
        return [self._message(operation) for operation in operations]

    def _message(self, operation: dist.P2POp) -> Work:
        stream = f"{_stream_of(operation.group)}, peer {operation.group_peer}"
        if operation.op is dist.isend:
            return self._start("send", stream, [operation.tensor], [], nbytes=operation.tensor.nbytes)
        with _disable_current_modes(), torch.no_grad():
            if operation.tensor.is_floating_point():
                operation.tensor.fill_(ARRIVED)
            else:
                operation.tensor.zero_()
        return self._start("receive", stream, [], [operation.tensor], nbytes=operation.tensor.nbytes)


def _as_many(rows: Tensor, count: int) -> Tensor:
    """Return so many of these rows, again and again; zeros where there are none."""
    if not len(rows):
        return rows.new_zeros(count, *rows.shape[1:])
    return rows.repeat(-(-count // len(rows)), *(1 for _ in rows.shape[1:]))[:count]


def _stream_of(group: Any) -> str:
    return f"group {(group or dist.group.WORLD).group_name}"


class Operations(TorchDispatchMode):
    """Tells a model of every operation that torch dispatches."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = _kind_of(func)
        if kind.touches_nothing:
            return out
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for name, value in (*zip(kind.arguments, args, strict=False), *kwargs.items()):
            (writes if name in kind.written else reads).extend(_tensors(value))
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        new = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in known]
        for storage in {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in new}.values():
            if storage.nbytes():
                self._model.free(storage)
                self._model.allocate(storage)
        if not kind.only_allocates:
            self._model.run(func._schema.name, reads, [*writes, *new], seconds=self._seconds(func, args, kwargs, out))
        return out

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
        """Return how long a product takes; of other operations their memory says it."""
        formula = FORMULAS.get(func._overloadpacket)
        return None if formula is None else formula(*args, **kwargs, out_val=out) / self._model.timeline.machine.flops


class Kind(NamedTuple):
    """What an operation does to memory, by its schema."""

    touches_nothing: bool
    only_allocates: bool
    arguments: tuple[str, ...]
    written: frozenset[str]


@cache
def _kind_of(func: Any) -> Kind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    view = any(given.alias_info is not None and not given.alias_info.is_write for given in schema.returns)
    arguments = tuple(argument.name for argument in schema.arguments)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    nothing = func.namespace != "aten" or view or name in ("detach", "alias", "set_", "resize_")
    return Kind(nothing, name.startswith(("empty", "new_empty")), arguments, frozenset(written))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


class LabellingArena(Arena):
    """Says what the buffers are for that it allocates. `model` is there while there is one.

    They hold zeros: what absent ranks send is made of this rank's, and what nobody has written would go everywhere.
    """

    model: Model | None = None

    def _label(self, category: str, allocate: Callable[[], Any]) -> Any:
        if self.model is None:
            return allocate()
        before, self.model.category = self.model.category, category
        try:
            return allocate()
        finally:
            self.model.category = before

    def allocate(self, category: str, *how: Any) -> Tensor:
        return self._label(category, lambda: super(LabellingArena, self).allocate(category, *how))

    def borrow(self, category: str, *how: Any) -> Tensor:
        buffer = self._label(category, lambda: super(LabellingArena, self).borrow(category, *how))
        with _disable_current_modes():
            return buffer.zero_()

    def reserve(self, category: str, *how: Any) -> Tensor:
        return self._label(category, lambda: super(LabellingArena, self).reserve(category, *how))

    def fill(self, category: str, buffer: Tensor, *how: Any) -> None:
        self._label(category, lambda: super(LabellingArena, self).fill(category, buffer, *how))
        with _disable_current_modes(), torch.no_grad():
            buffer.zero_()


# --- use --------------------------------------------------------------------------------------------------------------


@contextmanager
def alone_in(world: int, rank: int = 0) -> Iterator[None]:
    """Be a rank of a world whose other ranks are not there; what this process was a rank of before is over."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def lonely_mesh(dp: int = 1, tp: int = 1, pp: int = 1, **folds: int) -> FakeMesh:
    """Return a mesh on the CPU whose axes take NCCL's algorithms, for an engine that is to be modelled.

    folds  ep, sp and shard
    """
    mesh = FakeMesh(dp, tp, pp, "nccl", **folds)
    mesh.make_arena = LabellingArena
    return mesh


@contextmanager
def uneven_experts() -> Iterator[None]:
    """Let absent ranks of the ep axis have other rows than this one: its experts in turn, each rank from another on."""
    counts = Dispatch._counts

    def turned(self: Dispatch, sorted_experts: Tensor) -> list[list[int]]:
        rows, own = counts(self, sorted_experts), self._ep.rank
        return [rows[own][rank - own :] + rows[own][: rank - own] for rank in range(len(rows))]

    with replaced(Dispatch, "_counts", turned):
        yield


@contextmanager
def absent_neighbours() -> Iterator[None]:
    """Let neighbours in a pipeline that are not there agree on the shapes of what is sent."""
    with ExitStack() as stack:
        for vote in ("_warmup_forward_vote", "_warmup_backward_result"):
            if hasattr(PipelineStage, vote):
                yes = SimpleNamespace(item=lambda: 1)
                stack.enter_context(replaced(PipelineStage, vote, lambda *_, yes=yes, **__: yes))
        yield


@contextmanager
def collectives_of(model: Model) -> Iterator[None]:
    """Let torch.distributed's calls be the model's inside; an engine is built inside, too."""
    calls = Collectives(model)
    with ExitStack() as stack:
        for owner, name, call in (
            (algorithms, "_all_gather", calls.all_gather),
            (algorithms, "_reduce_scatter", calls.reduce_scatter),
            (dist, "all_to_all_single", calls.all_to_all),
            (dist, "all_reduce", calls.all_reduce),
            (dist, "broadcast", calls.broadcast),
            (dist, "batch_isend_irecv", calls.messages),
            (schedules, "_batch_p2p", calls.messages),
        ):
            stack.enter_context(replaced(owner, name, call))
        stack.enter_context(absent_neighbours())
        yield


@contextmanager
def modelled(engine: Engine, without: str = "", machine: Machine | None = None) -> Iterator[Model]:
    """Model the streams of an engine inside; `without`: plant one of FAULTS. What was allocated before is compute's."""
    model = Model(machine)
    arena = engine.arena
    assert isinstance(arena, LabellingArena), "build the engine on a lonely_mesh"
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        model.free(storage)
        result = resize(storage, size)
        if size:
            model.allocate(storage)
        return result

    with ExitStack() as stack:
        stack.enter_context(collectives_of(model))
        stack.enter_context(replaced(torch.accelerator, "current_stream", lambda *_: Stream(model, model.stream)))
        stack.enter_context(replaced(torch, "Event", lambda *_, **__: Event(model)))
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
        if without == "wait":
            stack.enter_context(replaced(Work, "wait", lambda _: True))
        for side in (engine.gathers._side, engine.reductions._side, engine.reductions._across):
            stream = Stream(model, side._name)
            if without == "issue":
                stream.wait_stream = lambda _: None
            stack.enter_context(replaced(side, "_stream", stream))
            stack.enter_context(replaced(side, "_ends", {}))
            if without == "join":
                stack.enter_context(replaced(side, "join", lambda _: None))
        stack.enter_context(replaced(arena, "model", model))
        stack.enter_context(Operations(model))
        yield model
