"""Writes a line of JSON for each test, {"test", "outcome", "why"}, and leaves out what is not applicable.

PEER_RECORD  the file of lines
PEER_SUITE   the file of the suite whose reasons hold; without it every test runs
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from verdicts import read

LINES = 12  # of an error, from its end


def _write(test: str, outcome: str, why: str = "") -> None:
    with Path(os.environ["PEER_RECORD"]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with a reason."""
    if "PEER_SUITE" not in os.environ:
        return
    suite = read(Path(os.environ["PEER_SUITE"]))
    left_out = [item for item in items if suite.reason(item.nodeid) is not None]
    for item in left_out:
        _write(item.nodeid, "left out")
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if suite.reason(item.nodeid) is None]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported."""
    if report.failed:
        _write(report.nodeid, "failed", _last_lines(str(report.longrepr)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test: the first of its phases that did not pass, or its call."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
    elif report.failed:
        _write(report.nodeid, "failed", _last_lines(str(report.longrepr)))
    elif report.when == "call":
        _write(report.nodeid, "passed")


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-LINES:])
