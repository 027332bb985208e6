"""Run the tests with other versions, and record each row of docs/tested.md: `make versions`, or one row of it.

    make versions                              all rows of versions.toml that this machine can be
    make versions ROW=python-3.12              one row; ROW=a,b several
    make versions ROW=pinned JOBS=2 ROOM=plan  other variables are those of the row's target, and are recorded
    make versions ROW=pinned INTO=FOLDER       its clone and its environment stay in FOLDER, and serve the next run

    results/versions/ROW.json   {row, date, commit, ran, user, python, torch, ..., passed, failed, skipped, failing}

A row is the Makefile's target in a clone of the commit that is checked out, with an environment of its own. A row that
cannot be tried here (no such Python, a release that pip does not install) leaves its file as it was, and says why; a
row without a file is "not tried" in the table. `--facts` prints what an environment is. Nothing here needs a package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pwd
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MATRIX = Path(__file__).with_suffix(".toml")
FILES = Path(__file__).parent / "results" / "versions"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl")
SAID = ("ROOM", "CPU")  # variables of the Makefile that say which tests run and how
SIZES = ("JOBS", "PIP_OPTIONS")
OUTER = ("MAKEFLAGS", "MFLAGS", "TORCH", "TRANSFORMERS", "PYTHONPATH")  # of the make that runs this: a row has its own
FOLDER = "Ordner für zero3d"  # of an ordinary user
COUNTED = ("failed", "skipped", "passed")


class NotTriedError(RuntimeError):
    """A row that this machine cannot be, and why."""


@dataclass(frozen=True)
class Row:
    """What a row asks for, as versions.toml says."""

    name: str
    python: str
    torch: str
    transformers: str
    system: str
    machine: str
    user: str
    target: str


@dataclass(frozen=True)
class Place:
    """Where a row runs: the clone, and what subprocess is told of the user there."""

    clone: Path
    user: Mapping[str, Any]


def matrix() -> dict[str, Row]:
    """Every row by its name, in the table's order."""
    asked = tomllib.loads(MATRIX.read_text())
    first = next(iter(asked.values()))
    return {name: Row(name, **{**first, **own}) for name, own in asked.items()}


def recorded() -> dict[str, dict[str, Any]]:
    """What was recorded of the rows that were tried, by row."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FILES.glob("*.json"))}


# --- one row ------------------------------------------------------------------------------------


def try_row(row: Row, python: str, folder: Path) -> dict[str, Any]:
    """Run a row's tests and return its record. Raises NotTriedError."""
    if (row.system, row.machine) != (platform.system(), platform.machine()):
        raise NotTriedError(f"this machine is {platform.system()} on {platform.machine()}")
    user = _user(row)
    found = _python(row.python, python, user)
    commit = _git("rev-parse", "--short=10", "HEAD")
    place = _place(row, folder, commit, user)
    begun = time.monotonic()
    report = place.clone / ".report.xml"
    report.unlink(missing_ok=True)
    given = [f"{name}={os.environ[name]}" for name in (*SAID, *SIZES) if os.environ.get(name)]
    words = [*_others(row), "VENV=.venv", f"PYTHON={found}", *given]
    installed = "peers" if row.target == "test-peers" else "dev"
    if _make([f".venv/.installed-{installed}", *words], place).returncode:
        raise NotTriedError("what it asks for could not be installed, as said above")
    facts = _facts(place)
    if not facts["python"].startswith(f"{row.python}.") or _release(facts["torch"]) != row.torch:
        raise NotTriedError(f"Python {facts['python']} and torch {facts['torch']} are in {place.clone}: remove it")
    options = f"--junitxml={shlex.quote(str(report))}"
    _make([row.target, *words, "CAMPAIGN=true"], place, PYTEST_ADDOPTS=options)
    if not report.is_file():
        raise NotTriedError("the tests did not come to an end, as said above")
    ran = " ".join(["make", row.target, *(word for word in given if word.partition("=")[0] in SAID)])
    return {
        "row": row.name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "ran": ran,
        "seconds": round(time.monotonic() - begun),
        "user": "ordinary, umask 077, in `" + FOLDER + "`" if place.user else "ordinary" if os.getuid() else "root",
        **facts,
        **counted(report),
    }


def counted(report: Path) -> dict[str, Any]:
    """How many cases of a report in JUnit's form passed, failed and were skipped; the names of those that failed."""
    counts = dict.fromkeys(COUNTED, 0)
    failing = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        verdicts = Counter(child.tag for child in case)
        verdict = (
            "failed" if verdicts["failure"] or verdicts["error"] else "skipped" if verdicts["skipped"] else "passed"
        )
        counts[verdict] += 1
        if verdict == "failed":
            failing.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
    return {**counts, "failing": sorted(failing)}


def facts() -> dict[str, Any]:
    """What this process's environment and machine are."""
    import torch

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
    }


def version(name: str) -> str:
    """The version of a package; empty where it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU as its maker names it, or what else the system says of it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _others(row: Row) -> list[str]:
    """The Makefile's words for versions that are not those of constraints.txt."""
    pins = dict(
        line.strip().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    return [
        f"{name.upper()}={getattr(row, name)}" for name in ("torch", "transformers") if getattr(row, name) != pins[name]
    ]


def _release(version: str) -> str:
    return version.partition("+")[0]


def _make(words: Sequence[str], place: Place, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the clone's Makefile there, as the row's user."""
    home = {"HOME": str(place.clone.parent)} if place.user else {}
    outer = {name: value for name, value in os.environ.items() if name not in OUTER}
    return subprocess.run(["make", *words], cwd=place.clone, env={**outer, **home, **environment}, **place.user)


def _facts(place: Place) -> dict[str, Any]:
    command = [".venv/bin/python", "benchmarks/versions.py", "--facts"]
    done = subprocess.run(command, cwd=place.clone, capture_output=True, text=True, check=True, **place.user)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _user(row: Row) -> dict[str, Any]:
    """What subprocess is told of a row's user: nothing where any will do, nobody's number if root starts it."""
    if row.user != "ordinary":
        return {}
    if os.getuid():
        return {"umask": 0o077}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "umask": 0o077}


def _place(row: Row, folder: Path, commit: str, user: Mapping[str, Any]) -> Place:
    """Bring a commit into a clone; for an ordinary user, into a folder of theirs."""
    above = folder / row.name / FOLDER if user else folder / row.name
    clone = above / "zero3d"
    if not clone.exists():
        above.mkdir(parents=True, exist_ok=True)
        above.parent.chmod(0o755)  # whatever the umask is: an ordinary user's folder lies in it
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "-c", "safe.directory=*", "fetch", "--quiet", str(ROOT), "HEAD"], cwd=clone, check=True)
    subprocess.run(["git", "-c", "safe.directory=*", "checkout", "--quiet", "--detach", commit], cwd=clone, check=True)
    if "user" in user:
        subprocess.run(["chown", "-R", f"{user['user']}:{user['group']}", str(above)], check=True)
    return Place(clone, user)


def _python(wanted: str, given: str, user: Mapping[str, Any]) -> str:
    """An interpreter of a version that this user can run and that makes environments. Raises NotTriedError."""
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for name in (given, f"python{wanted}", f"/usr/bin/python{wanted}", f"/usr/local/bin/python{wanted}"):
        path = shutil.which(name)
        try:
            done = subprocess.run([path or name, "-c", script], capture_output=True, text=True, cwd="/", **user)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == wanted:
            return path or name
    raise NotTriedError(
        f"no Python {wanted} with venv was found that this user can run: pass PYTHON=/path/to/python{wanted}"
    )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def _folder(into: str) -> Iterator[Path]:
    """The folder of clones: the one that is given stays."""
    if into:
        yield Path(into).resolve()
        return
    with TemporaryDirectory(prefix="zero3d-versions-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def main(argv: Sequence[str] | None = None, attempt: Callable[..., dict[str, Any]] = try_row) -> int:
    """Try rows one after another and write the file of each; 1 if one that was asked for could not be tried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", default="", help="names of versions.toml, with commas; all without it")
    parser.add_argument("--python", default="python3", help="for the rows of its version")
    parser.add_argument("--into", default="", help="folder in which clones and environments stay")
    parser.add_argument("--facts", action="store_true", help="print what this environment is")
    arguments = parser.parse_args(argv)
    if arguments.facts:
        print(json.dumps(facts()))
        return 0
    rows = matrix()
    names = [name for name in arguments.row.split(",") if name] or list(rows)
    if unknown := [name for name in names if name not in rows]:
        parser.error(f"ROW={unknown[0]}: one of {', '.join(rows)}")
    if changed := _git("status", "--porcelain", "--", ".", f":!{FILES.relative_to(ROOT)}"):
        parser.error(f"commit first, so that results can name what they are of:\n{changed}")
    untried = []
    for name in names:
        with _folder(arguments.into) as folder:
            try:
                record = attempt(rows[name], arguments.python, folder)
            except NotTriedError as error:
                print(f"{name}: not tried: {error}", flush=True)
                untried.append(name)
                continue
        path = FILES / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{name}: {', '.join(f'{record[each]} {each}' for each in COUNTED)}; {path.relative_to(ROOT)}", flush=True
        )
    return bool(arguments.row and untried)


if __name__ == "__main__":
    sys.exit(main())
