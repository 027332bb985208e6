"""A peer's own tests against what we put in its place.

    python benchmarks/peer_suites/run.py --suite transformers --checkout ~/transformers [--json OUT]
    python benchmarks/peer_suites/run.py --suite transformers --checkout ~/transformers --plain     without us
    python benchmarks/peer_suites/run.py --suite accelerate --checkout ~/accelerate --minutes 12    on two ranks, too
    python benchmarks/peer_suites/run.py --suite fsdp2                                              no checkout

Prints pass, fail, not run and not applicable by reason; suites/NAME.yaml lists which test is what, and names the
repository and the installed library. Without --json the exit code is 1 where a test that applies did not pass, or one
is unlisted. Nothing is downloaded. Beside the peers themselves their tests need pytest-timeout, parameterized,
datasets, deepspeed, tensorboard and torchdata.

With --minutes, tests that have built an engine of ours run a second time on two ranks at stage 3 (two_ranks.py), in the
order of their ids' hashes as long as there is time. Those that fail by reading a weight, which is cut there, have
weights gathered (plugins/gathered.py), and those that still fail run once more with the peer as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import two_ranks
from verdicts import BAD, SUITES, Suite, Verdict, judge, judge_ranks, names, outcomes_of, read, summary

HERE = Path(__file__).parent
US = {
    "accelerate": "peer_accelerate",
    "deepspeed": "peer_deepspeed",
    "transformers": "peer_transformers",
    "transformers_ranks": "peer_transformers",
    "trl": "peer_trl",
}
HELP = {"trl": ["local_hub"]}  # needed with and without us
ERROR, FOLDERS = re.compile(r"[\w.]*(Error|Exception|Failed|Exit)\b: *\S"), re.compile(r"(?<!\S)/(\S*/)+")
FIRST = 0.6  # of the minutes are for all tests, and the rest for those that fail
READ = "ReleasedParameterError"  # raised where a test reads a weight at stage 3, outside of a forward
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
    parser.add_argument("--minutes", type=float, default=0.0, help="for tests that train, on two ranks at stage 3")
    parser.add_argument("--json", type=Path, help="write verdicts there")
    arguments = parser.parse_args(argv)
    suite = read(SUITES / f"{arguments.suite}.yaml")
    ranks: dict[str, Any] = {}
    if not suite.files:
        outcomes = _own(suite)
    elif arguments.checkout is None or not (arguments.checkout / suite.files[0]).is_file():
        parser.error(f"--checkout {arguments.checkout}: no {suite.files[0]} is there; it takes {suite.checkout}")
    else:
        with TemporaryDirectory(prefix="zero3d-peers-") as folder:
            outcomes, trained = _theirs(suite, arguments, Path(folder))
            if arguments.minutes:
                ranks = _on_two_ranks(suite, arguments, Path(folder), [test for test in trained if test in outcomes])
    verdicts = judge(suite, outcomes)
    if arguments.select:
        verdicts = [one for one in verdicts if one.test in outcomes]
    counts = summary(verdicts)
    bad = [one for one in verdicts if one.verdict in BAD]
    for one in [*bad, *ranks.get("bad", ())]:
        print(f"{one.verdict}: {one.test}\n    {one.why}\n")
    print(json.dumps({**counts, **{key: value for key, value in ranks.items() if key != "bad"}}, indent=1))
    if arguments.json:
        found = {"suite": suite.path.stem, "library": suite.library, "checkout": suite.checkout}
        found |= {"installed": _installed(suite.library), "left out": suite.left_out}
        more = {"two ranks": {**ranks, "bad": _shortened(ranks["bad"])}} if ranks else {}
        arguments.json.write_text(json.dumps({**found, **counts, "bad": _shortened(bad), **more}, indent=1) + "\n")
        return 0
    return int(bool(bad or ranks.get("bad")))


def _theirs(suite: Suite, arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Run a peer's files, each in a process of its own; return what became of every test, and which built an engine."""
    record = folder / "lines"
    record.touch()
    environment = {**_environment(folder), "PEER_RECORD": str(record)}
    if arguments.stage is not None:
        environment["PEER_STAGE"] = str(arguments.stage)
    if not arguments.all:
        environment["PEER_SUITE"] = str(suite.path)
    words = _words(suite, arguments.plain)
    words += ["-k", arguments.select] if arguments.select else []
    if _has("pytest_timeout"):
        words += ["--timeout", str(arguments.timeout)]
    for file in suite.files:
        print(f"--- {file}", flush=True)
        subprocess.run([sys.executable, "-m", "pytest", file, *words], cwd=arguments.checkout, env=environment)
    text = record.read_text() + "".join(
        json.dumps({"test": file, "outcome": "not taken", "why": "no line of the suite names this file"}) + "\n"
        for file in suite.unnamed(arguments.checkout)
    )
    return outcomes_of(text), [one["test"] for one in map(json.loads, text.splitlines()) if one.get("engine")]


def _on_two_ranks(suite: Suite, arguments: argparse.Namespace, folder: Path, tests: list[str]) -> dict[str, Any]:
    """Run tests on two ranks, and those that fail once more without us; return counts, and verdicts under "bad"."""
    chosen = two_ranks.in_order(test for test in set(tests) if test in suite.applicable)

    until = time.monotonic() + 60 * arguments.minutes

    def run(tests: Iterable[str], words: list[str], share: float = 1.0) -> dict[str, tuple[str, str]]:
        environment = two_ranks.environment_of(_environment(folder), arguments.stage)
        seconds = share * (until - time.monotonic())
        return two_ranks.run(
            two_ranks.in_order(tests), arguments.checkout, words, environment, seconds, arguments.timeout
        )

    found = run([test for test in chosen if suite.reason_on_ranks(test) is None], _words(suite, False), FIRST)
    read = [test for test, (outcome, why) in found.items() if outcome == "failed" and READ in why]
    gathered = run(read, [*_words(suite, False), "-p", "plugins.gathered"])
    found |= gathered
    theirs = run([test for test, (outcome, _) in found.items() if outcome == "failed"], _words(suite, True))
    return {**judge_ranks(suite, chosen, found, theirs), "gathered": len(gathered)}


def _words(suite: Suite, plain: bool) -> list[str]:
    """Return words of pytest's command line, with our plugins or without."""
    chosen = ["record", *HELP.get(suite.path.stem, ()), *([] if plain else [US[suite.path.stem]])]
    words = [word for name in chosen for word in ("-p", f"plugins.{name}")]
    return [*words, "-o", "addopts=", "--rootdir", ".", "-p", "no:cacheprovider", "-q", "--tb=short"]


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment without the network, and with a home of the hub's in a folder."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, **OFFLINE, "HF_HOME": str(folder), "PYTHONPATH": paths}


def _own(suite: Suite) -> dict[str, tuple[str, str]]:
    """Run contracts of our own writing; what is not applicable is listed by name, for there is nothing to collect."""
    import fsdp2_contracts

    return {pattern: ("left out", "") for pattern, _ in suite.patterns} | fsdp2_contracts.run()


def error_of(lines: str) -> str:
    """Return the last line that has an error's name, or the last of all; folders are left out of paths."""
    every = [line.removeprefix("E ").strip() for line in lines.splitlines()] or [""]
    chosen = next((line for line in reversed(every) if ERROR.match(line)), every[-1])
    return FOLDERS.sub(".../", chosen)


def _shortened(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    return [{**vars(one), "why": error_of(one.why)} for one in verdicts]


def _installed(library: str) -> str:
    """Return the library with the version that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    name = library.partition("==")[0]
    try:
        return f"{name}=={version(name).partition('+')[0]}"
    except PackageNotFoundError:
        return library


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
