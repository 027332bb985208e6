"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.tools.doctor.dead_run import DeadRun, describe
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, worst
from zero3d.watchdog.block import short_frames

STYLES = {OK: "green", WARNING: "yellow", BROKEN: "bold red", SKIPPED: "dim"}
SAID = {
    OK: "nothing is wrong here",
    WARNING: "it works, with warnings",
    BROKEN: "broken: a run would fail or hang here",
}
FRAMES = 12  # of a stack, innermost first


def show(findings: Mapping[str, Finding], symptoms: Mapping[str, str], seconds: float, console: Console) -> None:
    """Print one row for each probe; of what is not ok also its symptom and what to type."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("verdict", "probe"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", overflow="fold")
    for name, finding in findings.items():
        table.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), name, cell(finding, symptoms.get(name, "")))
    console.print(table)
    verdict = worst(findings)
    counts = [sum(each.verdict == kind for each in findings.values()) for kind in (OK, SKIPPED, WARNING, BROKEN)]
    listed = "{} ok, {} skipped, {} warning{}, {} broken".format(*counts[:3], "s" * (counts[2] != 1), counts[3])
    console.print(Text(f"{SAID[verdict]} ({listed}; {seconds:.1f} s)", style=STYLES[verdict]))


def cell(finding: Finding, symptom: str) -> Text:
    """Return what was found, and for what is not ok the symptom and the remedy below it."""
    text = Text(finding.text, style="dim" if finding.verdict == SKIPPED else "")
    if finding.verdict in (WARNING, BROKEN):
        if symptom:
            text.append(f"\nsymptom: {symptom}", style="dim")
        text.append(f"\ntry: {finding.remedy}", style="bold")
    return text


def show_run(run: DeadRun, console: Console) -> None:
    """Print where every rank of a dead run was, and the stacks of those that others waited for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("rank", "step", "still for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    shown = [*run.culprits, *(rank for rank in run.ranks if rank not in run.culprits)][:64]
    for rank in sorted(shown, key=lambda each: each.rank):
        since = f"{rank.seconds:.0f} s" if rank.seconds is not None else ""
        step = "" if rank.step is None else str(rank.step)
        style = STYLES[BROKEN] if rank in run.culprits else ""
        table.add_row(str(rank.rank), step, since, Text(f"{rank.state} {rank.place}".strip()), style=style)
    console.print(table)
    for rank in (run.culprits or run.ranks)[:2]:
        if rank.stack:
            console.print(Text(f"\n{describe(rank)}", style="bold"), soft_wrap=True)
            for line in short_frames(rank.stack)[:FRAMES]:
                console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()


def as_json(
    findings: Mapping[str, Finding],
    symptoms: Mapping[str, str],
    taken: Mapping[str, float],
    seconds: float,
    runs: Sequence[DeadRun] = (),
) -> str:
    """Return everything as a line of JSON. taken: seconds of each probe."""
    tree: dict[str, Any] = {
        "version": 1,
        "host": socket.gethostname(),
        "verdict": worst(findings),
        "seconds": round(seconds, 3),
        "findings": [
            {"name": name, "symptom": symptoms.get(name, ""), **finding.as_dict()}
            | ({"seconds": round(taken[name], 3)} if name in taken else {})
            for name, finding in findings.items()
        ],
    }
    if runs:
        tree["runs"] = [asdict(run) for run in runs]
    return json.dumps(tree, default=str)
