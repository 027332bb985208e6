"""A rank runs on the cores near its GPU, which the kernel names; no GPU is needed to read what it says."""

import os
from types import SimpleNamespace

import pytest
import torch

from zero3d.distributed import cores
from zero3d.distributed.cores import bind_to_device, near, pci_address

ADDRESS = "0001:3b:00.0"
GPU = torch.device("cuda", 1)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A host of two nodes, on whose second the GPU is, seen by a rank that may run on cores 0 to 15."""
    for node, listed in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(listed + "\n")
    device = tmp_path / "bus" / "pci" / "devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cores, "SYSTEM", tmp_path)
    return tmp_path


@pytest.fixture
def affinity(monkeypatch):
    """The cores that the rank may run on: a set that tests change, and that binding does."""
    found = set(range(16))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(found))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: (found.clear(), found.update(chosen)))
    return found


def test_a_rank_is_bound_to_the_cores_of_its_gpus_node(system, affinity):
    assert pci_address(GPU) == ADDRESS
    assert bind_to_device(GPU) == "cores: ranks run near their GPUs; cuda:1 on the 8 of 16 cores of node 1"
    assert affinity == {4, 5, 6, 7, 12, 13, 14, 15}
    assert bind_to_device(GPU) is None  # they are near


def test_cores_that_a_launcher_has_given_are_the_most(system, affinity):
    affinity.intersection_update({2, 3, 4, 5})
    assert "on the 2 of 4 cores" in bind_to_device(GPU)
    assert affinity == {4, 5}


def test_cores_far_from_the_gpu_are_kept_and_told(system, affinity):
    affinity.intersection_update({0, 1})
    assert "may run on none of the 8 cores there: let the launcher" in bind_to_device(GPU)
    assert affinity == {0, 1}


@pytest.mark.parametrize("node", ["-1", "7", "none"])
def test_without_a_node_nothing_changes(system, affinity, node):
    (system / "bus" / "pci" / "devices" / ADDRESS / "numa_node").write_text(node)
    assert bind_to_device(GPU) is None
    assert affinity == set(range(16))


def test_a_torch_that_knows_no_address_and_a_cpu_are_left_alone(system, affinity, monkeypatch):
    assert bind_to_device(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(pci_bus_id=1))
    assert bind_to_device(GPU) is None


def test_the_kernel_of_this_machine_is_read():
    node, found = near(cores.SYSTEM, "ffff:ff:1f.7")
    assert (node, found) == (-1, set())
