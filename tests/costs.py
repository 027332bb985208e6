"""What tests take, by file and by reason: `make costs` runs those of `make test`, `make costs-all` the long ones, too.

It writes what each file took into tests/durations.json (`durations.py`) and the tables of CONTRIBUTING.md; of these
`make sizes` writes those of lines of code and of changes alone, which no test limits. The machine must be quiet. CPU seconds, of all
processes:

start     Python, imports and collection: what no test accounts for
tests     in the processes that run them
ranks     of cases on several ranks, and in processes of their own
meeting   of those ranks, before a case
commands  that tests start and wait for
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

import pytest
from durations import SECONDS, recorded
from pool import RankPool

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "map"))
import sizes  # noqa: E402

PAGE = ROOT / "CONTRIBUTING.md"
END = "<!-- end -->"  # of a table, behind <!-- NAME -->
SHOWN = 12  # files
KINDS = ("start", "tests", "ranks", "meeting", "commands")


class Recorder:
    """A plugin of pytest that writes a line of JSON per test: its name, whether it is long, seconds, CPU seconds."""

    def __init__(self, path):
        self.path = Path(path)

    @staticmethod
    def now():
        """CPU seconds so far, by kind."""
        ours, others = (sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Counter(tests=ours, commands=others, **RankPool.cpu)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        began, start = self.now(), time.monotonic()
        result = yield
        took = self.now()
        took.subtract(began)
        row = {"test": item.nodeid, "long": "long" in item.keywords, "seconds": time.monotonic() - start, "cpu": took}
        with self.path.open("a") as file:  # all workers append; a line this short is not mixed with another
            file.write(json.dumps(row) + "\n")
        return result


def measure(markers):
    """Run tests; return the rows that they left, and wall and CPU seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs"
        began = time.monotonic()
        workers = (os.cpu_count() or 1) + 1  # as `make test` has
        command = [sys.executable, "-m", "pytest", "-n", str(workers), "-m", markers, f"--costs={path}"]
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            sys.exit("the tests failed: nothing is written")
        seconds = time.monotonic() - began
        cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        return [json.loads(line) for line in path.read_text().splitlines()], seconds, cpu


def update_seconds(rows):
    """Write the means of the files that were run; what others took stays."""
    found = defaultdict(list)
    for row in rows:
        found[row["test"].partition("::")[0], "long" if row["long"] else "case"].append(row["seconds"])
    kept = recorded() if SECONDS.exists() else {}
    for (file, kind), times in found.items():
        kept.setdefault(file, {})[kind] = round(mean(times), 2)
    there = {file: kept[file] for file in sorted(kept) if (ROOT / file).exists()}
    SECONDS.write_text(json.dumps(there, indent=1) + "\n")


def table(rows, seconds, cpu):
    """Markdown: CPU seconds by kind, of all and of the files that take most."""
    files = defaultdict(Counter)
    for row in rows:
        files[row["test"].partition("::")[0]].update(row["cpu"])
    total = sum(files.values(), Counter())
    total["start"] = cpu - sum(total.values())
    most = sorted(files, key=lambda file: -sum(files[file].values()))[:SHOWN]
    lines = [
        f"{len(rows):,} tests in {seconds / 60:.1f} minutes and {cpu / 60:.1f} CPU minutes, of which seconds:",
        "",
        f"| | all | {' | '.join(KINDS)} |",
        "|---|" + "---:|" * (len(KINDS) + 1),
        line("all", total),
        *(line(file.removeprefix("tests/"), files[file]) for file in most),
    ]
    return "\n".join(lines)


def line(name, found):
    """A row of the table."""
    return f"| {name} | {sum(found.values()):.0f} | {' | '.join(f'{found[kind]:.0f}' for kind in KINDS)} |"


def put(name, text):
    """Write a table between its marks."""
    begin = f"<!-- {name} -->"
    head, _, rest = PAGE.read_text().partition(begin)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{begin}\n{text}\n{END}{tail}")


def main():
    """Count, and measure unless sizes alone are asked for; write what was found."""
    put("sizes", sizes.table())
    put("changes", sizes.changes())
    if sys.argv[1] != "sizes":
        rows, seconds, cpu = measure(sys.argv[1])
        update_seconds(rows)
        put("costs", table(rows, seconds, cpu))


if __name__ == "__main__":
    main()
