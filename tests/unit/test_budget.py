"""What a rank may take of its host: the least of what is available, of each cgroup and of what was granted."""

import os
from collections import namedtuple

import psutil
import pytest

from zero3d.errors import ConfigError, OutOfBudget
from zero3d.memory.budget import Bound, HostBudget, host_budget
from zero3d.memory.cgroups import cgroups, usable_cores
from zero3d.spec.offload import HOST_BUDGET
from zero3d.spec.sizes import decimal, parse_size

GB = 10**9
Memory = namedtuple("Memory", "total available")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 100 GB, of which 40 are available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(100 * GB, 40 * GB))


def group(folder, limit, use, v2=True, **counts):
    """The files of one cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, use), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in counts.items()))


def system(root, line):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)
    return root


def test_without_cgroups_it_is_what_is_available_shared_by_the_ranks(tmp_path):
    assert host_budget(1, root=tmp_path).nbytes == 40 * GB
    assert host_budget(4, root=tmp_path).nbytes == 10 * GB
    assert host_budget(3, root=tmp_path).nbytes == 40 * GB // 3


def test_what_was_granted_is_for_all_ranks_of_the_host_together(tmp_path):
    assert host_budget(2, 8 * GB, root=tmp_path).nbytes == 4 * GB
    assert host_budget(2, 80 * GB, root=tmp_path).nbytes == 20 * GB


@pytest.mark.parametrize("v2", [True, False])
def test_page_cache_is_not_counted_as_used(tmp_path, v2):
    system(tmp_path, "0::/a\n" if v2 else "5:memory:/a\n3:cpuset:/\n")
    base = tmp_path / ("sys/fs/cgroup" if v2 else "sys/fs/cgroup/memory")
    cache = {"active_file": 10 * GB, "inactive_file": 5 * GB}
    cache = cache | {"slab_reclaimable": GB} if v2 else {f"total_{name}": value for name, value in cache.items()}
    used = 19 * GB if v2 else 18 * GB
    group(base / "a", 20 * GB, used, v2, anon=3 * GB, shmem=0, **cache)
    assert host_budget(1, root=tmp_path).nbytes == 17 * GB


def test_shared_memory_is_counted_as_used(tmp_path):
    system(tmp_path, "0::/a\n")
    group(tmp_path / "sys/fs/cgroup/a", 20 * GB, 12 * GB, file=9 * GB, shmem=8 * GB, active_file=GB, inactive_file=0)
    assert host_budget(1, root=tmp_path).nbytes == 9 * GB


@pytest.mark.parametrize(("own", "outer", "free"), [(20, 30, 17), (20, 15, 5), ("max", 15, 5), (20, "max", 17)])
def test_the_limit_of_every_group_above_holds(tmp_path, own, outer, free):
    system(tmp_path, "0::/outer/own\n")
    base = tmp_path / "sys/fs/cgroup"
    group(base / "outer", outer if outer == "max" else outer * GB, 10 * GB)
    group(base / "outer/own", own if own == "max" else own * GB, 3 * GB)
    assert host_budget(1, root=tmp_path).nbytes == free * GB


def test_the_limit_from_which_on_a_group_is_slowed_down_holds(tmp_path):
    system(tmp_path, "0::/a\n")
    group(tmp_path / "sys/fs/cgroup/a", 30 * GB, 0)
    (tmp_path / "sys/fs/cgroup/a/memory.high").write_text(f"{25 * GB}\n")
    assert host_budget(1, root=tmp_path).nbytes == 25 * GB


def test_no_limit_is_none(tmp_path):
    system(tmp_path, "4:cpu,memory:/a\n0::/\n")
    group(tmp_path / "sys/fs/cgroup/memory/a", 9223372036854771712, 50 * GB, v2=False)
    budget = host_budget(1, root=tmp_path)
    assert budget.nbytes == 40 * GB
    assert str(budget) == "40.00 GB of available memory"


def test_a_group_that_is_full_leaves_nothing(tmp_path):
    system(tmp_path, "0::/a\n")
    group(tmp_path / "sys/fs/cgroup/a", 5 * GB, 6 * GB)
    assert host_budget(2, root=tmp_path).nbytes == 0


def test_a_container_finds_its_group_at_the_root_and_nobody_looks_outside(tmp_path):
    system(tmp_path, "0::/../../elsewhere\n")
    group(tmp_path / "sys/fs/cgroup", 7 * GB, GB)
    group(tmp_path / "elsewhere", GB, GB)
    assert host_budget(1, root=tmp_path).nbytes == 6 * GB
    assert [found.folder for found in cgroups(tmp_path)] == [tmp_path / "sys/fs/cgroup"]


def test_this_system_is_read_without_an_error():
    assert 0 <= host_budget(1).nbytes <= 40 * GB
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("files", "cores"), [
    ({}, 16), ({"a/b/cpu.max": "max 100000"}, 16), ({"a/b/cpu.max": "250000 100000"}, 2), ({"a/b/cpu.max": "50000 100000"}, 1),
    ({"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000"}, 3), ({"a/b/cpu.max": "9900000 100000"}, 16),
])  # fmt: skip
def test_threads_run_at_once_on_the_cores_that_a_quota_leaves(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    system(tmp_path, "0::/a/b\n")
    for name, said in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{said}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 16), (350000, 3)])
def test_a_quota_of_the_first_version_is_in_two_files(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    system(tmp_path, "5:memory:/m\n4:cpu,cpuacct:/a\n")
    folder = tmp_path / "sys/fs/cgroup/cpu/a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_what_fits_is_granted_and_one_byte_more_refused():
    budget = HostBudget((Bound(10, "of available memory"),), 2)
    budget.check({"states": 3, "gradients": 2})
    with pytest.raises(OutOfBudget):
        budget.check({"states": 3, "gradients": 3})


def test_a_refusal_has_the_arithmetic_and_what_to_type(tmp_path):
    system(tmp_path, "0::/a\n")
    group(tmp_path / "sys/fs/cgroup/a", 20 * GB, 3 * GB)
    with pytest.raises(OutOfBudget) as caught:
        host_budget(2, 50 * GB, root=tmp_path).check({"optimizer states": 10 * GB, "gradients": 7 * GB, "ring": 0})
    message = str(caught.value)
    assert "take 17.00 GB (optimizer states 10.00 GB + gradients 7.00 GB), and it may take 8.50 GB" in message
    assert (
        f"17.00 GB left of cgroup {tmp_path}/sys/fs/cgroup/a (20.00 GB - 3.00 GB held) / 2 ranks = 8.50 GB" in message
    )
    assert "40.00 GB of available memory" in message
    assert "50.00 GB offload.host_budget" in message
    assert "What fits is 0.50 of it: lower offload.fraction" in message
    assert "raise offload.host_budget" not in message
    assert caught.value.exit_code == 2


def test_a_budget_that_was_given_too_small_is_said_to_be_raised(tmp_path):
    with pytest.raises(OutOfBudget, match=r"raise offload\.host_budget to 12\.00 GB, or lower offload\.fraction"):
        host_budget(3, 9 * GB, root=tmp_path).check({"optimizer states": 4 * GB})


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("64GB", 64 * GB),
        ("1.5 TB", 1500 * GB),
        ("2kB", 2000),
        ("7", 7),
        (12345678901234567, 12345678901234567),
        ("8B", 8),
    ],
)
def test_sizes_are_decimal(given, nbytes):
    assert parse_size(given, HOST_BUDGET) == nbytes


@pytest.mark.parametrize("given", ["64GiB", "64 Gb", "-1GB", "", "GB", True, 1.5, None, [], "1e9GB"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ConfigError, match=r"is no size: type bytes, or a number with kB"):
        parse_size(given, HOST_BUDGET)


@pytest.mark.parametrize("given", [
    "1" * 5000, "1" * 400 + "GB", "1" * 400, 10**400, 10**5000, 10**18, "1000000TB", "1." + "1" * 5000 + "kB", "9" * 41,
    "0." + "1" * 400,
], ids=range(10))  # fmt: skip
@pytest.mark.parametrize("setting", ["offload.host_budget", "zero.gather_budget"])
def test_a_size_that_no_machine_has_is_refused_in_one_short_line(given, setting):
    with pytest.raises(
        ConfigError, match=rf"{setting} '.*' is more than any machine has: type less than 1,000,000TB"
    ) as told:
        parse_size(given, setting)
    assert len(str(told.value)) < 250
    assert parse_size(10**18 - 1, HOST_BUDGET) == 10**18 - 1


def test_a_huge_negative_number_is_no_size():
    with pytest.raises(ConfigError, match="'a huge number' is no size"):
        parse_size(-(10**5000), HOST_BUDGET)


def test_bytes_are_written_in_decimal_units():
    written = [decimal(n) for n in (0, 999, 1000, 1_250_000_000, 3 * 10**12)]
    assert written == ["0 B", "999 B", "1.00 kB", "1.25 GB", "3.00 TB"]
