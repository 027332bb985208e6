"""Where a rank computes: its own accelerator, which becomes the current device; never one that it has to share."""

from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from zero3d.distributed.devices import (
    P2P_OFF,
    Launched,
    choose_device,
    claim_device,
    count_devices,
    without_peer_access,
)
from zero3d.errors import MeshError

ALONE = Launched(0, 0, own_device=False)


@pytest.fixture
def host(monkeypatch):
    """host(kind, count) -> the list of device numbers that become current on a host of so many accelerators."""

    def made(kind, count, current=0):
        chosen = []
        stub = SimpleNamespace(
            is_available=lambda: kind is not None,
            current_accelerator=lambda: torch.device(kind),
            device_count=lambda: count,
            current_device_index=lambda: current,
            set_device_index=chosen.append,
        )
        monkeypatch.setattr(torch, "accelerator", stub)
        return chosen

    return made


@pytest.mark.parametrize(
    ("asked", "launched", "device", "current"),
    [
        (None, ALONE, "cuda:0", [0]),
        (None, Launched(3, 4, own_device=False), "cuda:3", [3]),
        (None, Launched(1, 0, own_device=False), "cuda:1", [1]),
        ("cuda:1", Launched(3, 4, own_device=False), "cuda:1", [1]),
        (torch.device("cuda", 2), ALONE, "cuda:2", [2]),
        ("cuda", ALONE, "cuda:1", [1]),
        ("cpu", Launched(3, 4, own_device=False), "cpu", []),
        ("cpu", Launched(9, 10, own_device=False), "cpu", []),
    ],
)
def test_the_device_has_a_number_and_becomes_the_current_one(host, asked, launched, device, current):
    chosen = host("cuda", 4, current=1)
    assert choose_device(asked, launched) == torch.device(device)
    assert chosen == current


@pytest.mark.parametrize(("asked", "launched", "index"), [
    ("cuda", Launched(3, 4, own_device=False), 3), ("cuda", ALONE, 0), ("cuda:0", Launched(3, 4, own_device=False), 0),
])  # fmt: skip
def test_a_kind_without_a_number_is_this_rank_s_own_device_where_none_was_made_current(host, asked, launched, index):
    chosen = host("cuda", 4, current=0)
    assert choose_device(asked, launched) == torch.device("cuda", index)
    assert chosen == [index]


def test_an_accelerator_without_float64_is_refused_when_it_is_asked_for(host):
    chosen = host("mps", 1)
    with pytest.raises(MeshError, match=r'mps was asked for, and mps here has no float64, .*Mesh\(device="cpu"\)'):
        choose_device("mps", ALONE)
    assert chosen == []


@pytest.mark.parametrize("kind", [None, "mps"])
def test_without_an_accelerator_that_has_float64_ranks_compute_on_the_cpu(host, kind):
    chosen = host(kind, 1)
    assert choose_device(None, ALONE) == torch.device("cpu")
    assert count_devices() == 0
    assert chosen == []


@pytest.mark.parametrize("fp64", [True, False])
def test_an_accelerator_that_may_lack_float64_is_asked(host, monkeypatch, fp64):
    host("xpu", 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda: SimpleNamespace(has_fp64=fp64))
    assert choose_device(None, ALONE) == torch.device("xpu:0" if fp64 else "cpu")
    assert count_devices() == (2 if fp64 else 0)


@pytest.mark.parametrize(("launched", "ranks", "lacking"), [((2, 0), 3, 1), ((2, 4), 4, 2), ((0, 4), 4, 2)])
def test_more_ranks_than_accelerators_are_refused_on_all_of_them_with_the_arithmetic(host, launched, ranks, lacking):
    chosen = host("cuda", 2)
    said = rf"this host has {ranks} ranks and 2 cuda devices, {lacking} too few .*start 2 on each host"
    with pytest.raises(MeshError, match=said) as error:
        choose_device(None, Launched(*launched, own_device=False))
    assert 'zero3d.Mesh(device="cpu")' in str(error.value)
    assert chosen == []


def test_a_rank_that_is_shown_one_device_alone_takes_it(host):
    host("cuda", 1)
    assert choose_device(None, Launched(3, 4, own_device=True)) == torch.device("cuda:0")
    with pytest.raises(MeshError, match="4 ranks and 1 cuda device, 3 too few"):
        choose_device(None, Launched(3, 4, own_device=False))


def test_two_ranks_on_one_device_are_refused_and_two_devices_are_not(monkeypatch):
    store, devices = HashStore(), {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    for rank, uuid in devices.items():
        module = SimpleNamespace(get_device_properties=lambda device, uuid=uuid: SimpleNamespace(uuid=uuid))
        monkeypatch.setattr(torch, "get_device_module", lambda device, module=module: module)
        if rank < 2:
            claim_device(store, torch.device("cuda:0"), rank)
            claim_device(store, torch.device("cuda:0"), rank)  # once more, as after a restart in this process
        else:
            with pytest.raises(MeshError, match="ranks 0 and 2 both compute on cuda:0"):
                claim_device(store, torch.device("cuda:0"), rank)


@pytest.mark.parametrize(
    ("count", "apart", "said"),
    [(1, [], None), (4, [], None), (2, [(0, 1)], "GPUs 0 and 1 of "), (4, [(1, 2), (1, 3)], "(P2P; 2 of 6 pairs)")],
)
def test_gpus_that_do_not_reach_each_other_are_said_with_what_to_set(monkeypatch, count, apart, said):
    monkeypatch.delenv(P2P_OFF, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart)
    line = without_peer_access(torch.device("cuda", 0))
    assert (line is None) == (said is None)
    if said is not None:
        assert said in line
        assert "set NCCL_P2P_DISABLE=1" in line
    assert without_peer_access(torch.device("cpu")) is None
    monkeypatch.setenv(P2P_OFF, "1")  # it is set already
    assert without_peer_access(torch.device("cuda", 0)) is None
