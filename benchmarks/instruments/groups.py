"""Process groups that note every operation and take tensors of one device only, as NCCL's do.

    alike     one process stands for all ranks: what the others send is what this rank sends
    threads   the ranks are threads of this process, and what they send arrives

Point-to-point messages go by order between two ranks, over one communicator each; tags are ignored.
"""

from __future__ import annotations

import itertools
import threading
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
PATIENCE = 60.0  # seconds for another thread
Arrive = Callable[[list[Tensor]], object]
Logs = list[list["Operation | Wait | Read"]]  # of every rank


class WrongDevice(RuntimeError):
    """A group was given a tensor of another device than its own."""


class Lost(RuntimeError):
    """Another rank failed or does something else."""


class Operation(NamedTuple):
    """What one rank asks of a group.

    ranks   the group's, of the world
    sizes   elements of each tensor
    peer    rank of the world, of a message; None for a collective
    batch   which messages were issued together; each alone has a number of its own
    """

    group: str
    ranks: tuple[int, ...]
    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    peer: int | None = None
    batch: int | None = None
    label: Any = None


class Wait(NamedTuple):
    """A rank's compute waits for an operation, by its place in the rank's list."""

    operation: int


class Read(NamedTuple):
    """A rank's host waits for all that its compute waits for, since it reads a value."""


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

    device   the only one whose tensors groups take
    log      operations, waits and reads of every rank, in order
    """

    def __init__(self, device: str, world: int, threads: bool) -> None:
        self.device, self.world, self.threads = device, world, threads
        self.log: Logs = [[] for _ in range(world)]
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._left: dict[tuple[str, int], int] = defaultdict(int)
        self._mail: dict[tuple[str, int, int], deque[Tensor]] = defaultdict(deque)
        self.failed: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Let no thread wait for one that failed."""
        with self._changed:
            self.failed = self.failed or error
            self._changed.notify_all()

    def meet(self, at: tuple[str, int], place: int, size: int, brought: Any) -> list[Any]:
        """Return what all members of a group bring to one collective, by place in the group."""
        with self._changed:
            meeting = self._meetings[at]
            meeting[place] = brought
            self._changed.notify_all()
            self._until(lambda: len(meeting) == size, f"{at}: {sorted(meeting)} of {size} came")
            self._left[at] += 1
            if self._left[at] == size:
                del self._meetings[at], self._left[at]
        return [meeting[place] for place in range(size)]

    def post(self, group: str, source: int, target: int, values: Tensor) -> None:
        """Send."""
        with self._changed:
            self._mail[group, source, target].append(values)
            self._changed.notify_all()

    def fetch(self, group: str, source: int, target: int) -> Tensor:
        """Return the oldest message from a rank, when it is there."""
        box = self._mail[group, source, target]
        with self._changed:
            self._until(lambda: bool(box), f"{group}: nothing from {source} to {target}")
            return box.popleft()

    def _until(self, there: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self.failed is not None or there(), PATIENCE) or self.failed is not None:
            raise Lost(what) from self.failed


class Group(dist.ProcessGroup):
    """One group of a fabric as one rank sees it."""

    def __init__(self, fabric: Fabric, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._fabric, self._name, self._ranks, self._place = fabric, name, tuple(ranks), rank
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
        self, op: str, tensors: Sequence[Tensor], send: Tensor, arrive: Callable[[list[Tensor]], Any]
    ) -> Work:
        """Note a collective, and do it at once: `arrive` is given what all ranks have sent."""
        number = self._note(op, tensors)
        with torch.no_grad(), _disable_current_modes():
            if self._fabric.threads:
                self._count += 1
                about = op, tuple(t.numel() for t in tensors)
                brought = self._fabric.meet((self._name, self._count), self._place, self.size(), (about, send.clone()))
                if any(told != about for told, _ in brought):
                    raise Lost(
                        f"{self._ranks} do not agree on their operation {self._count}: {[t for t, _ in brought]}"
                    )
                arrive([values for _, values in brought])
            else:
                arrive([send.clone()] * self.size())
        return Work(None, lambda: self._waited(number))

    def _note(self, op: str, tensors: Sequence[Tensor], **more: Any) -> int:
        for t in tensors:
            if t.device.type != self._fabric.device:
                raise WrongDevice(f"{op} of a group on {self._fabric.device} was given a tensor on {t.device}")
        log = self._fabric.log[self._ranks[self._place]]
        dtype = tensors[0].dtype if tensors else None
        log.append(Operation(self._name, self._ranks, op, tuple(t.numel() for t in tensors), dtype, **more))
        return len(log) - 1

    def _waited(self, number: int) -> None:
        self._fabric.log[self._ranks[self._place]].append(Wait(number))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        rows = output.view(self.size(), -1)
        return self._collective("all_gather", [output, given], given.reshape(-1), lambda came: _fill(rows, came))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        def arrive(came: list[Tensor]) -> None:
            output.view(-1).copy_(_sum([values.view(self.size(), -1)[self._place] for values in came]))

        return self._collective("reduce_scatter", [output, given], given.reshape(-1), arrive)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Work:
        def arrive(came: list[Tensor]) -> None:
            _fill(output.view(self.size(), -1), [values.view(self.size(), -1)[self._place] for values in came])

        return self._collective("all_to_all", [output, given], given.reshape(-1), arrive)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        def arrive(came: list[Tensor]) -> None:
            largest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
            tensors[0].copy_(torch.stack(came).amax(0) if largest else _sum(came))

        return self._collective("all_reduce", tensors, tensors[0], arrive)

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
            with torch.no_grad(), _disable_current_modes():
                self._fabric.post(self._name, self._place, target, tensors[0].detach().clone())
        return Work(None, lambda: self._waited(number))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Work:
        number = self._message("receive", tensors[0], source)

        def finish() -> None:
            with torch.no_grad(), _disable_current_modes():
                if self._fabric.threads:
                    tensors[0].copy_(self._fabric.fetch(self._name, source, self._place))
                else:
                    tensors[0].zero_()

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
                fabric.log[dist.get_rank()].append(Read())
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


def on_threads(world: int, case: Callable[[], Any], device: str = "cpu") -> tuple[list[Any], Logs]:
    """Run `case` as every rank of a world, each a thread; return results and what every rank asked of its groups.

    Raises the first error of a rank.
    """
    fabric, store = Fabric(device, world, threads=True), HashStore()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            torch.autograd.set_multithreading_enabled(False)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
            results[rank] = case()
        except BaseException as error:  # noqa: BLE001 (raised below)
            fabric.fail(error)
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
    if fabric.failed is not None:
        raise fabric.failed
    return results, fabric.log
