"""Contract 3: any (dp, tp, pp), stage, schedule and recomputation equals one process, in float64 to 1e-10.

All cases of a mesh run one after the other on the same ranks.
"""

from itertools import product

import pytest
from meshes import CLIP, MESHES, SETTINGS, is_possible, layers_of, oracle, pairs, pairs_on, run_all, world_of

PAIRS = pairs()
FEW = ((2, 2, 1), (2, 2, 2), (1, 4, 1))  # of each a case, with the schedule that has most to say; the rest is long
IN_FP32 = ((2, 2, 1),)  # the others are long


def first_of(mesh):
    """A case of a mesh."""
    return next(case for case in PAIRS if case[1] == mesh and case[3] in (None, "zbv"))


@pytest.fixture(scope="module")
def one_process():
    """(case, precision) -> what one process finds, each once."""
    found = {}

    def look(case, precision):
        family, shape, loss = case[0], case[1], case[-1]
        key = family, layers_of(shape), loss, precision
        if key not in found:
            found[key] = oracle(family, shape, loss, precision)
            assert found[key][0][1] > CLIP  # clipping is active
        return found[key]

    return look


def check(ranks, one_process, cases, precision, bound):
    everywhere = ranks(world_of(cases[0][1]), run_all, cases, precision)
    assert all(runs == everywhere[0] for runs in everywhere)  # all ranks know the same bits
    for case, found in zip(cases, everywhere[0], strict=True):
        for here, there in zip(found, one_process(case, precision), strict=True):
            assert here == pytest.approx(there, rel=bound), case


@pytest.mark.parametrize("mesh", [
    mesh if mesh in FEW else pytest.param(mesh, marks=pytest.mark.long) for mesh in MESHES
], ids=str)  # fmt: skip
def test_a_mesh_equals_one_process_in_float64_to_1e_10(ranks, one_process, mesh):
    check(ranks, one_process, [first_of(mesh)], "fp64", 1e-10)


@pytest.mark.parametrize("mesh", [
    *IN_FP32, *(pytest.param(mesh, marks=pytest.mark.long) for mesh in MESHES if mesh not in IN_FP32),
], ids=str)  # fmt: skip
def test_a_mesh_equals_one_process_in_fp32_to_1e_5(ranks, one_process, mesh):
    check(ranks, one_process, [case for case in PAIRS if case[1] == mesh][:1], "fp32", 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_two_settings_on_a_mesh_equal_one_process(ranks, one_process, mesh):
    """Every pair of settings is in one of these cases, too."""
    cases = pairs_on(mesh)
    for start in range(0, len(cases), 16):
        check(ranks, one_process, cases[start : start + 16], "fp64", 1e-10)


@pytest.mark.parametrize("cases", [PAIRS, [case for mesh in MESHES for case in pairs_on(mesh)]], ids=["few", "long"])
def test_the_cases_have_every_possible_pair_of_settings(cases):
    assert len(cases) <= (32 if cases is PAIRS else 80)
    for i, j in product(range(len(SETTINGS)), repeat=2):
        if i < j:
            possible = {(case[i], case[j]) for case in product(*SETTINGS) if is_possible(case)}
            assert {(case[i], case[j]) for case in cases} == possible
