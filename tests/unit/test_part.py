"""The part of the long tests that CI adds: the same for the same commit, never too much, and in time all of them."""

from pathlib import Path

from part import BUDGET, SECONDS, UNMEASURED, part_of

ROOT = Path(__file__).parents[2]
CASES = [f"{file}::test_something[{number}]" for file in SECONDS for number in range(12)]


def seconds_of(chosen):
    return sum(SECONDS.get(name.partition("::")[0], UNMEASURED) for name in chosen)


def test_a_commit_chooses_the_same_part_again_whatever_the_order():
    assert part_of(CASES, "a1b2") == part_of(reversed(CASES), "a1b2") != part_of(CASES, "a1b3")


def test_a_part_is_full_and_not_more():
    for commit in map(str, range(50)):
        left = BUDGET - seconds_of(part_of(CASES, commit))
        assert -1e-9 < left < 1


def test_in_time_every_case_has_its_turn():
    assert set().union(*(part_of(CASES, str(commit)) for commit in range(1000))) == set(CASES)


def test_cases_that_nobody_measured_count_as_dear():
    chosen = part_of([f"tests/unit/test_new.py::test_x[{number}]" for number in range(99)], "a1b2")
    assert len(chosen) == BUDGET // UNMEASURED


def test_every_file_with_long_tests_is_measured_and_no_other():
    marked = {file for file in (ROOT / "tests").rglob("test_*.py") if "mark.long" in file.read_text()}
    assert {str(file.relative_to(ROOT)) for file in marked} == set(SECONDS) | {"tests/unit/test_part.py"}
