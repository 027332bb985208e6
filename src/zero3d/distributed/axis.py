"""How ranks of one axis reach each other: its process groups, pairwise messages, errors that say where."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError, DistError, DistStoreError
from torch.distributed.distributed_c10d import Store, _get_default_store

from zero3d.distributed.order_log import OrderLog
from zero3d.errors import FAULT, OrderError, Zero3dError
from zero3d.watchdog.flight_recorder import folder_of, record

if TYPE_CHECKING:
    from zero3d.watchdog.heartbeat import Heartbeat

_OF_GLOO = re.compile(r"\S*\.(?:cc|cpp|h):\d+\] ?|This (?:is typically|may indicate).*")  # its source, its advice
_NOTE, _ENDED = "zero3d/why a rank went away", "zero3d/a rank that ended without an error"
AT_ONCE = 1.0  # seconds: a call that times out sooner has met a connection on which somebody's wait had ended before
ANSWER = 2.0  # seconds that a store is given: torch itself waits for one behind a cut link until TCP gives up
_TEXT, _SHOWN = 2000, 200  # letters of a note, of an error of the network
HOST = torch.device("cpu")
T = TypeVar("T")
_unanswered: WeakKeyDictionary[Store, threading.Thread] = WeakKeyDictionary()  # wait for an answer that is late


class Watch(Protocol):
    """Interface of the watch that compares ranks, for an axis: `OrderWatch` itself knows its axes."""

    verdict: str

    def found(self) -> str:
        """Return why ranks can never meet, where any rank knows that; empty otherwise."""

    def explain(self) -> str:
        """Return how ranks differ in begun operations, if all of them ask; empty otherwise."""

    def peers(self, axis: str, op: str) -> str:
        """Return what other ranks of an axis have told of its last operations, beside `op`; empty without any."""


@dataclass
class Axis:
    """One mesh axis as this rank sees it: two groups over the same ranks, or none for degree 1.

    broken    why its ranks no longer agree on which message comes next
    device    where its ranks compute
    patience  seconds until a device that still waits for a peer is given up, before the groups give up themselves
    meet      gathers a few numbers through the store, for ranks that come hours apart: where groups are on devices,
              whose watchdog would not wait, and where there are none
    under_way operations that outlive the step that began them
    heartbeat where this rank says what it waits for; None where nobody is told
    log       the operations that this rank has begun on it; None where nobody compares them
    watch     compares the log with the other ranks' logs, when nothing moves
    silent    calls are left out, and there is nothing to wait for: of a dry run's axes without groups
    """

    silent: ClassVar[bool] = False
    name: str
    rank: int
    size: int
    gathers: dist.ProcessGroup | None = None
    reductions: dist.ProcessGroup | None = None
    broken: str = ""
    device: torch.device = HOST
    patience: float = math.inf
    meet: Callable[[Tensor], Tensor] | None = None
    under_way: WeakSet[Pending] = field(default_factory=WeakSet)
    heartbeat: Heartbeat | None = None
    log: OrderLog | None = None
    watch: Watch | None = None

    def close(self) -> None:
        """Complete pending operations, for peers that need them, and drop the groups, whose threads must end now."""
        left = [pending for pending in self.under_way if not pending.over]
        for pending in left if left and read_note() == "" else []:  # after a failure a peer may never come
            try:
                pending.wait()
            except OrderError:  # nor does one that is stuck: it was waited for once
                break
            except (Zero3dError, RuntimeError):  # another peer may still want what is left
                continue
        self.gathers = self.reductions = None

    @property
    def backend(self) -> str:
        """Name of the torch.distributed backend that carries its device's tensors; "none" without groups."""
        return "none" if self.gathers is None else self._backends[self.device.type]

    @cached_property
    def _backends(self) -> dict[str, str]:
        """Return the backend for each type of device: asked of torch once, since every exchange uses it."""
        return backends_of(self.gathers)

    @property
    def place(self) -> torch.device:
        """The device of tensors to be sent: gloo sends host memory, others send their device's alone."""
        return HOST if self.backend in ("none", "gloo") else self.device

    def inside(self, op: str, unit: str, number: int = 0, peer: int | None = None) -> AbstractContextManager[object]:
        """Tell the heartbeat that this rank is, inside, where it may wait for peers or one; `number`: see `Call`."""
        return nullcontext() if self.heartbeat is None else self.heartbeat.inside(self.name, op, unit, number, peer)

    def count(self, op: str) -> int:
        """Return the number of the operation that begins, among operations of its kind on this axis."""
        return 0 if self.heartbeat is None else self.heartbeat.count(self.name, op)

    def call(self, op: str, unit: str, call: Callable[[], Any], number: int = 0, peer: int | None = None) -> Any:
        """Run a torch.distributed call; a timeout or a lost peer becomes an error that says where."""
        return Call(self, None, op, unit, number).run(call, peer)

    def guarded(self, op: str, unit: str, call: Callable[[], Any], peer: int | None = None) -> Any:
        """Run what makes torch.distributed calls, among others, with the same errors; the heartbeat is not told."""
        begun = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            self.raise_if_lost(error, begun, op, unit, peer)
            raise

    def raise_if_lost(self, error: RuntimeError, begun: float, op: str, unit: str, peer: int | None) -> None:
        """Raise an error that names this call, if the call has lost a peer. begun: a moment of `time.monotonic`."""
        waited = time.monotonic() - begun
        whom = "" if peer is None else f" for rank {peer} of that axis"
        phase = "" if self.heartbeat is None else self.heartbeat.long_phase
        what = (op if unit == "-" else f"{op} of unit {unit!r}") + f", in phase {phase}" * bool(phase)
        rank = f"rank {self.rank} of axis {self.name}"
        early = f"{rank} began {what} after a peer had given up waiting" if waited < AT_ONCE else ""
        where = f"{self._waited(waited)}{whom} in {what}"
        lost = _lost(where, error, early, phase)
        if lost is None:
            return
        if (known := self.out_of_order(f"{rank} waited{whom} in {what}")) is not None:
            raise known from error
        if isinstance(lost, OrderError) and (told := self._peers(op)):
            lost.args = (f"{lost} {told}",)
        raise lost from error

    def out_of_order(self, where: str = "") -> OrderError | None:
        """Return the error if ranks are known never to meet; with `where`, this rank's operation, ask other ranks."""
        watch = self.watch
        if watch is None:
            return None
        if where and (verdict := _asked(lambda _: watch.found(), watch.verdict)):
            return OrderError(f"{verdict} ({where}.)")
        return OrderError(watch.verdict) if watch.verdict else None

    def explain_order(self) -> str:
        """Return how ranks differ in begun operations, if all of them ask; empty where none can tell."""
        watch = self.watch
        return "" if watch is None else _asked(lambda _: watch.explain(), "")

    def _peers(self, op: str) -> str:
        """Return the operations begun by the other ranks, as they told the store; empty where they told nothing."""
        watch = self.watch
        return "" if watch is None else _asked(lambda _: watch.peers(self.name, op), "")

    def begins(self, op: str, unit: str) -> None:
        """Note an operation that all its ranks must begin in one order."""
        if self.log is not None:
            self.log.add(op, unit)

    def broadcast(self, t: Tensor, unit: str) -> None:
        """Overwrite `t` with rank 0's, wherever it is."""
        raw = t.view(torch.uint8) if t.dtype == torch.bool else t
        sent = raw.to(self.place).contiguous()
        call = Call(self, self.reductions, "broadcast", unit, self.count("broadcast"))
        call.wait(lambda: dist.broadcast(sent, group=call.group, group_src=0), 0 if self.rank else None)
        if sent is not raw:
            raw.copy_(sent)

    def barrier(self) -> None:
        """Return when all its ranks have come; a backend of devices is told which one, or it would guess."""
        ids = None if self.place == HOST else [self.device.index]
        call = Call(self, self.gathers, "barrier", "-", self.count("barrier"))
        call.wait(lambda: dist.barrier(group=call.group, device_ids=ids))

    def late(self, last: Mapping[str, tuple[str, str]]) -> Zero3dError:
        """Return the error of a rank whose device does not come to an end; `last` it began these, by axis."""
        begun = ", ".join(f"{op} of unit {unit!r} on axis {axis}" for axis, (op, unit) in last.items())
        where = f"{self._waited(self.patience)} for its device, where the last to begin were {begun}"
        error, file = _gone(where, late=True), _record(self.heartbeat)
        if file is not None:
            error.args = (f"{error} NCCL's flight recorder: {file}.",)
        return error

    def _waited(self, seconds: float) -> str:
        return f"rank {self.rank} of axis {self.name} waited {seconds:.1f} s"


def _record(heartbeat: Heartbeat | None) -> Path | None:
    """Write NCCL's flight recorder, where it is on; return its file."""
    told = {} if heartbeat is None else heartbeat.told
    return record(dist.get_rank(), folder_of(told)) if dist.is_initialized() else None


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend that carries each type of device's tensors in a group (None: the default one)."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in config.split(","))


class Pending:
    """A collective under way. `wait()` completes it once; later calls do nothing.

    failed  a wait began and has not come to its end
    """

    failed = False

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self._finish = finish

    @property
    def over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._finish is None

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            self.failed = True
            finish()
            self.failed = False


DONE = Pending()
Take = Callable[[list[Tensor]], object]  # is given what has come from the ranks, in their order


class Call(NamedTuple):
    """One operation on one unit, over one of an axis' groups; `number` counts those of its kind on the axis."""

    axis: Axis
    group: dist.ProcessGroup | None
    op: str
    unit: str
    number: int = 0

    def run(self, call: Callable[[], Any], peer: int | None = None) -> Any:
        """Run a torch.distributed call, perhaps for one peer; a timeout or a lost peer becomes an error.

        All that guards a call is in this one frame: a step makes several hundred.
        """
        axis, op, unit, number = self.axis, self.op, self.unit, self.number
        if axis.silent:
            return Pending()
        heartbeat, begun = axis.heartbeat, time.monotonic()
        if heartbeat is not None:
            heartbeat.enter(axis.name, op, unit, number, peer)
        try:
            return call()
        except RuntimeError as error:
            axis.raise_if_lost(error, begun, op, unit, peer)
            raise
        finally:
            if heartbeat is not None:
                heartbeat.leave()

    def wait(self, call: Callable[[], Any], peer: int | None = None) -> Any:
        """Run one that ends when peers have come to the same operation, on gloo, where the host waits in it."""
        log = self.axis.log
        if log is None or not log.blocks:
            return self.run(call, peer)
        log.wait = self.axis.name, self.op, self.unit, self.number, peer
        try:
            return self.run(call, peer)
        finally:
            log.wait = None


def messages(axis: Axis, op: str, unit: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
    """Send tensors to ranks of the axis and receive others from them, by rank; returns when all are through."""
    start_messages(axis, op, unit, sends, receives).wait()


def start_messages(
    axis: Axis, op: str, unit: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
) -> Pending:
    """Start to send tensors to ranks of the axis and to receive others from them, by rank."""
    group, place, number, peers = axis.reductions, axis.place, axis.count(op), {*sends, *receives}
    peer = peers.pop() if len(peers) == 1 else None
    arriving = {
        peer: into if into.device == place else torch.empty_like(into, device=place) for peer, into in receives.items()
    }
    calls = [dist.P2POp(dist.isend, part.to(place), group=group, group_peer=peer) for peer, part in sends.items()]
    calls += [dist.P2POp(dist.irecv, into, group=group, group_peer=peer) for peer, into in arriving.items()]
    works = axis.call(op, unit, lambda: dist.batch_isend_irecv(calls), number, peer) if calls else []
    whom = [*sends, *arriving] if len(works) == len(calls) else [peer] * len(works)  # NCCL has one for all

    def finish() -> None:
        for work, one in zip(works, whom, strict=True):
            axis.call(op, unit, work.wait, number, one)
        for peer, into in receives.items():
            if arriving[peer] is not into:
                into.copy_(arriving[peer])
        calls.clear()  # what travels must live until here

    return Pending(finish)


def leave_note(text: str, code: int = FAULT) -> None:
    """Leave why this rank goes away, its exit code and number, where its peers' errors find it; the first one stays.

    A store that is gone, or does not answer, reaches nobody.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def leave(store: Store) -> None:
        if not store.check([_NOTE]):
            store.set(_NOTE, json.dumps([text[:_TEXT], code, rank]))

    _asked(leave, None)


def say_ended() -> None:
    """Record in the store that this rank has ended without an error, for peers that still wait for it.

    A rank that ends later overwrites it.
    """
    _asked(lambda store: store.set(_ENDED, str(dist.get_rank())), None)


def read_note() -> str:
    """Return the note of the first rank that failed; empty if none did."""
    return _note()[0]


def _note() -> tuple[str, int, int]:
    """Return the note, its exit code, and the number of the rank that left it."""

    def read(store: Store) -> tuple[str, int, int]:
        text, code, rank = json.loads(store.get(_NOTE)) if store.check([_NOTE]) else ("", FAULT, 0)
        return text, code, rank

    return _asked(read, ("", FAULT, 0))


def _has_ended() -> str:
    """Return the number of a rank that has ended without an error; nothing where none has said so."""
    return _asked(lambda store: str(store.get(_ENDED).decode()) if store.check([_ENDED]) else "", "")


def _asked(ask: Callable[[Store], T], otherwise: T) -> T:
    """Return what the default store answers, or `otherwise`: it is gone, or does not answer, as behind a cut link.

    One that owes an answer is not asked again: the second question would wait behind the first. A later store of this
    process, of new groups, owes none.
    """
    answers: list[T] = []

    def wait(store: Store) -> None:
        with suppress(RuntimeError, ValueError):
            answers.append(ask(store))

    try:
        store = _get_default_store()
    except (RuntimeError, ValueError):
        return otherwise
    if store in _unanswered and _unanswered[store].is_alive():
        return otherwise
    asking = threading.Thread(target=wait, args=(store,), daemon=True)
    try:
        asking.start()
    except RuntimeError:  # at the interpreter's end no thread begins
        wait(store)
    else:
        asking.join(ANSWER)
        if asking.is_alive():
            _unanswered[store] = asking
    return answers[0] if answers else otherwise


def forget_note(axis: Axis) -> None:
    """Remove the note on all ranks of the axis, so that none quotes an earlier failure."""
    if axis.size == 1:
        return
    for turn in range(2):  # all have left what failed; none can fail again before the note is gone
        axis.barrier()
        if turn == 0 and axis.rank == 0:
            with suppress(RuntimeError, ValueError):
                _get_default_store().delete_key(_NOTE)


def _lost(where: str, error: RuntimeError, early: str, phase: str) -> Zero3dError | None:
    """Return the error of a rank whose peer went away; None for other errors of torch. early, phase: see `_gone`.

    NCCL and the stores have types of their own for it; gloo, and a store of files, say it in words alone.
    """
    message = " ".join(str(error).split())
    words = message.lower() if type(error) is RuntimeError else ""
    late = isinstance(error, DistStoreError) or any(word in words for word in ("timed out", "timeout"))
    if not (late or isinstance(error, DistError) or any(w in words for w in ("connection", "closed", "peer", "reset"))):
        return None
    _, found, reason = message.rpartition("Last error:")  # NCCL ends with its own
    reason = reason.strip()[:_SHOWN] if found else _OF_GLOO.sub("", reason).strip()[-_SHOWN:]
    backend = "the backend (such as NCCL) failed or " if isinstance(error, DistBackendError) else ""
    if late:
        return _gone(where, late, early=early, phase=phase)
    return _gone(f"{where} when {backend}a peer went away", late, reason)


def _gone(where: str, late: bool, message: str = "", early: str = "", phase: str = "") -> Zero3dError:
    """Return the error for a peer that came `late` or went away, as `where` says, with its note if there is one.

    early  the text in place of `where` for a rank that did not wait itself, if there is no note
    phase  a phase that may take long and needs all ranks together
    """
    note, code, rank = _note()
    if note:
        lost = Zero3dError(f"{note} ({where}{' and no peer came' if late else ''}; rank {rank} failed.)")
        lost.agreed = code
        return lost
    if late:
        what = early or f"{where}{',' * bool(phase)} and no peer came"
        if phase:
            return OrderError(
                f"{what}: not all ranks have begun this phase, or one is stuck. What is called there all ranks must "
                "call together; look at what the other ranks say."
            )
        return OrderError(
            f"{what}: ranks used units in different orders or numbers, or a peer is stuck. All ranks must run the same "
            "forwards, backwards and steps, and at stage 3 call the same units, also before a collective of the "
            "program's own (on every rank, or inside engine.full_params()). Look at what the other ranks say."
        )
    if ended := _has_ended():
        return Zero3dError(
            f"{where}: rank {ended} has no more batches, and ended without an error. All ranks must run equally many "
            "micro-batches."
        )
    return Zero3dError(f"{where}: look at the first rank that failed. ({message[:_SHOWN]})")
