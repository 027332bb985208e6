"""The wheel: every module and every file that modules read lies in it, its description is that of the project, and it runs."""

import json
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from environments import see_packages, typed

import zero3d

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('wheels')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the project, built with the setuptools that are installed."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(SRC, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "wheels").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [built] = (folder / "wheels").glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = {path.relative_to(SRC).as_posix() for path in (SRC / "zero3d").rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {
        "zero3d/py.typed",
        "zero3d/train/demo.yaml",
        "zero3d/tools/page/style.css",
        "zero3d/tools/doctor/tested.json",
        "zero3d/tools/vision/types.json",
    } < wanted
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted


def test_the_wheel_describes_the_project_and_brings_its_command(wheel):
    [info] = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    described = message_from_string(wheel.read(info).decode())
    assert (described["Name"], described["License-Expression"]) == ("zero3d", "Apache-2.0")
    assert described["Version"] == zero3d.__version__
    assert described["Requires-Python"] == ">=3.11"
    assert {"hf", "plot", "data", "docs"} <= set(described.get_all("Provides-Extra"))
    pythons = [line.rsplit(" ", 1)[-1] for line in described.get_all("Classifier") if "Python :: 3." in line]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]
    assert described.get_payload().startswith("# zero3d")
    entries = wheel.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "zero3d = zero3d.tools.cli.main:main" in entries


@pytest.mark.long
def test_the_wheel_runs_where_its_sources_are_not(wheel, tmp_path):
    typed("python -m venv --without-pip .venv", tmp_path)
    see_packages(tmp_path / ".venv")
    install = f"python -m pip install --quiet --no-deps --no-index --ignore-installed '{wheel.filename}'"
    typed(f". .venv/bin/activate; {install}", tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def printed(command):
        return typed(f". ../.venv/bin/activate; {command}", tmp_path / "elsewhere", OMP_NUM_THREADS="1")

    found = Path(printed("python -c 'import zero3d; print(zero3d.__file__)'").strip())
    assert found.is_relative_to(tmp_path / ".venv")
    assert "train" in printed("zero3d --help")
    assert "tokens/s/GPU" in printed("zero3d plan qwen3-0.6b --gpus 8 --gpu h100")
    printed("zero3d train train.steps=5 precision=fp32")
    lines = (tmp_path / "elsewhere" / "zero3d-demo" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in lines) == 5
