"""Which environments are a launcher's workers, and what srun's variables become."""

import os

import pytest

from zero3d.errors import ConfigError
from zero3d.tools.cli.rank_environment import from_slurm, hosts, join_environment

SRUN = {  # task 5 of 8 on two nodes
    "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[08-09]",
}  # fmt: skip
JOINED = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu08", "MASTER_PORT": str(15000 + 1234567 % 15000),
}  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def without(*names):
    return {name: value for name, value in SRUN.items() if name not in names}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b[2-3]", ["a", "b2", "b3"]),
        ("c[8-10]-ib,login", ["c8-ib", "c9-ib", "c10-ib", "login"]),
        ("rack[1-2]node[08-09]", ["rack1node08", "rack1node09", "rack2node08", "rack2node09"]),
        ("gpu-a-[098-101].x.org", ["gpu-a-098.x.org", "gpu-a-099.x.org", "gpu-a-100.x.org", "gpu-a-101.x.org"]),
    ],
)
def test_slurms_short_node_lists_are_expanded(nodes, names):
    assert hosts(nodes) == names


@pytest.mark.parametrize("nodes", [",", "a[]"])
def test_a_list_without_nodes_is_refused(nodes):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        hosts(nodes)


@pytest.mark.parametrize(
    ("environment", "made"),
    [
        (SRUN, JOINED),
        (SRUN | {"SLURM_STEP_ID": "3"}, JOINED | {"MASTER_PORT": str(15000 + 1234570 % 15000)}),
        (
            SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"},
            JOINED | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        ),
        (without("SLURM_STEP_NODELIST"), JOINED | {"MASTER_ADDR": "gpu07"}),
    ],
    ids=["srun", "a later step", "the user's address", "an old Slurm"],
)
def test_a_task_of_srun_joins(environment, made):
    assert from_slurm(environment) == made


@pytest.mark.parametrize(
    "environment",
    [
        {},
        without("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST") | {"SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_ID": "-5", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        without("SLURM_PROCID"),
    ],
    ids=["no Slurm", "batch", "batch step", "batch step, signed", "salloc's shell", "one task", "only allocated"],
)
def test_all_others_are_bare_machines_and_wait_for_nobody(environment):
    assert from_slurm(environment) == {}


@pytest.mark.parametrize(
    ("environment", "joins", "rank"),
    [({}, False, None), (SRUN, True, "5"), (TORCHRUN, True, "1"), (SRUN | TORCHRUN, True, "1")],
    ids=["bare", "srun", "torchrun", "torchrun under srun"],
)
def test_joining_completes_the_environment(monkeypatch, environment, joins, rank):
    monkeypatch.setattr(os, "environ", dict(environment))
    assert join_environment() is joins
    assert os.environ.get("RANK") == rank
    assert os.environ.get("WORLD_SIZE") == {None: None, "5": "8", "1": "2"}[rank]


def test_a_rank_without_its_world_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK=0 is set, but not MASTER_ADDR, MASTER_PORT"):
        join_environment()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "x"}, "RANK=x: must be a whole number: start with torchrun or srun, or unset RANK"),
        ({"RANK": "-1", "WORLD_SIZE": ""}, "RANK=-1, WORLD_SIZE=: must be a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: must be a whole number"),
        ({"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "9" * 5000}, "LOCAL_RANK=x, LOCAL_WORLD_SIZE=9"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks count from 0 to 2 - 1"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: ports end at 65535"),
    ],
)
def test_what_no_launcher_sets_is_refused(monkeypatch, changed, message):
    monkeypatch.setattr(os, "environ", TORCHRUN | changed)
    with pytest.raises(ConfigError) as caught:
        join_environment()
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 500


def test_an_odd_port_of_the_users_own_is_refused_under_srun_too(monkeypatch):
    monkeypatch.setattr(os, "environ", SRUN | {"MASTER_PORT": "x"})
    with pytest.raises(ConfigError, match=r"^MASTER_PORT=x: must be a whole number"):
        join_environment()
