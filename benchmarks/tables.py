"""Every table of figures in README.md, README.zh.md and docs/, written from benchmarks/results.

    python benchmarks/tables.py --write                       all tables anew, from the files that are there
    python benchmarks/tables.py --run exact                   what does not depend on the machine's speed
    python benchmarks/tables.py --run timed                   all timings: on a quiet machine, nothing beside them
    python benchmarks/tables.py --run engines,loading --write

    <!-- table NAME -->          a table stands between these lines; figures_*.py make it, from results/*.json or a
    <!-- end -->                 command that takes milliseconds

`--run` takes committed code alone, so that a file names what it is of. `exact` needs the folder of published tables
(`--tables DIR`), for planner-accuracy; peer-suites needs checkouts of the peers (`--checkouts DIR`); `timed` needs
DeepSpeed (pip install 'zero3d[bench]'). Tests compare the texts with what this script writes, and run the commands
again whose results are no timings.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from demo_curves import draw
from figures_exact import EXACT, packaged_types
from figures_faults import FAULTS
from figures_gpu import GPU
from figures_measured import MEASURED, stamp
from figures_peers import PEERS
from figures_planner import PLANNER
from figures_ran import RAN
from figures_versions import DOCTORS, VERSIONS, doctors
from figures_watched import WATCHED, draw_watched
from hybrid_picture import draw_influence
from memory_picture import draw_memory
from planner_accuracy import as_text
from recorded import RECIPES, RESULTS, ROOT, load, record
from stage_picture import draw_stages

DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
STAMP = "from-"
TYPES = ROOT / "src" / "zero3d" / "tools" / "vision" / "types.json"
ACCURACY = RESULTS / "planner_accuracy.txt"
CURVES, PICTURE = RESULTS / "demo-curves.json", ROOT / "docs" / "optimizers.png"
STAGES = ROOT / "docs" / "stages.png"
MEMORY, STEP = RESULTS / "engines-memory.json", ROOT / "docs" / "memory-of-a-step.png"
HYBRIDS, LEAKS = RESULTS / "hybrid-packing.json", ROOT / "docs" / "hybrids.png"
TABLES = (
    EXACT
    | MEASURED
    | FAULTS
    | PEERS
    | PLANNER
    | GPU
    | RAN
    | VERSIONS
    | WATCHED
    | {STAMP + name: lambda name=name: stamp(name) for name in RECIPES}
)  # type: ignore[misc]
GROUPS = {
    "all": list(RECIPES),
    "timed": [name for name, recipe in RECIPES.items() if recipe.timed],
    "exact": [name for name, recipe in RECIPES.items() if recipe.repeats],
}


def written(text: str) -> str:
    """A document with all of its tables anew. Raises KeyError for a name that is no table's."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def accuracy_text() -> str:
    """The planner's errors as its script prints them, for readers of results/."""
    found = load("planner-accuracy")
    [run] = found["runs"]
    result = run["result"]
    text = as_text(result["scores"], result["skipped"], result["unknown"], result.get("untold"), result.get("rows"))
    return f"# {run['command']}\n# commit {found['commit']}, {found['date']}\n{text}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, or both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", metavar="NAME,...", default="", help=f"{', '.join([*GROUPS, *RECIPES])}")
    parser.add_argument("--only", metavar="WORD", default="", help="of peer-suites: this suite alone, the others stay")
    parser.add_argument("--write", action="store_true", help="write the READMEs and docs")
    parser.add_argument(
        "--tables", type=lambda text: Path(text).resolve(), help="folder of published tables, for planner-accuracy"
    )
    parser.add_argument(
        "--checkouts", type=lambda text: Path(text).resolve(), help="folder of peers' repositories, for peer-suites"
    )
    arguments = parser.parse_args(argv)
    names = [name for word in arguments.run.split(",") if word for name in GROUPS.get(word, [word])]
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"--run {unknown[0]}: one of {', '.join([*GROUPS, *RECIPES])}")
    if arguments.tables is not None and not any(arguments.tables.glob("*.csv")):
        parser.error(f"--tables {arguments.tables}: this folder has no published table (*.csv)")
    given = {"TABLES": arguments.tables, "CHECKOUTS": arguments.checkouts}
    failed = [
        name
        for name in names
        if not _ran(name, {key: path for key, path in given.items() if path is not None}, arguments.only)
    ]
    if arguments.write:
        for path in DOCUMENTS:
            path.write_text(written(path.read_text()))
        ACCURACY.write_text(accuracy_text())
        DOCTORS.write_text(doctors())
        TYPES.write_text(packaged_types())
        draw(CURVES, PICTURE)
        draw_stages(STAGES)
        draw_memory(MEMORY, STEP)
        draw_influence(HYBRIDS, LEAKS)
        draw_watched()
    return bool(failed)


def _ran(name: str, folders: Mapping[str, Path], only: str) -> bool:
    """Record one recipe and say how long it took; the others go on where it fails."""
    begun = time.monotonic()
    try:
        path = record(name, folders, only)
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    print(f"{name}: {time.monotonic() - begun:.0f} s, {path.relative_to(RESULTS.parents[1])}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
