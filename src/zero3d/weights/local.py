"""From rank 0 to processes of its host, through memory that they share; nothing of it has a name that could stay.

    sender                                          receiver
    a Unix socket at PATH                           connects
    {"format", "bytes"}, two memory files     ->    maps them
    {"stream": k}                             ->
    fills bucket 0; {"bucket": 0, "parts"}    ->    reads it where it is, verifies checksums
    fills bucket 1; {"bucket": 1, ...}        ->
    waits for bucket 0's                      <-    {"have": 0}
    ...
    {"end": tensors, "bytes"}                 ->    compares
                                              <-    {"have all": k}

Messages are JSON behind 4 bytes of their length; the memory files travel as file descriptors (SCM_RIGHTS). The
sender fills a bucket only when the one before last was acknowledged. The connection stays for later streams. A process
that ends, however it does, closes its end, which the other one sees at once; one that is stopped, or sleeps, is named
when `timeout` is over, and the stream fails on both sides: {"failed": why}, either way.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from zero3d.errors import ConfigError, StreamError
from zero3d.weights.buckets import Assembler, Bucket

FORMAT = 1
SLOTS = 2  # memories of a bucket each
LOOK = 0.05  # seconds between two tries to connect
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is held by a debugger", "Z": "has died", "S": "sleeps", "R": "runs"}
_MOST_TEXT = 1 << 28  # bytes of a message: parts of a million tensors


class Connection:
    """Sends and receives messages over one socket. Raises StreamError, which names the process at the other end.

    name  of the other end
    """

    def __init__(self, end: socket.socket, role: str) -> None:
        self._end = end
        self.pid = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        self.name = f"{role} (process {self.pid})"

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message, with open files perhaps."""
        data = json.dumps(message).encode()
        try:
            head = _LENGTH.pack(len(data))
            sent = socket.send_fds(self._end, [head], list(files)) if files else self._end.send(head)
            self._end.sendall(head[sent:] + data)
        except TimeoutError as error:
            raise StreamError(f"the {self.name} takes no message: it {self.state}.") from error
        except OSError as error:
            raise self._gone() from error

    def receive(self, until: float | None) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and the files that came with it. Raises TimeoutError at a time (monotonic)."""
        files: list[int] = []
        head = self._read(_LENGTH.size, until, files)
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_TEXT:
            raise StreamError(f"the {self.name} announces a message of {length:,} bytes: it is no peer of this kind.")
        try:
            message = json.loads(self._read(length, until, files))
        except ValueError as error:
            raise StreamError(f"the {self.name} sends what is no message: it is no peer of this kind.") from error
        if not isinstance(message, dict):
            raise StreamError(f"the {self.name} sends what is no message: it is no peer of this kind.")
        return message, files

    def _read(self, count: int, until: float | None, files: list[int]) -> bytes:
        data = b""
        while len(data) < count:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            try:
                some, came, *_ = socket.recv_fds(self._end, count - len(data), SLOTS)
            except TimeoutError:
                raise
            except OSError as error:
                raise self._gone() from error
            if not some:
                raise self._gone()
            data += some
            files += came
        return data

    def patience(self, seconds: float | None) -> None:
        """Wait no longer than this where the other end takes no message."""
        self._end.settimeout(seconds)

    def _gone(self) -> StreamError:
        return StreamError(f"the {self.name} is gone: it has ended, or was killed.")

    @property
    def state(self) -> str:
        """Return what the other process does, as Linux says it."""
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            return _STATES.get(text.rpartition(")")[2].split()[0], "works")
        return "is gone"

    def close(self) -> None:
        """End the connection."""
        self._end.close()


class LocalSender:
    """Sends streams to processes of this host that have connected to a path; on rank 0 alone.

    receivers  how many there are to be: a stream begins when as many have come
    timeout    seconds that are waited for one of them to come, or to acknowledge a bucket
    waiting    what is entered, with who is waited for, while it is: an engine tells its watchdog
    """

    def __init__(self, path: str | Path, receivers: int = 1, timeout: float = 60.0) -> None:
        self.path = Path(path)
        self._timeout, self._count = timeout, receivers
        self._files: list[int] = []
        self._memory: list[Tensor] = []
        self._receivers: list[Connection] = []
        self._streams, self._buckets = 0, 0
        self.waiting: Callable[[str], AbstractContextManager[object]] = lambda whom: nullcontext()
        self._socket = _listen(self.path)

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of two buckets, which receivers map; it stays from stream to stream."""
        if not self._memory or self._memory[0].numel() != nbytes:
            self._drop()
            self._forget_memory()
            for number in range(SLOTS):
                file = os.memfd_create(f"zero3d-bucket-{number}")
                self._files.append(file)
                os.ftruncate(file, nbytes)
                self._memory.append(_mapped(file, nbytes))
        return self._memory

    def begin(self) -> None:
        """Begin a stream, once all receivers have come. Raises StreamError."""
        end = time.monotonic() + self._timeout
        while len(self._receivers) < self._count:
            self._receivers.append(self._accept(end))
        self._streams, self._buckets = self._streams + 1, 0
        self._tell({"stream": self._streams})

    def send(self, bucket: Bucket) -> None:
        """Tell receivers of a bucket in this memory; return when they have read the one before. Raises StreamError."""
        self._tell({"bucket": bucket.number, "bytes": bucket.nbytes, "parts": bucket.header()})
        self._buckets += 1
        if bucket.number:
            self._await("have", bucket.number - 1, f"bucket {bucket.number - 1}")

    def finish(self, tensors: int, nbytes: int) -> None:
        """End a stream of so many tensors; return when receivers have all of it. Raises StreamError."""
        self._tell({"end": tensors, "bytes": nbytes})
        if self._buckets:
            self._await("have", self._buckets - 1, f"bucket {self._buckets - 1}")
        self._await("have all", self._streams, "all of the stream")

    def fail(self, why: str) -> None:
        """Tell receivers that the stream has failed, and let go of them: they connect again."""
        for receiver in self._receivers:
            receiver.patience(1.0)
            with suppress(StreamError):
                receiver.send({"failed": why})
        self._drop()

    def close(self) -> None:
        """End all connections, and remove the path."""
        self._drop()
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self._forget_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, until: float) -> Connection:
        self._socket.settimeout(max(0.0, until - time.monotonic()) or 1e-3)
        try:
            with self.waiting("a receiver to connect"):
                end, _ = self._socket.accept()
        except TimeoutError as error:
            come = f"{len(self._receivers)} of {self._count} have"
            raise StreamError(
                f"no receiver has connected to {self.path} in {self._timeout:g} s ({come}): start it, with "
                "zero3d.weights.connect(path)."
            ) from error
        receiver = Connection(end, "receiver")
        receiver.patience(self._timeout)
        receiver.send({"format": FORMAT, "bytes": self._memory[0].numel()}, self._files)
        return receiver

    def _tell(self, message: dict[str, Any]) -> None:
        for receiver in self._receivers:
            receiver.patience(self._timeout)
            receiver.send(message)

    def _await(self, key: str, value: int, what: str) -> None:
        """Wait until all receivers have acknowledged something. Raises StreamError, which names one that has not."""
        end = time.monotonic() + self._timeout
        for receiver in self._receivers:
            with self.waiting(f"{receiver.name} to acknowledge {what}"):
                self._hear(receiver, key, value, what, end)

    def _hear(self, receiver: Connection, key: str, value: int, what: str, end: float) -> None:
        try:
            message, _ = receiver.receive(end)
        except TimeoutError as error:
            raise StreamError(
                f"the {receiver.name} has not acknowledged {what} of weights in {self._timeout:g} s: it "
                f"{receiver.state}."
            ) from error
        if "failed" in message:
            raise StreamError(f"the {receiver.name} says: {message['failed']}")
        if message.get(key) != value:
            raise StreamError(f"the {receiver.name} answers {message}, and is to acknowledge {what}.")

    def _drop(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []

    def _forget_memory(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self._memory = [], []


class Receiver:
    """Receives streams from a sender of this host.

    timeout  seconds that are waited for the sender within a stream; before one it may train as long as it likes
    """

    def __init__(self, sender: Connection, timeout: float) -> None:
        self._sender, self._timeout = sender, timeout
        self._memory: list[Tensor] = []

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
        message = self._next(None)
        if "format" in message:
            message = self._next(None)
        assembler = Assembler()
        stream = message.get("stream")
        while "bucket" in (message := self._next(self._timeout)):
            number = message["bucket"]
            bucket = Bucket.of(number, self._memory[number % SLOTS], message["bytes"], message["parts"])
            yield from assembler.take(bucket)
            self._sender.send({"have": number})
        if message.get("end") != assembler.count or message["bytes"] != assembler.nbytes or assembler.missing:
            raise StreamError(
                f"{assembler.count} tensors of {assembler.nbytes:,} bytes have come, and the sender says {message}."
            )
        self._sender.send({"have all": stream})

    def _next(self, seconds: float | None) -> dict[str, Any]:
        try:
            message, files = self._sender.receive(None if seconds is None else time.monotonic() + seconds)
        except TimeoutError as error:
            raise StreamError(
                f"the {self._sender.name} has sent nothing for {seconds:g} s within a stream: it {self._sender.state}."
            ) from error
        if "failed" in message:
            raise StreamError(f"the stream has failed: {message['failed']}")
        if "format" in message:
            if message["format"] != FORMAT or len(files) != SLOTS:
                raise StreamError(
                    f"the {self._sender.name} sends format {message['format']}, and this is version {FORMAT}: use one "
                    "version of zero3d."
                )
            self._memory = [_mapped(file, message["bytes"]) for file in files]
            for file in files:
                os.close(file)
        return message

    def _refuse(self, why: str) -> None:
        with suppress(StreamError):
            self._sender.patience(1.0)
            self._sender.send({"failed": why})
        self._sender.close()

    def close(self) -> None:
        """End the connection."""
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(path: str | Path, timeout: float = 60.0) -> Receiver:
    """Return a receiver of the sender at a path, for which it waits so many seconds. Raises StreamError."""
    end = time.monotonic() + timeout
    while True:
        attempt = socket.socket(socket.AF_UNIX)
        try:
            attempt.connect(str(path))
        except OSError as error:
            attempt.close()
            if time.monotonic() > end:
                raise StreamError(f"no sender listens at {path} ({error.strerror}) in {timeout:g} s.") from error
            time.sleep(LOOK)
        else:
            return Receiver(Connection(attempt, "sender"), timeout)


def receive(path: str | Path, timeout: float = 60.0) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of one stream from the sender at a path; see `Receiver.receive`."""
    with connect(path, timeout) as receiver:
        yield from receiver.receive()


def _listen(path: Path) -> socket.socket:
    """Listen at a path, for this user alone. Raises ConfigError where something else is there."""
    made = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_heard(path):
            path.unlink()  # of a process that is gone
        made.bind(str(path))
        path.chmod(0o600)
        made.listen()
    except OSError as error:
        made.close()
        raise ConfigError(f"no socket can be at {path} ({error.strerror or error}): choose another path.") from error
    return made


def _is_heard(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as attempt:
        try:
            attempt.connect(str(path))
        except OSError:
            return False
        return True


def _mapped(file: int, nbytes: int) -> Tensor:
    """Return the bytes of an open memory file as a tensor that shares them."""
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
