"""Contract 3 on 8 ranks: deep pipelines with few replicas, and shallow ones with many, equal no pipeline bit for bit."""

from collections import defaultdict

import pytest
import torch
from pipelines import SCHEDULES, STATES, covering, layers_for, train

MESHES = ((2, 4), (4, 2))
PLAIN = ((0, "every_use"), "1f1b", "none")
FAR = [((3, "every_use"), "zero-bubble", "none"), ((2, "every_use"), "1f1b", "full")]


def check(ranks, family, mesh, cases):
    """Losses, norms and weights of every rank are those of the run without pipeline on dp ranks."""
    dp, pp = mesh
    layers = max(layers_for(pp, schedule) for _, schedule, _ in cases)
    losses, norms, weights = ranks(dp, train, family, (dp, 1), layers, [PLAIN])[0][0]
    assert norms[0] > 0.5  # clipping is active
    for runs in ranks(dp * pp, train, family, mesh, layers, cases):
        for case, run in zip(cases, runs, strict=True):
            assert run[:2] == (losses, norms), case
            assert [name for name, own in run[2].items() if not torch.equal(own, weights[name])] == [], case


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_pipeline_on_8_ranks_equals_no_pipeline(ranks, mesh):
    check(ranks, "net", mesh, FAR)


SETTINGS = (("net", "llama", "qwen3_moe"), MESHES, STATES, SCHEDULES)
BY_MESH = defaultdict(list)  # (family, mesh) -> cases, which together have every pair of settings
for family, mesh, state, schedule in covering(SETTINGS):
    BY_MESH[family, mesh].append((state, schedule, "none"))


@pytest.mark.long
@pytest.mark.parametrize(("family", "mesh"), BY_MESH, ids=str)
def test_every_stage_and_schedule_on_8_ranks_equals_none(ranks, family, mesh):
    check(ranks, family, mesh, BY_MESH[family, mesh])
