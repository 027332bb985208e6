"""Tables of peers' own test suites, from results/peer-suites.json: what was run, counts, reasons and failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from figures_measured import results, table
from recorded import ROOT, load

sys.path.append(str(ROOT / "benchmarks" / "peer_suites"))
from verdicts import SUITES, read

WHOSE = {
    "fsdp2": "FSDP2's contracts", "transformers": "transformers' Trainer", "accelerate": "Accelerate",
    "transformers_ranks": "the Trainer's checkpoints and data", "deepspeed": "DeepSpeed", "trl": "TRL",
}  # fmt: skip
BY_THEMSELVES = {"deepspeed": "as many as each test starts", "fsdp2": "2"}  # their tests start ranks
TOO, OVER = "fails in the original, too", "over the budget"
ONE, TWO = "1, where stage 3 is stage 2", "2 at stage 3 where a test builds an engine"


def ran() -> str:
    """What was run: whose tests, with which library, on how many ranks, and which files are left out."""
    file, rows = load("peer-suites"), []
    for run in file["runs"]:
        found = run["result"]
        repository, _, commit = found["checkout"].partition(" at ")
        rows.append(
            [
                WHOSE[found["suite"]],
                f"{repository} at {commit[:10]}" if commit else repository,
                found.get("installed", found["library"]).replace("==", " "),
                BY_THEMSELVES.get(found["suite"], f"{ONE}; {TWO}" if "two ranks" in found else ONE),
                f"{run.get('commit', file['commit'])}, {run.get('date', file['date'])}",
                _left_out(read(SUITES / f"{found['suite']}.yaml").left_out),
            ]
        )
    return table(["suite", "tests of", "library", "ranks", "zero3d", "files left out"], rows)


def suites() -> str:
    """Counts of each suite."""
    rows = []
    for run in results("peer-suites"):
        counts = [run["pass"], run["fail"] + run["not run"] + run["unlisted"], run["not applicable"]]
        if two := run.get("two ranks"):
            counts += [two["pass"], two["fail"] + two["not run"], two[TOO], two["not applicable"], two[OVER]]
        cells = [str(count) for count in counts]
        missing = "-" if run["suite"] in BY_THEMSELVES else "not run"
        rows.append([WHOSE[run["suite"]], *cells, *[missing] * (8 - len(cells))])
    head = ["suite", "pass", "fail", "not applicable"]
    ranks = ["on 2 ranks: pass", "fail", "fail in the original, too", "not applicable there", OVER]
    return table([*head, *ranks], rows)


def reasons() -> str:
    """Why tests are not applicable, and how many."""
    rows = []
    for run in results("peer-suites"):
        rows.append([WHOSE[run["suite"]], _counted(run["reasons"])])
        if more := run.get("two ranks", {}).get("reasons"):
            rows.append([f"{WHOSE[run['suite']]}, on 2 ranks", _counted(more)])
    return table(["suite", "not applicable, and how many"], rows)


def failures() -> str:
    """Each test that fails, and with what."""
    rows = [
        [WHOSE[run["suite"]], ranks, one["test"].partition("::")[2], one["why"].replace("|", "/")]
        for run in results("peer-suites")
        for ranks, one in _failed(run)
    ]
    return table(["suite", "ranks", "test", "fails with"], rows)


def _failed(run: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield tests that fail with us and not in the original."""
    for one in run["bad"]:
        yield BY_THEMSELVES.get(run["suite"], "1"), one
    for one in run.get("two ranks", {}).get("bad", ()):
        if one["verdict"] in ("fail", "not run"):
            yield "2", one


def _counted(found: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in found.items())


def _left_out(found: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{reason}: {', '.join(files)}" for reason, files in found.items())


PEERS: dict[str, Callable[[], str]] = {
    "peer-suites-runs": ran,
    "peer-suites": suites,
    "peer-suites-reasons": reasons,
    "peer-suites-failures": failures,
}
