"""All ranks go on, or all raise the same error."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zero3d import errors
from zero3d.errors import CheckpointError, RankError, Zero3dError
from zero3d.zero.collectives import Comm

_TEXT = 2000  # bytes of an error message that travel between ranks
T = TypeVar("T")


def agree(comm: Comm, action: Callable[[], T]) -> T:
    """Run on every rank; if any fails, all raise the first failure, so that none goes on alone.

    raised on purpose    the failing rank raises it as it is, the others one of its class
    OSError              a CheckpointError on all ranks: a disk or a right that is missing is nobody's bug
    anything else        the failing rank raises it as it is, with its callstack, the others a RankError

    On the others it carries `from_rank`, so that it is told once. Moves 8 bytes per rank, and the
    message after a failure.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 (passed on below)
        failure = error
    failed = [rank for rank, bad in enumerate(_gather(comm, [float(failure is not None)])) if bad[0]]
    if not failed:
        return result
    text = (f"{type(failure).__name__}: {failure}" if failure else "").encode()[:_TEXT]
    said = bytes(int(byte) for byte in _gather(comm, [float(byte) for byte in text.ljust(_TEXT)])[failed[0]])
    if comm.rank == failed[0] and failure is not None and not isinstance(failure, OSError):
        raise failure
    name, _, message = said.decode(errors="replace").strip().partition(": ")
    kind: Any = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Zero3dError):
        raised: Zero3dError = kind(message)
    else:
        system = getattr(builtins, name, None)
        other = CheckpointError if isinstance(system, type) and issubclass(system, OSError) else RankError
        raised = other(f"rank {failed[0]} failed: {name}: {message}")
    raised.from_rank = None if comm.rank == failed[0] else failed[0]
    raise raised from failure


def _gather(comm: Comm, values: list[float]) -> list[list[float]]:
    table: list[list[float]] = comm.exchange(torch.tensor(values, dtype=torch.float64, device=comm.device)).tolist()
    return table
