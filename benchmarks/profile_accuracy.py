"""Plans by a machine's own profile against runs: `python benchmarks/profile_accuracy.py [--rounds 3] [--json OUT]`.

    profile    zero3d calibrate --ranks R, once for each number of ranks
    plan       zero3d plan explain run.yaml --cluster profile.json, of models and lengths that calibrate does not run
    run        zero3d train run.yaml, STEPS steps, in each round once; the median of its steps
    by a run   the same plan by the profile.json that a run of another model on so many ranks left

A plan's error is its seconds over the median of the rounds' medians, less 1. Rounds differ, too: `spread` is the
largest of their medians over the smallest, less 1, and no plan can be surer than that. Cases take turns in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy

ROOT = Path(__file__).parents[1]
STEPS, TARGET, VOCAB, HEAD = 20, 0.05, 4096, 64


class Case(NamedTuple):
    """A Llama and how it trains: blocks, hidden size, tokens of a sequence, sequences of a rank's step."""

    blocks: int
    hidden: int
    length: int
    micro_batch: int
    ranks: int
    stage: int

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.blocks} x {self.hidden}, {self.micro_batch} x {self.length} tokens"

    @property
    def folder(self) -> str:
        """Where its files are."""
        return "-".join(map(str, self))


CASES = (
    Case(4, 384, 192, 4, ranks=1, stage=0),
    Case(8, 256, 256, 2, ranks=1, stage=0),
    Case(2, 768, 512, 1, ranks=1, stage=0),
    Case(4, 384, 192, 4, ranks=2, stage=0),
    Case(8, 256, 256, 2, ranks=2, stage=3),
    Case(3, 768, 128, 4, ranks=2, stage=3),
)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default %(default)s)")
    parser.add_argument("--only", type=int, metavar="R", help="cases of so many ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    arguments = parser.parse_args(words)
    cases = [case for case in CASES if arguments.only in (None, case.ranks)]
    with tempfile.TemporaryDirectory() as place:
        rows = measure(Path(place), cases, arguments.rounds)
    for row in rows:
        print(
            f"{row['case']:28} {row['ranks']} ranks, stage {row['stage']}: {row['plan']:.3f} s planned, "
            f"{row['measured']:.3f} s measured, {100 * row['error']:+.1f} %; by a run {100 * row['error_by_run']:+.1f} "
            f"%; spread {100 * row['spread']:.1f} %"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measure(place: Path, cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Calibrate, plan and run; one row for each case."""
    profiles = {ranks: place / f"profile-{ranks}.json" for ranks in dict.fromkeys(case.ranks for case in cases)}
    for ranks, profile in profiles.items():
        command(place, "calibrate", "--ranks", str(ranks), "--out", str(profile))
    for case in cases:
        prepare(place, case, profiles[case.ranks])
    medians: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            medians[case].append(run(place / case.folder, case, number))
    of_runs = {case: place / another(case, cases).folder / "out-0" / "profile.json" for case in cases}
    return [row(place, case, medians[case], profiles[case.ranks], of_runs[case]) for case in cases]


def another(case: Case, cases: Sequence[Case]) -> Case:
    """Return the first case of another model on as many ranks."""
    return next(each for each in cases if each.ranks == case.ranks and each.name != case.name)


def row(place: Path, case: Case, medians: Sequence[float], profile: Path, of_run: Path) -> dict[str, Any]:
    """What was planned by both profiles, and what was measured."""
    planned, by_run = (plan(place / case.folder, case, file) for file in (profile, of_run))
    measured = median(medians)
    return {
        "case": case.name,
        "ranks": case.ranks,
        "stage": case.stage,
        "plan": planned,
        "by_run": by_run,
        "measured": measured,
        "rounds": list(medians),
        "error": planned / measured - 1,
        "error_by_run": by_run / measured - 1,
        "spread": max(medians) / min(medians) - 1,
    }


def prepare(place: Path, case: Case, profile: Path) -> None:
    """Write a model's config.json, token ids, and the file of its run."""
    folder = place / case.folder
    (folder / "model").mkdir(parents=True)
    heads = case.hidden // HEAD
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": case.hidden, "num_hidden_layers": case.blocks,
        "intermediate_size": HEAD * round(case.hidden * 8 / 3 / HEAD), "num_attention_heads": heads,
        "num_key_value_heads": heads, "max_position_embeddings": case.length,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    numpy.save(folder / "rows.npy", numpy.random.default_rng(0).integers(3, VOCAB, (64, case.length)))
    settings = {
        "model": {"path": "model", "init": "random"},
        "data": {"train": "rows.npy", "length": case.length},
        "train": {"steps": STEPS, "batch": case.micro_batch * case.ranks, "micro_batch": case.micro_batch},
        "zero": {"stage": case.stage},
        "checkpoint": {"every": 0, "export": False},
        "plan": {"cluster": str(profile)},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))


def run(folder: Path, case: Case, number: int) -> float:
    """Train once; return the median seconds of a step."""
    command(folder, "train", "run.yaml", "--ranks", str(case.ranks), f"output=out-{number}")
    records = (folder / f"out-{number}" / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(record)["seconds"] for record in records)


def plan(folder: Path, case: Case, profile: Path) -> float:
    """Return the planned seconds of a step."""
    words = ["plan", "explain", "run.yaml", "--cluster", str(profile), "--gpus", str(case.ranks), "--json"]
    return float(json.loads(command(folder, *words))["seconds"]["mid"])


def command(folder: Path, *words: str) -> str:
    """Run zero3d in a folder; return what it prints. Raises RuntimeError."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ZERO3D_CACHE": str(folder / "cache")}
    python = [sys.executable, "-m", "zero3d.tools.cli.main"]
    done = subprocess.run([*python, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"zero3d {' '.join(words)} exited with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
