"""A launcher that is told what to run, and workers that stop as the training loop does, without torch.

python stopping.py FOLDER   reads case names from stdin, launches two workers for each, writes the exit code to stdout
python -m stopping CASE FOLDER   one worker
"""

import os
import signal
import sys
from pathlib import Path


def say(folder, word):
    """One line to the test; lines this short are not mixed."""
    with open(folder / "events", "w") as events:
        events.write(f"{word} {os.environ['RANK']}\n")


def train(case, folder):
    """Say that it is ready, wait for a signal, save for as long as the test wants, count signals, stop."""
    from zero3d.errors import DataError
    from zero3d.train.stop import Stopped, StopRequest

    rank = os.environ["RANK"]
    if case == "fails together" or (case in ("fails", "dies") and rank == "1"):
        say(folder, "ready")
        (folder / f"go-{rank}").read_bytes()
        if case != "dies":
            error = DataError("no such file")
            error.from_rank = None if rank == "1" else 1
            raise error
        print("some last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "loads":
        say(folder, "ready")
        signal.pause()
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    with StopRequest() as request:
        say(folder, "ready")
        number = os.read(signals, 1)[0]
        say(folder, "asked")
        (folder / f"go-{rank}").read_bytes()
        os.set_blocking(signals, False)
        try:
            more = list(os.read(signals, 100))
        except BlockingIOError:
            more = []
        (folder / f"signals-{rank}").write_text(str([number, *more]))
        say(folder, "saved")
        raise Stopped(request.signal, "step 3 is saved in out")


def serve(folder):
    """Launch what stdin asks for."""
    from zero3d.tools.cli.workers import launch

    print("up", flush=True)
    for line in sys.stdin:
        errors = os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(errors, 2)
        print(launch([line.strip(), str(folder)], 2, module="stopping"), flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        from zero3d.tools.cli.worker import as_worker

        as_worker(lambda: train(sys.argv[1], Path(sys.argv[2])))
    serve(Path(sys.argv[1]))
