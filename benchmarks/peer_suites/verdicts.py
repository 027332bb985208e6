"""What of a peer's test suite applies to us, and what became of it.

    suites/NAME.yaml    library, checkout, files, applicable, not_applicable; left_out, on_two_ranks
    pytest's outcomes   {test id: (outcome, last lines)}
    judge(...)          a verdict for every test: pass, fail, not run, not applicable, unlisted

Applicable tests are listed one by one, so that the set cannot shrink unseen. What is not applicable is a pattern below
its reason, and the first pattern that fits holds. A test that fits neither is unlisted: of a newer checkout.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

SUITES = Path(__file__).parent / "suites"
PASS, FAIL, NOT_RUN, NOT_APPLICABLE, UNLISTED = "pass", "fail", "not run", "not applicable", "unlisted"
BAD = (FAIL, NOT_RUN, UNLISTED)
KEYS = {"library", "checkout", "files", "applicable", "not_applicable"}
MORE = {"left_out", "on_two_ranks"}
TOO, OVER = "fails in the original, too", "over the budget"


@dataclass(frozen=True)
class Suite:
    """The tests of a peer.

    path        the file that lists them
    library     what has to be installed, such as "transformers==5.23.0"
    checkout    the repository and commit whose tests are listed
    files       test files, below the checkout
    applicable  test ids, as pytest writes them
    patterns    of test ids that are not applicable, in order, with reasons
    left_out    reasons, and the files of the checkout that are not taken for each
    on_ranks    patterns of test ids that are not applicable on two ranks, with reasons
    """

    path: Path
    library: str
    checkout: str
    files: tuple[str, ...]
    applicable: frozenset[str]
    patterns: tuple[tuple[str, str], ...]
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    on_ranks: tuple[tuple[str, str], ...] = ()

    def reason(self, test: str) -> str | None:
        """Return why a test is not applicable; None of one that is, or that is not listed."""
        if test in self.applicable:
            return None
        return next((reason for pattern, reason in self.patterns if _fits(test, pattern)), None)

    def unnamed(self, checkout: Path) -> list[str]:
        """Return test files beside the suite's that are neither taken nor left out by name."""
        known = [*self.files, *(pattern for patterns in self.left_out.values() for pattern in patterns)]
        folders = sorted({(checkout / file).parent for file in self.files})
        found = [str(path.relative_to(checkout)) for folder in folders for path in sorted(folder.glob("test_*.py"))]
        return [file for file in found if not any(_fits(file, pattern) for pattern in known)]

    def reason_on_ranks(self, test: str) -> str | None:
        """Return why a test is not applicable on two ranks; None of one that is."""
        return next((reason for pattern, reason in self.on_ranks if _fits(test, pattern)), None)


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
    if not KEYS <= set(tree) <= KEYS | MORE:
        raise ValueError(f"{path}: keys {', '.join(sorted(tree))}; it needs {', '.join(sorted(KEYS))}")
    applicable = list(_ids(tree["applicable"]))
    if twice := [test for test, count in Counter(applicable).items() if count > 1]:
        raise ValueError(f"{path}: {twice[0]} is listed twice")

    def patterns(key: str) -> tuple[tuple[str, str], ...]:
        return tuple((pattern, reason) for reason, given in tree.get(key, {}).items() for pattern in given)

    return Suite(
        path,
        tree["library"],
        tree["checkout"],
        tuple(tree["files"]),
        frozenset(applicable),
        patterns("not_applicable"),
        tree.get("left_out", {}),
        patterns("on_two_ranks"),
    )


def outcomes_of(lines: str) -> dict[str, tuple[str, str]]:
    """Return what became of each test; one whose call passed and whose teardown failed has failed."""
    found: dict[str, tuple[str, str]] = {}
    for line in map(json.loads, lines.splitlines()):
        if found.get(line["test"], ("passed",))[0] != "failed":
            found[line["test"]] = line["outcome"], line["why"]
    return found


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


def judge_ranks(
    suite: Suite, chosen: Sequence[str], ours: Mapping[str, tuple[str, str]], theirs: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return counts of tests on two ranks, and under "bad" verdicts of those that do not pass.

    chosen  tests that build an engine, in order
    ours    pytest's outcomes, of those that there was time for
    theirs  outcomes of those that fail, with the peer as it is
    """
    verdicts = [_on_ranks(suite, test, ours, theirs) for test in chosen]
    counts = Counter(one.verdict for one in verdicts)
    reasons = Counter(one.why for one in verdicts if one.verdict == NOT_APPLICABLE)
    return {
        "trains": len(chosen),
        **{name: counts[name] for name in (PASS, FAIL, NOT_RUN, TOO, NOT_APPLICABLE, OVER)},
        "reasons": dict(reasons.most_common()),
        "bad": [one for one in verdicts if one.verdict in (FAIL, NOT_RUN, TOO)],
    }


def _on_ranks(
    suite: Suite, test: str, ours: Mapping[str, tuple[str, str]], theirs: Mapping[str, tuple[str, str]]
) -> Verdict:
    if (reason := suite.reason_on_ranks(test)) is not None:
        return Verdict(test, NOT_APPLICABLE, reason)
    if test not in ours:
        return Verdict(test, OVER)
    found = _verdict(suite, test, *ours[test])
    if found.verdict == FAIL and theirs.get(test, ("",))[0] == "failed":
        return Verdict(test, TOO, found.why)
    return found


def _verdict(suite: Suite, test: str, outcome: str, why: str) -> Verdict:
    if test in suite.applicable:
        known = {"passed": (PASS, ""), "failed": (FAIL, why)}
        return Verdict(test, *known.get(outcome, (NOT_RUN, f"{outcome}: {why}")))
    reason = suite.reason(test)
    return Verdict(test, UNLISTED, f"{outcome}: {why}") if reason is None else Verdict(test, NOT_APPLICABLE, reason)


def _fits(test: str, pattern: str) -> bool:
    """Compare with *; brackets stand for themselves, as they do in the ids of parametrised tests."""
    return fnmatchcase(test, pattern.replace("[", "[[]"))


def _ids(tree: Mapping[str, Any] | list[str] | None, before: str = "") -> Iterator[str]:
    """Yield the test ids of {file: {class: [tests]}} or {file: [tests]}; {file: {test: null}} is one beside classes."""
    if tree is None:
        yield before.removesuffix("::")
    elif isinstance(tree, Mapping):
        for name, below in tree.items():
            yield from _ids(below, f"{before}{name}::")
    else:
        yield from (f"{before}{name}" for name in tree)
