"""Replays what ranks ask of their groups as NCCL does it, and says where it stops, and why.

    communicator   one of each group, for its collectives and batches of messages; one of each pair of ranks, for
                   messages sent alone. `eager`: a group has one for everything, made with the group, as after
                   `init_process_group(device_id=)`
    first use      all members meet on the host; a rank goes no further until they have (not where it is eager)
    queue          a communicator does what a rank asks in order, one after another, and a batch as one
    rendezvous     nothing is buffered: a send is over when its receive has begun, tags are ignored
    streams        what a rank asks for on a stream waits for all that this stream waits for by then
    reads          a host that reads a value waits for that, too; for nothing else

A `Machine` may do worse. An operation is asked for, begins when its streams let it, and is over when its like has begun
on all ranks. Where nothing that begins takes another's place, no step here prevents another one: whatever the order in
which they are taken, all runs end at the same place, so that ranks whose lists fit each other in this one fit on any
timing. Only with `resident` it matters who comes first: interleavings.py tries all of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from torch.distributed.pipelining.stage import _PipelineStageBase

from instruments import groups
from instruments.groups import Follow, Logs, Operation, Read, Wait
from zero3d.distributed.axis import Call

Key = tuple[str, tuple[int, ...]]  # a communicator: its group, its ranks
Moment = dict[Key, int]  # how many operations of a rank on each communicator


class Machine(NamedTuple):
    """What a machine does beside what all do.

    eager        communicators are made with their groups
    together     groups of the same ranks share a communicator
    one_queue    a rank has one hardware queue for all its streams (CUDA_DEVICE_MAX_CONNECTIONS=1): what waits there
                 holds up all that was enqueued later
    in_order     operations of a rank begin in the order in which its host asked for them, over all communicators
    resident     a rank has room for so many collectives at once, which keep it until they are over; None: for all
    pauses       before each operation a host waits for all that it asked for, as where memory must be allocated
    """

    eager: bool = False
    together: bool = False
    one_queue: bool = False
    in_order: bool = False
    resident: int | None = None
    pauses: bool = False


PLAIN = Machine()


@contextmanager
def labelled() -> Iterator[None]:
    """Say of what ranks send what it is for.

    Collectives of zero3d: operation and unit. Messages of pipelines: direction, receiving stage, micro-batch.
    """
    run = Call.run

    def labelling(call: Call, inner: Any, peer: int | None = None) -> Any:
        with groups.labelled((call.op, call.unit)):
            return run(call, inner, peer)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Call, "run", labelling))
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


# --- programs -----------------------------------------------------------------------------------


@dataclass
class Entry:
    """What a rank enqueues at once on a communicator: a collective, or a batch of messages.

    number  among the rank's entries on this communicator
    after   what its stream waits for by then
    """

    rank: int
    key: Key
    number: int
    operations: list[Operation]
    after: Moment

    @property
    def is_collective(self) -> bool:
        return self.operations[0].peer is None

    def __str__(self) -> str:
        parts = [
            f"{o.op} {list(o.sizes)}{'' if o.peer is None else f' rank {o.peer}'}{_words(o.label)}"
            for o in self.operations
        ]
        return f"rank {self.rank}, {self.operations[0].stream}: {', '.join(parts)} on {_named(self.key)}"


@dataclass
class HostRead:
    """Where a host waits for what a stream has waited for."""

    rank: int
    after: Moment

    def __str__(self) -> str:
        return f"rank {self.rank}, host: reads a value"


@dataclass
class Marker:
    """Where a stream waits for others: it takes a place in a hardware queue."""

    rank: int
    stream: str
    after: Moment

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.stream}: waits"


Item = Entry | HostRead | Marker


def _words(label: Any) -> str:
    return "" if label is None else f" ({' '.join(map(str, label))})"


def _named(key: Key) -> str:
    group, ranks = key
    return f"group {group if len(group) < 32 else group[:8]} of {', '.join(map(str, ranks))}"


def program_of(rank: int, log: Sequence[Operation | Wait | Read | Follow], machine: Machine) -> list[Item]:
    """Return what a rank enqueues, and where its host and its streams wait, in order."""
    history: dict[str, list[tuple[int, Moment]]] = defaultdict(lambda: [(0, {})])  # of streams, since when
    counts: Moment = defaultdict(int)
    made: dict[int, Entry] = {}  # by place in the log
    found: list[Item] = []
    for place, each in enumerate(log):
        if isinstance(each, Operation):
            last = found[-1] if found else None
            if isinstance(last, Entry) and each.batch is not None and last.operations[0].batch == each.batch:
                last.operations.append(each)
            else:
                key = _key_of(rank, each, machine)
                last = Entry(rank, key, counts[key], [each], history[each.stream][-1][1])
                counts[key] += 1
                found.append(last)
            made[place] = last
        elif isinstance(each, Read):
            found.append(HostRead(rank, history[each.stream][-1][1]))
        else:
            if isinstance(each, Wait):
                more = {made[each.operation].key: made[each.operation].number + 1}
            else:
                past = history[each.other]
                more = past[bisect_right(past, each.place, key=lambda entry: entry[0]) - 1][1]
            before = history[each.stream][-1][1]
            if any(before.get(key, 0) < count for key, count in more.items()):
                later = before | {key: max(count, before.get(key, 0)) for key, count in more.items()}
                history[each.stream].append((place + 1, later))
                found.append(Marker(rank, each.stream, later))
    return found


def _key_of(rank: int, operation: Operation, machine: Machine) -> Key:
    alone = operation.peer is not None and not operation.op.startswith("batched") and not machine.eager
    group = "one" if machine.together else operation.group
    return group, tuple(sorted((rank, operation.peer or 0))) if alone else operation.ranks


def step_of(logs: Logs, number: int = -1) -> Logs:
    """Return what ranks asked for between two marks (`mark`): the last part, or that of a number."""
    found: Logs = []
    for log in logs:
        marks = [place for place, each in enumerate(log) if isinstance(each, Operation) and each.op == MARK]
        start = marks[number]
        stop = marks[marks.index(start) + 1] if start != marks[-1] else len(log)
        part: list[Operation | Wait | Read | Follow] = []
        places = {}
        for place in range(start + 1, stop):
            each = log[place]
            if isinstance(each, Wait):
                if each.operation not in places:
                    continue  # an operation of another part, which is over
                each = each._replace(operation=places[each.operation])
            elif isinstance(each, Follow):
                each = each._replace(place=sum(other < each.place for other in places))
            places[place] = len(part)
            part.append(each)
        found.append(part)
    return found


MARK = "mark"


def mark() -> None:
    """Begin another part of this thread's log."""
    groups.note_alone(MARK)


# --- what a machine does ------------------------------------------------------------------------


@dataclass
class State:
    """How far everything has come.

    hosts   items that each rank's host has passed
    begun   operations of each rank on each communicator that have begun, and that are over
    moved   messages of a batch under way that have met theirs, by rank and communicator
    met     ranks that have come to a communicator's first use
    passed  items of each rank that its hardware has taken in order
    """

    hosts: list[int]
    begun: dict[tuple[Key, int], int] = field(default_factory=dict)
    over: dict[tuple[Key, int], int] = field(default_factory=dict)
    moved: dict[tuple[Key, int], frozenset[int]] = field(default_factory=dict)
    met: dict[Key, frozenset[int]] = field(default_factory=dict)
    passed: list[int] = field(default_factory=list)

    def copy(self) -> State:
        return State(
            list(self.hosts), dict(self.begun), dict(self.over), dict(self.moved), dict(self.met), list(self.passed)
        )

    @property
    def known(self) -> tuple[Any, ...]:
        """What tells two states apart."""
        parts = (frozenset(part.items()) for part in (self.begun, self.over, self.moved, self.met))
        return (tuple(self.hosts), *parts)


class Replay:
    """Ranks' programs on a machine, and what does not fit in them."""

    def __init__(self, logs: Logs, machine: Machine = PLAIN) -> None:
        self.machine = machine
        self.programs = [program_of(rank, log, machine) for rank, log in enumerate(logs)]
        self.entries: dict[tuple[Key, int], list[Entry]] = defaultdict(list)
        self._places: dict[int, int] = {}  # of entries in their rank's program
        for program in self.programs:
            for place, item in enumerate(program):
                if isinstance(item, Entry):
                    self.entries[item.key, item.rank].append(item)
                    self._places[id(item)] = place
        self.keys = list(dict.fromkeys(key for key, _ in self.entries))
        self.faults: list[str] = []

    def begin(self) -> State:
        """Return the state before anything."""
        return State([0] * len(self.programs), passed=[0] * len(self.programs))

    # --- steps: each returns whether it was possible --------------------------------------------

    def step_host(self, state: State, rank: int) -> bool:
        """Let a host pass one item."""
        program, place = self.programs[rank], state.hosts[rank]
        if place == len(program):
            return False
        item = program[place]
        if isinstance(item, HostRead) and not self._are_over(state, rank, item.after):
            return False
        if isinstance(item, Entry):
            came = state.met.get(item.key, frozenset())
            if self.machine.pauses and any(
                state.over.get((key, rank), 0) < self._asked(state, key, rank) for key in self.keys
            ):
                return False
            if not self.machine.eager and len(came) < len(item.key[1]):
                if rank not in came:
                    state.met[item.key] = came | {rank}
                    if len(came) + 1 < len(item.key[1]):
                        return True
                else:
                    return False
        state.hosts[rank] += 1
        self._take_in_order(state, rank)
        return True

    def head(self, state: State, key: Key, rank: int) -> Entry | None:
        """Return what a rank has asked for on a communicator and is next there; None where there is nothing."""
        place, entries = state.over.get((key, rank), 0), self.entries[key, rank]
        return entries[place] if place < len(entries) and self._is_asked(state, entries[place]) else None

    def may_begin(self, state: State, entry: Entry) -> bool:
        """Return whether nothing but others' taking part is missing."""
        at = entry.key, entry.rank
        if state.begun.get(at, 0) > entry.number or state.over.get(at, 0) != entry.number:
            return False
        if not self._are_over(state, entry.rank, entry.after):
            return False
        if (self.machine.one_queue or self.machine.in_order) and self._next_in_order(state, entry.rank) is not entry:
            return False
        return self.machine.resident is None or len(self.under_way(state, entry.rank)) < self.machine.resident

    def step_begin(self, state: State, entry: Entry) -> None:
        """Let an operation begin."""
        state.begun[entry.key, entry.rank] = entry.number + 1
        self._take_in_order(state, entry.rank)

    def step_meet(self, state: State, key: Key) -> bool:
        """Let what has begun on a communicator meet."""
        begun = {
            rank: entry
            for rank in key[1]
            if (entry := self.head(state, key, rank)) and state.begun.get((key, rank), 0) > entry.number
        }
        return self._collective(state, key, begun) or self._messages(state, key, begun)

    def _collective(self, state: State, key: Key, begun: dict[int, Entry]) -> bool:
        if len(begun) < len(key[1]) or not all(entry.is_collective for entry in begun.values()):
            return False
        if not _agree([begun[rank].operations[0] for rank in key[1]]):
            self._say("different collectives meet: " + "; ".join(map(str, begun.values())))
        for rank in begun:
            self._end(state, key, rank)
        return True

    def _messages(self, state: State, key: Key, begun: dict[int, Entry]) -> bool:
        changed = False
        for rank, entry in begun.items():
            for place, send in enumerate(entry.operations):
                other = begun.get(-1 if send.peer is None else send.peer)
                if other is None or not send.op.endswith("send") or place in state.moved.get((key, rank), ()):
                    continue
                there = state.moved.get((key, other.rank), frozenset())
                receive = next(
                    (
                        i
                        for i, o in enumerate(other.operations)
                        if i not in there and o.op.endswith("receive") and o.peer == rank
                    ),
                    None,
                )
                if receive is None:
                    continue
                got = other.operations[receive]
                if send[3:5] != got[3:5] or (send.label or 0) != (got.label or 0):
                    self._say(f"a message meets another's receiver: {entry} and {other}")
                state.moved[key, rank] = state.moved.get((key, rank), frozenset()) | {place}
                state.moved[key, other.rank] = there | {receive}
                changed = True
        for rank, entry in begun.items():
            if not entry.is_collective and len(state.moved.get((key, rank), ())) == len(entry.operations):
                state.moved.pop((key, rank))
                self._end(state, key, rank)
                changed = True
        return changed

    def _end(self, state: State, key: Key, rank: int) -> None:
        state.over[key, rank] = state.over.get((key, rank), 0) + 1
        self._take_in_order(state, rank)

    def _say(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    # --- what is known --------------------------------------------------------------------------

    def _are_over(self, state: State, rank: int, after: Moment) -> bool:
        return all(state.over.get((key, rank), 0) >= count for key, count in after.items())

    def _is_asked(self, state: State, entry: Entry) -> bool:
        return self._places[id(entry)] < state.hosts[entry.rank]

    def _asked(self, state: State, key: Key, rank: int) -> int:
        return sum(self._is_asked(state, entry) for entry in self.entries[key, rank])

    def under_way(self, state: State, rank: int) -> list[Entry]:
        """Return what has begun on a rank and is not over."""
        places = ((key, state.over.get((key, rank), 0)) for key in self.keys)
        return [self.entries[key, rank][place] for key, place in places if state.begun.get((key, rank), 0) > place]

    def _take_in_order(self, state: State, rank: int) -> None:
        """Let a rank's hardware take what it need not wait for."""
        if not (self.machine.one_queue or self.machine.in_order):
            return
        program = self.programs[rank]
        while state.passed[rank] < state.hosts[rank]:
            item = program[state.passed[rank]]
            if isinstance(item, Entry) and state.begun.get((item.key, rank), 0) <= item.number:
                return
            if isinstance(item, Marker) and self.machine.one_queue and not self._are_over(state, rank, item.after):
                return
            state.passed[rank] += 1

    def _next_in_order(self, state: State, rank: int) -> Item | None:
        place = state.passed[rank]
        return self.programs[rank][place] if place < state.hosts[rank] else None

    # --- a run ----------------------------------------------------------------------------------

    def run(self) -> State:
        """Take every step that is possible, and return where it ends; `faults` has what did not fit."""
        state, moved = self.begin(), True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while self.step_host(state, rank):
                    moved = True
            for key in self.keys:
                for rank in key[1]:
                    entry = self.head(state, key, rank)
                    if entry is not None and self.may_begin(state, entry):
                        self.step_begin(state, entry)
                        moved = True
                moved |= self.step_meet(state, key)
        for item in self.waiting(state):
            self._say(f"waits for ever: {item}")
        return state

    def waiting(self, state: State) -> list[Item]:
        """Return what cannot go on: hosts that want to ask for something or to read, and heads of queues."""
        stand = zip(self.programs, state.hosts, strict=True)
        hosts = [program[place] for program, place in stand if place < len(program)]
        heads = [self.head(state, key, rank) for key in self.keys for rank in key[1]]
        return [
            item for item in hosts if not isinstance(item, HostRead) or item.after
        ] + [head for head in heads if head is not None]  # fmt: skip

    # --- why it stops ---------------------------------------------------------------------------

    def reasons(self, state: State, item: Item) -> Iterator[tuple[str, Item | None]]:
        """Yield why something does not go on, and what it waits for; None where a rank's program is over."""
        rank = item.rank
        if isinstance(item, (HostRead, Marker)):
            yield from (("waits for", entry) for entry in self._missing(state, rank, item.after))
            return
        if not self._is_asked(state, item):
            yield from self._reasons_of_host(state, rank, item)
            return
        if state.begun.get((item.key, rank), 0) > item.number:
            yield from self._reasons_of_peers(state, item)
            return
        if (before := self.head(state, item.key, rank)) is not None and before is not item:
            yield "waits for its communicator, where it comes after", before
        yield from (("waits, as its stream does, for", entry) for entry in self._missing(state, rank, item.after))
        if self.machine.one_queue or self.machine.in_order:
            first = self._next_in_order(state, rank)
            if first is not None and first is not item:
                yield "waits in the rank's one queue behind", first
        if self.machine.resident is not None:
            for entry in self.under_way(state, rank):
                yield "waits for the room of", entry

    def _reasons_of_host(self, state: State, rank: int, item: Entry) -> Iterator[tuple[str, Item | None]]:
        place = state.hosts[rank]
        now = self.programs[rank][place]
        if now is not item:
            yield "is not asked for: its host is at", now
            return
        if self.machine.pauses:
            for key in self.keys:
                if (head := self.head(state, key, rank)) is not None:
                    yield "is not asked for: its host waits, before it allocates, for", head
        for other in item.key[1]:
            if other != rank and other not in state.met.get(item.key, ()):
                yield f"begins a communicator, to which rank {other} must come:", self._host(state, other)

    def _reasons_of_peers(self, state: State, item: Entry) -> Iterator[tuple[str, Item | None]]:
        peers = [o.peer for i, o in enumerate(item.operations) if i not in state.moved.get((item.key, item.rank), ())]
        for other in item.key[1] if item.is_collective else dict.fromkeys(p for p in peers if p is not None):
            if other == item.rank:
                continue
            place, entries = state.over.get((item.key, other), 0), self.entries[item.key, other]
            if place >= len(entries):
                yield f"waits for rank {other}, which never asks for it", None
            elif state.begun.get((item.key, other), 0) <= place or not item.is_collective:
                yield f"waits for rank {other}:", entries[place]

    def _host(self, state: State, rank: int) -> Item | None:
        place = state.hosts[rank]
        return self.programs[rank][place] if place < len(self.programs[rank]) else None

    def _missing(self, state: State, rank: int, after: Moment) -> Iterator[Entry]:
        for key, count in after.items():
            place = state.over.get((key, rank), 0)
            if place < count:
                yield self.entries[key, rank][place]

    def cycle(self, state: State) -> list[str]:
        """Return who waits for whom for ever, a line for each: a cycle, or a way to a rank that never comes."""
        for start in self.waiting(state):
            way: list[tuple[Item, str]] = []
            if (found := self._follow(state, start, way, set())) is not None:
                return found
        return []

    def _follow(self, state: State, item: Item, way: list[tuple[Item, str]], seen: set[int]) -> list[str] | None:
        on_way = [i for i, (other, _) in enumerate(way) if other is item]
        if on_way:
            return [f"{other}\n    {why}" for other, why in way[on_way[0] :]] + [f"{item}: the cycle is closed"]
        if id(item) in seen:
            return None
        seen.add(id(item))
        for why, other in self.reasons(state, item):
            if other is None:
                return [f"{each}\n    {reason}" for each, reason in way] + [f"{item}\n    {why}"]
            if (found := self._follow(state, other, [*way, (item, why)], seen)) is not None:
                return found
        return None


def _agree(asked: Sequence[Operation]) -> bool:
    """Return whether the operations of a group's ranks, by place, are one collective."""
    if len({(o.op, None if o.splits else o.sizes, o.dtype, o.label) for o in asked}) > 1:
        return False
    return all(
        (a.splits is None) == (b.splits is None)
        and (a.splits is None or b.splits is None or a.splits[0][there] == b.splits[1][here])
        for here, a in enumerate(asked)
        for there, b in enumerate(asked)
    )


def replay(logs: Logs, eager: bool = False, machine: Machine = PLAIN) -> list[str]:
    """Return in words what does not fit: messages and collectives that meet others, and who waits for ever."""
    run = Replay(logs, machine._replace(eager=eager or machine.eager))
    run.run()
    return run.faults


def cycle(logs: Logs, machine: Machine = PLAIN) -> list[str]:
    """Return who waits for whom for ever, a line for each; nothing where all comes to its end."""
    run = Replay(logs, machine)
    return run.cycle(run.run())
