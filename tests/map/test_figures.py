"""Figures of README and docs are what benchmarks/tables.py writes from results, and none stand beside its marks."""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import hybrid_picture  # noqa: E402
import memory_picture  # noqa: E402
import tables  # noqa: E402
from demo_curves import digest  # noqa: E402
from figures_exact import first_plans  # noqa: E402
from recorded import RECIPES, RESULTS  # noqa: E402
from stage_picture import drawn_from, gigabytes  # noqa: E402
from versions import matrix  # noqa: E402

from zero3d.tools.cli.main import main  # noqa: E402

CHECKED_ELSEWHERE = ("zero-and-3d.md", "zero-and-3d.zh.md", "config.md")  # their own tests write or check them
DOCUMENTS = [path for path in tables.DOCUMENTS if path.name not in CHECKED_ELSEWHERE]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FIGURE = re.compile(r"\d{1,3}(,\d{3})+|\d+\.\d{2,}|\d+\.\d [KMG]?i?B\b|\d[x%]|\d %")
RELEASE = re.compile(r"\b\d+\.\d+\.\d+\b")
QUANTITY = re.compile(r"\d(?:x\b| ?(?:%|[KMG]i?B(?:/s)?\b|ms\b))")
HEADER = {"name", "date", "commit", "machine", "python", "torch", "runs"}
REFERENCE = re.compile(r"<!-- reference [\w.]+ -->\n.*?<!-- end of reference -->", re.S)  # of docs/site/reference.py


def outside(path):
    """A document's text that no script writes: this one, or that of the reference."""
    return REFERENCE.sub("", tables.MARKED.sub("", path.read_text()))


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_what_stands_between_marks_is_what_the_script_writes(path):
    text = path.read_text()
    assert tables.written(text) == text, "type: python benchmarks/tables.py --write"
    assert text.count("<!-- table ") == len(tables.MARKED.findall(text)) == text.count("<!-- end -->")


def test_the_picture_of_the_demos_losses_is_drawn_of_its_results():
    said = digest(tables.CURVES.read_bytes()).encode()
    assert said in tables.PICTURE.read_bytes(), "type: python benchmarks/tables.py --write"


def test_the_picture_of_memory_over_a_step_is_drawn_of_its_results():
    assert digest(tables.MEMORY.read_bytes()).encode() in tables.STEP.read_bytes(), (
        "type: python benchmarks/tables.py --write"
    )
    ways = [memory_picture.shown(tables.MEMORY)["variants"][way]["memory"] for way in memory_picture.WAYS]
    points = ways[0]["timeline"]["ends"]["update"]
    for way in ways:
        assert way["timeline"]["ends"] == ways[0]["timeline"]["ends"]
        assert len(memory_picture.edges(points)) == len(memory_picture.heights(way)) + 1 == points + 2


def test_the_picture_of_what_leaks_is_drawn_of_its_results_and_nothing_leaks_in_them():
    assert digest(tables.HYBRIDS.read_bytes()).encode() in tables.LEAKS.read_bytes(), (
        "type: python benchmarks/tables.py --write"
    )
    found = hybrid_picture.shown(tables.HYBRIDS)
    document = [number for number, length in enumerate(found["documents"]) for _ in range(length)]
    for way in hybrid_picture.WAYS:
        across = [
            moved
            for place, row in enumerate(found["influence"][way])
            for moved, other in zip(row, document, strict=True)
            if other != document[place]
        ]
        assert (max(across) == 0) == (way == "packed")


def test_the_picture_of_stages_is_drawn_of_the_formulas():
    assert drawn_from().encode() in tables.STAGES.read_bytes(), "type: python benchmarks/tables.py --write"
    assert [round(sum(stage.values()), 1) for stage in gigabytes()] == [120, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_table_of_figures_stands_without_marks(path):
    text = outside(path)
    rows = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    assert [row for row in rows if FIGURE.search(RELEASE.sub("", row))] == []
    printed = [block for language, block in FENCE.findall(text) if not language]
    assert [block for block in printed if len(FIGURE.findall(block)) > 2] == []


PAGES = (
    "benchmarks", "offload", "offload.zh", "parallelism", "parallelism.zh", "reproducibility", "reproducibility.zh",
    "reliability", "reliability.zh",
)  # fmt: skip
PROSE = ("README.md", "README.zh.md", *(f"docs/{name}.md" for name in PAGES))


@pytest.mark.parametrize("name", PROSE)
def test_no_measured_quantity_stands_in_prose(name):
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", FENCE.sub("", outside(ROOT / name)))
    assert [line for line in prose.splitlines() if QUANTITY.search(line)] == []


def test_every_table_that_can_be_written_stands_somewhere_and_says_where_its_figures_are_from():
    marks = [name for path in tables.DOCUMENTS for _, name, _ in tables.MARKED.findall(path.read_text())]
    assert {name for name in tables.TABLES if not name.startswith(tables.STAMP)} <= set(marks)
    assert {tables.STAMP + name for name, recipe in RECIPES.items() if recipe.timed} <= set(marks)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_of_results_says_what_it_is_of(path):
    found = json.loads(path.read_text())
    assert set(found) == HEADER
    assert found["name"] == path.stem
    assert found["machine"]["cores"] >= 1
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert [run["command"] for run in found["runs"]] == list(RECIPES[path.stem].commands)
    assert all(run["seconds"] > 0 for run in found["runs"])


def test_every_recipe_has_its_file_and_the_planners_text_is_of_its_file():
    assert {path.stem for path in RESULTS.glob("*.json")} == set(RECIPES)
    assert tables.ACCURACY.read_text() == tables.accuracy_text()


def test_a_missed_target_is_said():
    assert tables.MEASURED["engines-targets"]().count("met") + tables.MEASURED["engines-targets"]().count("missed") >= 7
    from figures_measured import verdict

    assert verdict([0.9, 0.8], 1.0) == "met"
    assert verdict([1.1, 1.2], 1.0) == "missed"
    assert verdict([0.9, 1.1, 1.2], 1.0) == "missed in 2 of 3"
    assert verdict([0.7], 0.8, at_least=True) == "missed"


def test_what_the_package_carries_of_types_that_see_is_what_the_script_writes():
    assert tables.TYPES.read_text() == tables.packaged_types(), "type: python benchmarks/tables.py --write"


def test_what_the_doctor_carries_of_the_versions_tried_is_what_the_script_writes():
    assert tables.DOCTORS.read_text() == tables.doctors(), "type: python benchmarks/tables.py --write"


def test_versions_that_were_not_tried_stand_in_the_table_as_such(monkeypatch):
    monkeypatch.setattr("figures_versions.recorded", dict)
    head, _, *rows = tables.TABLES["tested"]().splitlines()
    assert [row.split("|")[1].strip(" `") for row in rows] == list(matrix())
    assert all("**not tried**" in row and row.count("|") == head.count("|") for row in rows)
    assert tables.TABLES["tested-failing"]() == "- none"
    assert json.loads(tables.doctors()) == []


def test_a_search_as_the_command_prints_it_has_the_lines_that_documents_quote(capsys):
    main(["plan", "--params", "3e9", "--gpus", "2", "--tokens-per-batch", "8192"])
    lines = first_plans(capsys.readouterr().out)
    first, (head, *plans, dots), (left, why, more) = (
        list(group) for empty, group in groupby(lines, lambda line: line == "") if not empty
    )
    assert first[0].startswith("Recommended: ")
    assert (head.split()[0], [plan.split()[0].lstrip("*") for plan in plans[::2]]) == ("mesh", ["1", "2", "3"])
    assert (dots, left.endswith("fit. Why the others do not:"), more) == ("...", True, "   ...")
    assert re.match(r"   [\d,]+: \w", why)


def test_a_folder_without_published_tables_is_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tables.main(["--run", "planner-accuracy", "--tables", str(tmp_path)])
    assert "has no published table" in capsys.readouterr().err


def test_uncommitted_code_is_not_measured(monkeypatch):
    import recorded

    monkeypatch.setattr(
        recorded, "_git", lambda *words: "M src/zero3d/engine/engine.py" if words[0] == "status" else ""
    )
    with pytest.raises(RuntimeError, match="commit first"):
        recorded.record("demo")
