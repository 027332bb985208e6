"""Workers that do in each attempt what a plan says, without torch: `python -m attempts train FOLDER ...`.

FOLDER/plan.json    one object per attempt: {"rank", "end", "metrics", "save"}: rank 0 writes steps into metrics.jsonl and
                    saves a checkpoint; then this rank ends so, and the others wait. Without an end all leave with 0
FOLDER/N-RANK.json  what a worker of attempt N was given
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from zero3d.errors import CorruptionError, DataError, NonFiniteError
from zero3d.tools.cli.worker import as_worker, report_output


def work(folder, words):
    """One worker of one attempt."""
    rank = int(os.environ["RANK"])
    attempt = folder / "attempts" / Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent.name
    attempt.mkdir(parents=True, exist_ok=True)
    number = len(list(attempt.parent.iterdir())) - 1
    given = {name: int(os.environ[name]) for name in ("WORLD_SIZE", "ZERO3D_SLOT")}
    replace(folder / f"{number}-{rank}.json", json.dumps(given | {"words": words}))
    plan = json.loads((folder / "plan.json").read_text())[number]
    if rank == 0:
        write(folder / "out", plan)
        (attempt / "written").touch()
    if rank == plan.get("rank"):
        until((attempt / "written").exists)
        until(lambda: len(list(folder.glob(f"{number}-*.json"))) == given["WORLD_SIZE"])
        end(plan["end"])
    elif "end" in plan:
        signal.pause()


def write(out, plan):
    """What rank 0 leaves of an attempt."""
    report_output(out)
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    if "metrics" in plan:
        replace(out / "metrics.jsonl", "".join(json.dumps({"step": step}) + "\n" for step in plan["metrics"]))
    if "save" in plan:
        checkpoint = out / "checkpoints" / f"step-{plan['save']}"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").touch()
    if "lost" in plan:
        (out / "lost-slots").write_text(plan["lost"])


def replace(path, text):
    """Write a file whole or not at all: who sees it may kill this process."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def until(ready):
    """Wait for something that another worker does."""
    last = time.monotonic() + 60
    while not ready() and time.monotonic() < last:
        time.sleep(0.005)


def end(how):
    """End in one of the ways in which workers end."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    kinds = {"bad input": DataError, "nan": NonFiniteError, "flip": CorruptionError, "bug": ValueError}
    raise kinds[how](f"of a {how}")


if __name__ == "__main__":
    as_worker(lambda: work(Path(sys.argv[2]), sys.argv[3:]))
