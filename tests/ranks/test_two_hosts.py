"""Ranks on two hosts: the bits of one host, also over a slow cable; a cut cable and a dead host end the others."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Thread
from unittest import mock

import cpus
import pytest
import torch.distributed as dist
import yaml
from models import adamw, batch, build, loss_of
from training import field, metrics, save_model, save_rows, train, tree
from two_hosts import ADDRESSES, CABLE, NAMES, hosts, network_of

import zero3d
from zero3d.errors import Zero3dError

__all__ = ["hosts"]
SRC = Path(__file__).parents[2] / "src"
PORT = 29500
LONG = 120.0


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


# --- ranks of the pool, moved to the hosts' networks ------------------------------------------------


def between(firsts, case, *args):
    """Call a case on a rank that has moved to the network of its host, as a launcher there would start it."""
    rank = dist.get_rank()
    port = 20_000 + firsts[0] % 10_000  # torch keeps a process' stores by port, also those of networks that are gone
    dist.destroy_process_group()
    given = {"RANK": str(rank), "WORLD_SIZE": str(len(firsts)), "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0],
             "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": CABLE}  # fmt: skip
    with network_of(firsts[rank]), mock.patch.dict(os.environ, given):
        return case(*args)


def train_until_it_fails(folder, patience):
    """Train in a loop of one's own, over groups that wait so long, until there is an error; what it says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    engine = zero3d.Engine(build("net"), stage=3, optimizer=adamw)
    for step in count():
        if step == 2:
            (folder / f"trains-{dist.get_rank()}").touch()
        try:
            engine.backward(loss_of(engine, batch(step, dist.get_rank())))
            engine.step()
        except Zero3dError as error:
            return str(error)


@pytest.mark.long
def test_two_hosts_train_with_the_bits_of_one_over_a_slow_cable(ranks, folder, hosts):
    for host in hosts:
        host.slow_down("50mbit")
    alone = ranks(2, train, tree(folder, "alone"))[0]
    assert all(host.bytes_sent() < 10_000 for host in hosts)
    apart = ranks(2, between, [host.first for host in hosts], train, tree(folder, "apart"))[0]
    for name in ("loss", "grad_norm", "lr"):
        assert field(apart, name) == field(alone, name)
    assert all(host.bytes_sent() > 100_000 for host in hosts)


@pytest.mark.long
def test_a_cut_cable_is_an_error_on_both_sides_in_a_loop_of_ones_own(ranks, hosts, tmp_path):
    """Also on the side that has no store: asking it why a peer went away takes no longer than that deserves."""

    def cut():
        while len(list(tmp_path.glob("trains-*"))) < 2:
            time.sleep(0.05)
        for host in hosts:
            host.cut()

    Thread(target=cut, daemon=True).start()
    ends = ranks(2, between, [host.first for host in hosts], train_until_it_fails, tmp_path, 15.0)
    for rank, said in enumerate(ends):
        waited = (
            rf"rank {rank} of axis (dp|world) waited \S+ s (for rank {1 - rank} of that axis )?in \w+( of unit '.+')?"
        )
        late = rf"rank {rank} of axis dp began \w+ of unit '.+' after a peer had given up waiting: "
        assert re.match(f"{waited} and no peer came: |{late}", said)


# --- commands on the hosts --------------------------------------------------------------------------

ENVIRONMENT = cpus.as_here({
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": os.environ.get("HOME", "/root"),
    "TMPDIR": "/dev/shm",  # each host's own, where the watch folders are
})  # fmt: skip


def torchrun(folder, number, ranks=1, words=()):
    """The recipe of docs/cluster.md for two machines by hand, of which this is one."""
    return ["torchrun", "--nnodes=2", f"--nproc-per-node={ranks}", f"--node-rank={number}",
            f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", "--no-python",
            "zero3d", "train", folder / "run.yaml", *words, "--resume", "auto"]  # fmt: skip


ENDLESS = {
    "train": {"steps": 100_000, "batch": 4, "accumulate": 2},
    "checkpoint": {"every": 0},
    "health": {"timeout": 10},
}


class Job:
    """A command on each of two hosts."""

    def __init__(self, folder, hosts, commands, environments=({}, {})):
        self.folder, self.hosts = folder, hosts
        self.logs = [folder / f"{host.name}.log" for host in hosts]
        self.processes = []
        for host, command, given, log in zip(hosts, commands, environments, self.logs, strict=True):
            with log.open("w") as output:
                start = host.start(command, cwd=folder, env=ENVIRONMENT | given, stdout=output, stderr=output)
            self.processes.append(start)

    def codes(self, seconds=LONG):
        """Both exit codes."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(0.0, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds:g} s\n{self.said()}") from None

    def said(self):
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

    def wait_for_steps(self, made, count):
        """Return when the run has written so many records, or one of its commands has ended."""
        file, end = Path(made["output"]) / "metrics.jsonl", time.monotonic() + LONG
        while not file.exists() or file.read_text().count("\n") < count:
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)


def configured(folder, output="out", **sections):
    """run.yaml in the folder; the tree it was made of."""
    made = tree(folder, output, **sections)
    (folder / "run.yaml").write_text(yaml.safe_dump(made))
    return made


def same_bits(made, expected):
    records = [record for record in metrics(made) if "loss" in record]
    return all(field(records, name) == field(expected, name) for name in ("step", "loss", "grad_norm", "lr"))


def printed_by_launch(capsys, target):
    """What `zero3d launch` prints for two nodes of one process, as a shell would run it on a node."""
    from zero3d.tools.cli.main import main

    assert main(["launch", target, "run.yaml", "--nodes", "2", "--gpus-per-node", "1"]) == 0
    text = capsys.readouterr().out
    if target == "k8s":
        return list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    return SRUN + text if target == "slurm" else text


SRUN = 'srun() { while [[ $1 == --* ]]; do shift; done; "$@"; }\n'  # one task of it
SLURM = {"SLURM_JOB_NAME": "zero3d-run", "SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "host[0-1]",
         "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}  # fmt: skip
GIVEN = {  # what each launcher gives the command on node n
    "torchrun": lambda n: {"HEAD_NODE": NAMES[0]},
    "k8s": lambda n: {"JOB_COMPLETION_INDEX": str(n)},
    "slurm": lambda n: SLURM | {"SLURM_PROCID": str(n)},
}


@pytest.mark.long
@pytest.mark.parametrize("target", GIVEN)
def test_what_launch_prints_runs_on_two_hosts_with_the_bits_of_one(ranks, folder, hosts, capsys, monkeypatch, target):
    monkeypatch.chdir(folder)
    expected = ranks(2, train, tree(folder, "alone"))[0]
    made = configured(folder)
    script = printed_by_launch(capsys, target)
    job = Job(folder, hosts, [["bash", "-c", script]] * 2, [GIVEN[target](number) for number in range(2)])
    assert job.codes() == [0, 0], job.said()
    assert same_bits(made, expected)
    assert all(host.ended() for host in hosts)


@pytest.mark.long
def test_two_ranks_on_each_of_two_hosts_train_with_the_bits_of_four_on_one(ranks, folder, hosts):
    sections = {"train": {"steps": 5, "batch": 8, "accumulate": 2}}
    expected = ranks(4, train, tree(folder, "alone", **sections))[0]
    made = configured(folder, **sections)
    job = Job(folder, hosts, [torchrun(folder, number, ranks=2) for number in range(2)])
    assert job.codes() == [0, 0], job.said()
    assert same_bits(made, expected)


@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 1], ids=["the head", "the other"])
def test_when_all_processes_of_a_host_are_killed_the_other_host_ends(folder, hosts, gone):
    made = configured(folder, **ENDLESS)
    job = Job(folder, hosts, [torchrun(folder, number) for number in range(2)])
    job.wait_for_steps(made, 3)
    hosts[gone].kill()
    codes = job.codes()
    assert codes[1 - gone] == 1, job.said()
    assert hosts[1 - gone].ended(), job.said()
    assert f"rank {1 - gone} of axis dp waited" in job.logs[1 - gone].read_text(), job.said()


@pytest.mark.long
@pytest.mark.parametrize("gone", [None, 0, 1], ids=["both live", "the head is gone", "the other is gone"])
def test_when_the_cable_is_cut_each_host_ends_and_names_the_rank_it_waited_for(folder, hosts, gone):
    """A host that vanished says nothing either: its processes are killed behind the cut."""
    made = configured(folder, **ENDLESS)
    job = Job(folder, hosts, [torchrun(folder, number) for number in range(2)])
    job.wait_for_steps(made, 3)
    for host in hosts:
        host.cut()
    if gone is not None:
        hosts[gone].kill()
    codes = job.codes()
    for number in {0, 1} - {gone}:
        assert codes[number] == 1, job.said()
        assert hosts[number].ended(), job.said()
        block = rf"rank {number}: waiting \S+ s in .+ on axis dp, for rank {1 - number}, in step \d+ "
        assert re.search(block, job.logs[number].read_text()), job.said()
        name = f"watchdog-{hosts[number].name}"
        assert re.search(block, (Path(made["output"]) / f"{name}.txt").read_text())
        told = json.loads((Path(made["output"]) / f"{name}.json").read_text())
        assert (told["host"], [wait["for"] for wait in told["waits"]]) == (hosts[number].name, [[1 - number]])


@pytest.mark.long
def test_when_all_processes_of_a_host_are_killed_an_elastic_run_goes_on_with_the_other_with_the_same_bits(
    ranks, folder, hosts
):
    """The agents' own rendezvous, which notices after 15 s that the other one is gone, and waits 5 s more."""
    sections = {
        "zero": {"exact": True}, "train": {"steps": 200, "batch": 4, "micro_batch": 1, "accumulate": None},
        "checkpoint": {"every": 5, "export": False},
    }  # fmt: skip
    expected = ranks(2, train, tree(folder, "alone", **sections))[0]
    made = configured(folder, **sections, health={"min_ranks": 1, "timeout": 10})
    commands = [
        ["torchrun", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
         f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", f"--rdzv-conf=is_host={1 - number},last_call_timeout=5",
         f"--local-addr={ADDRESSES[number]}", "--no-python", "zero3d", "train", folder / "run.yaml", "--resume", "auto"]
        for number in range(2)
    ]  # fmt: skip
    job = Job(folder, hosts, commands, [{"GLOO_SOCKET_IFNAME": CABLE}] * 2)
    job.wait_for_steps(made, 12)
    for process in hosts[1].processes():
        process.kill()
    assert job.codes()[0] == 0, job.said()
    said = job.logs[0].read_text()
    assert "zero3d train: stage 3, fp32, 1 rank on cpu" in said, job.said()
    assert re.search(r"\nbitwise: as if it had not been interrupted, dp 2 -> 1", said), job.said()
    assert same_bits(made, expected)
    assert hosts[0].ended()
