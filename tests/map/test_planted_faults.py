"""The ledger of planted faults can be read, and each fault can be planted: `make mutants` runs them."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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
        assert all((ROOT / TEST.match(test)[0]).is_file() for test in fault["tests"]), fault["name"]
