"""What of a peer's test suite applies to us, and what became of it.

    suites/NAME.yaml    library, checkout, files, applicable, not_applicable
    pytest's outcomes   {test id: (outcome, last lines)}
    judge(...)          a verdict for every test: pass, fail, not run, not applicable, unlisted

Applicable tests are listed one by one, so that the set cannot shrink unseen. What is not applicable is a pattern below
its reason, and the first pattern that fits holds. A test that fits neither is unlisted: of a newer checkout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

SUITES = Path(__file__).parent / "suites"
PASS, FAIL, NOT_RUN, NOT_APPLICABLE, UNLISTED = "pass", "fail", "not run", "not applicable", "unlisted"
BAD = (FAIL, NOT_RUN, UNLISTED)
KEYS = {"library", "checkout", "files", "applicable", "not_applicable"}


@dataclass(frozen=True)
class Suite:
    """The tests of a peer.

    path        the file that lists them
    library     what has to be installed, such as "transformers==5.23.0"
    checkout    the repository and commit whose tests are listed
    files       test files, below the checkout
    applicable  test ids, as pytest writes them
    patterns    of test ids that are not applicable, in order, with reasons
    """

    path: Path
    library: str
    checkout: str
    files: tuple[str, ...]
    applicable: frozenset[str]
    patterns: tuple[tuple[str, str], ...]

    def reason(self, test: str) -> str | None:
        """Return why a test is not applicable; None of one that is, or that is not listed."""
        if test in self.applicable:
            return None
        return next((reason for pattern, reason in self.patterns if _fits(test, pattern)), None)


@dataclass(frozen=True)
class Verdict:
    """What became of a test. why: the reason, or the error's last lines."""

    test: str
    verdict: str
    why: str = ""


def names() -> list[str]:
    """Return the suites that there are."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def read(path: Path) -> Suite:
    """Read a suite. Raises ValueError for unknown or missing keys, and for tests that are listed twice."""
    tree = yaml.safe_load(path.read_text())
    if set(tree) != KEYS:
        raise ValueError(f"{path}: keys {', '.join(sorted(tree))}; it needs {', '.join(sorted(KEYS))}")
    applicable = list(_ids(tree["applicable"]))
    if twice := [test for test, count in Counter(applicable).items() if count > 1]:
        raise ValueError(f"{path}: {twice[0]} is listed twice")
    patterns = [(pattern, reason) for reason, given in tree["not_applicable"].items() for pattern in given]
    return Suite(path, tree["library"], tree["checkout"], tuple(tree["files"]), frozenset(applicable), tuple(patterns))


def judge(suite: Suite, outcomes: Mapping[str, tuple[str, str]]) -> list[Verdict]:
    """Return a verdict for every test that pytest collected or that is applicable, by test id."""
    tests = sorted(suite.applicable | outcomes.keys())
    return [_verdict(suite, test, *outcomes.get(test, ("absent", "this checkout does not have it"))) for test in tests]


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the counts: of each verdict, and of what is not applicable by reason."""
    counts = Counter(one.verdict for one in verdicts)
    reasons = Counter(one.why for one in verdicts if one.verdict == NOT_APPLICABLE)
    return {
        **{name: counts[name] for name in (PASS, FAIL, NOT_RUN, UNLISTED, NOT_APPLICABLE)},
        "reasons": dict(reasons.most_common()),
    }


def _verdict(suite: Suite, test: str, outcome: str, why: str) -> Verdict:
    if test in suite.applicable:
        known = {"passed": (PASS, ""), "failed": (FAIL, why)}
        return Verdict(test, *known.get(outcome, (NOT_RUN, f"{outcome}: {why}")))
    reason = suite.reason(test)
    return Verdict(test, UNLISTED, f"{outcome}: {why}") if reason is None else Verdict(test, NOT_APPLICABLE, reason)


def _fits(test: str, pattern: str) -> bool:
    """Compare with *; brackets stand for themselves, as they do in the ids of parametrised tests."""
    return fnmatchcase(test, pattern.replace("[", "[[]"))


def _ids(tree: Mapping[str, Any] | list[str], before: str = "") -> Iterator[str]:
    """Yield the test ids of {file: {class: [tests]}} or {file: [tests]}."""
    if isinstance(tree, Mapping):
        for name, below in tree.items():
            yield from _ids(below, f"{before}{name}::")
    else:
        yield from (f"{before}{name}" for name in tree)
