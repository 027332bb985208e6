"""The routes of README and docs/trainer.md: few lines change, and what they import is there and does what it says."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
import yaml

ROOT = Path(__file__).parents[2]
ROUTES = re.findall(r"`(from zero3d[^`]+)`", (ROOT / "README.md").read_text().split("## Keep your program")[1])
PAGE = (ROOT / "docs" / "trainer.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
MOST = 6


def run(lines):
    """Execute lines; the names that they made. What is patched is put back."""
    made = {}
    try:
        exec("\n".join(lines), made)
    finally:
        getattr(transformers.Trainer, "zero3d_undo", lambda: None)()
    return made


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_of_the_readme_can_be_imported(route):
    name = re.search(r"import (\w+)", route)[1]
    assert run([route])[name] is not None


def test_there_are_as_many_routes_as_the_readme_says():
    assert len(ROUTES) == 4
    assert len(DIFFS) == 4


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.split()[0])
def test_a_shown_change_is_short_and_its_imports_are_there(diff):
    lines = diff.splitlines()
    assert len([line for line in lines if line[0] in "+-"]) <= MOST
    added = [line[1:] for line in lines if line[0] == "+" and "import " in line]
    assert added
    if "lightning" in diff and find_spec("lightning") is None:
        pytest.skip("needs the extra lightning")
    run(added)


def test_what_axolotls_file_names_is_there():
    block = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)[1]
    (named,) = yaml.safe_load(block)["plugins"]
    module, _, kind = named.rpartition(".")
    assert f"class {kind}(BasePlugin)" in (ROOT / "src" / Path(*module.split(".")) / "plugin.py").read_text()
