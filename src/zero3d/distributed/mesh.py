"""The ranks of a run on their axes: DP = world / (PP x TP), tp innermost (degrees.py has the arithmetic).

An axis over which states are cut has two process groups over the same ranks (axis.Axis, groups.py), or one where an
engine asks for it (zero.communicators); every other axis has one, since a group takes device memory
(Degrees.process_groups). Engines that share a mesh may ask for different numbers: the second group is made for the
first engine that needs it. The groups of one rank's axes make torch's DeviceMesh.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store

from zero3d.distributed.axis import Axis, backends_of, leave_note, read_note, say_ended
from zero3d.distributed.degrees import AXES, SLOT, Degrees, Place
from zero3d.distributed.devices import Launched, choose_device, claim_device
from zero3d.distributed.groups import EARLY, backend_options, check_carries, new_group, options_of, timeout, warm_up
from zero3d.distributed.order_watch import OrderWatch
from zero3d.distributed.rendezvous import end_world, world_store
from zero3d.distributed.waiting import StoreExchange
from zero3d.errors import MeshError
from zero3d.memory.arena import Arena
from zero3d.watchdog.flight_recorder import FACT, recorder
from zero3d.watchdog.heartbeat import WATCH, Heartbeat

# Until a rank that waits for a peer is given up. On gloo torch's own default is 30 minutes. A run under a watchdog
# (zero3d train) keeps it, since the watchdog reports earlier; for an Engine alone nobody else would say who waits for
# whom.
PATIENCE, WATCHED = timedelta(minutes=10), timedelta(minutes=30)
TIMEOUT = "ZERO3D_TIMEOUT"  # seconds in the place of PATIENCE
A_DAY = 24 * 3600.0  # seconds that ranks wait for one that tokenizes, or writes a checkpoint
# By these a launcher shows a rank some of its host's devices alone.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class Mesh:
    """The ranks of a run, arranged by degree; starts torch.distributed when nobody has.

    dp, tp, pp  degrees. Their product must equal the world; one may be left out (dp together with others, which are
                then 1)
    ep          number of neighbours on the dp axis among which experts of mixtures are shared out; it divides dp
    sp          number of neighbours on dp among which each sequence is cut into parts; it divides dp
    shard       number of neighbours on dp over which states are cut; it divides dp, and states are repeated over dp /
                shard. Left out, they are cut over all of dp
    device      where this rank computes; it becomes the current device (default: its accelerator by LOCAL_RANK, if
                that has float64, else cpu; without a number, as "cuda": the current one, if 0 that by LOCAL_RANK).
                Where nobody has, it decides with what torch.distributed starts
    debug       compare the order of gathers before every gather: slow, and names a culprit at once

    Raises MeshError. Groups are made on first use of an axis, by its ranks together; an engine uses all it needs
    before its first step.
    """

    def __init__(
        self,
        dp: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        ep: int | None = None,
        sp: int | None = None,
        shard: int | None = None,
        *,
        device: str | torch.device | None = None,
        debug: bool = False,
    ) -> None:
        self.device = choose_device(device, _launched())
        self._known = read_note() if dist.is_initialized() else ""  # in a world that was there before
        _users.add(self)  # before the world is looked at: another mesh may be collected meanwhile
        start_distributed(self.device)
        if dist.group.WORLD not in _begun:
            _users.discard(self)
        elif dist.get_world_size() == 1:  # peers would not collect theirs at the same time
            weakref.finalize(self, _end_unused, os.getpid()).atexit = False
        check_carries(self.device)
        self.world = dist.get_world_size()
        self.degrees = Degrees.resolve(self.world, dp, tp, pp, ep, sp, shard)
        self.pp = self.degrees.pp
        self.dp = self.degrees.dp
        self.tp = self.degrees.tp
        self.ep = self.degrees.ep
        self.sp = self.degrees.sp
        self.debug = debug
        self.make_arena: Callable[[torch.device], Arena] = Arena  # an observer passes one that tells it of buffers
        self.make_stores: Callable[[Any], Any] | None = None  # a dry run's, in place of `offload.tiers.Stores`
        self.communicators = usual_communicators(self.device)  # groups of axes that are opened now: engines say theirs
        self._axes: dict[int, dict[str, Axis]] = {1: {}, 2: {}}  # by this number
        self._node = 1  # ranks of the axis "node"
        self._watch: OrderWatch | None = None  # of all axes, once there is one of more than one rank
        self.heartbeat = Heartbeat.join(os.environ.get(WATCH), self.rank)  # nobody's, unless a worker has begun it

    def close(self) -> None:
        """End the groups of all axes, and torch.distributed where a mesh began it and none that uses it is left.

        All ranks call it, when no engine uses the mesh any more. In a world of one process a mesh that is collected
        counts as closed.
        """
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        opened = [axis for axes in self._axes.values() for axis in axes.values()]
        groups = dict.fromkeys(group for axis in opened for group in (axis.gathers, axis.reductions))
        for axis in opened:
            axis.close()
        for group in groups:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        for axes in self._axes.values():
            axes.clear()
        if self in _users:
            _users.discard(self)
            _end_unused(os.getpid())

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return dist.get_rank()

    @property
    def on_cpu(self) -> bool:
        """Return whether the ranks of this mesh compute on CPUs."""
        return self.device.type == "cpu"

    @property
    def place(self) -> Place:
        """This rank's coordinates."""
        return self.degrees.place(self.rank)

    @property
    def row(self) -> int:
        """Return which of `degrees.rows` parts of a batch this rank trains on; an sp group has one together."""
        return self.place.dp // self.sp

    @property
    def shard(self) -> int:
        """Return over how many neighbours on dp states are cut."""
        return self.degrees.size("shard")

    @property
    def data(self) -> Axis:
        """The dp axis as this rank sees it: the ranks that hold the same layers."""
        return self.axis("dp")

    @property
    def everyone(self) -> Axis:
        """All ranks of the mesh, over the default group; the dp axis itself where there is no other."""
        return self.axis("dp" if self.dp == self.world else "world")

    @property
    def model_parallel(self) -> Axis:
        """The ranks that hold one copy of the model together with this one: pipeline stages, each with its tp ranks."""
        return self.axis("pp" if self.tp == 1 else "tp" if self.pp == 1 else "replica")  # its name in the ledger

    def axis(self, name: str) -> Axis:
        """Return pp, dp, tp, world, replica (the model-parallel group), a fold or its complement, and make its groups.

        An axis that is all of another one is that one: the complement of a degree of 1 is dp itself.
        """
        name, axes, others = (
            self.degrees.group(name),
            self._axes[self.communicators],
            self._axes[3 - self.communicators],
        )
        if name not in axes:
            if name in others:
                axes[name] = axis = self._with_groups(others[name])
            else:
                known = {each: list(self._ranks(each)) for each in (*axes, *others, name)}
                self.heartbeat.tell(axes=known, **{FACT: recorder() is not None})
                axes[name] = axis = self.open_axis(name)
            if axis.size > 1:
                atexit.register(_close, weakref.ref(axis))
        return axes[name]

    def node(self, ranks: int) -> Axis:
        """Return so many neighbours on dp, who keep second shards together, as the axis "node", and make its group.

        One of another number of ranks, which an engine may still use, is kept as "node/RANKS".
        """
        if ranks != self._node:
            for name, becomes in (("node", f"node/{self._node}"), (f"node/{ranks}", "node")):
                for axes in self._axes.values():
                    if name in axes:
                        axes[becomes] = axes.pop(name)
            self._node = ranks
        return self.axis("node")

    def open_axis(self, name: str) -> Axis:
        """Make an axis and its groups. All its ranks call it; a dry run has axes of its own."""
        ranks = self._ranks(name)
        position, size = ranks.index(self.rank), len(ranks)
        patience = EARLY * timeout(self.device).total_seconds() if self.world > 1 else math.inf
        if size == 1:  # a read may wait for a peer on another axis
            return Axis(name, 0, 1, device=self.device, patience=patience, heartbeat=self.heartbeat)
        on_host = backends_of()[self.device.type] in ("gloo", "fake")
        make = partial(new_group, name, ranks, self.device, size == self.world)  # in the order of the axis
        # On the host a group has no options, and every pair of its ranks a connection.
        apart = name == "replica" or name.startswith("node")
        of_all = name == "world" or (on_host and size == self.world and not apart)
        first = dist.group.WORLD if of_all else make()
        second = make() if self._has_two(name) else first
        axis = Axis(
            name, position, size, first, second, device=self.device, patience=patience, heartbeat=self.heartbeat
        )
        axis.meet = None if on_host else self._through_the_store(name, ranks)
        if axis.backend != "fake":
            self._watch_order(axis, ranks)
        warm_up(axis)
        return axis

    def _with_groups(self, axis: Axis) -> Axis:
        """Return an axis that was opened with another number of groups, with as many as are asked for now."""
        if axis.size == 1:
            return axis
        if not self._has_two(axis.name):
            return replace(axis, reductions=axis.gathers)
        ranks = self._ranks(axis.name)
        axis = replace(axis, reductions=new_group(axis.name, ranks, self.device, len(ranks) == self.world))
        if axis.log is not None:
            self._watch_order(axis, ranks)
        warm_up(axis)
        return axis

    def _has_two(self, name: str) -> bool:
        """Return whether an axis has a group for gathers and another one for reductions."""
        return self.degrees.process_groups(self.communicators).get(name) == 2

    def _watch_order(self, axis: Axis, ranks: Sequence[int]) -> None:
        """Compare what ranks of an axis have begun with each other when nothing moves, and end waits without end."""
        if self._watch is None:
            with suppress(RuntimeError):  # a store that cannot count is one of a single process
                self._watch = OrderWatch(_get_default_store(), self.rank, self.world, self.heartbeat, _note_order)
                atexit.register(_close_watch, weakref.ref(self._watch))
        if self._watch is not None:
            self._watch.add(axis, ranks)

    def _ranks(self, name: str) -> Sequence[int]:
        """Return the ranks of this rank's axis, in its order."""
        if name == "world":
            return range(self.world)
        if name.startswith("node"):
            return self.degrees.neighbours(self.rank, int(name.removeprefix("node/")) if "/" in name else self._node)
        return self.degrees.model_parallel(self.rank) if name == "replica" else self.degrees.along(name, self.rank)

    def _through_the_store(self, name: str, ranks: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Return a function that gathers a few numbers from ranks that may come hours apart."""
        called = f"{name}/{ranks[0]}-{ranks[-1]}x{len(ranks)}"  # in one world no other axis of this name has these
        position = ranks.index(self.rank)
        return StoreExchange(_get_default_store(), called, position, len(ranks), A_DAY, self._known).exchange

    @property
    def torch(self) -> DeviceMesh:
        """The axes of more than one rank as torch's DeviceMesh, over the groups that gathers use. Raises MeshError."""
        axes = [self.axis(name) for name in AXES]
        groups = [axis.gathers for axis in axes if axis.gathers is not None]
        if not groups:
            raise MeshError("one rank has no axis of more than one rank, and so no DeviceMesh.")
        names = tuple(axis.name for axis in axes if axis.gathers is not None)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        ranks = torch.arange(self.world).view([axis.size for axis in axes if axis.gathers is not None])
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine, as the launcher says."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def local_world(self) -> int | None:
        """How many ranks this machine has; None where no launcher says so."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(ranks) if ranks.isdecimal() and int(ranks) > 0 else None

    @property
    def threads_asked(self) -> int | None:
        """Return the number of threads in OMP_NUM_THREADS; None if it is unset or 1, as every launcher sets it."""
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return int(threads) if threads.isdecimal() and int(threads) > 1 else None

    @contextmanager
    def waiting_room(self) -> Iterator[Axis]:
        """Give an axis of all ranks, through the store, with a day's patience: one rank works while the others wait.

        It carries exchanges only, and there is no connection between any two ranks.
        """
        axis = self.store_axis("world")
        axis.heartbeat = self.heartbeat
        yield axis

    def store_axis(self, name: str) -> Axis:
        """Return an axis of all ranks that exchanges through the store alone, so that threads may use one of their own.

        Those of one name count their exchanges together, in one order on all ranks. A heartbeat, which is of one thread
        alone, hears nothing of them.
        """
        if self.world == 1:
            return Axis("world", 0, 1)
        return Axis("world", self.rank, self.world, meet=self._through_the_store(name, range(self.world)))


_begun: WeakSet[dist.ProcessGroup] = WeakSet()  # the world, if `start_distributed` has begun it
_users: WeakSet[Mesh] = WeakSet()  # meshes that use such a world


def usual_communicators(device: torch.device) -> int:
    """Return how many groups an axis has where nobody says: 1 where two over the same ranks may wait for each other.

    ROCm starts kernels of both in an order of its own on each rank; one hardware queue runs them one after the other.
    """
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return 1 if device.type != "cpu" and (torch.version.hip is not None or one_queue) else 2


def start_distributed(device: torch.device | None = None) -> None:
    """Initialise torch.distributed for a device (None: as a Mesh chooses), from a launcher's environment or alone.

    Raises MeshError where two ranks were to compute on one device.
    """
    if dist.is_initialized():
        return
    device = device or choose_device(None, _launched())
    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    atexit.register(_end)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        patience = _patience(backend)
        store, rank, world = world_store(os.environ, patience)
        if backend != "gloo":
            claim_device(store, device, rank)
        options = backend_options(backend, options_of("world"), patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, pg_options=options, timeout=patience)
        if backend == "gloo":  # it connects rank by rank: one that leaves at once would fail ranks still connecting
            dist.barrier()
    else:
        with _loopback():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    _begun.add(dist.group.WORLD)


def _patience(backend: str) -> timedelta:
    """Return how long a rank waits for a peer. Raises MeshError for a time that is none."""
    given = os.environ.get(TIMEOUT, "")
    if not given:
        return WATCHED if backend == "gloo" and WATCH in os.environ else PATIENCE
    with suppress(ValueError, OverflowError):
        if (seconds := float(given)) > 0:
            return timedelta(seconds=seconds)
    raise MeshError(
        f"{TIMEOUT}={given[:40]!r} is not a number of seconds above 0, for which ranks wait for each other."
    )


def _launched() -> Launched:
    """Return a launcher's facts about this rank and its host."""
    shown = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), "")
    local_rank, local_world, slot = (
        int(os.environ.get(name) or "0") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", SLOT)
    )
    return Launched(max(local_rank, slot), local_world, own_device=shown != "" and "," not in shown)


@contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo listen on the loopback only, inside: one process has nobody to talk to."""
    name, given = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    if given is None and sys.platform == "linux":
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(name, None)


def _note_order(verdict: str) -> None:
    leave_note(f"OrderError: {verdict}")


def _close_watch(watch: weakref.ref[OrderWatch]) -> None:
    """End a watch's thread at exit: one inside of C++ would abort the interpreter that ends."""
    if (alive := watch()) is not None:
        alive.close()


def _close(axis: weakref.ref[Axis]) -> None:
    """Close an axis at exit, before `_end`: an engine's references would keep a destroyed group's threads running."""
    if getattr(sys, "last_value", None) is None:
        say_ended()
    alive = axis()
    if alive is not None:
        alive.close()


def _end_unused(process: int) -> None:
    """End a world that `start_distributed` began in this process, if no mesh uses it any more."""
    if os.getpid() == process and not list(_users) and dist.is_initialized() and dist.group.WORLD in _begun:
        _end()
        end_world(os.environ)


def _end() -> None:
    """End torch.distributed at exit, as `start_distributed` began it; after a failure at once: peers may never come."""
    if dist.is_initialized():
        failed = "nccl" in backends_of().values() and read_note() != ""
        (_abort_process_group if failed else dist.destroy_process_group)()
