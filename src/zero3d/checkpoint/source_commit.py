"""The commit that this code is of, where that is written down: no program is asked.

installed from a repository   direct_url.json, which installers leave beside the package
imported from a clone         .git/HEAD, and the branch that it names; files may have changed since
anything else                 not known
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
SHOWN = 12  # digits
ROOT = Path(__file__).parents[3]  # of a clone: src/zero3d/checkpoint is below it


def described_commit() -> str | None:
    """Return the commit in words; None where nothing says it."""
    if commit := _installed():
        return f"commit {commit[:SHOWN]}"
    if commit := of_clone(ROOT):
        return f"a clone at commit {commit[:SHOWN]}"
    return None


def _installed() -> str | None:
    try:
        text = distribution("zero3d").read_text("direct_url.json")
    except (PackageNotFoundError, OSError):
        return None
    return None if text is None else of_installer(text)


def of_installer(text: str) -> str | None:
    """Return the commit in a direct_url.json, which has one of packages that came from a repository."""
    try:
        found = json.loads(text)["vcs_info"]["commit_id"]
    except (ValueError, TypeError, KeyError):
        return None
    return _checked(found)


def of_clone(root: Path) -> str | None:
    """Return the commit that is checked out in a clone of this project; None where the folder is the root of none."""
    git = root / ".git"
    try:
        if 'name = "zero3d"' not in (root / "pyproject.toml").read_text().splitlines():
            return None  # of somebody else's project, in which this code lies
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return _checked(head)
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return _checked((git / name).read_text().strip())
        packed = (line.split(" ") for line in (git / "packed-refs").read_text().splitlines())
        return next((_checked(words[0]) for words in packed if words[1:] == [name]), None)
    except (OSError, ValueError):
        return None


def _checked(commit: object) -> str | None:
    return commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None
