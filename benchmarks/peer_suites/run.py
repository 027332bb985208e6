"""A peer's own tests against what we put in its place.

    python benchmarks/peer_suites/run.py --suite transformers --checkout ~/transformers [--json OUT]
    python benchmarks/peer_suites/run.py --suite transformers --checkout ~/transformers --plain     without us
    python benchmarks/peer_suites/run.py --suite fsdp2                                              no checkout

Prints pass, fail, not run and not applicable by reason; suites/NAME.yaml lists which test is what, and names the
repository and the installed library. Without --json the exit code is 1 where a test that applies did not pass, or one
is unlisted. Nothing is downloaded. Beside the peers themselves their tests need pytest-timeout, parameterized,
datasets, deepspeed and tensorboard.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from verdicts import BAD, SUITES, Suite, judge, names, read, summary

HERE = Path(__file__).parent
US = {
    "accelerate": "peer_accelerate",
    "deepspeed": "peer_deepspeed",
    "transformers": "peer_transformers",
    "trl": "peer_trl",
}
HELP = {"trl": ["local_hub"]}  # needed with and without us
ERROR, FOLDERS = re.compile(r"[\w.]*(Error|Exception|Failed|Exit)\b: *\S"), re.compile(r"(?<!\S)/(\S*/)+")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite and print its verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", required=True, choices=names())
    parser.add_argument("--checkout", type=Path, help="of the peer's repository, with its tests")
    parser.add_argument("--stage", type=int, choices=range(4), help="of ZeRO, in place of the default")
    parser.add_argument("--plain", action="store_true", help="leave the peer as it is, to see what it passes by itself")
    parser.add_argument("--all", action="store_true", help="run also what is not applicable")
    parser.add_argument("--select", default="", metavar="WORD", help="only these tests, as pytest's -k")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a test, with pytest-timeout installed")
    parser.add_argument("--json", type=Path, help="write verdicts there")
    arguments = parser.parse_args(argv)
    suite = read(SUITES / f"{arguments.suite}.yaml")
    if not suite.files:
        outcomes = _own(suite)
    elif arguments.checkout is None or not (arguments.checkout / suite.files[0]).is_file():
        parser.error(f"--checkout {arguments.checkout}: no {suite.files[0]} is there; it takes {suite.checkout}")
    else:
        outcomes = _theirs(suite, arguments)
    verdicts = judge(suite, outcomes)
    if arguments.select:
        verdicts = [one for one in verdicts if one.test in outcomes]
    counts = summary(verdicts)
    for one in verdicts:
        if one.verdict in BAD:
            print(f"{one.verdict}: {one.test}\n    {one.why}\n")
    print(json.dumps(counts, indent=1))
    if arguments.json:
        bad = [{**vars(one), "why": error_of(one.why)} for one in verdicts if one.verdict in BAD]
        found = {"suite": suite.path.stem, "library": suite.library, "checkout": suite.checkout}
        arguments.json.write_text(json.dumps({**found, **counts, "bad": bad}, indent=1) + "\n")
        return 0
    return int(any(one.verdict in BAD for one in verdicts))


def _theirs(suite: Suite, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Run a peer's files, each in a process of its own, and return what became of every test."""
    chosen = ["record", *HELP.get(suite.path.stem, ()), *([] if arguments.plain else [US[suite.path.stem]])]
    with TemporaryDirectory(prefix="zero3d-peers-") as folder:
        record = Path(folder) / "lines"
        record.touch()
        environment = {**os.environ, **OFFLINE, "HF_HOME": folder, "PEER_RECORD": str(record)}
        if arguments.stage is not None:
            environment["PEER_STAGE"] = str(arguments.stage)
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        if not arguments.all:
            environment["PEER_SUITE"] = str(suite.path)
        words = [word for name in chosen for word in ("-p", f"plugins.{name}")]
        words += ["-o", "addopts=", "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--tb=short"]
        words += ["-k", arguments.select] if arguments.select else []
        if _has("pytest_timeout"):
            words += ["--timeout", str(arguments.timeout)]
        for file in suite.files:
            print(f"--- {file}", flush=True)
            subprocess.run([sys.executable, "-m", "pytest", file, *words], cwd=arguments.checkout, env=environment)
        return outcomes_of(record.read_text())


def _own(suite: Suite) -> dict[str, tuple[str, str]]:
    """Run contracts of our own writing; what is not applicable is listed by name, for there is nothing to collect."""
    import fsdp2_contracts

    return {pattern: ("left out", "") for pattern, _ in suite.patterns} | fsdp2_contracts.run()


def outcomes_of(lines: str) -> dict[str, tuple[str, str]]:
    """Return what became of each test; one whose call passed and whose teardown failed has failed."""
    found: dict[str, tuple[str, str]] = {}
    for line in map(json.loads, lines.splitlines()):
        if found.get(line["test"], ("passed",))[0] != "failed":
            found[line["test"]] = line["outcome"], line["why"]
    return found


def error_of(lines: str) -> str:
    """Return the last line that has an error's name, or the last of all; folders are left out of paths."""
    every = [line.removeprefix("E ").strip() for line in lines.splitlines()] or [""]
    chosen = next((line for line in reversed(every) if ERROR.match(line)), every[-1])
    return FOLDERS.sub(".../", chosen)


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
