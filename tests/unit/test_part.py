"""Parts of the tests, rooms of packages, and CPUs: the same for the same input, never too much, and in time all cases."""

from pathlib import Path

import pytest
from cpus import CHOICES, KERNELS, VARIABLE, of_commit, refusal, tell
from durations import UNMEASURED, recorded, seconds_of
from part import AT_MOST, BUDGET, ROOMS, part_of
from rooms import BUDGET as OF_ROOM, files_of, files_of_faults, packages

ROOT = Path(__file__).parents[2]
LONG = [file for file, found in recorded().items() if "long" in found]
CASES = {f"{file}::test_something[{n}]": seconds_of(file, long=True) for file in LONG for n in range(4)}


def seconds(chosen):
    return sum(min(CASES[name], AT_MOST) for name in chosen)


def test_a_commit_chooses_the_same_part_again_whatever_the_order():
    assert part_of(CASES, "a1b2") == part_of(dict(reversed(CASES.items())), "a1b2") != part_of(CASES, "a1b3")


def test_a_part_is_full_and_not_more():
    for commit in map(str, range(50)):
        left = BUDGET - seconds(part_of(CASES, commit))
        assert -1e-9 < left < 1


def test_in_time_every_case_has_its_turn_that_a_part_has_time_for():
    fitting = {name for name in CASES if CASES[name] < BUDGET}
    assert set().union(*(part_of(CASES, str(commit)) for commit in range(300))) == fitting


def test_cases_that_nobody_measured_count_as_dear():
    names = [f"tests/unit/test_new.py::test_x[{number}]" for number in range(99)]
    chosen = part_of({name: seconds_of(name, long=True) for name in names}, "a1b2")
    assert len(chosen) == BUDGET // UNMEASURED["long"]


def test_every_file_is_measured():
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert there - recorded().keys() == set(), "make costs-all measures them"


@pytest.mark.long
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


# --- another CPU ------------------------------------------------------------------------------------


def test_the_rooms_of_another_cpu_are_packages():
    assert set(ROOMS) <= set(packages())


def test_a_commit_chooses_a_cpu_and_in_time_each():
    chosen = [of_commit(str(commit)) for commit in range(60)]
    assert chosen == [of_commit(str(commit)) for commit in range(60)]
    assert set(chosen) == set(CHOICES)


def test_another_cpu_is_told_to_the_libraries_that_multiply():
    for chosen, variables in KERNELS.items():
        environment = {VARIABLE: chosen}
        tell(environment)
        assert environment == {VARIABLE: chosen} | variables
    assert len({tuple(variables) for variables in KERNELS.values()}) == 1
    unchanged = {}
    tell(unchanged)
    assert unchanged == {}


@pytest.mark.parametrize("chosen", ["", *CHOICES, "noise:7"])
def test_a_cpu_that_there_is_has_no_refusal(chosen):
    assert refusal(chosen) is None


@pytest.mark.parametrize("chosen", ["avx3", "AVX2", "noisy"])
def test_a_cpu_that_there_is_not_is_refused_with_those_that_there_are(chosen):
    assert refusal(chosen) == f"CPU={chosen}: the tests run as on avx2, default, noise, or without CPU= as on this one"
