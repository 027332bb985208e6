"""Constants are data that the planner reads: systems are built from them, and what they were fitted on is true."""

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zero3d.tools.plan.constants import CONSTANTS, KERNEL_CONSTANTS, SYSTEM_CONSTANTS, VALUES, constant, fitted
from zero3d.tools.plan.kernels import KERNELS, Kernels
from zero3d.tools.plan.profiles import PROFILES, profiles

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from planner_constants import EVERY, JUDGING, Planner  # noqa: E402
from planner_left_out import asked_for, without  # noqa: E402
from planner_tables import Point  # noqa: E402

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS += ["thirteen", "fourteen", "fifteen"]


def ids(constants):
    return [f"{each.system} {each.name}" for each in constants]


def plain(profile):
    return replace(profile, pace=replace(profile.pace, kernels=KERNELS))


@pytest.mark.parametrize("each", SYSTEM_CONSTANTS, ids=ids(SYSTEM_CONSTANTS))
def test_a_systems_constant_is_what_its_profile_has(each):
    changed = profiles({**VALUES, each.key: each.value + 1})
    assert plain(changed[each.system]) != plain(PROFILES[each.system])
    assert all(plain(changed[name]) == plain(PROFILES[name]) for name in PROFILES if name != each.system)


@pytest.mark.parametrize("each", KERNEL_CONSTANTS, ids=ids(KERNEL_CONSTANTS))
def test_a_kernels_constant_is_what_kernels_take(each):
    changed = Kernels.of({**VALUES, each.key: each.value + 1})
    assert vars(changed) != vars(KERNELS)


@pytest.mark.parametrize(
    "file",
    [
        "kernels",
        "network",
        "time",
        "profiles",
        "profile_memory",
        "hardware",
        "shapes",
        "timeline",
        "memory",
        "footprint",
        "windows",
        "in_flight",
        "states",
        "rank_model",
        "traffic",
        "../../activations/policy",
        "../../pipeline/actions",
        "ladder",
        "estimate",
    ],
)
def test_no_number_of_its_own_stands_in_the_code_that_plans(file):
    tree = ast.parse((ROOT / "src" / "zero3d" / "tools" / "plan" / f"{file}.py").read_text())
    named = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith(("(GIB", "CATALOGUE"))
        for part in ast.walk(node.value)
        if isinstance(part, ast.Constant) and isinstance(part.value, float) and part.value
    ]
    assert named == []


def test_no_constant_stands_twice_and_a_fitted_one_has_rows_and_a_default_the_others_a_source():
    assert len({each.key for each in EVERY}) == len(EVERY)
    for each in EVERY:
        assert bool(each.fitted_on) == (each.default is not None) != bool(each.source), each
        assert not each.lender or constant(each.lender, each.name) == each.value


def test_a_lent_constant_follows_its_lender():
    changed = Planner({("torchtitan", "hide_dp"): 0.1})
    assert changed.systems["torchtitan-async-tp"].pace.hide_dp == changed.systems["zero3d"].pace.hide_dp == 0.1


def test_every_fitted_constant_changes_rows_of_every_set_that_it_was_fitted_on():
    [run] = json.loads((ROOT / "benchmarks" / "results" / "planner-accuracy.json").read_text())["runs"]
    accounts = {(entry["system"], entry["name"]): entry for entry in run["result"]["constants"]}
    seen = [each for each in EVERY if each.fitted_on and not each.lender]
    assert set(accounts) == {each.key for each in seen}
    for each in seen:
        rows = accounts[each.key]["rows"]
        assert [(r["set"], r["kind"], r["which"]) for r in rows] == [tuple(r) for r in each.fitted_on]
        assert all(r["count"] > 0 for r in rows), each


def test_without_a_set_constants_are_fitted_on_others_or_are_their_default():
    def predict(planner, sets):  # right where eager_passes is 3
        return [Point(name, "", "time", planner.value("kernels", "eager_passes") / 3, 1.0) for name in sets]

    found = without("bloom176b_prequel", predict)
    assert found["kernels", "eager_passes"] == pytest.approx(3, rel=0.03)
    assert found["megatron-deepspeed", "block"] == 0  # no other set has rows for it
    assert found["kernels", "odd_head"] == 4
    assert ("zero3d", "hide_dp") not in found  # lent: it follows


def test_what_is_read_off_the_rows_of_a_set_is_left_out_with_it():
    def predict(planner, sets):
        return [Point(name, "", "memory", planner.value("galvatron", "gathered"), 1.0) for name in sets]

    assert without("galvatron_states", predict)["galvatron", "gathered"] == 2


def test_every_set_counts_alike_in_a_fit_however_many_rows_it_has():
    """Two sets ask for 2 and one, of many rows, for 4: what most sets ask for is taken, not what most rows do."""
    wanted = {"megatron2021_table1": 4.0, "megatron2021_table2": 2.0, "korthikanti_table5": 2.0}

    def predict(planner, sets):
        value = planner.value("kernels", "eager_passes")
        named = [name for name in sets if name in wanted]
        return [
            Point(name, "", "time", value / wanted[name], 1.0) for name in named for _ in range(int(wanted[name]) ** 3)
        ]

    assert asked_for(predict)["kernels", "eager_passes"] == pytest.approx(2, rel=0.03)


def test_the_documents_count_systems_right():
    others = len(PROFILES) - 1
    text = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    [told] = re.findall(r"for this engine and for (\w+) others", text)
    assert told == NUMBERS[others]
    assert {each.system for each in SYSTEM_CONSTANTS} <= set(PROFILES)
    assert len(JUDGING) + len(CONSTANTS) == len(EVERY)


def test_a_fitted_constant_names_its_rows():
    with pytest.raises(TypeError):
        fitted("megatron", "spare", 1.0, "x")
