"""What a batch job is stopped for: named findings, never because a machine is busy; adapters, and links between hosts."""

import json

import pytest
import torch

from zero3d.tools.cli.main import main
from zero3d.tools.doctor import adapters, links as links_module
from zero3d.tools.doctor.adapters import judge, ports
from zero3d.tools.doctor.examine import _unanswered
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request
from zero3d.tools.doctor.links import judge_links, links
from zero3d.tools.doctor.preflight import BETWEEN, EXAMINED, stops
from zero3d.tools.doctor.table import PROBES
from zero3d.tools.doctor.together import judge_adapters, judge_ranks

WRONG = Finding(BROKEN, "no")


def test_named_findings_stop_a_job_on_whichever_host_they_are():
    assert set(EXAMINED) < {probe.name for probe in PROBES}
    for name in (*EXAMINED, *BETWEEN):
        assert stops({"a": Finding(OK, ""), name: WRONG}) == [name]
        assert stops({f"{name} @ host (rank 3)": WRONG}) == [f"{name} @ host (rank 3)"]
        assert stops({name: Finding(WARNING, "slow"), f"{name} @ b": Finding(SKIPPED, "")}) == []


@pytest.mark.parametrize("name", [
    "gpus", "pinned", "p2p", "nccl", "nics", "hcas", "shm", "limits", "space", "ranks", "alike", "between",
    "all-reduce between", "links between",
])  # fmt: skip
def test_each_of_these_alone_stops_a_job(name):
    assert stops({name: WRONG}) == [name]


@pytest.mark.parametrize(("load", "verdict"), [(3.1, WARNING), (3.0, BROKEN), (0.0, BROKEN)])
def test_a_probe_without_an_answer_is_a_warning_where_processes_wait_for_cores(monkeypatch, load, verdict):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 99.0, 99.0))
    monkeypatch.setattr("zero3d.tools.doctor.examine.usable_cores", lambda: 2)
    found = _unanswered(PROBES[0], 60.0)
    assert (found.verdict, "no answer in 60 s" in found.text) == (verdict, True)
    assert ("3.1 processes wait for 2 cores" in found.text) is (verdict == WARNING)
    assert "zero3d doctor --only versions" in found.remedy
    assert stops({"gpus": found}) == []


def test_what_a_busy_machine_makes_stops_none(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    late = {probe.name: _unanswered(probe, probe.timeout) for probe in PROBES}
    assert {each.verdict for each in late.values()} == {BROKEN}
    assert stops(late) == []
    assert stops({"versions": WRONG, "allreduce": WRONG, "leftovers": WRONG, "clocks": WRONG}) == []
    said = {0: {"host": "a", "first": True}, 1: {"host": "b", "first": True}}
    silent, missing = judge_ranks({0: {}}, said, 2), judge_ranks({}, said, 3)
    assert silent.verdict == missing.verdict == BROKEN
    assert stops({"ranks": silent}) == []
    assert stops({"ranks": missing}) == ["ranks"]


@pytest.mark.parametrize(("found", "code"), [(Finding(BROKEN, "down", "up"), 1), (Finding(WARNING, "late", "wait"), 0)])
def test_the_exit_code_is_that_of_findings_that_stop(monkeypatch, capsys, found, code):
    from zero3d.tools.doctor import examine

    def examined(probes, request, report=None):
        return {
            probe.name: examine.Examined(found if probe.name == "nics" else Finding(OK, ""), 0.0) for probe in probes
        }

    monkeypatch.setattr(examine, "examine", examined)
    assert main(["doctor", "--preflight"]) == code
    assert ("this stops the job: nics" in capsys.readouterr().out) is (code == 1)
    assert main(["doctor", "--preflight", "--json"]) == code
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]] == list(EXAMINED)


def test_a_preflight_has_probes_of_its_own(capsys):
    assert main(["doctor", "--preflight", "--only", "gpus"]) == 2
    assert "leave --only out" in capsys.readouterr().err


@pytest.fixture
def system(tmp_path):
    """Two InfiniBand ports that are up, one that is down, and one of RoCE."""
    for name, state, rate, layer in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"), ("mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_2", "1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand"), ("mlx5_10", "4: ACTIVE", "2.5 Gb/sec (1X)", "Ethernet"),
    ):  # fmt: skip
        port = tmp_path / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (port / file).write_text(text + "\n")
    (tmp_path / "class" / "infiniband" / "odd" / "ports" / "1").mkdir(parents=True)  # without files
    return tmp_path


@pytest.mark.parametrize(("wanted", "used"), [
    ("", {"mlx5_0", "mlx5_1", "mlx5_10"}), ("mlx5_1", {"mlx5_1", "mlx5_10"}), ("=mlx5_1", {"mlx5_1"}),
    ("mlx5_0:1,mlx5_2", {"mlx5_0"}), ("^mlx5_1", {"mlx5_0"}), ("^=mlx5_1", {"mlx5_0", "mlx5_10"}),
])  # fmt: skip
def test_ports_are_those_that_are_up_and_that_nccl_would_take(system, wanted, used):
    found = judge(ports(system), {"NCCL_IB_HCA": wanted}, True)
    assert found.verdict == OK
    assert {each.split(":")[0] for each in found.figures["ports"]} == used
    assert "1 down" in found.text


def test_adapters_that_nccl_would_not_find_are_named(system, tmp_path):
    there = ports(system)
    assert "mlx5_10:1 2.5 Gb/s Ethernet" in [str(port) for port in there]
    wrong = judge(there, {"NCCL_IB_HCA": "mlx4"}, True)
    assert (wrong.verdict, "NCCL_IB_HCA=mlx4 names no port" in wrong.text) == (WARNING, True)
    down = judge([port for port in there if not port.active], {}, True)
    assert (down.verdict, "none of 1 ports is up" in down.text) == (WARNING, True)
    assert "nvidia_peermem is not loaded" in judge(there, {}, False).text
    assert judge([], {}, True).verdict == SKIPPED
    assert judge([], {"NCCL_NET": "IB"}, True).verdict == BROKEN
    assert ports(tmp_path / "nowhere") == []


def test_the_probe_reads_this_system(monkeypatch, system):
    monkeypatch.setattr(adapters, "SYSTEM", system)
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0")
    assert adapters.adapters(Request()).figures["ports"] == ["mlx5_0:1 400 Gb/s InfiniBand"]


def test_hosts_with_fewer_adapters_are_named():
    two, one = (Finding(OK, "", figures={"ports": [f"mlx5_{n}:1 400 Gb/s" for n in range(many)]}) for many in (2, 1))
    assert judge_adapters({"a": two, "b": two}) == {}
    assert judge_adapters({"a": two, "b": one, "c": two})["hcas alike"].text.endswith("2 on a, c; 1 on b")


def passed():
    import torch.distributed as dist

    return links(dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_every_two_neighbours_time_what_they_pass(ranks, hosts):
    found = ranks(hosts, passed)
    assert sorted(lower for each in found for lower, _ in each) == list(range(hosts - 1))
    assert all(lower == place and pace > 0 for place, each in enumerate(found) for lower, pace in each)
    assert judge_links(found, [f"h{n}" for n in range(hosts)]).verdict in (OK, WARNING)


def test_the_first_operation_of_a_host_without_a_neighbour_is_of_all_hosts_too(monkeypatch):
    # NCCL makes a communicator with the first operation, and a message of two would wait for the third.
    begun = []
    monkeypatch.setattr(links_module, "_pace", lambda *_: begun.append("messages") or 1e9)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: begun.append("barrier"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: begun.append("sum"))
    assert links(2, 3) == []
    assert begun == ["sum", "sum", "barrier", "messages", "barrier"]


def test_a_slow_link_is_named_by_its_hosts():
    names = ["a", "b", "c", "d"]
    even = judge_links([[(0, 8e9)], [(1, 9e9)], [(2, 10e9)], []], names)
    assert (even.verdict, even.text) == (
        OK, "3 links between neighbours: 9.00 GB/s each way (median), at least 8.00 GB/s (a and b)",
    )  # fmt: skip
    slow = judge_links([[(0, 9e9)], [(1, 4e9)], [(2, 10e9)], []], names)
    assert slow.verdict == WARNING
    assert slow.text.endswith("4.00 GB/s between b and c")
    hung = judge_links([[(0, 9e9)], "no answer in 30 s"], names[:2])
    assert (hung.verdict, "no answer in 30 s" in hung.text) == (BROKEN, True)
