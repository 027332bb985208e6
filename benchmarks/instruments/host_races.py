"""Find races between an accelerator's streams, the host and its threads: `races.py` for what offload moves.

The engine runs on the stand-in accelerator (accelerator.py), on a process group whose other ranks are not there. It
takes every step that it would take on an accelerator: rings with streams and events, pinned slabs, threads.

    thread   the host's, one clock each. What it enqueues comes after what it has done. A task begins after what the
             thread had done that submits it; who asks for its result goes on after it
    kernel   on the stream that is current in its thread
    copy     between host and device: on that stream. The host goes on at once where memory is pinned and it asks so
    read     of a device value, an event or a stream that is synchronized: the thread goes on after that
    host     operations on tensors of the host, a numpy view of one, a disk that reads into one: on the thread, at once

An access of the host is ordered against a copy by what its thread has waited for, or it is a race. Use, in a process of
its own, since a stand-in is for ever:

    with alone_in(world), on_accelerator() as model:
        engine = zero3d.Engine(..., mesh=AcceleratedMesh(model, dp, tp, pp))
        engine.train_batch(batches)
    model.races

`without` plants a fault, which must be found: one of FAULTS. What nobody waits for: an event of a ring's buffer
("arrived", "used", "gone"), compute by the thread of updates ("follow"), gradients on their way to the host by the host
("norm"), staging by the host executor ("staging"), staging by a disk that reads into it ("read"), a thread ("result"),
the copy of a reduced shard to the host by what has its memory next ("leaving") and by what brings it back ("down"), the
copy of weights from a ring of the host's buffers by the disk ("copies"), a gradient that comes from the host by its
update, or that update by the next gradient ("staged").
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from instruments import accelerator
from instruments.races import COMPUTE, Buffer, LabellingArena, Model, Operations, Stream, collectives_of
from zero3d.checkpoint import restore
from zero3d.distributed.axis import Axis
from zero3d.memory.threads import Threads
from zero3d.offload import executors, ring, tiers
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.disk_tier import DiskStore
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.record_file import RecordFile
from zero3d.offload.updates import RecordUpdates
from zero3d.tools.sim.group import FakeMesh
from zero3d.tools.sim.patches import replaced
from zero3d.zero import optimizer, streams
from zero3d.zero.reductions import Reductions
from zero3d.zero.weights import Weights

HOST = "host"
UPDATED, USED, PREFETCHED, BACKWARD_ENDED = "updated", "used", "prefetched", "backward ended"  # of a log
EVENTS = ("arrived", "used", "gone")  # of a ring's buffer, as it makes them
FAULTS = (*EVENTS, "follow", "norm", "staging", "read", "result", "leaving", "down", "copies", "staged")


class Happened(NamedTuple):
    """An entry of a model's log: what began or ended, of which unit, and all that was over by then."""

    what: str
    unit: str
    moment: dict[str, int]

    def before(self, other: Happened) -> bool:
        """Return whether all of this is over before what is enqueued at the other one."""
        return all(other.moment.get(clock, 0) >= number for clock, number in self.moment.items())


class HostModel(Model):
    """The streams and the host's threads.

    without  the fault that is planted
    log      updates that have ended and gathers and uses that have begun, as they happened
    """

    def __init__(self, without: str = "") -> None:
        self._own = threading.local()
        self._lock = threading.RLock()
        super().__init__()
        self.without = without
        self.log: list[Happened] = []
        self.waits = 0

    @property
    def current(self) -> list[str]:  # type: ignore[override]
        """The streams of this thread, the current one last."""
        if not hasattr(self._own, "streams"):
            self._own.streams = [COMPUTE]
        found: list[str] = self._own.streams
        return found

    @current.setter
    def current(self, _: list[str]) -> None: ...

    @property
    def thread(self) -> str:
        """The clock of this thread."""
        name = threading.current_thread().name
        return HOST if threading.current_thread() is threading.main_thread() else f"thread {name}"

    def run(
        self,
        operation: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        stream: str = "",
        seconds: float | None = None,
    ) -> None:
        """Enqueue an operation on a stream, or do it on this thread where all tensors are the host's: in no time."""
        reads, writes = list(reads), list(writes)
        with self._lock:
            if not stream and not any(accelerator.is_here(tensor) for tensor in (*reads, *writes)):
                super().run(operation, reads, writes, self.thread, 0.0)
                return
            crossing = [tensor for tensor in (*reads, *writes) if tensor.dim() and not accelerator.is_here(tensor)]
            if crossing and not stream:
                seconds = sum(tensor.nbytes for tensor in crossing) / self.timeline.machine.host
            stream = stream or self.stream
            self.clocks.wait(stream, self.clocks.moment(self.thread))
            now = [tensor for tensor in reads if not accelerator.is_here(tensor) and not tensor.dim()]
            if now:  # numbers go with the launch
                super().run(operation, now, [], self.thread, 0.0)
            reads = [tensor for tensor in reads if not any(tensor is n for n in now)]
            super().run(operation, reads, writes, stream, seconds)

    def allocate(self, storage: torch.UntypedStorage, category: str = "") -> Buffer:
        """Give a storage memory of the current stream's pool, or the host's."""
        with self._lock:
            if storage.device.type != "cpu":
                return super().allocate(storage, category)
            self._buffers[storage._cdata] = buffer = Buffer(storage, self.thread, category or "host", {})
            return buffer

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give a storage's memory back."""
        with self._lock:
            super().free(storage)

    def _buffer(self, storage: torch.UntypedStorage) -> Buffer:
        buffer = super()._buffer(storage)
        if storage.device.type == "cpu" and buffer.stream == COMPUTE:
            buffer.stream = HOST  # there is no pool to go back to
        return buffer

    def _free(self, key: int) -> None:
        if self._buffers[key].stream.startswith((HOST, "thread")):
            self._shared.discard(key)
            del self._buffers[key]
        else:
            super()._free(key)

    def wait(self, moment: dict[str, int] | None = None) -> None:
        """Let this thread go on after a moment: of the current stream by default."""
        self.waits += 1
        with self._lock:
            self.clocks.wait(self.thread, self.clocks.moment(self.stream) if moment is None else moment)

    def note(self, what: str, unit: str = "") -> None:
        """Write the log: what is enqueued now comes after this moment."""
        before = self.clocks.moment(self.stream), self.clocks.moment(self.thread)
        self.log.append(Happened(what, unit, {key: max(m.get(key, 0) for m in before) for m in before for key in m}))


class HostOperations(Operations):
    """Tells a model of every operation that this thread dispatches, and lets it wait where the device makes it."""

    _model: HostModel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = [value for value in (*args, *kwargs.values(), out) if isinstance(value, Tensor)]
        here = [tensor for tensor in given if accelerator.is_here(tensor)]
        if here and name in ("copy_", "_to_copy"):
            outside = [tensor for tensor in given if not accelerator.is_here(tensor)]
            at_once = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if outside and not (at_once and all(map(accelerator.is_pinned, outside))):
                self._model.wait()
        elif here and name in accelerator.READS:
            self._model.wait()
        return out


class HostStream(Stream):
    """Stands for a torch.Stream of an accelerator, which the host may wait for."""

    _model: HostModel

    @property
    def device(self) -> torch.device:
        return torch.device(accelerator.NAME, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: HostEvent) -> None:
        if event.moment is not None and event.name != self._model.without:
            self._model.waits_for(self.name, event.moment)

    def synchronize(self) -> None:
        self._model.wait(self._model.clocks.moment(self.name))


class HostEvent:
    """Stands for a torch.Event."""

    def __init__(self, model: HostModel, name: str) -> None:
        self._model, self.name = model, name
        self.moment: dict[str, int] | None = None

    def record(self, stream: HostStream | None = None) -> None:
        self.moment = self._model.clocks.moment(self._model.stream if stream is None else stream.name)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.moment is not None and (self._model.without, self.name) != ("read", "arrived"):
            self._model.wait(self.moment)


# --- use --------------------------------------------------------------------------------------------------------------


class AcceleratedMesh(FakeMesh):
    """A mesh on the stand-in whose axes take NCCL's algorithms, for an engine that is to be modelled."""

    def __init__(self, model: HostModel, dp: int = 1, tp: int = 1, pp: int = 1) -> None:
        super().__init__(dp, tp, pp, "nccl")
        self.device = torch.device(accelerator.NAME, 0)
        self._model = model
        self.make_arena = self._arena

    def _arena(self, device: torch.device) -> LabellingArena:
        arena = LabellingArena(device)
        arena.model = self._model
        return arena

    def open_axis(self, name: str) -> Axis:
        """Make an axis; the fake group takes the CPU's tensors alone, and sends none."""
        with replaced(self, "device", torch.device("cpu")):
            axis = super().open_axis(name)
        axis.device = torch.device(accelerator.NAME, 0)
        return axis


@contextmanager
def on_accelerator(without: str = "") -> Iterator[HostModel]:
    """Model an engine that is built and used inside; `without`: plant one of FAULTS."""
    model = HostModel(without)
    with ExitStack() as stack:
        stack.enter_context(collectives_of(model))
        for owner, name, value in (*_streams(model), *_host(model), *_noted(model), *_planted(without)):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(HostOperations(model))
        yield model


Replacement = tuple[Any, str, Any]


def _streams(model: HostModel) -> Iterator[Replacement]:
    """Yield what stands for torch's streams, events and memory."""
    numbers: dict[str, int] = {}

    def numbered(what: str) -> int:
        numbers[what] = numbers.get(what, -1) + 1
        return numbers[what]

    class MadeStream(HostStream):
        def __init__(self, device: Any = None, *, priority: int = 0) -> None:
            owner = sys._getframe(1).f_locals.get("self")
            name = f"{type(owner).__name__} {getattr(owner, '_name', '')}".strip()
            super().__init__(model, f"{name} {numbered(name)}")

    class MadeEvent(HostEvent):
        def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
            self._tells_time = enable_timing  # and orders nothing, whoever looks at it
            makers = [sys._getframe(depth).f_code.co_qualname for depth in (1, 2)]
            name = EVENTS[numbered("event") % len(EVENTS)] if any("Buffer" in maker for maker in makers) else "event"
            super().__init__(model, "staged" if any("StagedGradients" in maker for maker in makers) else name)

        def query(self) -> bool:
            return self._tells_time or super().query()

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        model.free(storage)
        result = resize(storage, size)
        if size:
            model.allocate(storage)
        return result

    yield torch, "Stream", MadeStream
    yield torch, "Event", MadeEvent
    yield torch.accelerator, "current_stream", lambda *_: HostStream(model, model.stream)
    yield torch.UntypedStorage, "resize_", resized
    yield accelerator._arriving, "put", lambda into, values: into.copy_(values)


def _host(model: HostModel) -> Iterator[Replacement]:
    """Yield what tells of the host's threads, disks and numpy."""
    submit, result = Threads.submit, Future.result
    numpy, tolist = Tensor.numpy, Tensor.tolist
    own = threading.local()

    def submitted(pool: Threads, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        before, after = model.clocks.moment(model.thread), {}

        def task() -> Any:
            model.clocks.wait(model.thread, before)
            try:
                with HostOperations(model):
                    return work(*args, **kwargs)
            finally:
                after.update(model.clocks.moment(model.thread))

        future = submit(pool, task)
        future.after = after
        return future

    def waited(future: Future[Any], timeout: float | None = None) -> Any:
        try:
            return result(future, timeout)
        finally:
            if model.without != "result":
                model.clocks.wait(model.thread, dict(getattr(future, "after", {})))

    def seen(read: Callable[..., Any]) -> Callable[..., Any]:
        def called(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not accelerator.is_here(tensor):
                model.run(read.__name__, [tensor], [])
            return read(tensor, *args, **kwargs)

        return called

    def moving(move: Callable[..., Any]) -> Callable[..., Any]:
        def called(tier: Any, index: int, nbytes: int, buffer: Any) -> None:
            own.buffer = buffer
            move(tier, index, nbytes, buffer)

        return called

    def of_disk(move: Callable[..., Any], writes: bool) -> Callable[..., Any]:
        def called(slab: Any, index: int, memory: memoryview) -> None:
            into = [own.buffer.host]
            model.run("disk", [] if writes else into, into if writes else [])
            move(slab, index, memory)

        return called

    class Pinned(HostSlab):
        def __init__(self, parts: Any, device: torch.device, budget: Any = None) -> None:
            super().__init__(parts, device, budget)
            for part, memory in self.memory.items():
                for each in memory:
                    model.allocate(accelerator.pin(each).untyped_storage(), part)

    yield Threads, "submit", submitted
    yield Future, "result", waited
    yield Tensor, "numpy", seen(numpy)
    yield Tensor, "tolist", seen(tolist)
    for name in ("load", "store"):
        yield DiskStore, name, moving(getattr(DiskStore, name))
    for kind in (DiskSlab, RecordFile):
        yield kind, "read", of_disk(kind.read, True)
        if hasattr(kind, "write"):
            yield kind, "write", of_disk(kind.write, False)
    make = torch.tensor

    def from_host(values: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(values, *args, **kwargs)
        return made if device is None else made.to(device)

    yield torch, "tensor", from_host
    yield dist, "barrier", lambda *_, **__: None
    yield dist, "broadcast", lambda *_, **__: None  # this rank's are rank 0's
    yield tiers, "HostSlab", Pinned
    yield restore, "check_streams", lambda *_: None  # the stand-in makes no random numbers of its own


def _noted(model: HostModel) -> Iterator[Replacement]:
    """Yield what writes the log: updates when they are made, units when they are used, what is brought ahead."""
    update, gather, ready = RecordUpdates._update_buckets, Weights.gather, Weights.ready
    prefetch, end_backward = RecordUpdates.prefetch, Reductions.end_backward

    def updated(updates: Any, unit: Any, buckets: Any) -> None:
        update(updates, unit, buckets)
        model.note(UPDATED, unit.name)

    def gathered(weights: Any, exactly: bool = False) -> None:
        model.note(USED, weights.name)
        gather(weights, exactly)

    def is_ready(weights: Any) -> None:
        ready(weights)
        if not weights.sharded:
            model.note(USED, weights.name)

    def brought(updates: Any) -> None:
        model.note(PREFETCHED)
        prefetch(updates)

    def ended(reductions: Any) -> None:
        end_backward(reductions)
        if reductions.due:
            model.note(BACKWARD_ENDED)

    yield RecordUpdates, "_update_buckets", updated
    yield Weights, "gather", gathered
    yield Weights, "ready", is_ready
    yield RecordUpdates, "prefetch", brought
    yield Reductions, "end_backward", ended


def _planted(without: str) -> Iterator[Replacement]:
    """Yield what plants a fault; those of events and results are planted where they are."""
    nothing = lambda *_: None  # noqa: E731
    if without == "follow":
        yield streams.ThreadStream, "follow", nothing
    if without == "norm":
        yield optimizer, "wait_for_device", nothing
    if without == "leaving":

        def forgotten(copies: streams.ToHost, left: int) -> None:
            while len(copies._under_way) > left:
                copies._under_way.popleft()[1]()

        yield streams.ToHost, "_finish", forgotten
    if without == "copies":
        yield ring.Ring, "used", nothing
    if without == "down":
        yield streams.ToHost, "follow", nothing
    if without == "staging":
        yield executors, "wait_for_device", nothing
