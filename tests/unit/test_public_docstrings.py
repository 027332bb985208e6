"""Public names: each has a docstring, which the site's API page shows. The site itself needs no building for that."""

import importlib
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r"^<!-- reference (\S+) -->$", re.M)
sys.path.append(str(ROOT / "docs" / "site"))
import docstrings  # noqa: E402
import reference  # noqa: E402

import zero3d  # noqa: E402


def test_every_public_name_has_a_docstring():
    assert len(list(docstrings.public())) > 50
    assert docstrings.undocumented() == []


def test_the_api_page_shows_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    names = {name.rsplit(".")[-1] for name, _ in docstrings.public() if name.count(".") <= 2 and name[-1] != "_"}
    classes = {name for name in names if name[0].isupper()}
    functions = {"from_config", "evaluate", "recompute", "compile_blocks", "prepare_blocks"}
    assert classes | functions <= names
    shown = {name.rpartition(".")[2] for name in REFERENCE.findall(page)}
    shown |= set(re.findall(r"^\| `(\w+)` \| ", page, re.M))  # errors
    assert (classes | functions) - shown == set()


def test_a_name_without_a_docstring_is_found(monkeypatch):
    planted = ModuleType("planted")
    exec(
        "from dataclasses import dataclass\n"
        "def bare(): pass\n"
        "@dataclass\nclass Made:\n    x: int = 0\n"
        "class Said:\n    '''What it is.'''\n    def bare(self): pass\n    @property\n    def value(self): pass\n",
        planted.__dict__,
    )
    planted.__all__ = ["bare", "Made", "Said"]
    monkeypatch.setitem(sys.modules, "planted", planted)
    monkeypatch.setattr(docstrings, "MODULES", ("planted",))
    assert docstrings.undocumented() == ["planted.bare", "planted.Made", "planted.Said.bare", "planted.Said.value"]


def test_the_reference_is_what_signatures_and_docstrings_say():
    page = (ROOT / "docs" / "api.md").read_text()
    assert reference.written(page) == page, "type: python docs/site/reference.py --write"


def test_a_docstring_becomes_tables_blocks_and_text():
    lines = [
        "Do `it`.",
        "",
        "one    a number",
        "       below | ten",
        "two    another",
        "",
        "    a drawing",
        "",
        "    of two",
        "",
        "End.",
    ]
    table = ["| | |", "|---|---|", "| `one` | a number below \\| ten |", "| `two` | another |"]
    drawing = ["```text", "a drawing", "", "of two", "```"]
    assert reference.as_markdown(lines) == ["Do `it`.", "", *table, "", *drawing, "", "End."]
    known = {"one": "1", "two": ""}
    table = ["| argument | default | |", "|---|---|---|", "| `one` | `1` | a number |", "| `two` |  | another |"]
    assert reference.as_markdown(["one    a number", "two    another"], known) == table


def test_a_signature_has_annotations_and_defaults():
    def short(self, x: int, *rest, y="a", **more) -> "list[int]": ...

    assert reference.signature("thing.short", short, True, False) == [
        "thing.short(x: int, *rest, y='a', **more) -> list[int]"
    ]

    def long(
        first: "list[dict[str, list[float]]] | None", *, second: "float | None" = None, third_of_them: str = "auto"
    ): ...

    lines = ["long(", "    first: list[dict[str, list[float]]] | None,", "    *,", "    second: float | None = None,"]
    assert reference.signature("long", long, False, False) == [*lines, "    third_of_them: str = 'auto',", ")"]


def test_members_of_an_engine_are_in_the_order_of_their_use():
    found = reference.members(zero3d.Engine)
    assert found[:4] == ["train_batch", "backward", "backward_sum", "step"]
    named = {name.rpartition(".")[2] for name, _ in docstrings.public() if name.startswith("zero3d.Engine.")}
    assert named <= set(found) == set(reference.USE["Engine"])


def looked_up(name):
    """The documented name, after `import zero3d` alone."""
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "zero3d"]:
        del sys.modules[loaded]
    return type(reduce(getattr, name.split(".")[1:], importlib.import_module("zero3d"))).__name__


# The first three stand for all rooms whose packages load no modules, and for those that load the modules of their names.
SHOWN = ["zero3d.errors.StreamError", "zero3d.plan.ModelSpec", "zero3d.checkpoint.streamed_folder.FolderSender"]


def documented():
    page = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in REFERENCE.findall(page) if name != "zero3d.errors"]
    return [name for name in ["zero3d.models.open.open_model", *names] if name not in SHOWN]


@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(name, marks=pytest.mark.long) for name in documented())])
def test_a_documented_name_is_there_after_one_import(alone, name):
    assert alone(looked_up, name) in ("type", "ABCMeta", "function", "EnumType", "_ProtocolMeta")


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "zero3d", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("zero3d ")
