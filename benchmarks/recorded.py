"""What was run for the tables, and the files in results/ that hold what came of it.

    results/NAME.json   {name, date, commit, machine, python, torch, runs: [{command, seconds, result}, ...]}

    result   what the command printed: JSON where it prints or writes that, else text

All runs of a file are of one commit, the one that was checked out, but for those that name another (`Recipe.keeps`):
`record` refuses to run code that is not committed. A file is written when all of its runs are done.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MEASURED = (
    "src",
    "benchmarks/*.py",
    "benchmarks/instruments",
    "benchmarks/offloading",
    "benchmarks/faulting",
    "benchmarks/peer_suites",
    "examples",
    "constraints.txt",
)
FOLDERS = {"TABLES": "published tables", "CHECKOUTS": "checkouts of transformers, accelerate, deepspeed and trl"}
DROPPED = ("paths", "config", "sample")  # of what `zero3d train --json` prints: where it was, and what it was told


@dataclass(frozen=True)
class Recipe:
    """Commands, in order, run one at a time in an empty folder.

    timed    seconds matter: to be run on a quiet machine
    repeats  figures matter that are the same in every run
    source   a commit whose package is run, by the benchmarks of today; "" for today's
    keeps    some of its runs may be done anew, and the others stay on record, with their own commit and date
    """

    name: str
    commands: tuple[str, ...]
    timed: bool = True
    repeats: bool = False
    source: str = ""
    keeps: bool = False


def trains(*words: str) -> tuple[str, ...]:
    """One run of the demo for each."""
    return tuple(f"zero3d train --json {each}" for each in words)


_MESHES = "train.batch=32 zero.stage=3 precision=fp32 train.steps=20"
_ENGINES = "python benchmarks/engines.py --engines zero3d,fsdp2,ddp,plain --weights both --rounds 30 --json OUT"
_MEMORY = (
    "python benchmarks/engines.py --engines zero3d,fsdp2 --stages 3 --weights both --rounds 0 --family llama "
    "--micro-batch 2 --seq 64 --model layers=10,d=512,vocab=16384 --json OUT"
)
_MEMORY_RUNS = [
    f"--ranks {ranks} --accumulate {count}{kept}"
    for ranks in (2, 1)
    for count in (1, 4)
    for kept in ("", " --recompute", " --lora 8")
]
_DEEPSPEED = "python benchmarks/engines.py --engines zero3d,deepspeed,plain --memory-steps 0 --json OUT"
_LAUNCHES = (
    *(f"python benchmarks/instruments/dispatches.py --dp {dp} --json OUT" for dp in (8, 1)),
    "python benchmarks/instruments/step_syncs.py --layers 32 --stage 3",
)
_PEERS = "python benchmarks/peer_suites/run.py --json OUT --suite"
_CHECKOUTS = (
    ("transformers", ""),
    ("transformers_ranks", " --minutes 8"),
    ("accelerate", " --minutes 8"),
    ("deepspeed", ""),
    ("trl", " --minutes 9"),
)
_CARD = (
    "--minutes 0.8 --json OUT --only ceilings,streams,syncs,memory,edges,loops,speed,offload",
    "--json OUT --only parity,nccl,bits,shared,train",
)
_CARD_FEATURES = (
    "--minutes 0.8 --json OUT --only optimizers,experts,bases,weights,sequence,fp8,memory,streams.sanitizer,"
    "offload.bits,turns.8k,turns.8k-compiled,turns.16k-compiled"
)
_CARD_OFFLOAD = "--json OUT --only offload.resident,offload.device,offload.gradients,largest"
_CARD_LARGEST = "--minutes 0.8 --json OUT --only turns.8k,turns.8k-compiled,turns.16k-compiled,memory,largest"
_CARD_TURNS = (
    "--minutes 1.0 --json OUT --only turns.8k,turns.8k-compiled,turns.16k,turns.16k-compiled,memory,nccl,streams.late,"
    "bits.deterministic,edges,parity,offload.resident,offload.host",
    "--minutes 1.0 --json OUT --only optimizers,bases,experts,loops,syncs",
)
_SLOW_PLANS = "20ae079f58"  # the commit before searches were made fast
_LLAVA = "zero3d plan llava-1.5-7b --lora r=128 --seq 2048 --gpu a6000 --json"
_LLAVA_RUN = "zero3d plan explain EXAMPLES/llava_lora.yaml model.path=llava-1.5-7b --gpu a6000 --json activations=full"
_LLAVA_SHAPES = ((2, 8, 1), (2, 8, 2), (2, 8, 4), (3, 16, 1), (3, 16, 2), (3, 16, 4))  # stage, batch of a GPU, GPUs
_QWEN_RUN = (
    "zero3d plan explain model.path=qwen3-vl-8b lora.rank=64 data.length=1536 data.packing=false activations=full "
    "--gpu a6000 --patches 4096 --json"
)
_QWEN_SHAPES = tuple((stage, 4, gpus) for stage in (2, 3) for gpus in (1, 2, 4))
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("demo", trains("--steps 4 --ranks 2"), timed=False, repeats=True),
        Recipe(
            "four-stages", trains(*(f"--stage {stage} --steps 40" for stage in range(4))), timed=False, repeats=True
        ),
        Recipe(
            "meshes",
            trains(
                f"--ranks 1 {_MESHES}",
                f"--ranks 2 zero.reduce=every_step {_MESHES}",
                f"--ranks 4 mesh.pp=2 {_MESHES}",
                f"--ranks 8 mesh.pp=2 mesh.tp=2 {_MESHES}",
            ),
            timed=False,
            repeats=True,
        ),
        Recipe("compare-stages", ("zero3d compare zero.stage=0,1,2,3 train.steps=20",), repeats=True),
        Recipe(
            "compare-offload",
            ("zero3d compare offload.optimizer=none,host,disk offload.params=none,host train.steps=20",),
            repeats=True,
        ),
        Recipe(
            "offload-places",
            trains("--steps 4 --ranks 2 offload.optimizer=disk offload.params=host offload.fraction=0.5"),
            timed=False,
            repeats=True,
        ),
        Recipe("plan-72b", ("zero3d plan qwen2.5-72b --gpus 128 --gpu a100-80",), timed=False, repeats=True),
        Recipe("families", ("zero3d models --families",), timed=False),
        Recipe("vision-types", ("python benchmarks/vision_types.py --json OUT",), timed=False),
        Recipe("plan-llava", tuple(f"{_LLAVA} --gpus {gpus}" for gpus in (1, 2, 4)), timed=False, repeats=True),
        Recipe(
            "plan-llava-job",
            tuple(
                f"{_LLAVA_RUN} zero.stage={stage} train.micro_batch={size} train.batch={size * gpus} mesh.dp={gpus}"
                f"{packed}"
                for packed in ("", " model.quantize=nf4")
                for stage, size, gpus in _LLAVA_SHAPES
            ),
            timed=False,
            repeats=True,
        ),
        Recipe(
            "plan-qwen3-vl",
            tuple(
                f"{_QWEN_RUN} zero.stage={stage} train.micro_batch={size} train.batch={size * gpus} mesh.dp={gpus}"
                f"{packed}"
                for packed in ("", " model.quantize=nf4")
                for stage, size, gpus in _QWEN_SHAPES
            ),
            timed=False,
            repeats=True,
        ),
        Recipe("images-prepared", ("python benchmarks/tower_share.py --prepare 16 --json OUT",)),
        Recipe("tower-share", ("python benchmarks/tower_share.py --rounds 15 --json OUT",)),
        Recipe("llava", ("python benchmarks/llava.py --steps 20 --json OUT",)),
        Recipe("states-72b", ("python benchmarks/states.py EXAMPLES/72b_128gpu.yaml",), timed=False, repeats=True),
        Recipe(
            "planner-accuracy",
            ("python benchmarks/planner_accuracy.py --tables TABLES --json",),
            timed=False,
            repeats=True,
        ),
        Recipe("planner-speed", (f"python benchmarks/planner_speed.py --base {_SLOW_PLANS} --json OUT",)),
        Recipe("profile-accuracy", ("python benchmarks/profile_accuracy.py --rounds 3 --json OUT",)),
        Recipe("launches", _LAUNCHES, timed=False, repeats=True),
        Recipe("launches-before", _LAUNCHES, timed=False, source="cff2239dfe"),
        Recipe("engines", (_ENGINES, f"{_ENGINES} --memory-steps 0")),
        Recipe(
            "engines-memory",
            (f"{_MEMORY} {_MEMORY_RUNS[0]} --timeline", *(f"{_MEMORY} {words}" for words in _MEMORY_RUNS[1:])),
            timed=False,
        ),
        Recipe(
            "engines-one-rank",
            ("python benchmarks/engines.py --engines zero3d,plain --ranks 1 --memory-steps 0 --json OUT",),
        ),
        Recipe(
            "engines-exact",
            ("python benchmarks/engines.py --engines zero3d --stages 2,3 --exact both --memory-steps 0 --json OUT",),
        ),
        Recipe(
            "engines-autocast",
            (
                "python benchmarks/engines.py --engines zero3d --stages 3 --autocast both "
                "--model layers=4,d=256,vocab=2048 --memory-steps 0 --json OUT",
            ),
        ),
        Recipe("deepspeed", (_DEEPSPEED, f"{_DEEPSPEED} --micro-batch 1")),
        Recipe("pipeline", tuple(f"python benchmarks/pipeline.py --micro-batches {m} --json OUT" for m in (8, 4))),
        Recipe(
            "mesh",
            (
                "python benchmarks/mesh.py --pp 2 --dp 2 --tp 2 --json OUT",
                "python benchmarks/mesh.py --pp 1 --dp 1 --tp 2 --stages 0 --qkv separate --json OUT",
                "python benchmarks/mesh.py --pp 1 --dp 1 --tp 2 --stages 0 --qkv fused --json OUT",
            ),
        ),
        Recipe("experts", tuple(f"python benchmarks/experts.py --ranks {n} --rounds 9 --json OUT" for n in (2, 4))),
        Recipe("hybrid-packing", ("python benchmarks/hybrid_packing.py --rounds 8 --json OUT",)),
        Recipe("hybrid-sequence", ("python benchmarks/hybrid_sequence.py --ranks 2 --rounds 7 --json OUT",)),
        Recipe("sequence", ("python benchmarks/sequence.py --ranks 2 --rounds 5 --json OUT",)),
        Recipe("stream", ("python benchmarks/stream.py --rounds 7 --json OUT",)),
        Recipe("generation", ("python benchmarks/generation.py --rounds 5 --json OUT",)),
        Recipe("links", ("python benchmarks/links.py --rounds 5 --json OUT",)),
        Recipe("narrow-wires", ("python benchmarks/narrow_wires.py --json OUT",), timed=False),
        Recipe("qlora", ("python benchmarks/qlora.py --ranks 2 --rounds 3 --json OUT",)),
        Recipe("optimizers", ("python benchmarks/optimizers.py --ranks 2 --rounds 9 --json OUT",)),
        Recipe("demo-curves", ("python benchmarks/demo_curves.py --json OUT",), timed=False),
        Recipe("loading", ("python benchmarks/loading.py --json OUT",)),
        Recipe("loading-memory", ("python benchmarks/loading.py --memory --json OUT",), timed=False),
        Recipe("offload", ("python benchmarks/offload.py --gigabytes 0.5 --rounds 5 --json OUT",)),
        Recipe("checkpoint", ("python benchmarks/checkpoint.py --json OUT",)),
        Recipe("watchdog", ("python benchmarks/watchdog.py --parts cost,faults --timeout 10 --json OUT",)),
        Recipe(
            "watchdog-healthy",
            ("python benchmarks/watchdog.py --parts healthy --steps 10000 --timeout 10 --json OUT",),
            timed=False,
        ),
        Recipe("restart", ("python benchmarks/restart.py --ranks 2 --rounds 3 --json OUT",)),
        Recipe("replay", ("python benchmarks/replay.py --json OUT",)),
        Recipe("concurrency", ("python benchmarks/concurrency.py --json OUT",), timed=False),
        Recipe(
            "concurrency-before",
            ("python benchmarks/concurrency.py --faults none --json OUT",),
            timed=False,
            source="171e5042",
        ),
        Recipe("faults-configs", ("python benchmarks/faults.py --parts configs --json OUT",), timed=False),
        Recipe("faults-checkpoints", ("python benchmarks/faults.py --parts checkpoints --json OUT",), timed=False),
        Recipe(
            "faults-kills",
            (
                "python benchmarks/faults.py --parts kills --count 70 --json OUT",
                "python benchmarks/faults.py --parts kills --count 70 --asynchronous --seed 1000 --json OUT",
                "python benchmarks/faults.py --parts elastic --count 60 --json OUT",
            ),
            timed=False,
        ),
        Recipe(
            "peer-suites",
            (f"{_PEERS} fsdp2", *(f"{_PEERS} {name} --checkout CHECKOUTS/{name}{more}" for name, more in _CHECKOUTS)),
            timed=False,
            keeps=True,
        ),
        Recipe("gpu", tuple(f"python benchmarks/gpu_check.py {words}" for words in _CARD), timed=False),
        Recipe("gpu-features", (f"python benchmarks/gpu_check.py {_CARD_FEATURES}",), timed=False),
        Recipe("gpu-offload", (f"python benchmarks/gpu_check.py {_CARD_OFFLOAD}",), timed=False),
        Recipe("gpu-largest", (f"python benchmarks/gpu_check.py {_CARD_LARGEST}",), timed=False),
        Recipe("gpu-turns", tuple(f"python benchmarks/gpu_check.py {words}" for words in _CARD_TURNS), timed=False),
        Recipe("doctor", ("python benchmarks/doctor.py --json OUT",)),
        Recipe("watched-run", ("python benchmarks/watched_run.py --json OUT",), timed=False),
        Recipe("loop-overhead", ("python benchmarks/loop_overhead.py --json OUT",)),
        Recipe("watching", ("python benchmarks/watching.py --json OUT",)),
    )
}


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def record(name: str, folders: Mapping[str, Path] | None = None, only: str = "") -> Path:
    """Run a recipe and write its file. Raises RuntimeError for code that is not committed and runs that fail.

    folders  what a recipe needs of `FOLDERS`
    only     a word of the commands that are run, of a recipe that keeps the other runs
    """
    changed = _git("status", "--porcelain", "--", *MEASURED)
    if changed:
        raise RuntimeError(f"commit first, so that results can name what they are of:\n{changed}")
    recipe = RECIPES[name]
    with _package(recipe.source) as package:
        header = _header(name) | ({"commit": recipe.source} if recipe.source else {})
        earlier = load(name) if recipe.keeps and only else {}
        runs = [
            kept(command, earlier)
            if earlier and only not in shlex.split(command)
            else run(command, folders, partial(started, package=package))
            for command in recipe.commands
        ]
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**header, "runs": runs}, indent=1) + "\n")
    return path


def kept(command: str, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The run of a command that is on record, with its commit and date. Raises RuntimeError."""
    found = [one for one in earlier["runs"] if one["command"] == command]
    if not found:
        raise RuntimeError(f"{command}: it is not on record, so it has to be run, too")
    return {"commit": earlier["commit"], "date": earlier["date"], **found[0]}


@contextmanager
def _package(commit: str) -> Iterator[Path]:
    """The folder of today's package, or of a commit's, which is checked out meanwhile."""
    if not commit:
        yield ROOT / "src"
        return
    with TemporaryDirectory(prefix="zero3d-source-") as folder:
        _git("worktree", "add", "--detach", folder, commit)
        try:
            yield Path(folder) / "src"
        finally:
            _git("worktree", "remove", "--force", folder)


def started(words: Sequence[str], folder: str, package: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    """Run a command, `zero3d` or `python`, in a folder with a package."""
    start = [sys.executable, "-m", "zero3d.tools.cli.main"] if words[0] == "zero3d" else [sys.executable]
    return subprocess.run([*start, *words[1:]], cwd=folder, capture_output=True, text=True, env=_environment(package))


def run(
    command: str, folders: Mapping[str, Path] | None = None, start: Callable[[Sequence[str], str], Any] = started
) -> dict[str, Any]:
    """One command in an empty folder: what it printed, or wrote where OUT stands.

    start   (words, folder) -> its exit code and what it said, in the words of subprocess.CompletedProcess
    """
    begun = time.monotonic()
    with TemporaryDirectory(prefix="zero3d-tables-") as folder:
        out = Path(folder) / "out.json"
        given = folders or {}
        if missing := [name for name in FOLDERS if name in command and name not in given]:
            raise RuntimeError(f"{command}: pass --{missing[0].lower()}, the folder of {FOLDERS[missing[0]]}")
        places = {"OUT": str(out), "EXAMPLES": str(ROOT / "examples"), **{name: str(given[name]) for name in given}}
        words = [_word(word, places) for word in shlex.split(command)]
        done = start(words, folder)
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        result = _parsed(out.read_text() if out.exists() else done.stdout)
    return {"command": command, "seconds": round(time.monotonic() - begun, 1), "result": result}


def _word(word: str, places: dict[str, str]) -> str:
    name, _, rest = word.partition("/")
    if name == "benchmarks":
        return str(ROOT / word)
    return "/".join(part for part in (places.get(name, name), rest) if part) if name in places else word


def _environment(package: Path) -> dict[str, str]:
    """One package, one thread a rank."""
    path = os.pathsep.join(part for part in (str(package), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return {key: value for key, value in found.items() if key not in DROPPED} if isinstance(found, dict) else found


def _header(name: str) -> dict[str, Any]:
    import torch

    from zero3d.distributed.kernels import products

    return {
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short=10", "HEAD"),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "products": products(),
            "system": platform.system(),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
