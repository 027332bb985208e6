"""Modules by the names that they had: the same modules and objects, nothing of their own, in the table of docs/api.md."""

import ast
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import zero3d

ROOT = Path(__file__).parents[2]
SRC = Path(zero3d.__file__).parent
OLD = yaml.safe_load((ROOT / "tests" / "map" / "old_names.yaml").read_text())
NAMES = {
    "zero3d." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): new for file, new in OLD.items()
}
PEERS = {"lightning", "axolotl", "verl", "vllm"}  # what a way in needs is tested where it is installed
EMPTY = {"zero3d.integrations", "zero3d.cli"}  # packages of such names


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_old_name_leads_to_the_same_objects(old, new):
    if (peer := old.rpartition(".")[2]) in PEERS and find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    there, here = importlib.import_module(new), importlib.import_module(old)
    public = getattr(there, "__all__", [name for name in vars(there) if not name.startswith("_")])
    assert public or old in EMPTY
    if old not in EMPTY and old != "zero3d.cli.main":
        assert all(getattr(here, name) is getattr(there, name) for name in public)
    if old == "zero3d.cli.main":
        assert here.main is there.main


@pytest.mark.parametrize("file", OLD)
def test_a_file_of_an_old_name_has_nothing_of_its_own(file):
    tree = ast.parse((SRC / file).read_text())
    assert OLD[file] in ast.get_docstring(tree)
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imported <= {"__future__", "sys", "typing", OLD[file], OLD[file].rpartition(".")[0]}
    assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))


def test_every_file_in_a_folder_of_an_old_name_is_such_a_file():
    folders = {file.partition("/")[0] for file in OLD}
    found = {path.relative_to(SRC).as_posix() for folder in folders for path in (SRC / folder).rglob("*.py")}
    assert found == OLD.keys()


def test_the_documents_say_what_to_type_now():
    text = (ROOT / "docs" / "api.md").read_text()
    rows = dict(re.findall(r"^\| `(zero3d[\w.]+)` \| `(zero3d[\w.]+)` \|$", text, flags=re.MULTILINE))
    assert rows == {old: new for old, new in NAMES.items() if old not in EMPTY | {"zero3d.plan"}}


def test_modules_of_deepspeed_without_a_file_are_found_by_the_old_name():
    import torch.distributed
    import zero3d.integrations.deepspeed.comm as comm

    from zero3d.integrations import deepspeed

    assert comm is deepspeed.comm is torch.distributed
    assert deepspeed.initialize is zero3d.ways.deepspeed.initialize
    adam = importlib.import_module("zero3d.integrations.deepspeed.ops.adam")
    assert adam.FusedAdam is deepspeed.ops.adam.FusedAdam
    with pytest.raises(ImportError, match=r"no deepspeed\.ops\.lion here"):
        importlib.import_module("zero3d.integrations.deepspeed.ops.lion")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deepspeed.nothing  # noqa: B018


def test_an_old_commands_module_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "zero3d.cli.main", "--version"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert zero3d.__version__ in done.stdout


def test_the_facade_of_the_planner_has_its_public_names_alone():
    import zero3d.plan

    with pytest.raises(AttributeError, match="has no attribute 'search'"):
        zero3d.plan.search  # noqa: B018
