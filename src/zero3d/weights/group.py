"""From rank 0 to processes of other jobs or hosts, over a process group of their own: gloo's, or NCCL's on GPUs.

    sender                                          receiver
    a TCPStore at HOST:PORT                         connects, and takes the next number of `come`
    waits for as many as there are to be      <-    about/NUMBER: process, host
    seat/NUMBER: rank, ranks, group, device   ->
    both make a group over the store
    told/0, told/1, ...: a stream's messages  ->    a stream as protocol.py has it
    a broadcast of each bucket                ->
                                              <-    said/RANK/0, said/RANK/1, ...

Neither has another process group for it, and both may have one of their own: the store and the group are theirs alone.
A receiver that dies is seen where gloo or NCCL sees it, else when `timeout` is over; the group is given up then, and
those who connect again get a new one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from zero3d.errors import ConfigError, StreamError
from zero3d.weights.buckets import Bucket
from zero3d.weights.protocol import SLOTS, SOON, Message, Receiver, StreamSender

SCHEME = "tcp://"
FORMAT = 1
LEAST, MOST = 2e-4, 2e-2  # seconds between two looks into a store
_OF_GLOO = re.compile(r"\[?\S*\.(?:cc|cpp|h):\d+\] ?|This (?:is typically|may indicate).*")
_GONE = "gone, or the network between is cut"


class Place(NamedTuple):
    """Names the host and the port of a sender's store."""

    host: str
    port: int

    @classmethod
    def of(cls, address: str) -> Place:
        """Read "tcp://HOST:PORT". Raises ConfigError."""
        host, colon, port = address.removeprefix(SCHEME).rpartition(":")
        if not (address.startswith(SCHEME) and colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise ConfigError(f"{address!r} is not the address of a sender: type {SCHEME}HOST:PORT, PORT 0 for any.")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}:{self.port}"


def _nothing() -> None:
    """Do nothing."""


def _awaited(store: Store, key: str, until: float | None, watch: Callable[[], None] = _nothing) -> bytes:
    """Return what a store has under a key, once it has it; call `watch` meanwhile. Raises TimeoutError at a time.

    It looks again and again: a wait of the store's own warns on stderr when it ends in vain, and nobody could look at
    anything else.
    """
    pause = LEAST
    while not store.check([key]):
        watch()
        if until is not None and time.monotonic() > until:
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, MOST)
    found: bytes = store.get(key)
    return found


class Mail:
    """Sends and receives numbered JSON messages through a store.

    outward, inward  what keys of either direction begin with
    name             of the other end
    watch            is called while a message is waited for, and may raise
    """

    def __init__(self, store: Store, outward: str, inward: str, name: str) -> None:
        self._store = store
        self._outward, self._inward = outward, inward
        self._sent, self._heard = 0, 0
        self.name, self.watch = name, _nothing

    @property
    def state(self) -> str:
        """Return all that is known of a process that does not answer."""
        return f"is stopped, slow, {_GONE}"

    def say(self, message: Message) -> None:
        """Leave the next message for the other end. Raises StreamError."""
        try:
            self._store.set(f"{self._outward}/{self._sent}", json.dumps(message))
        except RuntimeError as error:
            raise StreamError(f"the {self.name} is {_GONE}.") from error
        self._sent += 1

    def hear(self, until: float | None) -> Message:
        """Return the next message of the other end. Raises TimeoutError at a time (monotonic); StreamError."""
        key = f"{self._inward}/{self._heard}"
        try:
            text = _awaited(self._store, key, until, self.watch)
            self._store.delete_key(key)
        except StreamError:
            raise
        except RuntimeError as error:
            raise StreamError(f"the {self.name} is {_GONE}.") from error
        self._heard += 1
        message: Message = json.loads(text)
        return message


class Group:
    """Carries buckets from rank 0 of a process group to all others.

    device  where their bytes travel: the CPU for gloo, a GPU for NCCL
    """

    def __init__(self, store: Store, rank: int, ranks: int, device: str, seconds: float) -> None:
        self.device = torch.device(device)
        self._patience = timedelta(seconds=seconds)
        if self.device.type == "cpu":
            self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, self._patience)
        else:
            torch.accelerator.set_device_index(self.device.index or 0)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._patience
            self._group = dist.ProcessGroupNCCL(store, rank, ranks, options)

    def begin(self, memory: Tensor) -> Any:
        """Begin to send memory of this device from rank 0 to all; return what `end` takes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._patience
        return self._group.broadcast([memory], options)

    def end(self, work: Any) -> None:
        """Return when memory has been sent. Raises RuntimeError."""
        work.wait(self._patience)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class GroupSender(StreamSender):
    """Sends streams to processes that have connected to an address; on rank 0 alone.

    address    tcp://HOST:PORT at which this process listens; PORT 0 chooses one, which `address` then has
    receivers  how many there are to be: a stream begins when as many have come
    timeout    seconds that are waited for one of them to come, or to acknowledge a bucket
    device     "cpu": buckets travel by gloo; "cuda:0", ...: by NCCL's broadcast, from this GPU to one of each receiver
    """

    def __init__(self, address: str, receivers: int = 1, timeout: float = 60.0, device: str = "cpu") -> None:
        super().__init__(timeout)
        self._count, self._device = receivers, device
        self._memory: list[Tensor] = []
        self._taken = 0  # receivers that have got a seat, of all that have ever come
        self._mail: list[Mail] = []
        self._group: Group | None = None
        self._under_way: list[Any] = []
        host, port = Place.of(address)
        try:
            self._store = TCPStore(host, port, None, True, timedelta(seconds=timeout), wait_for_workers=False)
        except RuntimeError as error:
            raise ConfigError(f"no store can be at {address} ({_first(error)}): choose another.") from error
        self.address = str(Place(host, self._store.port))

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of two buckets, which stays from stream to stream."""
        if not self._memory or self._memory[0].numel() != nbytes:
            self._memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        return self._memory

    def close(self) -> None:
        """End all connections."""
        self._let_go()
        self._memory = []
        del self._store

    def _meet(self) -> Sequence[Mail]:
        if self._group is None:
            end = time.monotonic() + self._timeout
            numbers = range(self._taken, self._taken + self._count)
            abouts = [self._come(number, end) for number in numbers]
            self._taken += self._count
            name = f"group-{self._taken}"
            for rank, number in enumerate(numbers, 1):
                seat = {"format": FORMAT, "rank": rank, "ranks": 1 + self._count, "group": name}
                self._store.set(f"seat/{number}/0", json.dumps(seat | {"gpu": self._device != "cpu"}))
            inside = PrefixStore(name, self._store)
            self._mail = [Mail(inside, f"told/{rank}", f"said/{rank}", about) for rank, about in enumerate(abouts, 1)]
            for mail in self._mail:
                mail.watch = self._watch
            try:
                with self.waiting("receivers to make a group"):
                    self._group = Group(inside, 0, 1 + self._count, self._device, self._timeout)
            except RuntimeError as error:
                raise StreamError(
                    f"{', '.join(abouts)}: no process group can be made with them ({_first(error)})."
                ) from error
        return self._mail

    def _come(self, number: int, end: float) -> str:
        """Return the name of a receiver, once it has come. Raises StreamError."""
        with self.waiting("a receiver to connect"):
            try:
                about = json.loads(_awaited(self._store, f"about/{number}", end))
            except TimeoutError as error:
                come = f"{number - self._taken} of {self._count} have"
                raise StreamError(
                    f"no receiver has connected to {self.address} in {self._timeout:g} s ({come}): start it, with "
                    "zero3d.weights.connect(address)."
                ) from error
        return f"receiver (process {about['pid']} of {about['node']})"

    def _tell(self, message: Message, seconds: float) -> None:
        for mail in self._mail:
            mail.say(message)

    def _deliver(self, bucket: Bucket) -> None:
        assert self._group is not None
        sent = bucket.memory[: bucket.nbytes].to(self._group.device)
        try:
            self._under_way.append(self._group.begin(sent))
        except RuntimeError as error:
            raise self._broken(error) from error

    def _await(self, key: str, value: int, what: str) -> None:
        """Wait for acknowledgements, and see to it that buckets go out meanwhile."""
        super()._await(key, value, what)
        if key == "have":
            self._end(self._under_way.pop(0))

    def _watch(self) -> None:
        """Raise StreamError where a bucket cannot go out: one of its receivers is gone."""
        for work in self._under_way:
            if work.is_completed():
                self._end(work)

    def _end(self, work: Any) -> None:
        assert self._group is not None
        try:
            self._group.end(work)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> StreamError:
        """Return the error of a group that carries no more, with those who acknowledge nothing soon."""
        end, silent = time.monotonic() + SOON, []
        for receiver in self._mail:
            receiver.watch = _nothing
            try:
                receiver.hear(end)
            except TimeoutError:
                silent.append(f"the {receiver.name}, which {receiver.state}")
        return StreamError(f"weights do not reach {', '.join(silent) or 'all receivers'}: {_first(error)}.")

    def _drop(self) -> None:
        self._mail, self._under_way = [], []
        self._group = None


class GroupReceiver(Receiver):
    """Receives streams from a sender of another job, over a process group."""

    def __init__(self, store: Store, sender: Mail, group: Group, timeout: float) -> None:
        super().__init__(sender, timeout)
        self._store, self._group = store, group
        self._mail = sender
        self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """End the connection."""
        self._group, self._store = None, None  # type: ignore[assignment]

    def _hear(self, until: float | None) -> Message:
        return self._mail.hear(until)

    def _taken(self, number: int, nbytes: int) -> Tensor:
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        try:
            self._group.end(self._group.begin(self._memory[:nbytes]))
        except RuntimeError as error:
            raise StreamError(f"bucket {number} of weights has not arrived: {_first(error)}.") from error
        return self._memory

    def _answer(self, message: Message) -> None:
        self._mail.say(message)


def join(address: str, timeout: float, device: str) -> GroupReceiver:
    """Return a receiver of the sender at an address; see `connect`. Raises StreamError."""
    host, port = Place.of(address)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise StreamError(f"no sender listens at {address} in {timeout:g} s ({_first(error)}).") from error
    number = store.add("come", 1) - 1
    store.set(f"about/{number}", json.dumps({"pid": os.getpid(), "node": platform.node()}))
    seat = Mail(store, "", f"seat/{number}", f"sender at {address}").hear(None)
    if seat["format"] != FORMAT or seat["gpu"] != (device != "cpu"):
        carried = "GPUs by NCCL" if seat["gpu"] else "CPUs by gloo"
        raise StreamError(
            f"the sender at {address} has format {seat['format']} and reaches {carried}, and this is format {FORMAT} "
            f"on {device}: use one version of zero3d, and the same kind of device."
        )
    inside = PrefixStore(seat["group"], store)
    mail = Mail(inside, f"said/{seat['rank']}", f"told/{seat['rank']}", f"sender at {address}")
    try:
        group = Group(inside, seat["rank"], seat["ranks"], device, timeout)
    except RuntimeError as error:
        raise StreamError(f"no process group can be made with the sender at {address}: {_first(error)}.") from error
    return GroupReceiver(store, mail, group, timeout)


def _first(error: BaseException) -> str:
    """Return what an error of gloo's or a store's says, without its source and its advice."""
    text = _OF_GLOO.sub("", str(error).partition("\n")[0])
    return text.strip(" .")
