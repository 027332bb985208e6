"""Contract 3: a pipeline equals accumulation over the same micro-batches without one, bit for bit (tied: 1e-6)."""

from collections import defaultdict
from itertools import combinations, product

import pytest
import torch
from pipelines import FAMILIES, MESHES, SCHEDULES, SETTINGS, covering, is_tied, layers_for, train
from tensors import assert_near

OFTEN = {  # of the cases that have all pairs of settings those that together have every value, most of them on two ranks
    ("net", (1, 4), "interleaved"), ("llama", (2, 2), "zbv"), ("llama", (1, 2), "zero-bubble"),
    ("gpt2", (1, 2), "interleaved"), ("qwen3_moe", (1, 2), "zbv"), ("qwen3_moe", (1, 2), "gpipe"),
    ("qwen3", (1, 2), "zbv"), ("net", (1, 2), "1f1b"), ("qwen3", (1, 2), "zero-bubble"),
}  # fmt: skip
CASES = [case for case in covering(SETTINGS) if (*case[:2], case[3]) in OFTEN]
PLAIN = ((0, "every_use"), "1f1b", "none")


@pytest.fixture(scope="module")
def reference(ranks):
    """(family, dp, layers) -> the run without pipeline on dp ranks, each once."""
    runs = {}

    def run(family, dp, layers):
        key = family, dp, layers
        if key not in runs:
            runs[key] = ranks(dp, train, family, (dp, 1), layers, [PLAIN])[0][0]
        return runs[key]

    return run


def assert_same(family, run, reference):
    losses, norms, weights = run
    if not is_tied(family):
        assert (losses, norms) == reference[:2]
        assert all(torch.equal(weight, reference[2][name]) for name, weight in weights.items())
        return
    assert losses == pytest.approx(reference[0], rel=1e-6)
    assert norms == pytest.approx(reference[1], rel=1e-6)
    copied = {"lm_head.weight": "model.embed_tokens.weight" if family == "qwen3" else "transformer.wte.weight"}
    assert_near(weights, {name: reference[2][copied.get(name, name)] for name in weights}, 1e-6)


def check(ranks, reference, family, mesh, schedule, cases):
    dp, pp = mesh
    layers = layers_for(pp, schedule)
    expected = reference(family, dp, layers)
    assert expected[1][0] > 0.5  # clipping is active
    for runs in ranks(dp * pp, train, family, mesh, layers, [(state, schedule, kept) for state, kept in cases]):
        for run in runs:
            assert_same(family, run, expected)


@pytest.mark.parametrize(("family", "mesh", "state", "schedule", "activations"), CASES, ids=str)
def test_a_pipeline_equals_no_pipeline(ranks, reference, family, mesh, state, schedule, activations):
    check(ranks, reference, family, mesh, schedule, [(state, activations)])


@pytest.fixture(scope="module")
def triples():
    """(family, mesh, schedule) -> [(state, activations)], which together have every combination of three settings."""
    found = defaultdict(list)
    for family, mesh, state, schedule, activations in covering(SETTINGS, together=3):
        found[family, mesh, schedule].append((state, activations))
    return found


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_three_settings_of_a_pipeline_equal_none(ranks, reference, triples, family, mesh, schedule):
    assert triples[family, mesh, schedule]
    check(ranks, reference, family, mesh, schedule, triples[family, mesh, schedule])


def test_the_cases_have_every_combination_of_three_settings(triples):
    cases = [(*how[:2], state, how[2], kept) for how, rest in triples.items() for state, kept in rest]
    assert len(cases) <= 160
    for three in combinations(range(5), 3):
        assert {tuple(case[i] for i in three) for case in cases} == set(product(*(SETTINGS[i] for i in three)))


def test_the_cases_that_run_often_have_every_value():
    assert len(CASES) == len(OFTEN)
    assert all({case[i] for case in CASES} == set(SETTINGS[i]) for i in range(5))
