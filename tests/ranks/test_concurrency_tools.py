"""Tools that look for faults of concurrency: each fault is found, and each tool finds one that no other does."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))


def recorded(name):
    """{fault: {tool: what it found}} of a file of results."""
    [run] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["runs"]
    return run["result"]["found"]


def test_every_fault_is_found_and_each_tool_finds_one_that_no_other_does():
    found = recorded("concurrency")
    assert not any(found.pop("none").values())
    by_fault = {fault: {tool for tool, what in tools.items() if what} for fault, tools in found.items()}
    assert all(by_fault.values())
    alone_with = {tools.pop() for tools in by_fault.values() if len(tools) == 1}
    assert alone_with == set(next(iter(found.values())))


def test_three_faults_that_the_code_had_are_found_in_it():
    [before] = recorded("concurrency-before").values()
    assert {each for what in before.values() for each in what} == {"a hole", "superfluous waits", "a caller's groups"}


def find(names):
    import concurrency

    return {
        name: {tool: list(run(concurrency.FAULTS[name])) for tool, run in concurrency.TOOLS.items()} for name in names
    }


def test_the_list_of_faults_is_that_of_the_record():
    import concurrency

    assert list(concurrency.FAULTS) == list(recorded("concurrency"))


@pytest.mark.long
def test_tools_find_what_is_recorded(alone):
    wanted = recorded("concurrency")
    assert alone(find, list(wanted)) == wanted
