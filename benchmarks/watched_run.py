"""A run with a slow rank, a skipped step, a stop and a resume, and where each of them is seen.

    python benchmarks/watched_run.py --json out.json

The demo's model trains for 200 steps on 2 ranks of this machine, in an empty folder. `Trouble`, the callback of its
file, makes the trouble. At about step STOP it gets a SIGTERM, as a scheduler sends one, and goes on with `--resume
auto`. In each session its port is asked once. The result has what the terminal, the port, the commands of log.on,
`zero3d doctor --run`, `zero3d report --html` and `zero3d generate` said, and the run's records. The exit code is 1 if
any of the trouble is `unseen` in one of them.

The result names no machine: the host is called HOST, and the folder is left out of paths.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from socket import create_server, gethostname
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

SLOW_RANK, FIRST, LAST, SHARE = 1, 60, 130, 0.5  # which rank is slow, from step to step, by how much of a step
BAD = 87  # the step that is skipped
STOP, ASKED = 120, (100, 150)  # when the run is stopped, and when its port is asked in either session
HOST, RUN, PORT = "node-a", "runs/watched", 9400
FILE = """\
output: runs/watched
model: {path: demo}
data: {train: stdlib, tokenizer: bytes, validation: 0.02, length: 128}
train: {steps: 200, micro_batch: 2}
optimizer: {lr: 1.5e-3}
schedule: {warmup: 0.04}
evaluate: {every: 50, batches: 8, prompt: "def "}
checkpoint: {every: 50}
callbacks: [watched_run:Trouble]
log:
  to: prometheus
  port: 9400
  on:
    straggler: 'echo "step $ZERO3D_STEP: rank $ZERO3D_SLOWEST_RANK is slow in $ZERO3D_SLOWEST_PART" >> told.txt'
    nonfinite: 'echo "step $ZERO3D_STEP: loss $ZERO3D_LOSS, $ZERO3D_HOW" >> told.txt'
    end: 'echo "step $ZERO3D_STEP: $ZERO3D_HOW" >> told.txt'
"""


class Trouble:
    """What goes wrong: forwards of a rank that wait, as on a device that throttles, and a loss that is not finite."""

    def on_start(self, engine: Any, config: Any, step: int) -> None:
        """Hook the model of the slow rank."""
        self._step, self._usual = step + 1, 0.0
        if engine.world.rank == SLOW_RANK:
            engine.module.register_forward_pre_hook(self._wait)
            engine.module.get_output_embeddings().register_forward_hook(self._spoil)

    def on_step(self, engine: Any, record: Mapping[str, Any]) -> None:
        """Note which step is next, and how long one takes while no rank is slow, or at the start of a session."""
        self._step = record["step"] + 1
        if self._step <= FIRST or not self._usual:
            self._usual = record["seconds"]

    def _wait(self, *_: Any) -> None:
        if FIRST < self._step <= LAST:
            time.sleep(SHARE * self._usual)

    def _spoil(self, module: Any, inputs: Any, logits: Any) -> Any:
        return logits * float("inf") if self._step == BAD else logits


# --- the run ------------------------------------------------------------------------------------


def watched(folder: Path) -> dict[str, Any]:
    """Make the run in an empty folder; return all that was said of it."""
    with create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    (folder / "watched.yaml").write_text(FILE.replace(str(PORT), str(port)))
    scrapes: list[list[str]] = []

    def ask(process: subprocess.Popen[str]) -> None:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        scrapes.append([line for line in lines if not line.startswith("#")])

    def stop(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGTERM)

    train = ["train", "watched.yaml", "--ranks", "2"]
    first = said(folder, train, {ASKED[0]: ask, STOP: stop})
    second = said(folder, [*train, "--resume", "auto"], {ASKED[1]: ask})
    after = {
        "doctor": said(folder, ["doctor", "--run", RUN]),
        "report": said(folder, ["report", RUN]),
        "page": said(folder, ["report", RUN, "--html"]),
        "generate": said(folder, ["generate", RUN, "def ", "--max-tokens", "40"]),
    }
    root = folder / RUN
    found = {
        "file": FILE,
        "sessions": [first, second],
        "scrapes": scrapes,
        "told": (folder / "told.txt").read_text().splitlines(),
        **after,
        "settings": (root / "config.yaml").read_text(),
        "of_session": (root / "report.json").read_text(),
        "records": [in_short(json.loads(line)) for line in (root / "metrics.jsonl").read_text().splitlines()],
        "html": len((root / "report.html").read_bytes()),
        "png": len((root / "run.png").read_bytes()),
    }
    nameless: dict[str, Any] = json.loads(without_names(json.dumps(found), folder, port))
    return nameless


def said(
    folder: Path, words: Sequence[str], at: Mapping[int, Callable[[subprocess.Popen[str]], None]] | None = None
) -> dict[str, Any]:
    """Run a command of zero3d; return it, its exit code and its lines. at: what to do when it says a step."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-m", "zero3d.tools.cli.main", *words], cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip())
        found = re.match(r"step +(\d+)/", line)
        if found and (do := (at or {}).get(int(found[1]))):
            do(process)
    return {"command": f"zero3d {' '.join(words)}", "code": process.wait(), "lines": lines}


def in_short(record: Mapping[str, Any]) -> str:
    """Write a record in a line, with six digits of each figure."""
    return json.dumps(
        {name: float(f"{each:.6g}") if isinstance(each, float) else each for name, each in record.items()}
    )


def without_names(text: str, folder: Path, port: int) -> str:
    """Leave the machine out of a text: its host, the run's folder, and the port that was free."""
    text = re.sub(rf"{re.escape(str(folder.resolve()))}/?", "", text)
    text = re.sub(rf"\b{re.escape(gethostname())}\b", HOST, text)
    return re.sub(rf"\b{port}\b", str(PORT), text)


# --- what was seen ------------------------------------------------------------------------------


def unseen(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was to be seen, and where it was not."""
    first, second = (session["lines"] for session in found["sessions"])
    slow = rf"slowest rank {SLOW_RANK} \({HOST}\): \+\d+ % over the median in \d+ of \d+ steps: compute"
    records = [json.loads(line) for line in found["records"]]
    expected = [
        ("a slow rank in the terminal", rf"step \d+: {slow}", first),
        ("a skipped step in the terminal", rf"step {BAD}: skipped: ", first),
        ("a save in the terminal", rf"saved: {RUN}/checkpoints/step-50", first),
        ("a stop in the terminal", r"stopped by SIGTERM; resume with: zero3d train", first),
        ("a resume in the terminal", rf"going on from {RUN}/checkpoints/step-\d+, after step \d+", second),
        ("run.png in the terminal", rf"curves: {RUN}/run.png", second),
        ("a slow rank at the port", rf'zero3d_slowest_rank{{run="watched"}} {SLOW_RANK}', found["scrapes"][0]),
        ("a skipped step at the port", r'zero3d_session_skipped_steps_total{run="watched"} 1', found["scrapes"][0]),
        ("a save at the port", r'zero3d_save_seconds{run="watched"} ', found["scrapes"][0]),
        ("a resume at the port", r'zero3d_resumed_from{run="watched"} ', found["scrapes"][1]),
        ("a command for a slow rank", rf"step \d+: rank {SLOW_RANK} is slow in compute", found["told"]),
        ("a command for a skipped step", rf"step {BAD}: loss nan, skipped", found["told"]),
        ("a command for a stop", r"step \d+: stopped", found["told"]),
        ("a command for the end", r"step 200: finished", found["told"]),
        ("a slow rank in doctor", rf"warning +slow rank +slowest rank {SLOW_RANK}", found["doctor"]["lines"]),
        ("a page", rf"written: {RUN}/report.html", found["page"]["lines"]),
        ("a text", r".", found["generate"]["lines"][1:]),
    ]
    yield from (what for what, pattern, lines in expected if not any(re.match(pattern, line) for line in lines))
    if [record["step"] for record in records] != [*range(1, 201)]:
        yield "one record of each step"
    commands = [*found["sessions"], *(found[name] for name in ("doctor", "report", "page", "generate"))]
    yield from (f"exit code of {each['command']}" for each in commands[1:] if each["code"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all that was said")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory(prefix="zero3d-watched-") as folder:
        found = watched(Path(folder))
    print("\n".join(line for session in found["sessions"] for line in session["lines"]))
    missing = list(unseen(found))
    print(f"not seen: {', '.join(missing)}" if missing else "all of it was seen", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
