"""Records through a ring: what is used is what the tier holds, one after the other, and errors come out of the calls."""

import errno
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import torch

from zero3d.errors import CheckpointError
from zero3d.offload import ring as module
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.disk_tier import DiskStore
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.offload.ring import DEPTH, HostStore, Ring, ring_buffers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import COMPUTE, Model, Stream

CPU = torch.device("cpu")
ELEMENTS = (16, 4096, 48, 100_000, 1024)


def split(name, elements):
    return Record(name, ((torch.int16, elements), (torch.float32, elements)))


RECORDS = [split(f"block.{i}", elements) for i, elements in enumerate(ELEMENTS)]


class Bed:
    """A tier of RECORDS and a ring on the CPU; `ended` waits for what was retired and has it committed."""

    def __init__(self, kind, folder, records=RECORDS):
        host = {"states": records} if kind == "host" else {}
        self.slab = HostSlab({"ring": ring_buffers(records), **host}, CPU)
        self.disk = DiskSlab(folder, 0, {r.name: r.nbytes for r in records}, "run") if kind == "disk" else None
        self.tier = HostStore(self.slab.memory["states"]) if kind == "host" else DiskStore(self.disk)
        self.ring = Ring(self.tier, records, self.slab.memory["ring"])
        self.records, self.step = records, 0

    def ended(self):
        self.ring.drain()
        if self.disk is not None:
            self.disk.commit(self.step)
            self.disk.confirm(self.step)
        self.step += 1

    def fill(self):
        """Write the first contents: the record's number, everywhere."""
        for index in range(len(self.records)):
            for field in self.ring.fetch(index):
                field.fill_(index)
            self.ring.retire(index)
        self.ended()
        return self

    def close(self):
        self.ring.close()
        if self.disk is not None:
            self.disk.close()


@pytest.fixture(params=["host", "disk"])
def bed(request, tmp_path):
    bed = Bed(request.param, tmp_path)
    yield bed.fill()
    bed.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_step_finds_what_the_last_one_left(bed, seed):
    draw = random.Random(seed)
    for step in range(5):
        order = draw.sample(range(len(RECORDS)), len(RECORDS))
        for place, index in enumerate(order):
            low, m = bed.ring.fetch(index)
            for coming in order[place + 1 : place + 1 + draw.randrange(4)]:
                bed.ring.ahead(coming)
            assert (low.dtype, m.dtype, low.numel()) == (torch.int16, torch.float32, ELEMENTS[index])
            assert low.unique().tolist() == m.unique().tolist() == [index + 10 * step]
            low.add_(10)
            m.add_(10)
            bed.ring.retire(index)
        bed.ended()


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_records_than_buffers_are_read_after_they_are_written(tmp_path, count):
    for kind in ("host", "disk"):
        bed = Bed(kind, tmp_path / kind, RECORDS[3:4] * count if count == 1 else RECORDS[3:]).fill()
        for step in range(6):
            for index in range(count):
                bed.ring.ahead((index + 1) % count)
                fields = bed.ring.fetch(index)
                assert all(field.unique().tolist() == [index + step] for field in fields)
                for field in fields:
                    field.add_(1)
                bed.ring.retire(index)
            bed.ended()
        bed.close()


def test_what_is_not_changed_is_not_written(bed):
    for value in (2, 2):
        low, _ = bed.ring.fetch(2)
        assert low.unique().tolist() == [value]
        low.fill_(99)
        bed.ring.retire(2, changed=False)
    bed.ring.ahead(3)
    bed.ring.retire(3, changed=False)  # it was not needed after all
    assert bed.ring.fetch(4)[0].unique().tolist() == [4]
    bed.ring.retire(4, changed=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_record_that_is_put_is_not_read_first(bed, monkeypatch, seed):
    draw, wanted = random.Random(seed), dict.fromkeys(range(len(RECORDS)), None)
    load, read = bed.tier.load, []
    monkeypatch.setattr(bed.tier, "load", lambda index, *rest: (read.append(index), load(index, *rest)))
    for value in range(40):
        index = draw.randrange(len(RECORDS))
        if draw.random() < 0.6:
            for field in bed.ring.put(index):
                field.fill_(value)
            wanted[index] = value
            bed.ring.retire(index)
            assert read == []
        else:
            fields = bed.ring.fetch(index)
            value = index if wanted[index] is None else wanted[index]
            assert all(field.unique().tolist() == [value] for field in fields)
            bed.ring.retire(index, changed=False)
            assert read.pop() == index
        assert bed.ring.idle == DEPTH


def test_what_is_wanted_waits_for_a_buffer_and_too_much_in_use_is_an_error(bed):
    for index in range(5):
        bed.ring.ahead(index)
    for index in range(DEPTH):
        bed.ring.fetch(index)
    with pytest.raises(
        AssertionError, match=r"record block\.3: all 3 buffers hold others: block\.0, block\.1, block\.2"
    ):
        bed.ring.fetch(3)
    bed.ring.retire(1)
    assert bed.ring.fetch(3)[0].unique().tolist() == [3]
    for index in (0, 2, 3):
        bed.ring.retire(index)
    bed.ring.retire(4, changed=False)


def test_one_is_read_and_one_written_while_one_is_used(bed, monkeypatch):
    """Whoever comes third ends it for the others: without all three at once it would hang."""
    met, seen = threading.Barrier(3, timeout=60), []
    load, store = bed.tier.load, bed.tier.store

    def meeting(call, index, what):
        def called(*arguments):
            if arguments[0] == index:
                met.wait()
                seen.append(what)
            call(*arguments)

        return called

    bed.ring.fetch(0)
    bed.ring.fetch(1)
    monkeypatch.setattr(bed.tier, "load", meeting(load, 2, "read 2"))
    monkeypatch.setattr(bed.tier, "store", meeting(store, 0, "write 0"))
    bed.ring.retire(0)
    bed.ring.ahead(2)
    met.wait()  # compute uses 1
    bed.ring.fetch(2)
    for index in (1, 2):
        bed.ring.retire(index, changed=False)
    bed.ring.drain()
    assert sorted(seen) == ["read 2", "write 0"]


def test_after_construction_no_memory_is_allocated(bed, monkeypatch):
    places = {memory.data_ptr() for memory in bed.slab.memory["ring"]}
    for name in ("empty", "zeros", "empty_like", "frombuffer"):
        monkeypatch.setattr(torch, name, None)
    seen = set()
    for _ in range(4):
        for index in range(len(RECORDS)):
            seen.add(bed.ring.fetch(index)[0].data_ptr())
            bed.ring.retire(index)
        bed.ring.drain()
    assert seen == places


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_a_disk_comes_out_of_the_next_call_with_the_records_name(tmp_path, monkeypatch, call):
    bed = Bed("disk", tmp_path).fill()

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    bed.ring.fetch(1)
    monkeypatch.setattr(os, call, broken)
    with pytest.raises(
        CheckpointError, match=r"record block\.[12] \(.* bytes\) cannot be (read|written): .*Input/output error"
    ):
        bed.ring.retire(1)
        for _ in range(2):
            bed.ring.fetch(2)
            bed.ring.retire(2)
        bed.ring.drain()
    if call == "pwritev":  # it stays broken
        for again in (bed.ring.drain, lambda: bed.ring.fetch(3), lambda: bed.ring.fetch(1)):
            with pytest.raises(CheckpointError, match=r"record block\.[12] .* cannot be written"):
                again()
    bed.close()
    monkeypatch.undo()
    with DiskSlab(tmp_path, 0, {r.name: r.nbytes for r in RECORDS}, "run") as disk:
        assert disk.steps == (0,)


def test_any_other_error_says_while_which_record_was_moved(bed, monkeypatch):
    def broken(*_):
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(bed.tier, "load", broken)
    with pytest.raises(RuntimeError, match="the copy failed") as caught:
        bed.ring.fetch(3)
    assert caught.value.__notes__ == ["while record block.3 was moved"]


def test_closing_waits_for_what_is_under_way(tmp_path, monkeypatch):
    before = set(threading.enumerate())
    bed = Bed("host", tmp_path).fill()
    store, ended, may_end = bed.tier.store, [], threading.Event()

    def slow(*arguments):
        may_end.wait()
        store(*arguments)
        ended.append(arguments[0])

    monkeypatch.setattr(bed.tier, "store", slow)
    for index in (0, 1):
        bed.ring.fetch(index)
        bed.ring.retire(index)
    bed.ring.ahead(2)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    bed.ring.close()
    assert ended == [0, 1]
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before


# --- streams of an accelerator --------------------------------------------------------------------------------------


class Streams:
    """Streams and events in place of torch's, with every copy and use in a race model.

    without  what is left out: waits for one kind of event, or the host's for the end ("drain")
    """

    def __init__(self, monkeypatch, without=None):
        self.model = model = Model()
        self.made = {"streams": 0, "events": 0}

        class Event:
            def __init__(event, device):
                event.name = ("arrived", "used", "gone")[self.made["events"] % 3]
                event.moment = None
                self.made["events"] += 1

            def record(event, stream):
                event.moment = model.clocks.moment(stream.name)

            def synchronize(event):
                if event.moment is not None and without != "drain":
                    model.clocks.wait(COMPUTE, event.moment)

        class Side(Stream):
            def wait_event(stream, event):
                if event.moment is not None and event.name != without:
                    model.clocks.wait(stream.name, event.moment)

            def synchronize(stream): ...

        def make(device):
            self.made["streams"] += 1
            return Side(model, f"side {self.made['streams']}")

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(torch, "Stream", make)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Side(model, model.stream))
        monkeypatch.setattr(module, "copy_bytes", lambda into, source: model.run("copy", [source], [into]))

    def use(self, fields):
        self.model.run("use", fields, fields)


@pytest.mark.parametrize("without", [None, "arrived", "used", "gone", "drain"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_on_an_accelerator_streams_wait_for_what_they_need(monkeypatch, without, count):
    streams = Streams(monkeypatch, without)
    records = RECORDS[:count]
    memory = [torch.zeros(record.nbytes, dtype=torch.uint8) for record in records]
    buffers = [torch.empty(record.nbytes, dtype=torch.uint8, device="meta") for record in ring_buffers(records)]
    streams.use(buffers)  # as compute used this memory before
    with Ring(HostStore(memory), records, buffers) as ring:
        for step in range(3):
            for index in range(count):
                streams.use(ring.fetch(index))
                if (step, index) != (2, count - 1):
                    ring.ahead((index + 1) % count)
                ring.retire(index, changed=(step + index) % 3 > 0)
        ring.drain()
        streams.use(memory)
    assert streams.made["streams"] == 2
    assert bool(streams.model.races) == (without is not None)


@pytest.mark.parametrize("without", [None, "arrived", "used", "gone"])
def test_on_an_accelerator_what_is_put_waits_for_what_was_in_its_buffer(monkeypatch, without):
    streams = Streams(monkeypatch, without)
    memory = [torch.zeros(record.nbytes, dtype=torch.uint8) for record in RECORDS]
    buffers = [torch.empty(record.nbytes, dtype=torch.uint8, device="meta") for record in ring_buffers(RECORDS)]
    with Ring(HostStore(memory), RECORDS, buffers) as ring:
        for _ in range(2):
            for index in range(len(RECORDS)):
                streams.use(ring.put(index))
                ring.retire(index)
            for index in reversed(range(len(RECORDS))):
                if index:
                    ring.ahead(index - 1)
                streams.use(ring.fetch(index))
                ring.retire(index, changed=False)
    assert bool(streams.model.races) == (without is not None)


def random_trace(monkeypatch, seed, without=None):
    """Races of a ring that is asked for anything in any order, as far as there are buffers."""
    streams, draw = Streams(monkeypatch, without), random.Random(seed)
    memory = [torch.zeros(record.nbytes, dtype=torch.uint8) for record in RECORDS]
    buffers = [torch.empty(record.nbytes, dtype=torch.uint8, device="meta") for record in ring_buffers(RECORDS)]
    used = []
    with Ring(HostStore(memory), RECORDS, buffers) as ring:
        for _ in range(draw.randrange(10, 60)):
            index = draw.randrange(len(RECORDS))
            do = draw.choice(["put", "fetch", "ahead", "give up", "retire", "retire", "drain"])
            held = index in ring._held or index in ring._wanted
            if do == "put" and ring.idle and not held:
                streams.use(ring.put(index))
                used.append(index)
                if draw.random() < 0.8:
                    ring.retire(used.pop())
            elif do == "fetch" and index not in used and len(used) < DEPTH:
                streams.use(ring.fetch(index))
                used.append(index)
            elif do == "ahead":
                ring.ahead(index)
            elif do == "give up" and index in ring._held and index not in used:
                ring.retire(index, changed=False)
            elif do == "retire" and used:
                ring.retire(used.pop(draw.randrange(len(used))), changed=draw.random() < 0.6)
            elif do == "drain" and draw.random() < 0.1:
                ring.drain()
        for index in used:
            ring.retire(index)
        ring.drain()
        streams.model.run("read", memory, [])
    return streams.model.races


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 4000), marks=pytest.mark.long)], ids=len)
def test_on_an_accelerator_random_traces_have_no_races(monkeypatch, seeds):
    assert {seed: races for seed in seeds if (races := random_trace(monkeypatch, seed))} == {}


@pytest.mark.parametrize("without", ["arrived", "used", "gone", "drain"])
def test_random_traces_find_each_wait_that_is_left_out(monkeypatch, without):
    assert any(random_trace(monkeypatch, seed, without) for seed in range(20))


def test_on_an_accelerator_reads_do_not_wait_for_the_writes_beside_them(monkeypatch):
    streams = Streams(monkeypatch)
    memory = [torch.zeros(record.nbytes, dtype=torch.uint8) for record in RECORDS]
    buffers = [torch.empty(record.nbytes, dtype=torch.uint8, device="meta") for record in ring_buffers(RECORDS)]
    with Ring(HostStore(memory), RECORDS, buffers) as ring:
        for index in range(3):
            ring.ahead(index + 1)
            streams.use(ring.fetch(index))
            ring.retire(index)
        reading, writing = (streams.model.clocks.moment(f"side {number}") for number in (1, 2))
        assert reading["side 2"] < writing["side 2"]  # 3 is on its way, into the buffer of 0, and 2 is not yet back


def on_the_stand_in(folder):
    """Steps through a disk and a device with memory of its own; what the last one found."""
    from instruments.accelerator import pin, register

    device = register()
    disk = DiskSlab(Path(folder), 0, {record.name: record.nbytes for record in RECORDS}, "run")
    host = HostSlab({"staging": ring_buffers(RECORDS)}, CPU)
    staging = [pin(memory) for memory in host.memory["staging"]]
    buffers = [torch.zeros(record.nbytes, dtype=torch.uint8, device=device) for record in ring_buffers(RECORDS)]
    with Ring(DiskStore(disk), RECORDS, buffers, staging) as ring, disk:
        for step in range(4):
            found = []
            for index in range(len(RECORDS)):
                ring.ahead((index + 1) % len(RECORDS))
                fields = ring.fetch(index)
                if step == 0:
                    for field in fields:
                        field.fill_(index)
                found.append([field.cpu().unique().tolist() for field in fields])
                for field in fields:
                    field.add_(10)
                ring.retire(index)
            ring.drain()
            disk.commit(step)
            disk.confirm(step)
    return found


def test_a_disk_and_a_device_with_its_own_memory_pass_records_through_the_host(alone, tmp_path):
    assert alone(on_the_stand_in, str(tmp_path)) == [[[index + 30], [index + 30]] for index in range(len(RECORDS))]
