"""The watchdog: what heartbeats cost, whether it is ever wrong, and how long it takes after a fault.

python benchmarks/watchdog.py --parts cost,healthy,faults --json benchmarks/results/watchdog.json

cost     the demo on 2 ranks: time inside heartbeats and the ledger, of the time of its steps (target: at most 1 %);
         the clock that is read around each of them is inside, too
healthy  a tiny model for --steps steps with a timeout of --timeout seconds: blocks written (target: none)
faults   a tiny model whose rank 1 is stopped, loops, calls a collective of its own, is killed, or kills its launcher:
         seconds from that moment to the block and to the last process gone (targets: the timeout + 5, and 15 more),
         and whether the block has the rank, the unit and the operation that the other waits in, and both stacks
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import yaml

from zero3d.distributed.ledger import Ledger
from zero3d.tools.cli import train
from zero3d.tools.cli.main import main as zero3d, parse
from zero3d.tools.cli.worker import as_worker
from zero3d.tools.cli.workers import launch
from zero3d.watchdog.heartbeat import Heartbeat

FAULTS = ("stop", "loop", "other", "kill", "launcher")
PHASES = ("forward", "backward", "step", "save", "evaluate")  # of a run, in which a fault may be: "stop:save"
SHARE, BLOCK, GONE = 0.01, 5.0, 15.0  # targets: of a step; seconds beyond the timeout; seconds beyond that
SLOW, STARTING = (
    ("save", "evaluate"),
    30.0,
)  # phases with the patience of `health.slow_timeout`; that patience, in seconds
SPENT = "ZERO3D_BENCHMARK_SPENT"  # the file in which rank 0 leaves what was spent
MODEL = """
import os, signal, time
import torch, torch.distributed as dist
import zero3d
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

NAME, _, PHASE = os.environ.get("FAULT", "").partition(":")
CALLS = {"forward": 9, "backward": 9, "step": 5, "save": 2, "evaluate": 3}
seen = []

def come_to(phase):
    if phase != (PHASE or "forward") or os.environ.get("RANK") != "1" or not NAME:
        return
    seen.append(phase)
    if len(seen) != CALLS[phase]:
        return
    open("fault", "w").write(repr(time.time()))
    if NAME == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    if NAME == "other":
        dist.recv(torch.zeros(3), 0)  # of a collective ranks tell each other before the monitor's time is up
    if NAME in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if NAME == "stop" else signal.SIGKILL)
    while True:
        time.sleep(0)

def build():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    layer, save = model.model.layers[1], zero3d.Engine.save

    def entered(module, given):
        come_to("forward" if module.training else "evaluate")

    def left(module, given, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: come_to("backward"))

    def saved(engine, *given, **named):
        come_to("save")
        return save(engine, *given, **named)

    layer.register_forward_pre_hook(entered)
    layer.register_forward_hook(left)
    register_optimizer_step_pre_hook(lambda *_: come_to("step"))
    zero3d.Engine.save = saved
    return model
"""


# --- the cost ------------------------------------------------------------------------------------


class Spent:
    """Counts calls of methods, and the seconds inside them."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method with its calls counted."""

        def call(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                self.seconds += time.perf_counter() - begun
                self.calls += 1

        return call


def train_timed(words: Sequence[str]) -> None:
    """Train as one of the launcher's workers, with heartbeats and ledger timed; rank 0 leaves what was spent."""
    spent = Spent()
    for kind, names in ((Heartbeat, ("inside", "__exit__", "count", "work")), (Ledger, ("record",))):
        for name in names:
            setattr(kind, name, spent.timed(getattr(kind, name)))
    step: Any = Heartbeat.step
    Heartbeat.step = property(step.fget, spent.timed(step.fset))  # type: ignore[assignment,method-assign]
    arguments = parse(["train", *words])
    name, config = train.read(arguments)

    def work() -> None:
        train.work(arguments, name, config)
        if os.environ["RANK"] == "0":
            Path(os.environ[SPENT]).write_text(json.dumps({"calls": spent.calls, "seconds": spent.seconds}))

    as_worker(work, {"timeout": config.health.timeout, "slow_timeout": config.health.slow_timeout})


def cost(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what heartbeats and the ledger take of the demo's steps."""
    os.environ[SPENT] = str(folder / "spent.json")
    steps = ["train.steps=60", "evaluate.every=0", "checkpoint.verify=false", f"output={folder / 'demo'}"]
    assert launch(steps, 2, module="watchdog") == 0
    spent = json.loads((folder / "spent.json").read_text())
    records = [json.loads(line) for line in (folder / "demo" / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["seconds"] for record in records if "loss" in record]
    share = spent["seconds"] / sum(seconds)  # what was spent before the first step and after the last is in it
    return {
        "steps": len(seconds), "calls_per_step": spent["calls"] / len(seconds), "share": share, "target": SHARE,
        "met": share <= SHARE,
    }  # fmt: skip


# --- alarms --------------------------------------------------------------------------------------


def prepare(folder: Path, steps: int, timeout: float, every: int = 0, slow: float = 3600.0) -> list[str]:
    """Write a tiny model and its data; return the words of `zero3d train`.

    every  steps between saves, and evaluations
    slow   seconds of patience in them, and where ranks start
    """
    (folder / "tiny_model.py").write_text(MODEL)
    numpy.save(folder / "rows.npy", numpy.random.default_rng(0).integers(3, 64, (40, 16), dtype=numpy.int64))
    config = {
        "output": "out", "precision": "fp32", "model": {"path": "tiny_model:build"},
        "data": {"train": "rows.npy", "length": 16, "cache": "cache", "validation": 0.2 * (every > 0)},
        "train": {"steps": steps, "batch": 4},
        "checkpoint": {"export": False, "every": every}, "evaluate": {"every": every},
        "health": {"timeout": timeout, "slow_timeout": max(timeout, slow)},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, str(Path(__file__).resolve()), "--zero3d", "train", "run.yaml", "--ranks", "2"]


def healthy(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how many blocks a run without faults has written."""
    command = prepare(folder, arguments.steps, arguments.timeout)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    begun = time.monotonic()
    code = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL
    ).returncode
    alarms = len(list((folder / "out").glob("watchdog*.txt")))
    return {
        "steps": arguments.steps, "timeout": arguments.timeout, "alarms": alarms, "exit_code": code,
        "seconds": time.monotonic() - begun, "met": alarms == 0 and code == 0,
    }  # fmt: skip


def faults(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return, for each fault, the seconds to the block and to the last process gone, and what the block names."""
    rows = {}
    for fault in FAULTS:
        place = folder / fault
        place.mkdir()
        rows[fault] = one_fault(place, fault, arguments.timeout)
    return {"timeout": arguments.timeout, "rows": rows, "met": all(row["met"] for row in rows.values())}


def one_fault(folder: Path, fault: str, timeout: float) -> dict[str, Any]:
    """Run into one fault, in a phase where it names one behind a colon, and watch."""
    name, _, phase = fault.partition(":")
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "FAULT": fault}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    every, slow = (3, max(timeout, STARTING)) if phase else (0, 3600.0)
    longest = 2 * max(timeout, STARTING) + BLOCK + GONE
    launcher = subprocess.Popen(prepare(folder, 100, timeout, every, slow), cwd=folder, env=environment, **silent)
    block, at = folder / "out" / "watchdog.json", folder / "fault"
    try:
        while not block.exists():
            if launcher.poll() is not None and not at.exists():
                raise RuntimeError(f"the run with fault {fault!r} ended before its fault")
            if at.exists() and time.time() - at.stat().st_mtime > longest:
                raise RuntimeError(f"{longest:g} s after the fault {fault!r} the watchdog has not said a word")
            time.sleep(0.05)
        pids = [rank["pid"] for rank in json.loads(block.read_text())["ranks"]]
        while launcher.poll() is None or any(map(psutil.pid_exists, pids)):
            time.sleep(0.05)
    finally:
        end(launcher)
    if not at.exists():
        raise RuntimeError(f"the watchdog came before the fault {fault!r}: {block.with_suffix('.txt').read_text()}")
    gone, begun = time.time(), float(at.read_text())
    told, seconds = json.loads(block.read_text()), block.stat().st_mtime - begun
    named = named_in(told, phase)
    patience = max(timeout, STARTING) if phase in SLOW else timeout
    limit = BLOCK + (patience if name in ("stop", "loop", "other") else 0.0)
    met = all(named.values()) and seconds <= limit and gone - begun <= limit + GONE
    return {
        "kind": told["kind"], "cause": told["cause"], "block_s": seconds, "gone_s": gone - begun,
        "exit_code": launcher.returncode, "named": named, "met": met,
    }  # fmt: skip


def named_in(told: dict[str, Any], phase: str) -> dict[str, bool]:
    """Return what the block of two ranks names, as it must. phase: in which rank 1 had its fault; "": a forward."""
    waiting, faulty = told["ranks"]
    # Where kernels wait and not the host, rank 0 comes to the end of its step and reads there.
    reads = waiting["op"].startswith("read after ")
    return {
        # Of a rank that died its peer learns, too, and may be out of its collective by then.
        "rank": faulty["state"] == "dead" or [wait["for"] for wait in told["waits"][:1]] == [[1]],
        "unit": reads or waiting["unit"] not in ("", "-") or phase not in ("", "forward", "backward"),
        "operation": reads or (waiting["op"] == "all_gather" if phase in ("", "forward") else bool(waiting["op"])),
        "stacks": bool(waiting["stack"]) and (bool(faulty["stack"]) or faulty["state"] == "dead"),
    }


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Leave no process of a run behind, if it is still there."""
    with suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    launcher.wait()


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "cost": cost, "healthy": healthy, "faults": faults
}  # fmt: skip


def main() -> None:
    """Measure the parts that are asked for and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of cost, healthy, faults")
    parser.add_argument("--steps", type=int, default=10_000, help="of the healthy run")
    parser.add_argument("--timeout", type=float, default=10.0, help="health.timeout of tiny runs, in seconds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    parts: dict[str, Any] = {}
    for name in arguments.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            parts[name] = PARTS[name](Path(folder), arguments)
        print(f"{name}: {json.dumps(parts[name], indent=1)}", flush=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--zero3d"]:
        sys.exit(zero3d(sys.argv[2:]))
    if "RANK" in os.environ:
        train_timed(sys.argv[1:])
    main()
