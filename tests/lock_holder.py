"""A process that holds an output folder, as a run does."""

import subprocess
import sys
from contextlib import contextmanager

HOLDER = """
import sys
from pathlib import Path
from zero3d.train.lock import FolderLock
with FolderLock() as lock:
    lock.acquire(Path(sys.argv[1]))
    {then}
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked_by_another(folder, then=""):
    """Its process id, while it holds the folder; `then` is what it does beside that."""
    command = [sys.executable, "-c", HOLDER.format(then=then), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.stdin.close()
