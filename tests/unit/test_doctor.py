"""`zero3d doctor` as it is typed: planted problems are named, what hangs or crashes is told."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from zero3d.tools.cli.main import main
from zero3d.tools.doctor import versions
from zero3d.tools.doctor.examine import examine
from zero3d.tools.doctor.finding import BROKEN, OK, WARNING, Finding, Request
from zero3d.tools.doctor.network import reach
from zero3d.tools.doctor.storage import disk
from zero3d.tools.doctor.table import PROBES, Probe


def told(capsys):
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.long
def test_planted_problems_are_named_with_what_to_type(tmp_path, capsys, monkeypatch):
    """An interface that is not there, a taken port, a host without a way to it, a clock, a low limit of open files."""
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    late = tmp_path / "checkpoint"
    late.write_text("")
    os.utime(late, (time.time() + 3 * 86400,) * 2)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--only", "nics,hosts,ports,clocks,limits", "--interface", "eht0", "--hosts", "255.255.255.255:9",
                 "--port", str(port), "--disk", str(tmp_path), "--json"]  # fmt: skip
        script = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
            f"from zero3d.tools.cli.main import main; sys.exit(main({['doctor', *words]!r}))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert {name: each["verdict"] for name, each in found.items()} == {
        "nics": BROKEN, "hosts": BROKEN, "ports": BROKEN, "clocks": WARNING, "limits": WARNING,
    }  # fmt: skip
    assert "--interface=eht0: there is no such interface" in found["nics"]["text"]
    assert "1 of 1 hosts do not answer: 255.255.255.255:9" in found["hosts"]["text"]
    assert f"--port {port}: cannot be bound" in found["ports"]["text"]
    assert f"process {os.getpid()}" in found["ports"]["text"]
    assert "checkpoint is 3 days in the future" in found["clocks"]["text"]
    assert "200 open files" in found["limits"]["text"]
    assert all(each["remedy"] and each["symptom"] for each in found.values())


def test_a_torchvision_of_another_torch_is_named_before_transformers_fails_by_it(tmp_path, monkeypatch):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    details = tmp_path / "torchvision-0.20.0.dist-info"
    details.mkdir()
    (details / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = versions.versions(Request())
    assert found.verdict == BROKEN
    assert "torchvision 0.20.0 does not fit torch" in found.text
    assert "operator torchvision::nms does not exist" in found.text
    assert "torchvision 0.20.0 is for torch 2.5" in found.text
    assert found.remedy.startswith("pip uninstall torchvision")


def test_a_disk_without_direct_io_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("zero3d.offload.direct_file.DIRECT", 0)
    monkeypatch.setattr("zero3d.tools.doctor.storage.FILE", 1 << 20)
    found = disk(Request(disk=str(tmp_path)))
    assert (found.verdict, found.figures["direct"]) == (WARNING, False)
    assert found.text.startswith("no O_DIRECT here")
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_never_answers_is_given_up():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = listening.getsockname()[1]
        waiting = []
        for _ in range(8):  # until nobody is accepted any more
            peer = socket.socket()
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", port))
            waiting.append(peer)
        answer = reach("127.0.0.1", port, seconds=0.2)
        for peer in waiting:
            peer.close()
    assert "does not answer" in answer.fault
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert reach("127.0.0.1", port).fault == ""  # refused: that host is up


ODD = """
import json, os, signal, sys
sys.stdin.read()
for name in sys.argv[1:]:
    print(json.dumps({"begins": name}), flush=True)
    if name == "hangs":
        signal.pause()
    if name == "crashes":
        print("the driver says goodbye", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"name": name, "finding": {"verdict": "ok", "text": "well"}}), flush=True)
"""


def test_a_probe_that_hangs_and_one_that_crashes_are_findings_and_those_behind_them_go_on(tmp_path, monkeypatch):
    (tmp_path / "odd_probes.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probes = [
        Probe(name, "symptom", "", "reload the driver", lambda _: Finding(OK, ""), seconds, torch=True)
        for name, seconds in (("first", 60.0), ("hangs", 0.5), ("second", 60.0), ("crashes", 60.0), ("third", 60.0))
    ]
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    found = {name: each.finding for name, each in examine(probes, Request(), "odd_probes").items()}
    assert list(found) == ["first", "hangs", "second", "crashes", "third"]
    assert [each.verdict for each in found.values()] == [OK, BROKEN, OK, BROKEN, OK]
    assert "no answer in 0.5 s" in found["hangs"].text
    assert "zero3d doctor --only hangs" in found["hangs"].remedy
    assert "killed by SIGSEGV: the driver says goodbye" in found["crashes"].text


@pytest.mark.parametrize(("words", "said"), [
    (["--only", "disks"], "Did you mean disk?"), (["--only", ","], "names no probe"), (["--port", "70000"], "65535"),
    (["--run", "nowhere"], "no such folder"), (["--cluster", "nowhere.yaml"], "nowhere.yaml"),
    (["--only", "space", "--disk", "nowhere"], "--disk nowhere: there is no such folder"),
    (["--disks", "x"], "Did you mean --disk?"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_a_healthy_machine_has_nothing_broken(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    code = main(["doctor", "--disk", str(tmp_path), "--json"])
    found = told(capsys)
    assert [name for name, each in found.items() if each["verdict"] == BROKEN] == []
    assert code == 0
    assert list(found) == [probe.name for probe in PROBES]
    assert found["allreduce"]["figures"]["bandwidth"] > 0


def as_root(command):
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("only root may make namespaces")
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", command], capture_output=True, text=True, timeout=300
    )
    return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.mark.long
def test_a_small_dev_shm_a_full_disk_and_a_dead_loopback_are_named(tmp_path):
    doctor = f"{sys.executable} -m zero3d.tools.cli.main doctor --only shm,space,disk,ports --disk {tmp_path} --json"
    code, found = as_root(
        "mount -t tmpfs -o size=8m none /dev/shm && "
        f"mount -t tmpfs -o size=24m none {tmp_path} && env -u RANK -u MASTER_PORT {doctor}"
    )
    assert code == 1
    assert {name: each["verdict"] for name, each in found.items()} == dict.fromkeys(found, BROKEN)
    assert "8 MiB of 8 MiB are free; at least 16 MiB are needed" in found["shm"]["text"]
    assert "--shm-size" in found["shm"]["remedy"]
    assert "less than 1.0 GiB" in found["space"]["text"]
    assert "64 MiB cannot be written" in found["disk"]["text"]
    assert found["ports"]["remedy"].startswith("ip link set lo up")
