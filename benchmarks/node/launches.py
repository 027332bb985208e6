"""Launches of all ranks of a part: one that fails or hangs is a finding, and leaves the others their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from campaign.account import Account, Place
from ranks import Start, run_ranks
from torch.multiprocessing.spawn import ProcessException

FAULTS = (ProcessException, TimeoutError)  # a rank has raised or died; ranks do not end
SHARES = 3  # of a part's limit: so many launches may hang, or fewer where there are fewer
LONGEST = 4000  # letters of a traceback


def start_of(place: Place, launches: int = 1, malloc: str = "default") -> Start:
    """Return how the processes of one of so many launches start."""
    limit = place.limit_s if launches == 1 else 0.9 * place.limit_s / min(launches, SHARES)
    return Start(place.ranks, "gloo" if place.on_cpu else "nccl", place.device, malloc, limit)


def launched(
    account: Account, names: Sequence[str], start: Start, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Return rank 0's result of a launch; None, and a fault under each name, where there is none."""
    try:
        return run_ranks(start, function, *arguments)
    except FAULTS as error:
        for name in names:
            account.ran(name, {"raised": str(error)[-LONGEST:]}, last_line(error))
        return None


def last_line(error: BaseException) -> str:
    """Return the end of what a rank has raised, behind its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
