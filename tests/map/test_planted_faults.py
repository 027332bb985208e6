"""The ledger of planted faults can be read, and each fault can be planted: `make mutants` runs them."""

import multiprocessing
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))  # benchmarks/peer_suites has a run.py, too

from run import tried  # noqa: E402

LEDGERS = sorted((ROOT / "tests" / "mutants").glob("*.yaml"))
TEST = re.compile(r"[^:\[]+")


@pytest.mark.parametrize("ledger", LEDGERS, ids=lambda path: path.stem)
def test_every_fault_names_a_text_that_stands_once_and_tests_that_are_there(ledger):
    faults = yaml.safe_load(ledger.read_text())
    assert len({fault["name"] for fault in faults}) == len(faults) > 0
    for fault in faults:
        source = (ROOT / "src" / "zero3d" / fault["file"]).read_text()
        assert source.count(fault["text"]) == 1, f"{fault['name']}: {fault['text']}"
        assert fault["replacement"] != fault["text"]
        assert fault.get("long", True) is True, f"{fault['name']}: leave `long` out where no long case is needed"
        assert all((ROOT / TEST.match(test)[0]).is_file() for test in fault["tests"]), fault["name"]


LONG_CASE = """\
from pathlib import Path
import pytest

@pytest.mark.long
def test_of_the_sum():
    assert "1 + 1" in Path("src/zero3d/sums.py").read_text()
"""


def test_long_cases_are_run_for_a_fault_that_says_so_and_for_no_other(tmp_path):
    checkout = tmp_path / "checkout"
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = \"-m 'not long'\"\nmarkers = ['long']\n",
        "src/zero3d/sums.py": "TWO = 1 + 1\n",
        "tests/test_sums.py": LONG_CASE,
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    fault = {"file": "sums.py", "text": "1 + 1", "replacement": "1 - 1", "tests": ["tests/test_sums.py"]}
    context = multiprocessing.get_context("spawn")
    assert tried(fault, checkout, context)["found"] == "broken"
    seen = tried(fault | {"long": True}, checkout, context)
    assert (seen["found"], seen["by"]) == ("found", "tests/test_sums.py::test_of_the_sum")
