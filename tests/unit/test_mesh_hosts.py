"""A tp axis that does not fit on a host is warned of, with what it sends and what to type; gradients of a dp axis on
several hosts travel as terms where that is no more bytes.
"""

import warnings
from collections import Counter

import pytest

from zero3d.config import load
from zero3d.distributed.choice import REDUCTIONS, choose_algorithm
from zero3d.distributed.degrees import Degrees
from zero3d.tensor_parallel.parallelize import warn_across_hosts
from zero3d.tensor_parallel.traffic import Region
from zero3d.tools.cli.rank_environment import from_slurm
from zero3d.tools.plan import ParallelPlan
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.states import with_algorithm

HIDDEN, WIDTH = 4096, 2
LAYER = [Region(name, *ops, HIDDEN) for name, ops in
         (("q", ("", "all_reduce")), ("o", ("all_reduce", "")), ("gate", ("", "all_reduce")), ("down", ("all_reduce", "")))]  # fmt: skip


def warned(degrees, local):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_across_hosts(degrees, local, LAYER, WIDTH)
    return [str(warning.message) for warning in caught]


def test_16_tp_ranks_on_hosts_of_8_cost_4_all_reduces_per_layer_across_hosts():
    (text,) = warned(Degrees(1, 2, 16), 8)
    assert f"{4 * HIDDEN * WIDTH * 2 * 15 // 16:,} bytes per token" in text
    assert text.startswith("mesh.tp=16 on hosts of 8 ranks")
    assert "mesh.tp=8 mesh.pp=2" in text


@pytest.mark.parametrize(("tp", "local"), [(8, 8), (4, 8), (1, 8), (16, None)])
def test_nothing_is_said_where_it_fits_or_nobody_knows(tp, local):
    assert warned(Degrees(1, 2, tp), local) == []


def test_tp_groups_that_straddle_two_hosts_are_told_too():
    assert "mesh.tp=2 mesh.pp=2" in warned(Degrees(1, 3, 4), 6)[0]


@pytest.mark.parametrize(("tasks", "here"), [("8(x16)", "8"), ("8", "8"), ("8(x2),4", None), ("", None)])
def test_slurm_says_how_many_tasks_a_node_has(tasks, here):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "128", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    assert from_slurm(step | {"SLURM_STEP_TASKS_PER_NODE": tasks}).get("LOCAL_WORLD_SIZE") == here


@pytest.mark.parametrize(("pp", "dp", "tp", "ranks", "on_host"), [
    (1, 16, 1, 8, 8), (1, 16, 4, 8, 2), (1, 16, 8, 8, 1), (1, 16, 16, 8, 1),  # of several hosts
    (1, 8, 1, 8, 8), (2, 8, 1, 8, 8), (4, 2, 2, 8, 2), (2, 4, 1, 8, 4), (1, 4, 1, 16, 4),  # each axis on one
    (4, 6, 1, 8, 5), (4, 3, 1, 8, 2), (2, 4, 4, 6, 2),  # some axes on one, or some ranks of tp
    (1, 16, 1, None, None), (2, 1, 4, 6, 1),
])  # fmt: skip
def test_ranks_of_a_dp_axis_on_a_host(pp, dp, tp, ranks, on_host):
    assert Degrees(pp, dp, tp).dp_on_host(ranks) == on_host


@pytest.mark.parametrize(("pp", "dp", "tp", "per_host"), [(1, 16, 1, 8), (4, 6, 1, 8), (2, 4, 4, 6), (3, 4, 2, 12)])
def test_it_is_what_counting_them_on_every_host_says(pp, dp, tp, per_host):
    degrees = Degrees(pp, dp, tp)
    axes = {tuple(degrees.along("dp", rank)) for rank in range(degrees.world)}
    several = [max(Counter(rank // per_host for rank in axis).values()) for axis in axes
               if len({rank // per_host for rank in axis}) > 1]  # fmt: skip
    assert max(several) <= degrees.dp_on_host(per_host) < dp


AUTO = [("nccl", 16, on_host, name) for on_host, name in
        ((16, "all-to-all"), (None, "all-to-all"), (1, "all-to-all"), (2, "all-to-all"), (3, "native"), (8, "native"))]  # fmt: skip


@pytest.mark.parametrize(("backend", "size", "on_host", "name"), [
    *AUTO, ("xccl", 16, 8, "native"), ("xccl", 8, 8, "all-to-all"), ("none", 1, 1, "native"), ("fake", 16, 8, "fake"),
    *(("gloo", size, on_host, name) for size, name in ((8, "pairwise"), (9, "native")) for on_host in (None, 4, size)),
])  # fmt: skip
def test_terms_are_sent_where_they_are_no_more_bytes_between_hosts(backend, size, on_host, name):
    assert choose_algorithm(backend, size, "auto", on_host) == name
    for asked in ("native", "all-to-all"):
        found = choose_algorithm(backend, size, asked, on_host)
        assert found == ("fake" if backend == "fake" else "native" if size == 1 else asked)
    without = "pairwise" if name == "pairwise" else "fake" if backend == "fake" else "native"
    assert choose_algorithm(backend, size, on_host=on_host) == without  # no gradients are reduced there


def chosen_by_engines(plans):
    from zero3d.engine.foundation import Axes
    from zero3d.tools.sim.group import FakeMesh, fake_group

    found = []
    for (pp, dp, tp), per_host in plans:
        with fake_group(0, pp * dp * tp):
            found.append(Axes.of(FakeMesh(dp, tp, pp, "nccl", per_host), "auto").dp.algorithm)
    return found


def test_the_planner_s_auto_is_the_engine_s(alone):
    plans = [((1, 64, 1), 8), ((1, 64, 1), 64), ((1, 16, 4), 8), ((8, 8, 1), 8), ((2, 8, 8), 8), ((2, 8, 2), 8)]
    planned = [
        with_algorithm(
            ParallelPlan(dp=dp, tp=tp, pp=pp), cluster("a100", pp * dp * tp, pp * dp * tp // per_host)
        ).zero.reduce_scatter
        for (pp, dp, tp), per_host in plans
    ]
    assert planned == alone(chosen_by_engines, plans)
    assert planned == ["native", "all-to-all", "all-to-all", "all-to-all", "all-to-all", "native"]


@pytest.mark.parametrize("asked", ["native", "all-to-all"])
def test_what_a_plan_asks_for_stays(asked):
    for dp in (8, 64):
        plan = ParallelPlan(dp=dp, reduce_scatter=asked)
        assert with_algorithm(plan, cluster("a100", 64)) == plan
    assert set(REDUCTIONS) == {"auto", "native", "all-to-all"}
    for value in REDUCTIONS:
        assert load({"zero": {"reduce_scatter": value}}).zero.reduce_scatter == value
