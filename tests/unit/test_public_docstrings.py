"""Public names: each has a docstring, which the site's API page shows. The site itself needs no building for that."""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))
import docstrings  # noqa: E402


def test_every_public_name_has_a_docstring():
    assert len(list(docstrings.public())) > 50
    assert docstrings.undocumented() == []


def test_the_api_page_shows_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    names = {name.rsplit(".")[-1] for name, _ in docstrings.public() if name.count(".") <= 2 and name[-1] != "_"}
    classes = {name for name in names if name[0].isupper()}
    functions = {"from_config", "evaluate", "recompute", "compile_blocks", "prepare_blocks"}
    assert classes | functions <= names
    assert [name for name in classes | functions if f".{name}\n" not in page] == []


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


def test_a_docstring_becomes_definitions_blocks_and_text():
    lines = [
        "Do `it` * twice_.",
        "",
        "one    a number",
        "       below ten",
        "two    another",
        "",
        "    a drawing",
        "",
        "End.",
    ]
    assert docstrings.as_rst(lines) == [
        "Do ``it`` \\* twice\\_.", "",
        "", "``one``", "    a number", "    below ten", "``two``", "    another", "",
        "", "::", "", "        a drawing", "",
        "", "End.", "",
    ]  # fmt: skip
