"""Records of several places behind one store: commits carry the engine's step, and views cost no mapping each."""

import gc
from pathlib import Path

import pytest
import torch

from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.disk_tier import DiskStore, OnDisk
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.offload.ring import Ring, ring_buffers
from zero3d.offload.tiered_records import Address, InPlace, TieredRecords

RECORDS = [Record("one", ((torch.float32, 5000),)), Record("two", ((torch.int16, 64), (torch.float32, 64)))]


@pytest.fixture
def opened(tmp_path):
    """How to open a store of two records on a disk and one in memory, and its slab."""
    stores = []

    def open_store():
        slab = DiskSlab(tmp_path / "slab", 0, {record.name: record.nbytes for record in RECORDS}, "run")
        memory = HostSlab({"ring": ring_buffers(RECORDS)}, torch.device("cpu")).memory["ring"]
        tier = OnDisk(Ring(DiskStore(slab), RECORDS, memory), RECORDS, slab.newest)
        here = InPlace([[torch.zeros(3)]])
        stores.append(TieredRecords([Address(tier, 0), Address(tier, 1), Address(here, 0)], slab))
        return stores[-1], slab

    yield open_store
    for store in stores:
        store.close()


def write(store, value):
    for index in range(3):
        with store.opened(index) as fields:
            for field in fields:
                field.fill_(value)


def values(store):
    return [{float(field.float().mean()) for field in store.view(index)} for index in range(2)]


def mappings(path):
    """How often this process has mapped a file."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_commit_carries_the_number_of_the_engines_step(opened):
    store, slab = opened()
    store.count_from(7)
    write(store, 1)
    store.commit()
    assert slab.steps == (8,)
    store.confirm()
    write(store, 2)
    store.commit()
    assert slab.steps == (9, 8)


def test_going_back_brings_what_was_committed_last(opened):
    store, slab = opened()
    write(store, 1)
    store.commit()
    store.confirm()
    write(store, 2)
    assert values(store) == [{2.0}, {2.0}]
    store.go_back()
    assert values(store) == [{1.0}, {1.0}]
    write(store, 3)
    store.commit()
    assert slab.steps == (2, 1)


def test_what_was_discarded_is_gone_and_records_stay(opened):
    store, slab = opened()
    write(store, 1)
    store.commit()
    store.discard()
    store.discard()
    assert slab.steps == ()
    write(store, 3)
    assert values(store) == [{3.0}, {3.0}]
    store.count_from(20)
    store.commit()
    assert slab.steps == (21,)


def test_records_of_an_earlier_process_can_be_cleared(opened):
    store, slab = opened()
    write(store, 5)
    store.commit()
    store.close()
    store, slab = opened()
    assert (slab.had_steps, slab.steps) == (True, (1,))
    slab.resume(1)
    store.clear()
    assert values(store) == [{0.0}, {0.0}]
    store.go_back()
    assert values(store) == [{5.0}, {5.0}]


def test_views_of_a_record_share_one_mapping(opened):
    store, slab = opened()
    write(store, 1)
    store.drain()
    first = [store.view(0)[0][at : at + 10] for at in range(0, 5000, 10)]
    assert mappings(slab.path) == 1
    assert all(bool((values == 1).all()) for values in first)
    del first
    gc.collect()
    assert mappings(slab.path) == 0
