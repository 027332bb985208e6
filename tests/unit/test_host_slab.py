"""One mapping for all records of a rank's host tier: exact, aligned, there at once, alive as long as a view of it."""

import errno
import mmap
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from zero3d.errors import LayoutError, OutOfBudget
from zero3d.memory.blocks import BLOCK
from zero3d.memory.budget import Bound, HostBudget
from zero3d.offload import host_slab
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def record(name, elements):
    """The record of a bucket with a split master."""
    return Record(name, ((torch.int16, elements), (torch.float32, elements), (torch.float32, elements)))


def raw(name, nbytes):
    return Record(name, ((torch.uint8, nbytes),))


def test_views_are_typed_aligned_and_the_memory_itself():
    records = [record("a", 16), record("b", 1 << 20), record("c", 48)]
    slab = HostSlab({"states": records, "ring": [raw("ring", 1)], "none": []}, CPU)
    assert slab.nbytes == BLOCK + (10 << 20) + BLOCK + BLOCK
    assert [memory.numel() for memory in slab.memory["states"]] == [r.nbytes for r in records]
    assert all(memory.data_ptr() % BLOCK == 0 for part in slab.memory.values() for memory in part)
    assert slab.memory["none"] == []
    for (low, m, v), memory in zip(slab.views["states"], slab.memory["states"], strict=True):
        assert (low.dtype, m.dtype, v.dtype) == (torch.int16, torch.float32, torch.float32)
        assert low.data_ptr() == memory.data_ptr()
        assert not memory.any()
        m.fill_(1.0)
        v.fill_(2.0)
        low.fill_(-1)
        assert memory[:2].tolist() == [255, 255]
        assert memory[low.nbytes :].view(torch.float32).tolist() == [1.0] * m.numel() + [2.0] * v.numel()
    assert not slab.memory["ring"][0].any()


@pytest.mark.parametrize("nbytes", [1, 15, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, (2 << 20) + 1])
def test_records_of_any_size_lie_beside_each_other(nbytes):
    slab = HostSlab({"odd": [raw(str(i), nbytes) for i in range(3)]}, CPU)
    assert slab.nbytes == 3 * -(-nbytes // BLOCK) * BLOCK
    for i, memory in enumerate(slab.memory["odd"]):
        memory.fill_(i + 1)
    assert [set(memory.tolist()) if nbytes < 99 else memory.unique().tolist() for memory in slab.memory["odd"]] == (
        [{1}, {2}, {3}] if nbytes < 99 else [[1], [2], [3]]
    )


def test_nothing_takes_nothing():
    slab = HostSlab({"states": [raw("empty", 0)]}, CPU)
    assert slab.nbytes == 0
    assert slab.memory["states"][0].numel() == 0


def test_a_field_that_would_not_be_aligned_is_refused():
    with pytest.raises(LayoutError, match="would begin at byte 2, which is not a multiple of 4"):
        HostSlab({"states": [record("a", 1)]}, CPU)


def test_more_than_the_budget_is_refused_before_anything_is_mapped(monkeypatch):
    monkeypatch.setattr(host_slab._Region, "of", None)
    with pytest.raises(
        OutOfBudget, match=r"take 12\.29 kB \(states 8\.19 kB \+ ring 4\.10 kB\), and it may take 8\.19 kB"
    ):
        HostSlab({"states": [raw("a", BLOCK + 1)], "ring": [raw("r", 1)]}, CPU, HostBudget((Bound(8192, "x"),), 1))


def test_memory_that_the_system_does_not_give_is_an_error_with_its_bytes():
    with pytest.raises(OutOfBudget, match=r"the system gives no 4503\.60 TB \(4503599627370496 bytes\)") as caught:
        HostSlab({"states": [raw("a", 1 << 52)]}, CPU)
    assert caught.value.exit_code == 1


def test_an_older_kernel_has_the_pages_touched_one_by_one(monkeypatch):
    def madvise(region, *advice):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host_slab._Region, "madvise", madvise)
    slab = HostSlab({"states": [raw("a", 64 * BLOCK)]}, CPU)
    assert resident(slab.memory["states"][0].data_ptr()) >= 64 * BLOCK


def is_mapped(address):
    """Whether this process has memory there."""
    heads = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in heads)


def mapping(address):
    """What /proc/self/smaps says of the mapping that holds an address, in bytes."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found is not None:
                break
            if int(head[1], 16) <= address < int(head[2], 16):
                found = {}
        elif found is not None and line.endswith(" kB"):
            name, value, _ = line.split()
            found[name.rstrip(":")] = 1024 * int(value)
    return found


def resident(address):
    return mapping(address)["Rss"] if sys.platform == "linux" else 1 << 40


@linux
def test_all_pages_are_there_and_none_beside(monkeypatch):
    mapped, of = [], host_slab._Region.of
    monkeypatch.setattr(host_slab._Region, "of", lambda nbytes: mapped.append(nbytes) or of(nbytes))
    monkeypatch.setattr(host_slab, "AT_ONCE", 2 << 20)
    nbytes = 5 * (1 << 20) + 3 * BLOCK
    slab = HostSlab({"states": [raw("a", nbytes - BLOCK - 1), raw("b", 1)]}, CPU)
    found = mapping(slab.memory["states"][0].data_ptr())
    assert mapped == [slab.nbytes]
    assert found["Rss"] == found["Size"] == found["Anonymous"] >= slab.nbytes  # neighbours alike are one mapping


@linux
def test_memory_goes_with_its_last_view_and_not_before():
    slab = HostSlab({"states": [raw("a", 1 << 20), record("b", 1 << 10)]}, CPU)
    address = slab.memory["states"][0].data_ptr()
    view = slab.views["states"][1][2][5:]
    del slab
    view.fill_(3.0)
    assert view.sum() == 3.0 * view.numel()
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


class Driver:
    """What CUDA's runtime is asked, in a log; `mapped` is whether the memory was there then."""

    def __init__(self, monkeypatch, error=0):
        self.log, self._error = [], error
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))

    def _on(self, device):
        self.log.append(str(device))
        return nullcontext()

    def cudaHostRegister(self, address, nbytes, flags):
        self.log.append(("register", address, nbytes, flags))
        return self._error

    def cudaGetErrorString(self, error):
        return {2: "out of memory"}[error]

    def cudaHostUnregister(self, address):
        self.log.append(("unregister", address, is_mapped(address)))
        return 0


@linux
def test_cudas_driver_is_told_of_the_whole_and_forgets_it_before_it_is_unmapped(monkeypatch):
    driver = Driver(monkeypatch)
    slab = HostSlab({"states": [raw("a", 100), raw("b", 2 * BLOCK)]}, torch.device("cuda:1"))
    assert slab.pinned
    address = slab.memory["states"][0].data_ptr()
    assert driver.log == ["cuda:1", ("register", address, 3 * BLOCK, 1)]
    view = slab.memory["states"][1]
    driver.log.clear()
    del slab
    assert driver.log == []
    del view
    assert driver.log == ["cuda:1", "synchronize", ("unregister", address, True)]
    assert not is_mapped(address)


def test_a_driver_that_refuses_is_an_error_with_bytes_and_nothing_stays(monkeypatch):
    driver = Driver(monkeypatch, error=2)
    with pytest.raises(
        OutOfBudget, match=r"registers no 8\.19 kB of the host's memory \(cudaHostRegister: out of memory\)"
    ):
        HostSlab({"states": [raw("a", BLOCK + 1)]}, torch.device("cuda:0"))
    assert [entry[0] for entry in driver.log if isinstance(entry, tuple)] == ["register"]


def test_other_devices_have_plain_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", None)
    assert not HostSlab({"states": [raw("a", 1)]}, torch.device("meta")).pinned


@linux
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_copy_and_unmaps_nothing(monkeypatch):
    driver = Driver(monkeypatch)
    slab = HostSlab({"states": [raw("a", 1 << 20)]}, torch.device("cuda:0"))
    slab.memory["states"][0].fill_(7)
    address = slab.memory["states"][0].data_ptr()
    driver.log.clear()
    child = os.fork()
    if child == 0:
        unharmed = False
        try:
            had = is_mapped(address)
            others = [mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(4)]
            for other in others:  # one of them may lie where the slab was
                other[:] = b"x" * (1 << 20)
            del slab
            unharmed = not had and not driver.log and all(other[5] == ord("x") for other in others)
        finally:
            os._exit(0 if unharmed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slab.memory["states"][0].unique().tolist() == [7]
