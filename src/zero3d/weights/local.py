"""From rank 0 to processes of its host, through memory that they share; nothing of it has a name that could stay.

    sender                                          receiver
    a Unix socket at PATH                           connects
    {"format", "bytes"}, two memory files     ->    maps them, and reads buckets where they are
    a stream, as protocol.py has it           <->

Messages are JSON behind 4 bytes of their length; the memory files travel as file descriptors (SCM_RIGHTS). The
connection stays for later streams. A process that ends, however it does, closes its end, which the other one sees at
once; of one that is stopped, or sleeps, Linux says what it does.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from zero3d.errors import ConfigError, StreamError
from zero3d.weights.buckets import Bucket
from zero3d.weights.protocol import SLOTS, SOON, Message, Receiver, StreamSender

FORMAT = 1
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

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
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

    def hear(self, until: float | None) -> Message:
        """Return the next message. Raises TimeoutError at a time (monotonic)."""
        return self.receive(until)[0]

    def receive(self, until: float | None) -> tuple[Message, list[int]]:
        """Return the next message and the files that came with it. Raises TimeoutError at a time (monotonic)."""
        files: list[int] = []
        head = self._read(_LENGTH.size, until, files)
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_TEXT:
            raise StreamError(
                f"the {self.name} announces a message of {length:,} bytes: it is not a peer of this kind."
            )
        try:
            message = json.loads(self._read(length, until, files))
        except ValueError as error:
            raise StreamError(f"the {self.name} sends what is no message: it is not a peer of this kind.") from error
        if not isinstance(message, dict):
            raise StreamError(f"the {self.name} sends what is no message: it is not a peer of this kind.")
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


class LocalSender(StreamSender):
    """Sends streams to processes of this host that have connected to a path; on rank 0 alone.

    receivers  how many there are to be: a stream begins when as many have come
    timeout    seconds that are waited for one of them to come, or to acknowledge a bucket
    """

    def __init__(self, path: str | Path, receivers: int = 1, timeout: float = 60.0) -> None:
        super().__init__(timeout)
        self.path = Path(path)
        self._count = receivers
        self._files: list[int] = []
        self._memory: list[Tensor] = []
        self._ends: list[Connection] = []
        self._socket = _listen(self.path)

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of two buckets, which receivers map; it stays from stream to stream."""
        if not self._memory or self._memory[0].numel() != nbytes:
            self._let_go()
            self._forget_memory()
            for number in range(SLOTS):
                file = os.memfd_create(f"zero3d-bucket-{number}")
                self._files.append(file)
                os.ftruncate(file, nbytes)
                self._memory.append(_mapped(file, nbytes))
        return self._memory

    def close(self) -> None:
        """End all connections, and remove the path."""
        self._let_go()
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self._forget_memory()

    def _meet(self) -> Sequence[Connection]:
        end = time.monotonic() + self._timeout
        while len(self._ends) < self._count:
            self._ends.append(self._accept(end))
        return self._ends

    def _accept(self, until: float) -> Connection:
        self._socket.settimeout(max(0.0, until - time.monotonic()) or 1e-3)
        try:
            with self.waiting("a receiver to connect"):
                end, _ = self._socket.accept()
        except TimeoutError as error:
            come = f"{len(self._ends)} of {self._count} have"
            raise StreamError(
                f"no receiver has connected to {self.path} in {self._timeout:g} s ({come}): start it, with "
                "zero3d.weights.connect(path)."
            ) from error
        receiver = Connection(end, "receiver")
        receiver.patience(self._timeout)
        receiver.send({"format": FORMAT, "bytes": self._memory[0].numel()}, self._files)
        return receiver

    def _tell(self, message: Message, seconds: float) -> None:
        failed: list[StreamError] = []
        for receiver in self._ends:
            receiver.patience(seconds)
            try:
                receiver.send(message)
            except StreamError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _deliver(self, bucket: Bucket) -> None:
        """Do nothing: receivers have the bucket's memory."""

    def _drop(self) -> None:
        for receiver in self._ends:
            receiver.close()
        self._ends = []

    def _forget_memory(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self._memory = [], []


class LocalReceiver(Receiver):
    """Receives streams from a sender of this host, in memory that both have."""

    def __init__(self, sender: Connection, timeout: float) -> None:
        super().__init__(sender, timeout)
        self._connection = sender
        self._memory: list[Tensor] = []

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _hear(self, until: float | None) -> Message:
        message, files = self._connection.receive(until)
        if "format" not in message:
            return message
        if message["format"] != FORMAT or len(files) != SLOTS:
            raise StreamError(
                f"the {self._sender.name} sends format {message['format']}, and this is version {FORMAT}: use one "
                "version of zero3d."
            )
        self._memory = [_mapped(file, message["bytes"]) for file in files]
        for file in files:
            os.close(file)
        return self._hear(until)

    def _taken(self, number: int, nbytes: int) -> Tensor:
        return self._memory[number % SLOTS]

    def _answer(self, message: Message) -> None:
        self._connection.patience(SOON if "failed" in message else self._timeout)
        self._connection.send(message)


def join(path: str | Path, timeout: float) -> LocalReceiver:
    """Return a receiver of the sender at a path; see `connect`. Raises StreamError."""
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
            return LocalReceiver(Connection(attempt, "sender"), timeout)


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
