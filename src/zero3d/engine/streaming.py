"""Weights streamed out of an engine in buckets: `Engine.stream_weights`, `Engine.send_weights`.

    every pipeline stage in turn    a unit is gathered; the stage's first rank has its tensors as they are published
                                    (checkpoint/published.py) and copies them into buckets (weights/buckets.py)
    rank 0 of all                   yields the buckets, those of later stages once they have been sent to it
    all other ranks                 yield as many, without tensors, so that all ranks run one loop

Memory: the largest gathered unit, as long as units are streamed, and two buckets on rank 0, one on the first ranks of
later stages; where adapters are merged or left out, a block of the model on the host, too. All ranks agree before each
bucket whether it comes: whoever fails, all of them raise its error, and nothing of training has changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from zero3d.checkpoint.adapter_folder import AdapterForm, streamed_name
from zero3d.checkpoint.export import card_of
from zero3d.checkpoint.forms import ADAPTER, BASE, MERGED, WHOLE, Form
from zero3d.checkpoint.hub_names import has_adapters
from zero3d.checkpoint.model_card import Card
from zero3d.checkpoint.published import Published
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.streamed_folder import FolderSender
from zero3d.distributed.agreement import agree, agree_and_count, exchange_texts
from zero3d.distributed.degrees import Place
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.features import required
from zero3d.engine.parts import Parts
from zero3d.engine.state import engine_state
from zero3d.engine.stream_guard import Streaming
from zero3d.engine.unshard import Unsharded
from zero3d.errors import ConfigError, StreamError, Zero3dError
from zero3d.models.bases import model_of
from zero3d.precision import DTYPES
from zero3d.spec.sizes import parse_size
from zero3d.spec.tiers import HOST
from zero3d.weights.buckets import Bucket, Packer, check_bucket_bytes
from zero3d.zero.gathers import STREAM
from zero3d.zero.unit import Unit

ADAPTERS = {"merged": MERGED, "alone": ADAPTER, "none": BASE}
CATEGORY = "stream"  # of the memory of buckets
AXIS = "receivers"  # where a watchdog is told that rank 0 waits for one
Memory = Callable[[int], Sequence[Tensor]]  # gives two pieces of so many bytes
Buckets = Generator[Bucket, None, None]


class Sender(Protocol):
    """Brings buckets to receivers; rank 0 has one."""

    waiting: Callable[[str], Any]
    current: int

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of two buckets, or of one where `send` has read it when it returns."""

    def meet(self) -> None:
        """Return when all receivers are there; `current` is 0 if they are others than before."""

    def begin(self) -> None:
        """Begin a stream."""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the memory of the one before is free."""

    def finish(self, tensors: int, nbytes: int) -> None:
        """Return when receivers have all of the stream."""

    def fail(self, why: str) -> None:
        """Tell receivers that the stream has failed."""


class Sent(NamedTuple):
    """Counts what a stream has sent: tensors and their bytes, in so many buckets and seconds; 0 on ranks but 0.

    unchanged  tensors that were left out, because receivers have them
    """

    tensors: int
    nbytes: int
    buckets: int
    seconds: float
    unchanged: int = 0


class Last(NamedTuple):
    """Remembers the last stream that its receivers had to the end.

    sender     rank 0's, and the number that it gave the stream
    checksums  of the tensors that this rank packed
    """

    sender: Sender | None = None
    number: int = 0
    checksums: Mapping[str, str] = MappingProxyType({})


class WeightStreams:
    """Streams the weights of an engine.

    memory  the entry of buckets while a stream holds them
    _last   the receivers' last weights, as far as this rank packed them; `_packers`: for the stream under way
    _form   of weights in the stream under way; _card: of their model
    """

    _form: Form | None = None
    _card: Card | None = None

    def __init__(self, parts: Parts, unsharded: Unsharded) -> None:
        self._parts, self._unsharded = parts, unsharded
        self._mesh, self._world = parts.mesh, parts.axes.world
        self._held, self._peak = 0, 0
        self._last, self._packers = Last(), list[Packer]()

    @property
    def memory(self) -> list[MemoryEntry]:
        """Return the entry of buckets, where a stream has held any."""
        held, peak = self._held, self._peak
        return [MemoryEntry(CATEGORY, HOST, peak, held, peak, peak, held)] if peak else []

    def stream(self, dtype: str | None, bucket_bytes: int | str, adapters: str) -> Buckets:
        """Return the generator that `Engine.stream_weights` promises."""
        kind, nbytes, wanted = self._checked(dtype, bucket_bytes, adapters)
        return self._stream(kind, wanted, nbytes, _allocated, {})

    def _checked(
        self, dtype: str | None, bucket_bytes: int | str, adapters: str
    ) -> tuple[str, int, torch.dtype | None]:
        """Return what is published, the bytes of a bucket, and the dtype. Raises ConfigError."""
        kind, nbytes = self._kind(adapters), check_bucket_bytes(parse_size(bucket_bytes, "bucket_bytes"))
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype!r}: pass {', '.join(map(repr, DTYPES))}, or None for that of training.")
        return kind, nbytes, None if dtype is None else DTYPES[dtype]

    def send(
        self, sender: Sender | None, dtype: str | None, bucket_bytes: int | str, adapters: str, changed_only: bool
    ) -> Sent:
        """Stream to a sender's receivers, as `Engine.send_weights` says."""
        with self._mesh.heartbeat.phase("stream"):
            kind, nbytes, wanted = self._checked(dtype, bucket_bytes, adapters)
            agree(self._world, partial(self._check_sender, sender, kind))
            if sender is not None:
                sender.waiting = self._waiting
            known = self._known(sender, nbytes) if changed_only else {}
            self._last = Last()
            memory = _allocated if sender is None else sender.memory
            return self._send(sender, self._stream(kind, wanted, nbytes, memory, known))

    def _known(self, sender: Sender | None, nbytes: int) -> Mapping[str, str]:
        """Return the checksums of this rank's last packed tensors, if all receivers have these tensors."""

        def met() -> bool:
            if sender is None:
                return False
            sender.memory(nbytes)
            sender.meet()
            return sender is self._last.sender and sender.current == self._last.number > 0

        have = agree(self._world, met)
        told = self._world.exchange(torch.tensor([have], dtype=torch.int64))
        return self._last.checksums if told[0, 0] else {}

    def _send(self, sender: Sender | None, stream: Buckets) -> Sent:
        begun, tensors, nbytes, buckets = time.perf_counter(), 0, 0, 0
        try:
            for bucket in stream:
                if sender is None:
                    continue
                try:
                    if not bucket.number:
                        sender.begin()
                    sender.send(bucket)
                except Zero3dError as error:
                    stream.throw(error)
                buckets += 1
                tensors += sum(part.checksum != "" for part in bucket.parts)
                nbytes += sum(part.tensor.nbytes for part in bucket.parts)
            if isinstance(sender, FolderSender):
                sender.form, sender.card = self._form, self._card
            agree(self._world, lambda: None if sender is None else _finish(sender, buckets, tensors, nbytes))
        except BaseException as error:
            if sender is not None:
                sender.fail(str(error))
            raise
        checksums = {name: digest for packer in self._packers for name, digest in packer.checksums.items()}
        self._last = Last(sender, 0 if sender is None else sender.current, checksums)
        left_out = torch.tensor([sum(packer.unchanged for packer in self._packers)], dtype=torch.int64)
        unchanged = int(self._world.exchange(left_out).sum())
        return Sent(tensors, nbytes, buckets, time.perf_counter() - begun, 0 if sender is None else unchanged)

    def _check_sender(self, sender: Sender | None, kind: str) -> None:
        if (sender is not None) != (self._world.rank == 0):
            raise ConfigError("send_weights(sender): rank 0 gives a sender, and the others None.")
        if isinstance(sender, FolderSender) and kind == ADAPTER:
            raise ConfigError("a folder of the adapter alone is written by engine.export(directory, 'adapter').")

    def _waiting(self, whom: str) -> Any:
        return self._mesh.heartbeat.inside(AXIS, "wait", whom)

    def _kind(self, adapters: str) -> str:
        if adapters not in ADAPTERS:
            raise ConfigError(f"adapters={adapters!r}: pass one of {', '.join(map(repr, ADAPTERS))}.")
        chunk = next(iter(self._parts.partition.chunks.values()))
        return ADAPTERS[adapters] if has_adapters(model_of(chunk)) else WHOLE

    # --- the buckets ----------------------------------------------------------------------------

    def _stream(
        self, kind: str, dtype: torch.dtype | None, nbytes: int, memory: Memory, known: Mapping[str, str]
    ) -> Buckets:
        """Yield the buckets of all stages in turn, numbered from 0, in memory that `memory` gives.

        known  checksums of tensors that are left out where they still have them
        """
        self._parts.registry.check()
        self._parts.optimizer.flush()
        with (
            required(self._parts.features, Streaming).begun(),
            self._mesh.heartbeat.phase("stream"),
            self._resharded(),
            torch.no_grad(),
        ):
            state, place = engine_state(self._parts), self._mesh.place
            published = agree(self._world, lambda: Published(state, kind))
            self._form, self._card = published.form, card_of(state)
            packs = (place.tp, place.dp) == (0, 0)
            memories = agree(self._world, lambda: memory(nbytes)[: 1 if place.pp else 2] if packs else [])
            self._held = self._peak = sum(each.numel() for each in memories)
            self._packers = [Packer(memories, known)] if packs else []
            try:
                yield from self._stages(state, published, dtype, memories)
            finally:
                self._held = 0

    @contextmanager
    def _resharded(self) -> Iterator[None]:
        """Reshard parameters inside; make the ones that were whole whole again afterwards, however it ends."""
        before = self._unsharded.now
        self._unsharded.reshard()
        try:
            yield
        finally:
            self._unsharded.again(*before)

    def _stages(
        self, state: EngineState, published: Published, dtype: torch.dtype | None, memories: Sequence[Tensor]
    ) -> Buckets:
        world, whole = self._world, self._parts.whole_parameters
        alone = isinstance(published.form, AdapterForm)
        counts = world.exchange(torch.tensor([len(published.units)], dtype=torch.int64)).flatten().tolist()
        number, sent = 0, set[str]()
        for stage in range(state.degrees.pp):
            head = state.degrees.rank(Place(stage, 0, 0))
            packer = self._packers[0] if world.rank == head else None
            hand = partial(self._handed, head, memories)
            here = self._mesh.place.pp == stage
            with whole.receiving(published.units if here else []):
                for i in range(counts[head]):
                    unit = published.units[i] if here else None
                    with nullcontext() if unit is None else whole.on_first(unit, STREAM):
                        number = yield from hand(number, self._packed(published, unit, packer, dtype))
            last = agree(world, partial(_others, published, sent) if packer is not None else dict[str, Tensor])
            names = list(last)
            number = yield from hand(number, _to_the_end(packer, last, dtype if alone else None))
            if state.degrees.pp > 1:
                sent.update(name for text in exchange_texts(world, json.dumps(names)) for name in json.loads(text))

    def _packed(
        self, published: Published, unit: Unit | None, packer: Packer | None, dtype: torch.dtype | None
    ) -> Iterator[Bucket]:
        """Yield the buckets that a unit of this stage fills, on its first rank; others help to make it whole."""
        tensors = {} if unit is None else published.collect(unit)
        if packer is not None:
            yield from packer.feed(tensors, dtype)

    def _handed(
        self, head: int, memories: Sequence[Tensor], number: int, packed: Iterator[Bucket]
    ) -> Generator[Bucket, None, int]:
        """Yield what a stage's first rank packs, on rank 0 in its own memory; return the number of the next bucket."""
        while True:
            (bucket, text), lengths = agree_and_count(self._world, partial(_next, packed, head), _length)
            length = lengths[head]
            if not length:
                return number
            if head:
                bucket = self._moved(head, memories, bucket, text.ljust(length), number)
            elif bucket is not None:
                bucket = bucket._replace(number=number)
            yield from self._yielded(
                bucket if bucket is not None else Bucket(number, torch.empty(0, dtype=torch.uint8), 0, ())
            )
            number += 1

    def _moved(
        self, head: int, memories: Sequence[Tensor], bucket: Bucket | None, text: bytes, number: int
    ) -> Bucket | None:
        """Send a later stage's bucket to rank 0, and return it there."""
        world = self._world
        about = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        world.send_to_first(about, head, "a bucket's header")
        if bucket is not None:
            world.send_to_first(bucket.memory[: bucket.nbytes], head, "a bucket")
            return None
        if world.rank:
            return None
        memory = memories[number % len(memories)]
        nbytes, header = json.loads(about.numpy().tobytes())
        world.send_to_first(memory[:nbytes], head, "a bucket")
        return Bucket.of(number, memory, nbytes, header)

    def _yielded(self, bucket: Bucket) -> Buckets:
        """Yield a bucket; whoever leaves the stream there, or fails, all ranks raise that.

        The others are told where they ask for the next bucket.
        """
        rank = self._world.rank
        try:
            yield bucket
        except GeneratorExit:
            left = StreamError(f"rank {rank} left the stream of weights at bucket {bucket.number}.")
            with suppress(StreamError):
                agree_and_count(self._world, partial(_fail, left), _length)
            raise
        except Exception as error:  # noqa: BLE001 (agree raises it)
            agree_and_count(self._world, partial(_fail, error), _length)


def _next(packed: Iterator[Bucket], head: int) -> tuple[Bucket | None, bytes]:
    """Return the next bucket, if there is one, and what rank 0 has to read of it if rank `head` is another."""
    bucket = next(packed, None)
    if bucket is None:
        return None, b""
    return bucket, json.dumps([bucket.nbytes, bucket.header()] if head else []).encode()


def _length(found: tuple[Bucket | None, bytes]) -> int:
    return len(found[1])


def _others(published: Published, sent: Collection[str]) -> dict[str, Tensor]:
    """Return a stage's buffers, by their names in a stream, without names that an earlier stage has sent."""
    named = {streamed_name(name): tensor for name, tensor in published.buffers().items()}
    return {name: tensor for name, tensor in named.items() if name not in sent}


def _to_the_end(packer: Packer | None, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Iterator[Bucket]:
    """Yield the buckets of a stage's last tensors, the one that is open with them."""
    if packer is not None:
        yield from packer.feed(tensors, dtype)
        yield from packer.flush()


def _finish(sender: Sender, buckets: int, tensors: int, nbytes: int) -> None:
    """End a stream, which has not begun yet where it had no bucket."""
    if not buckets:
        sender.begin()
    sender.finish(tensors, nbytes)


def _allocated(nbytes: int) -> Sequence[Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]


def _fail(error: Exception) -> NoReturn:
    raise error
