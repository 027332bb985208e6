"""Defines the messages between a sender of weights and its receivers, which `local.py` and `group.py` carry.

    sender                                          receiver
    {"stream": k}                             ->
    fills bucket 0; {"bucket": 0, "parts"}    ->    takes it, verifies checksums
    fills bucket 1; {"bucket": 1, ...}        ->
    waits for bucket 0's                      <-    {"have": 0}
    ...
    {"end": tensors, "bytes"}                 ->    compares
                                              <-    {"have all": k}

The sender fills a bucket only when the one before last was acknowledged. Who ends, is stopped or sleeps is named when
`timeout` is over, if not before, and the stream fails on both sides: {"failed": why}, either way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from zero3d.errors import StreamError
from zero3d.weights.buckets import Assembler, Bucket

SLOTS = 2  # memories of a bucket each
SOON = 1.0  # seconds that somebody is given who is told of a failure
Message = dict[str, Any]


class Peer(Protocol):
    """Stands for the process at the other end: its name, and what it does (`it {state}`) as far as that is known."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def state(self) -> str:
        """Return what it does."""

    def hear(self, until: float | None) -> Message:
        """Return its next message. Raises TimeoutError at a time (monotonic); StreamError where it is gone."""


class Connection(ABC):
    """Ends with a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, or all of a sender's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamSender(Connection):
    """Sends streams to receivers; on rank 0 alone.

    waiting  what is entered, with who is waited for, while it is: an engine tells its watchdog
    current  the number of the last stream, if all receivers have had it to its end; 0 where one of them has not
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._receivers: Sequence[Peer] = ()
        self._streams, self._buckets = 0, 0
        self.current = 0
        self.waiting: Callable[[str], AbstractContextManager[object]] = lambda whom: nullcontext()

    @abstractmethod
    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of two buckets, which stays from stream to stream."""

    @abstractmethod
    def _meet(self) -> Sequence[Peer]:
        """Return the receivers, once there are as many as are to be. Raises StreamError."""

    @abstractmethod
    def _tell(self, message: Message, seconds: float) -> None:
        """Send a message to all receivers, each of which has so long to take it. Raises StreamError."""

    @abstractmethod
    def _deliver(self, bucket: Bucket) -> None:
        """Send receivers the bytes of a bucket of which they have been told, or begin to."""

    @abstractmethod
    def _drop(self) -> None:
        """Let go of all receivers: they connect again."""

    def meet(self) -> None:
        """Return when all receivers are there; where they are others than before, none of them is current."""
        if not self._receivers:
            self.current = 0
        self._receivers = self._meet()

    def begin(self) -> None:
        """Begin a stream, once all receivers have come. Raises StreamError."""
        self.meet()
        self._streams, self._buckets = self._streams + 1, 0
        self._tell({"stream": self._streams}, self._timeout)

    def send(self, bucket: Bucket) -> None:
        """Send a bucket in this memory; return when receivers have read the one before. Raises StreamError."""
        self._tell({"bucket": bucket.number, "bytes": bucket.nbytes, "parts": bucket.header()}, self._timeout)
        self._deliver(bucket)
        self._buckets += 1
        if bucket.number:
            self._await("have", bucket.number - 1, f"bucket {bucket.number - 1}")

    def finish(self, tensors: int, nbytes: int) -> None:
        """End a stream of so many tensors; return when receivers have all of it. Raises StreamError."""
        self._tell({"end": tensors, "bytes": nbytes}, self._timeout)
        if self._buckets:
            self._await("have", self._buckets - 1, f"bucket {self._buckets - 1}")
        self._await("have all", self._streams, "all of the stream")
        self.current = self._streams

    def fail(self, why: str) -> None:
        """Tell receivers that the stream has failed, and let go of them: they connect again."""
        with suppress(StreamError):
            self._tell({"failed": why}, SOON)
        self._let_go()

    def _let_go(self) -> None:
        self._drop()
        self._receivers, self.current = (), 0

    def _await(self, key: str, value: int, what: str) -> None:
        """Wait until all receivers have acknowledged something. Raises StreamError, which names one that has not."""
        end = time.monotonic() + self._timeout
        for receiver in self._receivers:
            with self.waiting(f"{receiver.name} to acknowledge {what}"):
                self._hear(receiver, key, value, what, end)

    def _hear(self, receiver: Peer, key: str, value: int, what: str, end: float) -> None:
        try:
            message = receiver.hear(end)
        except TimeoutError as error:
            raise StreamError(
                f"the {receiver.name} has not acknowledged {what} of weights in {self._timeout:g} s: it "
                f"{receiver.state}."
            ) from error
        if "failed" in message:
            raise StreamError(f"the {receiver.name} says: {message['failed']}")
        if message.get(key) != value:
            raise StreamError(f"the {receiver.name} answers {message}, and is to acknowledge {what}.")


class Receiver(Connection):
    """Receives streams from a sender.

    timeout  seconds that are waited for the sender within a stream; before one it may train as long as it likes
    """

    def __init__(self, sender: Peer, timeout: float) -> None:
        self._sender, self._timeout = sender, timeout

    @abstractmethod
    def _hear(self, until: float | None) -> Message:
        """Return the sender's next message. Raises TimeoutError at a time (monotonic); StreamError where it is gone."""

    @abstractmethod
    def _taken(self, number: int, nbytes: int) -> Tensor:
        """Return the bytes of a bucket that has been announced, once they are there. Raises StreamError."""

    @abstractmethod
    def _answer(self, message: Message) -> None:
        """Send the sender a message. Raises StreamError."""

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the next stream, each verified; a tensor may be used until the next is asked for.

        Do not write into it. Raises StreamError where the stream fails: tensors that came before are then of a state
        that not all others have.
        """
        try:
            yield from self._stream()
        except GeneratorExit:
            self._refuse("it left the stream before its end.")
            raise
        except StreamError as error:
            self._refuse(str(error))
            raise

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        stream = self._next(None).get("stream")
        assembler = Assembler()
        while "bucket" in (message := self._next(self._timeout)):
            number, nbytes = message["bucket"], message["bytes"]
            bucket = Bucket.of(number, self._taken(number, nbytes), nbytes, message["parts"])
            yield from assembler.unpack(bucket)
            self._answer({"have": number})
        if message.get("end") != assembler.count or message["bytes"] != assembler.nbytes or assembler.missing:
            raise StreamError(
                f"{assembler.count} tensors of {assembler.nbytes:,} bytes have come, and the sender says {message}."
            )
        self._answer({"have all": stream})

    def _next(self, seconds: float | None) -> Message:
        try:
            message = self._hear(None if seconds is None else time.monotonic() + seconds)
        except TimeoutError as error:
            raise StreamError(
                f"the {self._sender.name} has sent nothing for {seconds:g} s within a stream: it {self._sender.state}."
            ) from error
        if "failed" in message:
            raise StreamError(f"the stream has failed: {message['failed']}")
        return message

    def _refuse(self, why: str) -> None:
        with suppress(StreamError):
            self._answer({"failed": why})
        self.close()
