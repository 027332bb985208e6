"""Which versions were tried: the rows that promises need, their records, their table, and what the doctor says of them."""

import json
import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest

from zero3d.tools.doctor import versions as doctors
from zero3d.tools.doctor.finding import Request

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import versions  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
<testcase classname="tests.unit.test_a" name="test_passes[x.y]" time="0.1"/>
<testcase classname="tests.unit.test_a" name="test_fails[b-c]" time="0.1"><failure message="no">...</failure></testcase>
<testcase classname="tests.ranks.test_b" name="test_breaks" time="0.1"><error message="no">...</error></testcase>
<testcase classname="tests.ranks.test_b" name="test_waits" time="0.1"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""
COUNTS = {"passed": 5, "failed": 1, "skipped": 2, "failing": ["tests/unit/test_a.py::test_x"]}


def minimum(name):
    """The oldest release of a package that the project takes."""
    everything = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    return next(found[1] for each in everything if (found := re.fullmatch(rf"{name}>=([\d.]+)", each)))


def test_every_promise_has_its_row_that_was_tried_or_says_that_it_was_not():
    rows = versions.matrix()
    pinned, *others = rows.values()
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert (pinned.torch, pinned.transformers) == (pins["torch"], pins["transformers"])
    classifiers = PROJECT["classifiers"]
    pythons = {each.rsplit(" ", 1)[-1] for each in classifiers if re.search(r"Python :: 3\.", each)}
    assert pythons == {row.python for row in rows.values()}
    systems = {"MacOS": "Darwin", "Linux": "Linux"}
    promised = {each.rsplit(" ", 1)[-1] for each in classifiers if each.startswith("Operating System")}
    assert {systems[each] for each in promised} == {row.system for row in rows.values()}
    for name in ("torch", "transformers"):
        least = min((getattr(row, name) for row in others), key=lambda each: [int(part) for part in each.split(".")])
        assert least.startswith(minimum(name))


def test_a_row_is_recorded_of_what_it_asks_for():
    rows = versions.matrix()
    for name, record in versions.recorded().items():
        row = rows[name]
        assert record["row"] == name
        assert record["python"].startswith(f"{row.python}.")
        assert (record["torch"].partition("+")[0], record["transformers"]) == (row.torch, row.transformers)
        assert (record["system"], record["machine"]) == (row.system, row.machine)
        assert record["ran"].startswith(f"make {row.target}")
        assert record["cpu"]
        assert record["capability"]
        assert len(record["failing"]) == record["failed"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", record["date"])
        assert re.fullmatch(r"[0-9a-f]{10}", record["commit"])


def test_a_report_is_counted_with_the_names_of_what_failed(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert versions.counted(tmp_path / "report.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failing": ["tests/ranks/test_b.py::test_breaks", "tests/unit/test_a.py::test_fails[b-c]"],
    }


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of records, with those of two rows; what is not committed does not count."""
    folder = tmp_path / "benchmarks" / "results" / "versions"
    folder.mkdir(parents=True)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "FILES", folder)
    monkeypatch.setattr(versions, "_git", lambda *words: "")
    for name in ("pinned", "python-3.12"):
        (folder / f"{name}.json").write_text(json.dumps({"row": name}))
    return folder


def tried(row, python, folder):
    """A row that can be tried if it is of Python 3.11."""
    if row.python != "3.11":
        raise versions.NotTriedError(f"no Python {row.python}")
    return {"row": row.name, **COUNTS}


def test_one_row_is_run_by_itself_and_writes_its_own_file_alone(files, capsys):
    assert versions.main(["--row", "torch-2.14"], tried) == 0
    assert json.loads((files / "torch-2.14.json").read_text()) == {"row": "torch-2.14", **COUNTS}
    assert {path.name for path in files.iterdir()} == {"pinned.json", "python-3.12.json", "torch-2.14.json"}
    assert json.loads((files / "pinned.json").read_text()) == {"row": "pinned"}
    assert "torch-2.14: 1 failed, 2 skipped, 5 passed" in capsys.readouterr().out


def test_a_row_that_cannot_be_tried_says_why_and_leaves_its_file(files, capsys):
    assert versions.main(["--row", "python-3.12,python-3.14"], tried) == 1
    assert {path.name for path in files.iterdir()} == {"pinned.json", "python-3.12.json"}
    assert json.loads((files / "python-3.12.json").read_text()) == {"row": "python-3.12"}
    assert "python-3.14: not tried: no Python 3.14" in capsys.readouterr().out
    assert versions.main([], tried) == 0
    assert (files / "macos.json").is_file()
    with pytest.raises(SystemExit):
        versions.main(["--row", "python-2"], tried)
    assert "ROW=python-2: one of pinned, " in capsys.readouterr().err


def test_a_row_of_another_system_is_not_tried_here(tmp_path):
    other = {"Linux": "macos"}.get(platform.system(), "pinned")
    with pytest.raises(versions.NotTriedError, match="this machine is"):
        versions.try_row(versions.matrix()[other], sys.executable, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_uncommitted_code_is_not_tried(files, monkeypatch, capsys):
    monkeypatch.setattr(versions, "_git", lambda *words: "M src/zero3d/engine/engine.py")
    with pytest.raises(SystemExit):
        versions.main(["--row", "pinned"], tried)
    assert "commit first" in capsys.readouterr().err


def test_the_cpu_is_named_as_its_maker_names_it(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: A CPU @ 2 GHz\n")
    assert versions.cpu_model(tmp_path / "cpuinfo") == "A CPU @ 2 GHz"
    assert versions.cpu_model(tmp_path / "nowhere")


def test_the_doctor_says_which_row_has_the_versions_that_are_here(tmp_path, monkeypatch):
    monkeypatch.setattr(doctors, "import_all", lambda torch: [])  # tests/unit/test_doctor.py does
    found = doctors.versions(Request()).figures
    here = {"system": platform.system(), "machine": platform.machine(), "date": "2026-11-29", **COUNTS}
    row = here | {name: found[name] for name in ("python", "torch", "transformers")}
    monkeypatch.setattr(doctors, "TESTED", tmp_path / "tested.json")
    for others, said, name in (
        (
            [row | {"row": "old", "torch": "2.1.0"}, row | {"row": "this"}],
            "row this of docs/tested.md (1 test failed)",
            "this",
        ),
        ([row | {"row": "this", "failed": 0}], "row this of docs/tested.md (no test failed)", "this"),
        ([row | {"row": "this", "failed": 2}], "row this of docs/tested.md (2 tests failed)", "this"),
        ([row | {"row": "old", "transformers": "5.0.0"}], "no row of docs/tested.md has these versions", ""),
        ([row | {"row": "mac", "system": "Haiku"}], "no row of docs/tested.md has these versions", ""),
        ([row | {"row": "arm", "machine": "another"}], "no row of docs/tested.md has these versions", ""),
    ):
        doctors.TESTED.write_text(json.dumps(others))
        finding = doctors.versions(Request())
        assert (finding.text.rpartition("; ")[2], finding.figures["tested"]) == (said, name)


def test_a_build_of_torch_and_the_last_number_of_python_are_the_same_row():
    row = {"system": "Linux", "machine": "x86_64", "python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"}
    assert doctors.tested_row(row | {"python": "3.11.2", "torch": "2.13.0+cu130"}, [row]) is row
    assert doctors.tested_row(row | {"torch": "2.13.1"}, [row]) is None
    assert doctors.tested_row({name: value for name, value in row.items() if name != "transformers"}, [row]) is None
