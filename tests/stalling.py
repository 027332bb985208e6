"""Workers without torch that beat as training does, and then stop doing so. `python -m stalling CASE FOLDER`: one of two.

waits    rank 0 waits in the second all-gather of unit 'b' for rank 1, which is held by SIGSTOP
loops    ... which never comes to it
differs  ... which waits in a reduce-scatter
dies     ... which is killed
orphans  ... which is held by SIGSTOP, too, after it has killed the launcher
early    the same before anything answers SIGTERM
fast     rank 1 kills the launcher, and both stop within a millisecond of a SIGTERM
"""

import os
import signal
import sys
import time
from pathlib import Path


def train(case, folder):
    """Do two steps, tell where the run's folder is, and do what the case says."""
    from zero3d.watchdog.heartbeat import TRAINING, WATCH, Heartbeat

    rank = int(os.environ["RANK"])
    heartbeat = Heartbeat.join(os.environ[WATCH], rank)
    heartbeat.tell(axes={"dp": [0, 1]}, output=str(folder))
    (folder / "watch").write_text(os.environ[WATCH])
    if rank == 1:  # what it does comes after rank 0 is where it will stay
        (folder / "one-is-up").touch()
    wait_for(folder / ("one-is-up" if rank == 0 else "zero-is-there"))
    with heartbeat.phase(TRAINING):
        for step in (1, 2):
            heartbeat.step = step
            with heartbeat.inside("dp", "all_gather", "a", heartbeat.count("dp", "all_gather")):
                pass
            heartbeat.work(b"the forward of unit 'a'")
        if case == "fast":
            train_fast(rank, heartbeat, folder)
            return
        if rank == 0 and case == "early":
            (folder / "zero-is-there").touch()
            loop_for_ever()
        if rank == 0:
            with heartbeat.inside("dp", "all_gather", "b", heartbeat.count("dp", "all_gather")):
                wait_for_peers(folder / "zero-is-there")
        fault(case, heartbeat)


def fault(case, heartbeat):
    """Do what is wrong with rank 1."""
    if case in ("orphans", "early"):
        os.kill(os.getppid(), signal.SIGKILL)
    if case in ("waits", "orphans", "early"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "differs":
        with heartbeat.inside("dp", "reduce_scatter", "b", heartbeat.count("dp", "reduce_scatter")):
            wait_for_peers()
    loop_for_ever()


def train_fast(rank, heartbeat, folder):
    """Do steps until a signal asks to stop."""
    from zero3d.train.stop import StopRequest

    with StopRequest() as request:
        (folder / "zero-is-there").touch()
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        while request.signal is None:
            heartbeat.step += 1
            time.sleep(0.001)


def loop_for_ever():
    """Compute nothing."""
    while True:
        time.sleep(0.01)


def wait_for(file):
    """Wait until a file is there."""
    while not file.exists():
        time.sleep(0.01)


def wait_for_peers(there=None):
    """Wait where nobody ever comes; a signal that asks to stop is noted as the training loop does."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    if there is not None:
        there.touch()
    loop_for_ever()


def launch_two(case, folder):
    """Be the launcher."""
    from zero3d.tools.cli.workers import launch

    return launch([case, str(folder)], 2, module="stalling")


if __name__ == "__main__":
    if "RANK" in os.environ:
        from zero3d.tools.cli.worker import as_worker

        as_worker(lambda: train(sys.argv[1], Path(sys.argv[2])), {"timeout": 1.5, "slow_timeout": 60.0})
    sys.exit(launch_two(sys.argv[1], Path(sys.argv[2])))
