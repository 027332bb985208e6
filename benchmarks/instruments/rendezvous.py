"""Replays what ranks ask of their groups as NCCL does it, and says where it stops.

    communicator   one of each group, for its collectives and batches of messages; one of each pair of ranks, for
                   messages sent alone. `eager`: a group has one for everything, made with the group, as after
                   `init_process_group(device_id=)`
    first use      all members meet on the host; a rank goes no further until they have (not where it is eager)
    queue          a communicator does what a rank asks in order, one after another, and a batch as one
    rendezvous     nothing is buffered: a send is over when its receive has begun, tags are ignored
    compute        what a rank asks for waits for what its compute waits for by then
    reads          a host that reads a value waits for that, too; for nothing else

So ranks whose lists fit each other here fit on any timing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.distributed.pipelining.stage import _PipelineStageBase

from instruments import groups
from instruments.groups import Logs, Operation, Read, Wait
from zero3d.distributed.axis import Axis

Key = tuple[str, tuple[int, ...]]  # a communicator: its group, its ranks


@contextmanager
def labelled() -> Iterator[None]:
    """Say of what ranks send what it is for.

    Collectives of zero3d: operation and unit. Messages of pipelines: direction, receiving stage, micro-batch.
    """
    call = Axis.call

    def labelling(axis: Axis, op: str, unit: str, inner: Any, *rest: Any, **named: Any) -> Any:
        with groups.labelled((op, unit)):
            return call(axis, op, unit, inner, *rest, **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Axis, "call", labelling))
        for name, kind, offset in (
            ("get_fwd_recv_ops", "forward", 0), ("get_fwd_send_ops", "forward", 1),
            ("get_bwd_recv_ops", "backward", 0), ("get_bwd_send_ops", "backward", -1),
        ):  # fmt: skip
            method = _with_label(getattr(_PipelineStageBase, name), kind, offset)
            stack.enter_context(mock.patch.object(_PipelineStageBase, name, method))
        yield


def _with_label(method: Any, kind: str, offset: int) -> Any:
    def labelling(stage: Any, micro_batch: int) -> Any:
        operations = method(stage, micro_batch)
        for place, operation in enumerate(operations):
            operation.tensor.label = kind, stage.stage_index + offset, micro_batch, place
        return operations

    return labelling


@dataclass
class HostRead:
    """Where a host waits for what its compute has waited for."""

    after: list[Entry]


@dataclass
class Entry:
    """What a rank enqueues at once on a communicator: a collective, or a batch of messages.

    after   entries of this rank that its compute has waited for by then
    left    messages that have not met theirs
    """

    rank: int
    key: Key
    operations: list[Operation]
    after: list[Entry]
    left: list[Operation] = field(default_factory=list)
    over: bool = False

    @property
    def is_collective(self) -> bool:
        return self.operations[0].peer is None

    def __str__(self) -> str:
        parts = [
            f"{o.op} {list(o.sizes)}" + ("" if o.peer is None else f" rank {o.peer} {o.label}") for o in self.operations
        ]
        return f"rank {self.rank}: {', '.join(parts)} on {self.key}"


def replay(logs: Logs, eager: bool = False) -> list[str]:
    """Return in words what does not fit: messages and collectives that meet others, and who waits for ever."""
    run = Replay(logs, eager)
    run.run()
    return run.faults


class Replay:
    """The state of a replay: how far hosts have come, and what is enqueued where."""

    def __init__(self, logs: Logs, eager: bool) -> None:
        self.programs = [deque(_entries(rank, log, eager)) for rank, log in enumerate(logs)]
        self.eager = eager
        self.queues: dict[tuple[Key, int], deque[Entry]] = defaultdict(deque)
        self.begun: dict[Key, set[int]] = defaultdict(set)  # ranks that have come to the first use
        self.faults: list[str] = []

    def run(self) -> None:
        while self._hosts() | self._communicators():
            pass
        waiting = [program[0] for program in self.programs if program and isinstance(program[0], Entry)]
        waiting += [queue[0] for queue in self.queues.values() if queue]
        self.faults += [f"waits for ever: {entry}" for entry in waiting]

    def _hosts(self) -> bool:
        """Let every host enqueue until it must meet others, or waits for a value."""
        moved = False
        for rank, program in enumerate(self.programs):
            while program and self._may_go_on(rank, program[0]):
                if isinstance(entry := program.popleft(), Entry):
                    self.queues[entry.key, rank].append(entry)
                moved = True
        return moved

    def _may_go_on(self, rank: int, entry: Entry | HostRead) -> bool:
        if isinstance(entry, HostRead):
            return all(before.over for before in entry.after)
        if self.eager:
            self.begun[entry.key] = set(entry.key[1])
        self.begun[entry.key].add(rank)
        return self.begun[entry.key] == set(entry.key[1])

    def _communicators(self) -> bool:
        """Let every communicator do what is at the head of its ranks' queues."""
        moved = False
        for key in list(self.begun):
            heads = {rank: queue[0] for rank in key[1] if (queue := self.queues[key, rank])}
            ready = {rank: entry for rank, entry in heads.items() if all(before.over for before in entry.after)}
            moved |= self._collective(key, ready) or self._messages(ready)
            for rank in key[1]:
                if (queue := self.queues[key, rank]) and queue[0].over:
                    queue.popleft()
                    moved = True
        return moved

    def _collective(self, key: Key, ready: dict[int, Entry]) -> bool:
        if len(ready) < len(key[1]) or not all(entry.is_collective for entry in ready.values()):
            return False
        if len({entry.operations[0][2:5] for entry in ready.values()}) > 1:
            self.faults.append("different collectives meet: " + "; ".join(map(str, ready.values())))
        for entry in ready.values():
            entry.over = True
        return True

    def _messages(self, ready: dict[int, Entry]) -> bool:
        moved = False
        for rank, entry in ready.items():
            for send in [o for o in entry.left if o.op.endswith("send")]:
                other = ready.get(-1 if send.peer is None else send.peer)
                receive = other and next((o for o in other.left if o.op.endswith("receive") and o.peer == rank), None)
                if not receive or not other:
                    continue
                if send[3:5] != receive[3:5] or (send.label or 0) != (receive.label or 0):
                    self.faults.append(f"a message meets another's receiver: {entry} and {other}")
                entry.left.remove(send)
                other.left.remove(receive)
                moved = True
        for entry in ready.values():
            entry.over |= not entry.is_collective and not entry.left
        return moved


def _entries(rank: int, log: list[Operation | Wait | Read], eager: bool) -> Iterator[Entry | HostRead]:
    """Yield what a rank enqueues, and where its host waits, in order."""
    waited: list[Entry] = []
    made: dict[int, Entry] = {}  # by place in the log
    found: list[Entry | HostRead] = []
    for place, each in enumerate(log):
        if isinstance(each, Wait):
            waited = [*waited, made[each.operation]]
            continue
        if isinstance(each, Read):
            found.append(HostRead(waited))
            continue
        alone = each.peer is not None and not each.op.startswith("batched") and not eager
        key = each.group, tuple(sorted((rank, each.peer or 0))) if alone else each.ranks
        last = found[-1] if found else None
        if isinstance(last, Entry) and each.batch is not None and last.operations[0].batch == each.batch:
            last.operations.append(each)
        else:
            last = Entry(rank, key, [each], waited)
            found.append(last)
        if each.peer is not None:
            last.left.append(each)
        made[place] = last
    yield from found
