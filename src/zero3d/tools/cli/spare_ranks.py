"""Ranks that a launcher has started and dp does not take: they wait, without a device, until the run is over.

Where all of a node's ranks are spare and ended at once, torchrun's next rendezvous would miss that node; and Slurm may
end a step soon after its first task (WaitTime). They look into the store of MASTER_ADDR:MASTER_PORT:

    torchrun    the agents' store, which outlives the ranks: rank 0 leaves a word in it at the end
    srun        rank 0's own, which ends with it

At a restart the agents end them like any other rank. When a signal asks them to stop they have nothing to save and
leave with exit code 0, so that nobody ends the ranks that are saving.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from zero3d.train.stop import SIGNALS

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

OVER = "zero3d/over"
LOOK = 1.0  # seconds between two looks
PATIENCE = timedelta(minutes=10)  # for a store that is not open yet


def stand_by(started: int, ranks: int) -> None:
    """Wait until rank 0 has ended. started: ranks of the launcher; ranks: those that train."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    print(
        f"rank {os.environ['RANK']} of {started} is spare: {ranks} fit train.batch (health.min_ranks); it waits for "
        "the others to end",
        file=sys.stderr,
        flush=True,
    )
    store = _store()
    try:
        while not store.check([OVER]):
            time.sleep(LOOK)
    except RuntimeError:  # torch's, of a store that is gone
        return


def release() -> None:
    """Let spare ranks know that the run is over."""
    _store().set(OVER, "1")


def _store() -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)
