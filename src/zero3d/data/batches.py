"""Who gets which sequence when: an endless stream of samples, cut into batches, shared among ranks.

    epoch 0 in its order      epoch 1 in its order
    | . . . . . . . . . . . | . . . . . . . . . . . | ...
    |  step 0 |  step 1 |  step 2 |                        `batch` samples each
    |r0  |r1  |r0  |r1  |                                  each dp rank a contiguous part,
    |0101|0101|0101|0101|  dealt: micro-batches in turn    cut into `accumulate` micro-batches

An epoch's order depends on (seed, epoch) alone and a position is the number of samples taken, so a
run goes on exactly where it was, with any dp, batch and number of workers, and with the same sequences only.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from zero3d.config import Batch as Portions
from zero3d.data.encode import RULE
from zero3d.data.mixture import parts_of
from zero3d.data.modality import ModalityOrder, mixed, pictured
from zero3d.data.orders import GroupedOrder, Stream
from zero3d.data.sequences import Batch, Sample, Samples, padded_alike
from zero3d.errors import DataError

TYPED = {
    "seed": "seed",
    "shuffle": "data.shuffle",
    "length": "data.length",
    "packing": "data.packing",
    "weights": "weights in data.train",
    "grouped": "data.group_by_length and train.batch",
    "by modality": "data.group_by_modality and train.batch",
    "processor": "model.path, whose processor it is",
    "apart": "data.group_by_modality",
    "patches": "data.patches and train.micro_batch",
}
ABSENT: Mapping[str, int | str] = {
    "weights": "none",
    "grouped": 0,
    "by modality": 0,
    "patches": 0,
}  # what checkpoints mean that do not say
DATA = "data.train, data.validation and tokenizer"
EARLIER = (
    " If they are the same: the version that wrote the checkpoint tokenized prompt and completion apart, and left out "
    "tools and template options of chats, so this one makes other tokens of them. Go on with that version, or train on "
    "from its weights: zero3d ckpt export CHECKPOINT FOLDER, then model.path=FOLDER with another output."
)


class Grouping(NamedTuple):
    """What the sequences of a batch have in common: a similar length; images all or none.

    alike  the token with which micro-batches of a step are padded to one length; None: each has its own
    """

    length: bool = False
    modality: bool = False
    alike: int | None = None


NOT_GROUPED = Grouping()


class BatchStream:
    """An endless iterator: for each step this rank's `accumulate` micro-batches [micro_batch, length].

    `workers` processes read ahead; the batches are the same with any number. Call `close` at the end.
    `dealt`: rank r's k-th micro-batch is number k x dp + r of the batch's, as exact mode numbers them.
    `grouped`: what the sequences of a batch have in common.
    `pictured`: of the step handed out last, for each number of a micro-batch whether any rank's has an image; None
    where only samples that are read tell.
    """

    def __init__(
        self,
        sequences: Samples,
        portions: Portions,
        *,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        dealt: bool = False,
        grouped: Grouping = NOT_GROUPED,
    ) -> None:
        if not len(sequences):
            raise DataError("there is no sequence to train on: every document was too short or without a target.")
        self._sequences = sequences
        self.portions = portions
        self._rank = rank
        self._workers = workers
        self._dealt, self._alike = dealt, grouped.alike
        self._order: Stream = sequences.order(seed, shuffle)
        self._drawn: dict[str, int | str] = {"seed": seed, "shuffle": shuffle}
        if grouped.length:
            self._order = GroupedOrder(self._order, sequences.lengths, portions.batch, seed)
            self._drawn["grouped"] = portions.batch
        self._kinds = pictured(sequences)
        if grouped.modality and self._kinds is not None and mixed(self._kinds):
            self._order = ModalityOrder(self._order, self._kinds, portions.batch, seed)
            self._drawn["by modality"] = portions.batch
        self._taken = 0  # samples of the whole stream that were handed out, on all ranks
        self._batches: Iterator[Batch] | None = None
        self._ahead: deque[list[bool]] = deque()  # `pictured` of the steps that are read
        self.pictured: list[bool] | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._batches is None:
            self._batches = _load(self._sequences, self._micro_batches(self._taken), self._workers)
            atexit.register(self.close)
        step = [next(self._batches) for _ in range(self.portions.accumulate)]
        self.pictured = self._ahead.popleft() if self._kinds is not None else None
        self._taken += self.portions.batch
        return step if self._alike is None else padded_alike(step, self._alike)

    def _micro_batches(self, taken: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches, as indices of sequences, from a place of the stream on."""
        share, size = self.portions.batch // self.portions.dp, self.portions.micro_batch
        start, step = (size, size * self.portions.dp) if self._dealt else (share, size)
        while True:
            if self._kinds is not None:
                self._ahead.append(self._pictured(taken))
            first_of_all = taken + self._rank * start
            for first in range(first_of_all, first_of_all + step * self.portions.accumulate, step):
                yield self._order.samples(first, first + size)
            taken += self.portions.batch

    def _pictured(self, taken: int) -> list[bool]:
        """Return, of each micro-batch of the step at a place, whether any rank's has an image."""
        assert self._kinds is not None
        by_rank = (self.portions.accumulate, -1) if self._dealt else (self.portions.dp, self.portions.accumulate, -1)
        has: Any = self._kinds[self._order.samples(taken, taken + self.portions.batch)].reshape(by_rank)
        return [bool(any_of_all) for any_of_all in has.any(axis=1 if self._dealt else (0, 2))]

    def state(self) -> dict[str, int | str]:
        """Return the place after the last batch handed out, whatever workers have read ahead, and what the order needs.

        The same on all ranks.
        """
        epoch, index = divmod(self._taken, self._order.count)
        return {"epoch": epoch, "index": index, "rule": RULE, **self._sequences.identity, **self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved place. Raises DataError where the order is not the one that was saved."""
        present: dict[str, int | str] = {**ABSENT, **self.state()}
        for name in [name for name in present if name not in ("epoch", "index", "rule")]:
            saved = state.get(name, ABSENT.get(name, present[name]))
            if saved != present[name]:
                raise DataError(
                    f"the data are not those of the checkpoint: {name} was {_shown(saved)} and is now "
                    f"{_shown(present[name])}. Give the same {TYPED.get(name, DATA)}, or start a new run."
                    f"{EARLIER if name not in TYPED and state.get('rule', 1) != RULE else ''}"
                )
        self.close()
        self._taken = state["epoch"] * self._order.count + state["index"]

    @property
    def taken(self) -> int:
        """Sequences handed out so far, on all ranks."""
        return self._taken

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        atexit.unregister(self.close)
        self._ahead.clear()
        self._batches = None  # a loader's iterator ends its workers when it goes


class _Samples(Dataset[Sample]):
    """Sequences as torch's map-style data set."""

    def __init__(self, sequences: Samples) -> None:
        self._sequences = sequences

    def __getitems__(self, indices: list[int]) -> list[Sample] | DataError:
        """Return samples, or the error: one that a worker raised would come as its whole traceback."""
        try:
            return [self._sequences[index] for index in indices]
        except DataError as error:
            return error


class _Endless:
    """A generator as torch's batch sampler."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def _load(sequences: Samples, batches: Iterator[list[int]], workers: int) -> Iterator[Batch]:
    """Read micro-batches in this order.

    Workers are spawned: a fork would copy held locks of gloo, CUDA and tokenizers. The generator is
    private: DataLoader draws a number from it, and the global one belongs to dropout.
    """
    loader: DataLoader[Any] = DataLoader(
        _Samples(sequences),
        batch_sampler=_Endless(batches),  # it has no length, and needs none
        collate_fn=partial(_stacked, sequences),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_start_worker if workers else None,
        generator=torch.Generator(),
    )
    for batch in loader:
        if isinstance(batch, DataError):
            raise batch
        yield batch


def _stacked(sequences: Samples, samples: list[Sample] | DataError) -> Batch | DataError:
    return samples if isinstance(samples, DataError) else sequences.stack(samples)


def _start_worker(_: int) -> None:
    """Begin a worker: one core is its share, and signals are for the rank, which saves a checkpoint and closes it."""
    torch.set_num_threads(1)
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # read by the library itself, when it encodes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def validation_batches(
    sequences: Samples,
    micro_batch: int,
    *,
    dp: int = 1,
    rank: int = 0,
    limit: int | None = None,
    together: bool = False,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches over all sequences, or `limit` of them at most: as many on every rank.

    Sources of a mixture come one after another; each has the limit.

    together: `limit` is of all ranks, so that they see the same sequences at every dp.
    Missing rows are padding whose labels are all -100. Weigh each micro-batch's mean with its targets,
    and leave out one that has none (its mean is 0/0): the sum over ranks is exact.
    """
    for _, part in parts_of(sequences):
        seen, padding = len(part), len(part)
        if limit is not None:
            seen = min(seen, limit * micro_batch * (1 if together else dp))
        for step in range(math.ceil(seen / (micro_batch * dp))):
            first = (step * dp + rank) * micro_batch
            rows = (index if index < seen else padding for index in range(first, first + micro_batch))
            yield part.stack([part[index] for index in rows])


def steps_of(epochs: float, sequences: int, batch: int, taken: int = 0) -> int:
    """Return how many steps of `batch` sequences make so many passes, `taken` sequences of which are done.

    The last one may reach into the next pass.
    """
    return math.ceil((math.ceil(epochs * sequences) - taken) / batch)


def _shown(value: int | str) -> str:
    return f"{value:,}" if type(value) is int else str(value)
