"""`zero3d doctor` under torchrun on two hosts: a slow cable has its rate, ranks on loopback and a cut cable are named."""

import json
import os
import sys
from pathlib import Path

import pytest
from two_hosts import ADDRESSES, CABLE, hosts

__all__ = ["hosts"]
pytestmark = pytest.mark.long
SRC = Path(__file__).parents[2] / "src"
ENVIRONMENT = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/root"),
}  # fmt: skip


def examined(folder, hosts, interface):
    """Rank 0's exit code, as torchrun passes it on, and findings."""
    started = []
    for number, host in enumerate(hosts):
        command = ["torchrun", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}",
                   f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "--no-python",
                   "zero3d", "doctor", "--only", "nics,shm", "--interface", interface, "--json"]  # fmt: skip
        with (folder / f"{number}.out").open("w") as output, (folder / f"{number}.err").open("w") as errors:
            started.append(host.start(command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=errors))
    codes = [process.wait(300) for process in started]
    lines = [line for line in (folder / "0.out").read_text().splitlines() if line.startswith("{")]
    assert lines, (folder / "0.err").read_text()
    return codes[0], {each["name"]: each for each in json.loads(lines[0])["findings"]}


def test_two_hosts_reach_each_other_at_the_rate_of_their_cable(tmp_path, hosts):
    for host in hosts:
        host.slow_down("40mbit")
    code, found = examined(tmp_path, hosts, CABLE)
    assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(found, "ok")
    assert code == 0
    assert found["ranks"]["text"] == "2 ranks on 2 hosts: host0, host1"
    assert found["all-reduce between"]["figures"]["bandwidth"] < 6e6  # 40 Mbit/s are 5 MB/s
    assert abs(found["clocks between"]["figures"]["seconds"]["1"]) < 1


def test_ranks_that_would_listen_on_loopback_are_told_that_no_other_host_reaches_them(tmp_path, hosts):
    code, found = examined(tmp_path, hosts, "lo")
    assert code == 1
    assert found["between"]["verdict"] == "broken"
    assert "host0 (rank 0) to host1 (rank 1): 127.0.0.1:" in found["between"]["text"]
    assert "--interface NAME" in found["between"]["remedy"]
    assert found["all-reduce between"]["verdict"] == "broken"
