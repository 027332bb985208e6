"""Parts of the long tests and rooms of packages: the same for the same input, never too much, and in time all cases."""

from pathlib import Path

import pytest
from durations import UNMEASURED, recorded, seconds_of
from part import AT_MOST, BUDGET, part_of
from rooms import BUDGET as OF_ROOM, files_of, files_of_faults, packages

ROOT = Path(__file__).parents[2]
LONG = [file for file, found in recorded().items() if "long" in found]
CASES = [f"{file}::test_something[{number}]" for file in LONG for number in range(4)]


def seconds(chosen):
    return sum(min(seconds_of(name, long=True), AT_MOST) for name in chosen)


def test_a_commit_chooses_the_same_part_again_whatever_the_order():
    assert part_of(CASES, "a1b2") == part_of(reversed(CASES), "a1b2") != part_of(CASES, "a1b3")


def test_a_part_is_full_and_not_more():
    for commit in map(str, range(50)):
        left = BUDGET - seconds(part_of(CASES, commit))
        assert -1e-9 < left < 1


def test_in_time_every_case_has_its_turn_that_a_part_has_time_for():
    fitting = {name for name in CASES if seconds_of(name, long=True) < BUDGET}
    assert set().union(*(part_of(CASES, str(commit)) for commit in range(300))) == fitting


def test_cases_that_nobody_measured_count_as_dear():
    chosen = part_of([f"tests/unit/test_new.py::test_x[{number}]" for number in range(99)], "a1b2")
    assert len(chosen) == BUDGET // UNMEASURED["long"]


def test_every_file_is_measured():
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert there - recorded().keys() == set(), "make costs-all measures them"


@pytest.mark.parametrize("package", packages())
def test_every_package_has_a_room_that_fits(package):
    files = dict.fromkeys((ROOT / "tests").rglob("test_*.py"), 10.0)
    chosen = files_of(files, package)
    assert chosen
    assert 10.0 * len(chosen) <= OF_ROOM


def test_a_room_begins_with_the_files_that_see_its_faults_and_import_most_from_it():
    files = dict.fromkeys((ROOT / "tests").rglob("test_*.py"), OF_ROOM / 5)
    faults = files_of_faults("shards")
    assert set(files_of(files, "shards")[: len(faults)]) == faults
    assert files_of(files, "shards")[0].name == "test_cuts.py"
