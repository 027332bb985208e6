"""What is said about a worker that a signal ended: the out-of-memory killer with its count, and the memory."""

import os
import signal
import sys
from types import SimpleNamespace

import psutil
import pytest

from zero3d.tools.cli.oom import describe_kill, oom_kills


def system(root, kills, v2=True, limit="2000000000"):
    """The files of a system, with so many processes ended by the out-of-memory killer."""
    group = root / ("sys/fs/cgroup/a" if v2 else "sys/fs/cgroup/memory/a")
    for folder in (root / "proc/self", group):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/a\n" if v2 else "4:memory:/a\n3:cpuset:/\n")
    (root / "proc/vmstat").write_text("oom_kill 77\n")
    if v2:
        (group / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
        (group / "memory.max").write_text(f"{limit}\n")
    else:
        (group / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize("v2", [True, False])
def test_kills_during_the_run_are_counted_and_the_limit_is_the_cgroups(tmp_path, v2):
    before = oom_kills(system(tmp_path, 3, v2))
    assert before == 3
    message = describe_kill(signal.SIGKILL, before, system(tmp_path, 4, v2))
    assert message.startswith("killed by SIGKILL: the kernel's out-of-memory killer ended 1 process during the run (")
    assert "of 2.0 GB): lower train.micro_batch" in message
    assert "ended 2 processes" in describe_kill(signal.SIGKILL, before, system(tmp_path, 5, v2))


def largest(monkeypatch, nbytes):
    unit = 1 if sys.platform == "darwin" else 1024
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=nbytes // unit))


def test_a_small_worker_was_killed_by_somebody_unless_the_kernel_has_counted_one(tmp_path, monkeypatch):
    largest(monkeypatch, 60_000_000)
    told = describe_kill(signal.SIGKILL, 3, system(tmp_path, 3))
    assert told.startswith("killed by SIGKILL: somebody killed it, for it was not large (")
    assert "had 0.1 of 2.0 GB" in told
    assert "out-of-memory killer ended 1 process" in describe_kill(signal.SIGKILL, 2, tmp_path)


def test_without_a_count_it_is_the_usual_cause(tmp_path, monkeypatch):
    largest(monkeypatch, psutil.virtual_memory().total // 2)
    usual = "killed by SIGKILL: the usual cause is the kernel's out-of-memory killer ("
    assert oom_kills(tmp_path) is None
    assert describe_kill(signal.SIGKILL, None, tmp_path).startswith(usual)
    assert describe_kill(signal.SIGKILL, 3, system(tmp_path, 3, limit="max")).startswith(usual)
    (tmp_path / "sys/fs/cgroup/a/memory.events").unlink()
    assert oom_kills(tmp_path) == 77  # the machine's
    assert describe_kill(signal.SIGKILL, None, tmp_path).startswith(usual)


def test_another_signal_has_nothing_to_do_with_memory(tmp_path):
    assert describe_kill(signal.SIGSEGV, 1, system(tmp_path, 5)) == "killed by SIGSEGV"


def test_this_system_is_read_without_an_error():
    assert "of" in describe_kill(signal.SIGKILL, oom_kills())
    if os.path.exists("/proc/vmstat"):
        assert oom_kills() is not None
