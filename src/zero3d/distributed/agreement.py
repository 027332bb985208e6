"""All ranks go on, or all raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from zero3d import errors
from zero3d.distributed.collectives import Comm
from zero3d.errors import FAULT, CheckpointError, RankError, Zero3dError

_TEXT = 2000  # letters of an error message that travel between ranks
NAMED = 4  # ranks in a message
T = TypeVar("T")


def agree(comm: Comm, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if any fails, all raise the first failure, so that none goes on alone.

    raised on purpose    the failing rank raises it as it is, the others one of its class
    OSError              a CheckpointError on all ranks: a disk or a right that is missing is nobody's bug
    anything else        the failing rank raises it as it is, with its callstack, the others a RankError

    On the others it carries `from_rank`, so that it is told once, and the failing rank's exit code. Moves 8 bytes per
    rank, and the message after a failure.
    """
    return _agree(comm, action, None)[0]


def agree_and_count(comm: Comm, action: Callable[[], T], count: Callable[[T], int]) -> tuple[T, list[int]]:
    """Do so, and return every rank's count of its own result, too, by rank. Moves 16 bytes per rank."""
    result, rows = _agree(comm, action, count)
    return result, [row[1] for row in rows]


def _agree(comm: Comm, action: Callable[[], T], count: Callable[[T], int] | None) -> tuple[T, list[list[int]]]:
    """Return the result, and of every rank whether it failed and, if `count` is there, its count."""
    failure: Exception | None = None
    counted = [] if count is None else [0]
    try:
        result = action()
        counted = [] if count is None else [count(result)]
    except Exception as error:  # noqa: BLE001 (passed on below)
        failure = error
    rows = _gather(comm, [int(failure is not None), *counted])
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if not failed:
        return result, rows
    raised = None if failure is None else _raised(failure, comm.rank)
    text = json.dumps([type(raised).__name__, str(raised)[:_TEXT], getattr(raised, "exit_code", FAULT)])
    name, message, code = json.loads(exchange_texts(comm, text)[failed[0]])
    if raised is not None and comm.rank == failed[0]:
        raise raised
    kind: Any = getattr(errors, name, None)
    ours = isinstance(kind, type) and issubclass(kind, Zero3dError)
    other: Zero3dError = kind(message) if ours else RankError(f"rank {failed[0]} failed: {name}: {message}")
    other.from_rank, other.agreed = failed[0], code
    raise other from failure


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 1, 2, 5, 7 and others"."""
    shown = ", ".join(map(str, ranks[:NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{' and others' * (len(ranks) > NAMED)}"


def _raised(failure: Exception, rank: int) -> Exception:
    """Return what the failing rank raises: an error of the system becomes a CheckpointError."""
    if not isinstance(failure, OSError):
        return failure
    error = CheckpointError(f"rank {rank} failed: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def exchange_texts(comm: Comm, text: str) -> list[str]:
    """Return every rank's text, by rank; they travel as numbers in tensors, since no message is a pickle.

    Moves 8 bytes per rank and 8 for each byte of the longest text.
    """
    data = text.encode()
    lengths = [row[0] for row in _gather(comm, [len(data)])]
    rows = _gather(comm, list(data.ljust(max(lengths))))
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def _gather(comm: Comm, values: list[int]) -> list[list[int]]:
    table: list[list[int]] = comm.exchange(torch.tensor(values, dtype=torch.int64)).tolist()
    return table
