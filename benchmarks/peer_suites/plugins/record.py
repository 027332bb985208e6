"""Writes a line of JSON for each test, {"test", "outcome", "why", "engine"}, and leaves out what is not applicable.

engine says whether the test has built an engine of ours. A file that cannot be imported has a line for each test that
is written in it.

PEER_RECORD  the file of lines
PEER_SUITE   the file of the suite whose reasons hold; without it every test runs
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from verdicts import read

LINES = 12  # of an error, from its end
_built = [0]  # engines, in this test


def _write(test: str, outcome: str, why: str = "") -> None:
    line = {"test": test, "outcome": outcome, "why": why, "engine": _built[0] > 0}
    with Path(os.environ["PEER_RECORD"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_sessionstart() -> None:
    """Count engines, where one of our plugins has imported them."""
    if (module := sys.modules.get("zero3d.engine.engine")) is None:
        return
    init = module.Engine.__init__

    @functools.wraps(init)
    def counted(*given: Any, **options: Any) -> None:
        _built[0] += 1
        init(*given, **options)

    module.Engine.__init__ = counted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin a test without engines."""
    _built[0] = 0


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
    """Record the tests of a file that cannot be imported."""
    if report.failed:
        for test in written_in(report.nodeid):
            _write(test, "failed", _last_lines(str(report.longrepr)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test: the first of its phases that did not pass, or its call."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _write(report.nodeid, "skipped", reason.removeprefix("Skipped: "))
    elif report.failed:
        _write(report.nodeid, "failed", _last_lines(str(report.longrepr)))
    elif report.when == "call":
        _write(report.nodeid, "passed")


def written_in(file: str) -> list[str]:
    """Return the ids of the tests that a file's text has, or the file where it has none."""
    if not Path(file).is_file():
        return [file]
    tree = ast.parse(Path(file).read_text())
    owners = [(file, tree), *((f"{file}::{one.name}", one) for one in tree.body if isinstance(one, ast.ClassDef))]
    found = [
        f"{owner}::{one.name}"
        for owner, part in owners
        for one in part.body
        if isinstance(one, ast.FunctionDef) and one.name.startswith("test")
    ]
    return found or [file]


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-LINES:])
