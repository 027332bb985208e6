"""With states off the device no copy, thread or disk touches memory that another still uses, and nothing comes early.

Vector clocks over training on a stand-in accelerator: streams, rings, pinned slabs and threads are those of one.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from buckets import buckets_of
from meshes import engine_of, micro_batches, sum_of
from models import adamw
from pipelines import covering
from tensors import tiny

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

PLACES = {
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "part": {"optimizer": "host", "fraction": 0.5},
    "params host": {"optimizer": "host", "params": "host"},
    "params disk": {"optimizer": "disk", "params": "disk"},
    "gradients": {"optimizer": "host", "gradients": "host"},
    "narrow gradients": {"optimizer": "host", "gradients": "host", "gradient_dtype": "bf16"},
    "all on host": {"optimizer": "host", "params": "host", "gradients": "host"},
}
SETTINGS = (
    ((1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)),  # dp, tp, pp
    (0, 1, 2, 3),
    tuple(PLACES),
    ("device", "host"),
    ("fp32", "split"),
    ("fp32", "bf16"),  # moments
)


def is_possible(case):
    (_, tp, pp), stage, place, *_ = case
    offload = PLACES[place]
    alone = tp == pp == 1 or "gradient_dtype" not in offload
    return alone and (stage == 3 or "params" not in offload) and (stage > 1 or "gradients" not in offload)


def run(case, without=""):
    """Races and the log of some steps, and of all that reads or writes what is off the device between them."""
    from instruments import accelerator
    from instruments.host_races import AcceleratedMesh, on_accelerator
    from instruments.races import alone_in

    if not hasattr(run, "registered"):
        run.registered = accelerator.register()
    (dp, tp, pp), stage, place, executor, master, moments = case
    world, count = dp * tp * pp, 4 if pp > 1 else 2
    on_disk = "disk" in PLACES[place].values()
    with (
        tempfile.TemporaryDirectory() as folder, buckets_of(1024), alone_in(world, rank=(pp - 1) * dp * tp),
        on_accelerator(without) as model,
    ):  # fmt: skip
        offload = {**PLACES[place], "executor": executor, "moments": moments}
        engine = engine_of(
            tiny("llama", kv_heads=4, layers=4 if pp > 1 else 2), AcceleratedMesh(model, dp, tp, pp), stage=stage,
            precision="bf16", master=master, optimizer=adamw, loss=sum_of, accumulate=count, schedule="1f1b" if pp > 1 else None,
            reduce="every_micro_batch" if stage > 1 else "auto", offload=offload | ({"directory": folder} if on_disk else {}),
        )  # fmt: skip

        def given(number, count):
            batches = micro_batches(number, count)
            return [{name: values.to(engine.mesh.device) for name, values in each.items()} for each in batches]

        def train(number):
            engine.train_batch(given(number, count), wait=False)
            assert engine.last_step.reason == "applied"

        train(0)
        engine.evaluate(given(0, 2))
        train(1)
        with engine.full_params():
            list(engine.module.parameters())
        train(2)
        if world == 1:
            engine.fingerprint()
            train(3)
            engine.save(f"{folder}/checkpoints")
            train(4)
            engine.load(f"{folder}/checkpoints")
            train(5)
        engine.release()
        assert model.operations > 500
        return dict(model.races), model.log


def check(races, log):
    """No races; no unit is used before its update has landed, and records are brought before a backward has ended."""
    from instruments.host_races import BACKWARD_ENDED, PREFETCHED, UPDATED, USED

    assert races == {}
    last, begun = {}, False
    for entry in log:
        if entry.what == UPDATED:
            last[entry.unit] = entry
        elif entry.what == USED and entry.unit in last:
            assert last[entry.unit].before(entry)
        elif entry.what == BACKWARD_ENDED:
            assert begun
        begun = entry.what == PREFETCHED or (begun and entry.what != BACKWARD_ENDED)
    assert last


QUICK = ((1, 1, 1), 3, "all on host", "host", "split", "fp32")
# What is left out, and a place that needs it. Not the wait before the norm ("norm"): dividing gradients on the host by the
# sum of weights, which is on the device, waits for that, too.
FAULTS = {
    "arrived": "host", "used": "host", "gone": "host", "staging": "host", "result": "host", "follow": "host",
    "leaving": "gradients", "copies": "params disk", "staged": "gradients",
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [QUICK, pytest.param(((1, 1, 1), 2, "narrow gradients", "device", "fp32", "fp32"), marks=pytest.mark.long)],
    ids=["all", "narrow"],
)
def test_copies_threads_and_disks_are_ordered(alone, case):
    check(*alone(run, case))


def measured():
    """Races of the copies by which an executor is chosen, and the rates."""
    from unittest import mock

    import torch
    from instruments import accelerator
    from instruments.host_races import AcceleratedMesh, on_accelerator
    from instruments.races import alone_in

    from zero3d.offload import rates, tiers

    device = accelerator.register()
    with (
        alone_in(1), on_accelerator() as model,
        mock.patch.multiple(rates, COPIED=4096, UPDATED=4096, HostSlab=tiers.HostSlab),
    ):  # fmt: skip
        arena = AcceleratedMesh(model).make_arena(device)
        arena.borrow("wire", 1024, torch.uint8).zero_()
        found = rates.measure_rates(arena, 2)
        return dict(model.races), list(found), float(arena.live("wire"))


def test_what_is_copied_to_measure_is_ordered_and_given_back(alone):
    races, rates, held = alone(measured)
    assert races == {}
    assert min(rates) > 0
    assert held == 1024


def brought_back(without):
    """Races of a shard that goes to the host, and comes back on a side stream for the next sum."""
    import torch
    from instruments import accelerator
    from instruments.host_races import on_accelerator

    from zero3d.memory.arena import Arena
    from zero3d.offload import tiers
    from zero3d.offload.records import Record
    from zero3d.zero.gradient_shards import HostShard
    from zero3d.zero.streams import ToHost
    from zero3d.zero.unit_parts import UnitParts

    device = accelerator.register()
    with on_accelerator(without) as model:
        (kept,) = tiers.HostSlab({"kept": [Record("kept", ((torch.float32, 64),))]}, device).views["kept"][0]
        arena, to_host, side = Arena(device), ToHost(device, behind=True), torch.Stream(device)
        shard = HostShard(kept, UnitParts(None, None, arena, None, to_host=to_host))
        shard.receive(torch.float32, add=False).fill_(1)
        shard.keep_received()
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            sums = shard.receive(torch.float32, add=True)
        assert arena.live("bucket") == 2 * sums.nbytes
        to_host.finish()
        assert arena.live("bucket") == sums.nbytes
        return dict(model.races)


@pytest.mark.parametrize("without", ["", "down"])
def test_a_shard_comes_back_from_the_host_when_it_is_there(alone, without):
    assert bool(alone(brought_back, without)) is bool(without)


def through_staging(folder, without):
    """Races of a ring that reads records of a disk into staging memory from which nothing was taken back."""
    import torch
    from instruments import accelerator
    from instruments.host_races import on_accelerator

    from zero3d.offload import tiers
    from zero3d.offload.disk_slab import DiskSlab
    from zero3d.offload.disk_tier import DiskStore
    from zero3d.offload.records import Record
    from zero3d.offload.ring import Ring, ring_buffers

    device, cpu = accelerator.register(), torch.device("cpu")
    records = [Record(f"block.{number}", ((torch.float32, 1024),)) for number in range(5)]
    with on_accelerator(without) as model:
        disk = DiskSlab(Path(folder), 0, {record.name: record.nbytes for record in records}, "run")
        staging = tiers.HostSlab({"staging": ring_buffers(records)}, cpu).memory["staging"]
        buffers = [torch.zeros(memory.numel(), dtype=torch.uint8, device=device) for memory in staging]
        with disk, Ring(DiskStore(disk), records, buffers, staging) as ring:
            for number in range(5):
                ring.fetch(number)[0].add_(1)
                ring.retire(number)
            ring.drain()
            disk.commit(1)
            disk.confirm(1)
            for number in (0, 1, 2, 3, 4, 0):
                ring.fetch(number)[0].sum()
                ring.retire(number, changed=False)
            ring.drain()
        return dict(model.races)


def copied_by_the_device(folder, seeds, without):
    """Seeds whose random traces have races: a device copies from and to a ring of the host's buffers, beside a disk."""
    import random

    import torch
    from instruments import accelerator
    from instruments.host_races import on_accelerator

    from zero3d.offload import tiers
    from zero3d.offload.disk_slab import DiskSlab
    from zero3d.offload.disk_tier import DiskStore
    from zero3d.offload.records import Record
    from zero3d.offload.ring import Ring, ring_buffers

    device, cpu = accelerator.register(), torch.device("cpu")
    records = [Record(f"block.{number}", ((torch.float32, 1024),)) for number in range(6)]
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        with on_accelerator(without) as model:
            disk = DiskSlab(Path(folder) / str(seed), 0, {record.name: record.nbytes for record in records}, "run")
            buffers = tiers.HostSlab({"ring": ring_buffers(records)}, cpu).memory["ring"]
            here, streams, held = torch.zeros(6, 1024, device=device), [torch.Stream(device) for _ in range(2)], {}
            with disk, Ring(DiskStore(disk), records, buffers) as ring:
                for _ in range(30):
                    number = draw.randrange(6)
                    if number not in held and len(held) < 3:
                        held[number] = ring.fetch(number)[0], draw.random() < 0.5
                        values, changed = held[number]
                        with draw.choice(streams):
                            into, source = (values, here[number]) if changed else (here[number], values)
                            into.copy_(source, non_blocking=True)
                            ring.used(number, device)
                    elif held:
                        last = draw.choice(list(held))
                        ring.retire(last, held.pop(last)[1])
                for last, (_, changed) in held.items():
                    ring.retire(last, changed)
                ring.drain()
            if any("ring" in race.buffer for race in model.races):
                found.append(seed)
    return found


def test_random_traces_of_a_ring_that_a_device_copies_from_have_no_races(alone, tmp_path):
    assert alone(copied_by_the_device, str(tmp_path), range(40), "") == []


def test_random_traces_find_that_a_disk_does_not_wait_for_such_a_copy(alone, tmp_path):
    assert alone(copied_by_the_device, str(tmp_path), range(5), "copies")


@pytest.mark.parametrize("without", ["", "read"])
def test_a_disk_reads_into_staging_memory_when_what_was_there_is_on_the_device(alone, tmp_path, without):
    assert bool(alone(through_staging, str(tmp_path), without)) is bool(without)


@pytest.mark.long
@pytest.mark.parametrize("case", covering(SETTINGS, is_possible), ids=lambda case: " ".join(map(str, case)))
def test_pairs_of_settings_have_no_races(alone, case):
    check(*alone(run, case))


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_found(alone, fault):
    executor = "host" if fault in ("staging", "result", "follow") else "device"
    stage = 3 if "params" in FAULTS[fault] else 2
    races, _ = alone(run, ((1, 1, 1), stage, FAULTS[fault], executor, "fp32", "fp32"), fault)
    assert races
