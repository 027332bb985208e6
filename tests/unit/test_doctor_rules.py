"""The doctor's rules for what this machine may not have: GPUs, peer-to-peer, NCCL, ACS, several hosts; and its all-reduce."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from zero3d.tools.doctor import devices
from zero3d.tools.doctor.allreduce import DONE, JOINED, STARTED, Outcome, against, judge, reduce_among
from zero3d.tools.doctor.devices import judge_acs, judge_gpus, judge_nccl, judge_pairs, judge_pinned, outcome_of
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request, exit_code, worst
from zero3d.tools.doctor.limits import judge_limits
from zero3d.tools.doctor.network import refuse_interface
from zero3d.tools.doctor.storage import judge_clocks, judge_disk, judge_shm, judge_space
from zero3d.tools.doctor.together import Trip, judge_across, judge_skew, judge_trips, measure_across, merge
from zero3d.tools.doctor.topology import Bridges, bridges, cards, matrix
from zero3d.tools.doctor.versions import compare, compare_driver

GIB = 1 << 30

# --- what nvidia-smi and lspci print ------------------------------------------------------------

TOPO = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
P2P = """ \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""
LSPCI = """00:01.0 PCI bridge: Intel Corporation Sky Lake-E PCI Express Root Port A (rev 07) (prog-if 00)
\tCapabilities: [110 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
00:02.0 PCI bridge: PLX Technology, Inc. PEX 8747 (prog-if 00)
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
3b:00.0 3D controller: NVIDIA Corporation GA100 (rev a1)
\t\tACSCtl:\tSrcValid+ TransBlk-
"""


def test_the_matrix_of_links_has_gpus_alone():
    pairs = matrix(TOPO)
    assert pairs == {(0, 1): "NV18", (0, 2): "SYS", (1, 0): "NV18", (1, 2): "SYS", (2, 0): "SYS", (2, 1): "SYS"}
    assert matrix(P2P) == {(0, 1): "CNS", (1, 0): "CNS"}
    assert matrix("") == matrix("no devices were found") == {}


def test_bridges_whose_acs_is_on_are_named_and_other_devices_are_not():
    assert bridges(LSPCI) == Bridges(("00:01.0",), False, 2)
    found = judge_acs(bridges(LSPCI), True)
    assert found.verdict == WARNING
    assert "ACS is on at 1 of 2 PCI bridges (00:01.0), and an IOMMU translates" in found.text
    assert "BIOS" in found.remedy
    assert "setpci" in found.remedy


def test_acs_that_nobody_may_see_is_skipped_and_that_is_off_is_well():
    denied = bridges("00:01.0 PCI bridge: A\n\tCapabilities: <access denied>\n")
    assert judge_acs(denied, False).verdict == SKIPPED
    assert "lspci -vvv" in judge_acs(denied, False).remedy
    assert judge_acs(Bridges((), False, 3), False).verdict == OK
    assert "iommu=pt" in judge_acs(Bridges((), False, 3), True).remedy


CARDS = (
    "0, NVIDIA A100-SXM4-80GB, 81920, 4, 0, 0\n1, NVIDIA A100-SXM4-80GB, 81920, 40960, 100, [N/A]\nno line of a card\n"
)


def test_cards_are_compared_with_what_torch_sees():
    told = cards(CARDS)
    assert [(card.index, card.memory, card.errors) for card in told] == [(0, 80 * GIB, 0), (1, 80 * GIB, 0)]
    idle = told[:1]
    assert judge_gpus(1, idle, 1, "12.8", None).verdict == OK
    assert judge_gpus(1, idle, 0, "", None).text == "1 GPU, and this torch is built for the CPU alone"
    assert judge_gpus(1, idle, 0, "12.8", "7").remedy == "unset CUDA_VISIBLE_DEVICES"
    busy = judge_gpus(2, told, 2, "12.8", None)
    assert (busy.verdict, busy.text) == (WARNING, "GPU 1: 40.0 GiB of 80.0 GiB in use, before a run")
    sick = judge_gpus(1, cards("0, Tesla, 16384, 0, 0, 3"), 1, "12.8", None)
    assert (sick.verdict, sick.text) == (BROKEN, "GPU 0 has 3 uncorrected memory errors")


def test_pairs_without_peer_to_peer_are_told_with_the_reason():
    assert judge_pairs({(0, 1): "OK", (1, 0): "OK"}, matrix(TOPO)).verdict == OK
    found = judge_pairs(matrix(P2P), matrix(TOPO))
    assert found.verdict == WARNING
    assert "GPU 0 and 1 first: the chipset does not support it" in found.text
    assert "NCCL_P2P_DISABLE=1" in found.remedy
    assert judge_pairs({}, {}).verdict == SKIPPED


# --- NCCL with and without peer-to-peer ---------------------------------------------------------

WELL, FAST = Outcome(0.01, 10e9), Outcome(0.001, 100e9)
HANG, WRONG = Outcome(fault="hang", text="hangs"), Outcome(fault="wrong", text="ends with a wrong sum on rank 1")


@pytest.mark.parametrize("bad", [HANG, WRONG], ids=lambda each: each.fault)
def test_what_fails_with_peer_to_peer_alone_is_blamed_on_it_and_on_acs(bad):
    found = judge_nccl(bad, WELL, 4, Request())
    assert found.verdict == BROKEN
    assert bad.text in found.text
    assert "peer-to-peer is broken, and ACS or the IOMMU is the usual cause" in found.text
    for word in ("export NCCL_P2P_DISABLE=1", "lspci -vvv | grep -i ACSCtl", "BIOS", "setpci", "iommu=pt"):
        assert word in found.remedy


def test_what_fails_both_ways_or_without_it_alone_is_not():
    both = judge_nccl(HANG, HANG, 4, Request())
    assert both.verdict == BROKEN
    assert both.remedy.startswith("not peer-to-peer: NCCL_DEBUG=INFO")
    assert judge_nccl(WELL, HANG, 4, Request()).verdict == WARNING
    assert judge_nccl(FAST, WELL, 4, Request()).verdict == OK
    slower = judge_nccl(WELL, FAST, 4, Request())
    assert (slower.verdict, "slower than the host's memory" in slower.remedy) == (WARNING, True)


def test_both_runs_are_made_with_the_variable_and_without_it(monkeypatch):
    ran = []
    monkeypatch.setattr(devices, "present", lambda: 4)
    monkeypatch.setattr(devices, "known", lambda: [])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")

    def run(command, env, **_):
        ran.append((command[-3:], env.get("NCCL_P2P_DISABLE")))
        return subprocess.CompletedProcess(command, 0, json.dumps((HANG if len(ran) == 1 else WELL).as_dict()), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert "peer-to-peer is broken" in devices.nccl(Request()).text
    assert ran == [(["nccl", "4", "60"], None), (["nccl", "4", "60"], "1")]


def test_a_run_that_prints_nothing_or_never_ends_is_an_outcome(monkeypatch):
    def silent(command, **_):
        return subprocess.CompletedProcess(command, -11, "", "ncclSystemError: no devices\n")

    monkeypatch.setattr(subprocess, "run", silent)
    assert outcome_of("nccl", 4, 1.0, False).text == "ends with exit code -11: ncclSystemError: no devices"

    def endless(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", endless)
    assert outcome_of("nccl", 4, 1.0, False).fault == "hang"


@pytest.mark.long
def test_the_command_that_runs_nccl_runs_gloo_alike():
    outcome = outcome_of("gloo", 3, 60.0, True)
    assert outcome.fault == ""
    assert outcome.bandwidth > 0


# --- an all-reduce ------------------------------------------------------------------------------


def test_what_ranks_said_becomes_an_outcome():
    done = [STARTED, JOINED, (0.5, True), DONE]
    assert judge({0: done, 1: done}, 9) == Outcome(0.5, 2 * (16 << 20))  # 16 MiB out and in on a ring of two
    late = [STARTED, JOINED, (2.0, True), DONE]
    assert judge({0: done, 1: done, 2: late, 3: done}, 9) == Outcome(2.0, 1.5 * (16 << 20) / 2)
    assert judge({0: done, 1: [STARTED, JOINED, (0.5, False), DONE]}, 9).text == "ends with a wrong sum on rank 1"
    assert judge({0: [STARTED, JOINED], 1: [STARTED, JOINED]}, 9).text == (
        "hangs: rank 0 and 1 still in it 9 s after the start"
    )
    assert "rank 1 has not joined in 9 s" in judge({0: [STARTED, JOINED], 1: [STARTED]}, 9).text
    assert judge({0: [STARTED], 1: [STARTED, "RuntimeError: x"]}, 9).text == "fails on rank 1: RuntimeError: x"


def on_loopback():
    """Make ready for ranks of its own, in a process of the pool."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    multiprocessing.current_process().daemon = False


def reduced():
    on_loopback()
    return reduce_among(2, "gloo", 60.0).as_dict()


def stuck(how):
    """Plant a rank that never comes to the all-reduce, or that dies in it."""
    import torch.distributed as dist

    original = dist.all_reduce

    def planted(message):
        if dist.get_rank() == 1:
            signal.pause() if how == "hangs" else os.kill(os.getpid(), signal.SIGKILL)
        original(message)

    dist.all_reduce = planted
    on_loopback()
    return reduce_among(2, "gloo", 1.5 if how == "hangs" else 60.0).as_dict()


@pytest.mark.skipif(sys.platform != "linux", reason="the interface's name is Linux's")
def test_two_ranks_reduce_and_one_that_never_comes_is_told(alone):
    well = alone(reduced)
    assert (well["fault"], well["seconds"] > 0, well["bandwidth"] > 0) == ("", True, True)
    assert alone(stuck, "hangs")["fault"] == "hang"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the interface's name is Linux's")
def test_a_rank_that_dies_in_an_all_reduce_is_told(alone):
    assert alone(stuck, "dies")["fault"] == "crash"


def test_rates_are_compared_with_those_of_the_same_kind_of_device():
    request = Request(expected={"inside": 4e9, "disk": 1e9}, device="cpu")
    assert against(1e9, request, "inside", cpu=True) == (WARNING, ", 0.25 of the calibrated 4.00 GB/s")
    assert against(3e9, request, "inside", cpu=True) == (OK, ", 0.75 of the calibrated 4.00 GB/s")
    assert against(1e9, request, "inside", cpu=False) == (OK, "")
    assert against(1e9, Request(), "inside", cpu=True) == (OK, "")
    assert judge_disk(True, 0.2e9, 0.2e9, 1e9, request).verdict == WARNING
    assert judge_pinned(1e9, Request()).verdict == WARNING


# --- versions, memory, limits, clocks -----------------------------------------------------------


def test_versions_that_do_not_fit_are_told_apart():
    good = {"python": "3.12.1", "torch": "2.13.0+cu128", "torchvision": "0.28.0+cu128", "transformers": "5.23.0"}
    assert compare(good) == []
    assert "is for torch 2.12" in compare(good | {"torchvision": "0.27.1+cu128"})[0].text
    assert compare(good | {"torchvision": "0.28.0+cpu"})[0].text == "torch is built for cu128, torchvision for cpu"
    assert compare(good | {"torch": "2.9.1", "torchvision": ""})[0].verdict == BROKEN
    assert compare(good | {"transformers": "4.57.1"})[0].remedy.startswith("install transformers 5.16")
    assert compare_driver("12.8", "535.104.05") == compare_driver("12.8", "") == compare_driver("", "470.1") == []
    assert "older than 525.60, the first for CUDA 12.8" in compare_driver("12.8", "470.256.02")[0].text


def test_shared_memory_space_limits_and_clocks_have_their_bounds():
    assert [judge_shm(total, free, "", count).verdict for total, free, count in (
        (16 * GIB, 8 * GIB, 8), (64 << 20, 60 << 20, 0), (512 << 20, 512 << 20, 2), (512 << 20, 512 << 20, 0),
        (16 * GIB, 1 << 20, 0),
    )] == [OK, WARNING, WARNING, OK, BROKEN]  # fmt: skip
    assert judge_shm(GIB, GIB, "Permission denied", 0).verdict == BROKEN
    assert [judge_space(GIB << 10, free * GIB, 0, 0, "/x").verdict for free in (100, 5, 0)] == [OK, WARNING, BROKEN]
    assert "only 3 of 9 files" in judge_space(GIB << 10, 100 * GIB, 9, 3, "/x").text
    assert [judge_limits(files, 4096, 9999, -1, False).verdict for files in (1024, 256, 64)] == [OK, WARNING, BROKEN]
    assert judge_limits(256, 4096, 9999, -1, False).remedy == "ulimit -n 4096"
    assert judge_limits(2048, 4096, 9999, 8 << 20, False).verdict == OK
    assert judge_limits(2048, 4096, 9999, 8 << 20, True).remedy.startswith("ulimit -l unlimited")
    assert judge_clocks(0.01, -5, "a", -99, "yes").verdict == OK
    assert [judge_clocks(ahead, -5, "a", -99, "").verdict for ahead in (30, -30, 7200)] == [WARNING, WARNING, BROKEN]
    assert "zero3d's own code is 2 hours in the future" in judge_clocks(0, -5, "a", 7300, "").text


def test_an_interface_is_named_whole_for_gloo_and_by_its_beginning_for_nccl():
    there = {"lo": "127.0.0.1", "nothere0": ""}
    assert refuse_interface("NCCL_SOCKET_IFNAME", "l", there) is None
    assert refuse_interface("NCCL_SOCKET_IFNAME", "^docker", there) is None
    assert "no such interface" in refuse_interface("GLOO_SOCKET_IFNAME", "l", there).text
    assert "is down or has no IPv4 address" in refuse_interface("--interface", "nothere0", there).text


def test_skipped_is_no_fault_and_broken_is_exit_code_1():
    rows = {"a": Finding(OK, ""), "b": Finding(SKIPPED, "")}
    assert (worst(rows), exit_code(rows)) == (OK, 0)
    assert (worst(rows | {"c": Finding(WARNING, "")}), exit_code(rows | {"c": Finding(WARNING, "")})) == (WARNING, 0)
    assert exit_code(rows | {"c": Finding(BROKEN, "")}) == 1


# --- several hosts ------------------------------------------------------------------------------


def host(name, first=True, torch="2.13.0"):
    said = dict.fromkeys(("python", "zero3d", "transformers", "numpy"), "1")
    return {"host": name, "first": first, "address": "10.0.0.1", "port": 1, "torch": torch, **said}


def found(disk, trips=None):
    return {"host": "", "findings": {"disk": disk.as_dict()}, "trips": trips or {}, "reduced": None, "links": None}


def test_hosts_that_agree_share_a_row_and_one_that_does_not_has_its_own():
    ranks = {0: host("a"), 1: host("a", first=False), 2: host("b", torch="2.12.0"), 3: host("b", first=False)}
    trips = {"2": {"milliseconds": 0.1, "ahead": 0.0, "fault": ""}}
    back = {"0": {"milliseconds": 0.2, "ahead": 0.0, "fault": ""}}
    rows = merge({0: found(Finding(OK, "fast"), trips), 2: found(Finding(WARNING, "slow"), back)}, ranks, 5)
    assert rows["ranks"].text == "1 of 5 ranks never came in 45 s: 4"
    assert rows["alike"].text == "torch: 2.13.0 on a, 2.12.0 on b"
    assert rows["between"].verdict == rows["clocks between"].verdict == OK
    assert rows["disk @ b (rank 2)"].text == "slow"
    assert "disk" not in rows
    well = merge({0: found(Finding(OK, "fast"), trips), 2: found(Finding(OK, "slow"), back)}, ranks, 4)
    assert well["disk"].text == "on all 2 hosts; a: fast"
    assert "did not tell what it found" in merge({0: found(Finding(OK, ""), trips)}, ranks, 4)["ranks"].text


def test_a_way_that_is_cut_and_a_clock_that_is_off_are_named():
    names = {0: "a", 8: "b"}
    cut = judge_trips({(0, 8): Trip(fault="10.0.0.2:5 does not answer in 5 s"), (8, 0): Trip(0.1)}, names)
    assert (cut.verdict, "a (rank 0) to b (rank 8): 10.0.0.2:5 does not answer" in cut.text) == (BROKEN, True)
    assert judge_trips({(0, 8): Trip(90.0)}, names).verdict == WARNING
    skew = judge_skew({(0, 8): Trip(0.1, -30.0), (8, 0): Trip(0.1, 30.0)}, names)
    assert (skew.verdict, skew.text) == (WARNING, "clocks are at most 30.000 s apart (b, rank 8)")
    assert judge_across((0.1, True), 2, Request()).verdict == OK
    assert judge_across((0.1, False), 2, Request()).verdict == judge_across("no answer in 30 s", 2, Request()).verdict
    slow = judge_across((0.1, True), 2, Request(expected={"across": 1e9}, device="cpu"))
    assert (slow.verdict, "0.04 of the calibrated" in slow.text) == (WARNING, True)


def across(folder):
    """What an all-reduce between first ranks of hosts finds, in a process of the pool."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank = dist.get_rank()
    dist.destroy_process_group()
    found = measure_across(FileStore(f"{folder}/store", 2), [0, 1], rank, Request())
    dist.destroy_process_group()
    assert [lower for lower, _ in found.links] == [0] * (rank == 0)
    return found.reduced.as_dict()


def test_first_ranks_of_two_hosts_wait_for_their_all_reduce(ranks, tmp_path):
    for found in ranks(2, across, str(tmp_path)):
        assert (found["verdict"], found["remedy"]) == (OK, "")
        assert found["figures"]["bandwidth"] * found["figures"]["seconds"] == pytest.approx(4 << 20)
    assert measure_across(None, [0], 0, Request()) is None  # one host


def job(folder, ranks, words):
    """Two processes as a launcher would start them on two hosts; their exit codes and rank 0's output."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "zero3d.tools.cli.main", "doctor", *words]
    started = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in started]
    return [process.returncode for process in started], said[0]


@pytest.mark.long
def test_two_hosts_examine_each_other_under_a_launcher(tmp_path):
    words = ["--only", "space,limits", "--interface", "lo", "--json"]
    codes, (said, errors) = job(tmp_path, (0, 1), words)
    assert codes == [0, 0], errors
    found = {each["name"]: each for each in json.loads(said)["findings"]}
    assert list(found) == ["ranks", "alike", "between", "clocks between", "all-reduce between", "limits", "space"]
    assert found["ranks"]["text"].startswith("2 ranks on 2 hosts")
    assert found["all-reduce between"]["figures"]["bandwidth"] > 0
    assert found["space"]["text"].startswith("on all 2 hosts")
