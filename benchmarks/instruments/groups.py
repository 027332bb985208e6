"""Process groups that note every operation and take tensors of one device only, as NCCL's do.

    alike     one process stands for all ranks: what the others send is what this rank sends
    threads   the ranks are threads of this process, and what they send arrives; they may share one device

Point-to-point messages go by order between two ranks, over one communicator each; tags are ignored.

On threads a collective is asynchronous, as on an accelerator: the call leaves what this rank sends and returns, and
`wait` fills in what came, which reads as NaN before. So ranks that do not do the same may call their groups in other
orders. Here, unlike there, a host that waits for a collective stands still until all have come, since the values it
computes with are its own. Where all ranks stand still, no one can come any more:

    STAND_IN   each goes on with values of its own for those of the others, as an accelerator's host goes on; `stuck`
               says where. The log is then what the program asks of its groups, whoever waits for whom for ever:
               `rendezvous` says that
    TIME_OUT   each is told what a backend says when its time is up

On a device with streams a group has one of its own on each rank, as NCCL's have: what a rank sends is copied there
when its current stream has come so far, and what came is copied in when the others' have; `wait` lets the current
stream wait for that. All of it is ordered by events between the ranks' streams, so ranks may share one card.

So no run depends on a clock: that all stand still is seen, not waited for. The same holds for a rank that stops or
comes late by plan (`plan`): it goes on when all others stand still, or ended.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "instrument"
READS = ("item", "tolist", "__bool__", "__float__", "__int__")
PATIENCE = 60.0  # seconds for another thread that neither ends nor stands still: a fault of the instrument
COMPUTE = "compute"  # the stream on which a rank begins
STAND_IN, TIME_OUT = "stand-in", "time out"
Arrive = Callable[[list[Tensor]], object]
Logs = list[list["Operation | Wait | Read | Follow"]]  # of every rank


class WrongDevice(RuntimeError):
    """A group was given a tensor of another device than its own."""


class Lost(RuntimeError):
    """Another rank failed or does something else."""


class Stopped(BaseException):
    """Ends a rank that had stopped by plan, when all others have ended."""


class Operation(NamedTuple):
    """What one rank asks of a group.

    ranks   the group's, of the world
    sizes   elements of each tensor
    peer    rank of the world, of a message; None for a collective
    batch   which messages were issued together; each alone has a number of its own
    label   what is sent or for what, if anybody says so: ranks' must be equal
    splits  of an uneven all-to-all: elements to every rank of the group, and from every rank
    stream  on which it was asked for
    """

    group: str
    ranks: tuple[int, ...]
    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    peer: int | None = None
    batch: int | None = None
    label: Any = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    stream: str = COMPUTE


class Wait(NamedTuple):
    """A stream of a rank waits for an operation, by its place in the rank's list."""

    operation: int
    stream: str = COMPUTE


class Read(NamedTuple):
    """A rank's host waits for all that a stream waits for, since it reads a value."""

    stream: str = COMPUTE


class Follow(NamedTuple):
    """A stream waits for what another one had been given when the rank's list had so many entries."""

    stream: str
    other: str
    place: int


class Work:
    """An operation under way. Waiting is noted, once."""

    def __init__(self, finish: Callable[[], object] | None, waited: Callable[[], object]) -> None:
        self._finish, self._waited, self._over = finish, waited, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            self._over = True
            self._waited()
            if self._finish is not None:
                self._finish()
        return True

    def is_completed(self) -> bool:
        return self._over


class Fabric:
    """What lies between ranks: `alike`, or threads that meet here.

    device    the only one whose tensors groups take
    log       operations, waits and reads of every rank, in order
    lost      what waits do that nobody can end: STAND_IN or TIME_OUT
    plan      called before every operation of a thread, with its rank and how many it has asked for; it may raise, or
              call `come_late` or `stop`
    stuck     where ranks stood still for ever, in words
    """

    def __init__(
        self,
        device: str,
        world: int,
        threads: bool,
        lost: str = STAND_IN,
        plan: Callable[[Fabric, int, int], None] | None = None,
    ) -> None:
        self.device, self.world, self.threads, self.lost, self.plan = device, world, threads, lost, plan
        self.log: Logs = [[] for _ in range(world)]
        self.stuck: list[str] = []
        self.failed: BaseException | None = None
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._mail: dict[tuple[str, int, int], deque[Any]] = defaultdict(deque)
        self._alive = set(range(world))
        self._gone: set[int] = set()  # that ended by an error
        self._still: dict[int, _Stand] = {}  # ranks that wait here, and for what

    def fail(self, error: BaseException) -> None:
        """Let no thread wait for one that failed."""
        with self._changed:
            self.failed = self.failed or error
            self._changed.notify_all()

    def end(self, rank: int, by_error: bool = False) -> None:
        """Say that a rank's thread ends."""
        with self._changed:
            self._alive.discard(rank)
            if by_error:
                self._gone.add(rank)
            self._look()

    # --- what ranks bring and take --------------------------------------------------------------

    def bring(self, at: tuple[str, int], place: int, brought: Any) -> None:
        """Leave what one member of a group brings to a collective of its."""
        with self._changed:
            self._meetings[at][place] = brought
            self._look()

    def collect(self, at: tuple[str, int], ranks: Sequence[int], what: str) -> list[Any] | None:
        """Return what all members bring, by place in the group; None where one never comes. Others' calls end then."""
        meeting = self._meetings[at]

        def missing() -> set[int]:
            return {rank for place, rank in enumerate(ranks) if place not in meeting}

        came = self._until(lambda: not missing(), f"{what}: {{missing}} did not come", missing)
        return [meeting[place] for place in range(len(ranks))] if came else None

    def post(self, group: str, source: int, target: int, values: Any) -> None:
        """Send."""
        with self._changed:
            self._mail[group, source, target].append(values)
            self._look()

    def fetch(self, group: str, source: int, target: int, rank: int) -> Any:
        """Return the oldest message from a place in a group, when it is there; None if it never comes from `rank`."""
        box = self._mail[group, source, target]
        came = self._until(lambda: bool(box), f"message on {group}: {{missing}} sent none", lambda: {rank})
        return box.popleft() if came else None

    def differ(self, what: str, rank: int) -> None:
        """Say that the ranks of a group ask for other things; `rank` noticed. Raises Lost unless this stands in."""
        if self.lost != STAND_IN or not self.threads:
            raise Lost(what)
        self.stuck.append(f"rank {rank}: {what}")

    # --- who stands still -----------------------------------------------------------------------

    def come_late(self) -> None:
        """Have this thread wait until all others stand still or have ended."""
        self._until(lambda: False, "", late=True)

    def stop(self) -> None:
        """Have this thread do nothing more. Raises Stopped when all others have ended."""
        self._until(lambda: self._alive == {_thread.rank}, "", stops=True)
        raise Stopped

    def _until(
        self,
        there: Callable[[], bool],
        what: str,
        missing: Callable[[], set[int]] = set,
        late: bool = False,
        stops: bool = False,
    ) -> bool:
        """Wait until something is there, and return True; False where it never will be and this fabric stands in."""
        rank, stand = _thread.rank, _Stand(there, late, stops)
        with self._changed:
            self._still[rank] = stand
            self._look()
            try:
                while not there() and not stand.let_go and self.failed is None:
                    if missing() & self._gone:
                        raise self._peer_went_away(what, missing() & self._gone)
                    if not self._changed.wait(PATIENCE):
                        raise Lost(f"rank {rank}: {what.format(missing=sorted(missing()))}")
            finally:
                del self._still[rank]
            if late or (there() and not stand.let_go):  # let go is let go, whoever is faster then
                return True
            told = f"rank {rank}: {what.format(missing=sorted(missing()))}"
            if self.failed is not None:
                raise Lost(told) from self.failed
            self.stuck.append(told)
        if self.lost == TIME_OUT:
            _thread.waited += PATIENCE
            raise RuntimeError(f"Timed out waiting for an operation to complete ({told})")  # as gloo says it
        return False

    def _look(self) -> None:
        """Let those go who wait for what cannot come, if all stand still; those that come late first."""
        self._changed.notify_all()
        waiting = {rank: stand for rank, stand in self._still.items() if not stand.stops}
        if self._alive - set(self._still) or not waiting or any(s.let_go or s.there() for s in waiting.values()):
            return
        late = [stand for stand in waiting.values() if stand.late]
        for stand in late or waiting.values():
            stand.let_go = True

    @staticmethod
    def _peer_went_away(what: str, who: set[int]) -> RuntimeError:
        """Return what gloo says of a process that is gone."""
        return RuntimeError(f"Connection closed by peer ({what.format(missing=sorted(who))})")


class _Stand:
    """What a rank that stands still waits for; `let_go`: in vain. It comes late, or stops, by plan."""

    def __init__(self, there: Callable[[], bool], late: bool, stops: bool) -> None:
        self.there, self.late, self.stops, self.let_go = there, late, stops, False


class _Thread(threading.local):
    """What this thread is: a rank, its current streams, and what is asked of groups just now."""

    def __init__(self) -> None:
        self.rank = 0
        self.log: list[Operation | Wait | Read | Follow] = []
        self.streams = [COMPUTE]
        self.label: Any = None
        self.waited = 0.0  # seconds, in vain


_thread = _Thread()


class Lane:
    """A group's stream on one rank's device; on the CPU there is none.

    What ranks sent lives until this rank's stream has read it and all that followed: as long as the group.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = None if device == "cpu" else torch.Stream(self._device)
        self._kept: list[Any] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enqueue on it inside, after what the current stream was given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def send(self) -> torch.Event | None:
        """Return when what was enqueued is over; inside `entered`."""
        if self._stream is None:
            return None
        event = torch.Event(self._device)
        event.record(self._stream)
        return event

    @contextmanager
    def receiving(self, sent: Sequence[torch.Event | None]) -> Iterator[None]:
        """Enqueue on it inside, when others have sent; the current stream then waits for that."""
        if self._stream is None:
            yield
            return
        for event in sent:
            if event is not None:
                self._stream.wait_event(event)
        with self._stream:
            yield
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def keep(self, sent: Any) -> None:
        """Keep what was read alive: another rank's allocator may not have its memory again."""
        if self._stream is not None:
            self._kept.append(sent)


class Group(dist.ProcessGroup):
    """One group of a fabric as one rank sees it."""

    def __init__(self, fabric: Fabric, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._fabric, self._name, self._ranks, self._place = fabric, name, tuple(ranks), rank
        self._rank = self._ranks[rank]
        self._lane = Lane(fabric.device) if fabric.threads else Lane("cpu")
        self.options = SimpleNamespace(_timeout=timeout)
        self._count = 0

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._place

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: Any) -> Group:
        if torch.device(device).type != self._fabric.device:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    # --- collectives ----------------------------------------------------------------------------

    def _collective(
        self,
        op: str,
        tensors: Sequence[Tensor],
        send: Tensor | list[Tensor],
        arrive: Callable[[list[Any]], Any],
        fills: Tensor | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> Work:
        """Note a collective and start it: `arrive` is given what all ranks have sent.

        fills  what it fills in; it reads as NaN until it is waited for
        """
        number = self._note(op, tensors, label=_thread.label, splits=splits)
        with torch.no_grad(), _disable_current_modes(), self._lane.entered():
            mine = send.clone() if isinstance(send, Tensor) else [part.clone() for part in send]
            if not self._fabric.threads:
                arrive([mine] * self.size())
                return Work(None, lambda: self._waited(number))
            self._count += 1
            at, about = (self._name, self._count), (op, None if splits else tuple(t.numel() for t in tensors))
            self._fabric.bring(at, self._place, (about, mine, self._lane.send()))
            if fills is not None and fills.is_floating_point():
                fills.fill_(float("nan"))

        def finish() -> None:
            came = self._fabric.collect(at, self._ranks, f"{op} {_thread.label or ''} on group {self._name}")
            if came is not None and any(told != about for told, *_ in came):
                self._fabric.differ(
                    f"{self._ranks} do not agree on their operation {at}: {[told for told, *_ in came]}", self._rank
                )
                came = None
            with torch.no_grad(), _disable_current_modes(), self._lane.receiving([e for *_, e in came or []]):
                arrive([mine] * self.size() if came is None else [values for _, values, _ in came])
            self._lane.keep(came)

        return Work(finish, lambda: self._waited(number))

    def _note(self, op: str, tensors: Sequence[Tensor], **more: Any) -> int:
        for t in tensors:
            if t.device.type != self._fabric.device:
                raise WrongDevice(f"{op} of a group on {self._fabric.device} was given a tensor on {t.device}")
        log = self._fabric.log[self._rank]
        if self._fabric.plan is not None:
            self._fabric.plan(self._fabric, self._rank, sum(isinstance(entry, Operation) for entry in log))
        dtype, sizes = tensors[0].dtype if tensors else None, tuple(t.numel() for t in tensors)
        log.append(Operation(self._name, self._ranks, op, sizes, dtype, **more, stream=_thread.streams[-1]))
        return len(log) - 1

    def _waited(self, number: int) -> None:
        self._fabric.log[self._rank].append(Wait(number, _thread.streams[-1]))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        rows = output.view(self.size(), -1)
        return self._collective(
            "all_gather", [output, given], given.reshape(-1), lambda came: _fill(rows, came), fills=output
        )

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        def arrive(came: list[Tensor]) -> None:
            output.view(-1).copy_(_sum([values.view(self.size(), -1)[self._place] for values in came]))

        return self._collective("reduce_scatter", [output, given], given.reshape(-1), arrive, fills=output)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Work:
        """Exchange equal parts, or so many rows with each rank."""

        def arrive(came: list[Tensor]) -> None:
            _fill(output.view(self.size(), -1), [values.view(self.size(), -1)[self._place] for values in came])

        if not output_sizes and not input_sizes:
            return self._collective("all_to_all", [output, given], given.reshape(-1), arrive, fills=output)
        width = given[:1].numel() if len(given) else output[:1].numel()
        sends, receives = (tuple(width * rows for rows in sizes) for sizes in (input_sizes, output_sizes))

        def arrive_uneven(came: list[list[Tensor]]) -> None:
            parts = [parts[self._place] for parts in came]
            if tuple(len(part) for part in parts) != receives:  # stood in for, or the ranks do not agree
                self._fabric.differ(f"{self._ranks} do not agree on how much they exchange", self._rank)
                parts = [output.new_zeros(size) for size in receives]
            output.view(-1).copy_(torch.cat(parts))

        sent = list(torch.split(given.reshape(-1), sends))
        return self._collective("all_to_all", [output, given], sent, arrive_uneven, output, (sends, receives))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        def arrive(came: list[Tensor]) -> None:
            largest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
            tensors[0].copy_(torch.stack(came).amax(0) if largest else _sum(came))

        return self._collective("all_reduce", tensors, tensors[0], arrive, fills=tensors[0])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        root = opts.rootRank
        return self._collective("broadcast", tensors, tensors[0], lambda came: tensors[0].copy_(came[root]))

    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", [], torch.zeros(()), lambda came: None)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    # --- messages -------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> Work:
        number = self._message("send", tensors[0], target)
        if self._fabric.threads:
            with torch.no_grad(), _disable_current_modes(), self._lane.entered():
                self._fabric.post(self._name, self._place, target, (tensors[0].detach().clone(), self._lane.send()))
        return Work(None, lambda: self._waited(number))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        number = self._message("receive", tensors[0], source)

        def finish() -> None:
            with torch.no_grad(), _disable_current_modes():
                came = None
                if self._fabric.threads:
                    came = self._fabric.fetch(self._name, source, self._place, self._ranks[source])
                values, sent = (None, None) if came is None else came
                with self._lane.receiving([sent]):
                    tensors[0].zero_() if values is None else tensors[0].copy_(values)
                self._lane.keep(came)

        return Work(finish, lambda: self._waited(number))

    def _message(self, op: str, t: Tensor, peer: int) -> int:
        batch = getattr(_batches, "open", None)
        label = getattr(t, "label", None)
        about = {"peer": self._ranks[peer], "batch": next(_numbers) if batch is None else batch, "label": label}
        return self._note(f"batched {op}" if batch is not None else op, [t], **about)


def _fill(rows: Tensor, came: Sequence[Tensor]) -> None:
    for row, values in zip(rows, came, strict=True):
        row.copy_(values)


def _sum(came: Sequence[Tensor]) -> Tensor:
    """Return ((t0 + t1) + t2) + ..."""
    total = came[0].clone()
    for values in came[1:]:
        total += values
    return total


# --- streams ------------------------------------------------------------------------------------


class Stream:
    """A stream of a rank on a thread: who waits for whom is noted, and what is enqueued is done at once."""

    def __init__(self, log: list[Operation | Wait | Read | Follow], name: str) -> None:
        self._log, self.name = log, name

    def __enter__(self) -> Stream:
        _thread.streams.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.streams.pop()

    def wait_stream(self, other: Stream) -> None:
        """Let what comes next wait for all that the other has been given."""
        self._log.append(Follow(self.name, other.name, len(self._log)))

    def record_event(self, event: Event | None = None) -> Event:
        """Record what this stream has been given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what comes next wait for what an event has recorded."""
        if event.stream is not None:
            self._log.append(Follow(self.name, event.stream.name, event.place))

    def synchronize(self) -> None:
        """Let the host wait for what it has been given."""
        self._log.append(Read(self.name))


class Event:
    """What a stream had been given at a moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = current_stream() if stream is None else stream
        self.place = len(self.stream._log)

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)


def current_stream(*_: Any) -> Stream:
    """Return the stream on which this thread enqueues."""
    return Stream(_thread.log, _thread.streams[-1])


@contextmanager
def on_streams() -> Iterator[None]:
    """Give engines that are built on threads inside the side streams that they have on an accelerator."""
    from zero3d.zero.streams import SideStream

    begin = SideStream.__init__

    def with_stream(side: Any, *given: Any, **named: Any) -> None:
        begin(side, *given, **named)
        side._stream = Stream(_thread.log, side._name)

    with (
        mock.patch.object(SideStream, "__init__", with_stream),
        mock.patch.object(torch.accelerator, "current_stream", current_stream),
        mock.patch.object(torch, "Event", Event),
    ):
        yield


def note_alone(what: str) -> None:
    """Note in this thread's log something that no group is asked for."""
    _thread.log.append(Operation("", (_thread.rank,), what, (), None, stream=_thread.streams[-1]))


@contextmanager
def labelled(label: Any) -> Iterator[None]:
    """Say what this thread asks groups for inside."""
    before, _thread.label = _thread.label, label
    try:
        yield
    finally:
        _thread.label = before


# --- starting them ------------------------------------------------------------------------------


class _Batch(threading.local):
    """The number of the batch that this thread is issuing."""

    open: int | None = None


_batches = _Batch()
_numbers = itertools.count()  # of batches, and of messages issued alone
_BATCHED = dist.batch_isend_irecv


def _batch(operations: list[dist.P2POp]) -> Any:
    """Issue messages as one batch: torch asks only groups of its own class whether they take batches."""
    _batches.open = next(_numbers)
    try:
        return _BATCHED(operations)
    finally:
        _batches.open = None


@contextmanager
def _backend(fabric: Fabric) -> Iterator[None]:
    """Let torch.distributed make its groups of this fabric inside."""

    def create(asked: Any, _: Any) -> Group:
        ranks = asked.global_ranks_in_group or range(asked.group_size)
        return Group(fabric, asked.group_id, ranks, asked.group_rank, asked.timeout)

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(t: Tensor, *rest: Any) -> Any:
            if dist.is_initialized():
                fabric.log[dist.get_rank()].append(Read(_thread.streams[-1]))
            return method(t, *rest)

        return read

    backend = dist.Backend
    if BACKEND.upper() not in backend._plugins:
        backend.register_backend(BACKEND, create, extended_api=True, devices=[fabric.device])
    with (
        mock.patch.dict(backend._plugins, {BACKEND.upper(): backend._BackendPlugin(create, True)}),
        mock.patch.dict(backend.backend_capability, {BACKEND: [fabric.device]}),
        mock.patch.dict(backend.default_device_backend_map, {fabric.device: BACKEND}),
        mock.patch.object(dist, "batch_isend_irecv", _batch),
        mock.patch.multiple(Tensor, **{name: reading(getattr(Tensor, name)) for name in READS}),
    ):
        yield


@contextmanager
def alike(world: int, rank: int = 0, device: str = "cpu") -> Iterator[Fabric]:
    """Make this process a rank among others that do what it does; yields the fabric, whose log tells what that was."""
    fabric = Fabric(device, world, threads=False)
    with _backend(fabric):
        dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world)
        try:
            yield fabric
        finally:
            dist.destroy_process_group()


def on_threads(
    world: int,
    case: Callable[[], Any],
    device: str = "cpu",
    stuck: list[str] | None = None,
    errors: list[BaseException] | None = None,
) -> tuple[list[Any], Logs]:
    """Run `case` as every rank of a world, each a thread; return results and what every rank asked of its groups.

    stuck  is told where all ranks stood still: each went on with values of its own (see above). Without it that is an
           error
    errors is told the first error of a rank, which ends all; without it that is raised
    """
    fabric = Fabric(device, world, threads=True)
    results = _run(fabric, case)
    if fabric.failed is not None:
        if errors is None:
            raise fabric.failed
        errors.append(fabric.failed)
    if stuck is None and fabric.stuck:
        raise Lost("all ranks stood still: " + "; ".join(fabric.stuck))
    if stuck is not None:
        stuck.extend(fabric.stuck)
    return results, fabric.log


def each_on_a_thread(
    world: int, case: Callable[[], Any], plan: Callable[[Fabric, int, int], None], device: str = "cpu"
) -> tuple[list[Any], Logs]:
    """Do so where ranks fail, come late or stop by plan; what one raises is its result.

    The others are told what gloo tells: that a connection was closed, or that time is up. zero3d's clock then shows
    that they have waited, which nobody does.
    """
    from zero3d.distributed import axis

    fabric = Fabric(device, world, threads=True, lost=TIME_OUT, plan=plan)
    with mock.patch.object(axis, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + _thread.waited)):
        return _run(fabric, case, apart=True), fabric.log


def _run(fabric: Fabric, case: Callable[[], Any], apart: bool = False) -> list[Any]:
    """Return what each rank's thread returns; or raises, if ranks are `apart`: else one that fails ends all."""
    world, store = fabric.world, HashStore()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        _thread.rank, _thread.log = rank, fabric.log[rank]
        try:
            torch.autograd.set_multithreading_enabled(False)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
            results[rank] = case()
            fabric.end(rank)
        except BaseException as error:  # noqa: BLE001 (raised below)
            results[rank] = error
            if not apart:
                fabric.fail(error)
            fabric.end(rank, by_error=True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _backend(fabric), mock.patch.object(dist.distributed_c10d, "_world", ThreadLocalWorld()):
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world)]
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # torch keeps groups by name, which ranks share
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return results
