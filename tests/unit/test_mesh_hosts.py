"""A tp axis that does not fit on a host is warned of, with what it sends and what to type; so are terms of gradients."""

import warnings
from functools import partial

import pytest

from zero3d.cli.rank_environment import from_slurm
from zero3d.distributed.algorithms import AllToAll, Native
from zero3d.distributed.degrees import Degrees
from zero3d.engine.foundation import warn_of_terms_across_hosts
from zero3d.tensor_parallel.parallelize import warn_across_hosts
from zero3d.tensor_parallel.traffic import Region

HIDDEN, WIDTH = 4096, 2
LAYER = [Region(name, *ops, HIDDEN) for name, ops in
         (("q", ("", "all_reduce")), ("o", ("all_reduce", "")), ("gate", ("", "all_reduce")), ("down", ("all_reduce", "")))]  # fmt: skip


def warned(degrees, local, warn=lambda *hosts: warn_across_hosts(*hosts, LAYER, WIDTH)):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(degrees, local)
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


def test_gradients_of_8_dp_ranks_a_host_leave_it_as_4_times_the_bytes():
    (text,) = warned(Degrees(1, 16, 1), 8, partial(warn_of_terms_across_hosts, AllToAll.name))
    assert "dp=16 on hosts that have 8 of its ranks each" in text
    assert "4 times the bytes of fp32 sums" in text
    assert "zero.reduce_scatter=native" in text


@pytest.mark.parametrize(("algorithm", "dp", "tp", "local"), [
    (Native.name, 16, 1, 8), (AllToAll.name, 8, 1, 8), (AllToAll.name, 16, 4, 8), (AllToAll.name, 16, 1, None),
])  # fmt: skip
def test_nothing_is_said_where_terms_are_no_more_than_sums_or_nobody_knows(algorithm, dp, tp, local):
    assert warned(Degrees(1, dp, tp), local, partial(warn_of_terms_across_hosts, algorithm)) == []
