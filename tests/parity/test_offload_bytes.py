"""Bytes of states off the device: planned and held at every place, made once, also of odd models."""

import ctypes
import gc
import os
import tracemalloc
import warnings
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from buckets import buckets_of
from models import adamw, batch, bits, build, fill_gradients
from pipelines import covering
from tiers import OPTIMIZERS, PLACES, RESIDENT, Case, engine_of, is_possible, step, sum_of, unplanned
from torch import nn

import zero3d
from zero3d.memory.arena import TRANSIENT
from zero3d.offload.host_adam import CHUNK
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.ring import Ring
from zero3d.offload.rounding import TILE

AWAY = [place for place in PLACES if place != RESIDENT]


def away(place, folder):
    """An offload, with a folder where it needs one."""
    return {**PLACES[place], "directory": folder}


# --- planned and held -----------------------------------------------------------------------------

STAGES = ((0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"), (3, "every_step"))
FORMS = (("bf16", "fp32"), ("bf16", "split"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp32"))
MODELS = (("net", False), ("tied", False), ("net", True))


def of_settings(given):
    (stage, release), (precision, master), optimizer, micro_batches, (model, frozen), place = given
    moments = (micro_batches, "auto")
    return Case(1, stage, release, moments, precision, master, optimizer, False, False, model, frozen), place


SETTINGS = covering(
    (STAGES, FORMS, tuple(OPTIMIZERS), (1, 4), MODELS, AWAY), lambda given: is_possible(*of_settings(given))
)


def check_bytes(folder, given, bucket):
    case, place = of_settings(given)
    made, slabs = HostSlab.__init__, []

    def counted(self, *given):
        made(self, *given)
        slabs.append(self.nbytes)

    with buckets_of(bucket), mock.patch.object(HostSlab, "__init__", counted):
        engine = engine_of(case, away(place, folder))
        fill_gradients(engine)
        if case.optimizer.startswith(("fused", "foreach", "AdamW")):
            assert not unplanned(engine), "before a step"
        for number in range(2):
            step(engine, case, number)
        assert not unplanned(engine), case
        tiers = engine._parts.tiers
        rows = [
            row for row in engine.memory if row.category != "frozen originals"
        ]  # no slab's: tests/parity/test_close.py
        held = {where: sum(row.measured for row in rows if row.place == where) for where in ("host", "disk")}
        threads = len(os.sched_getaffinity(0))  # of one rank, which has them for itself
        scratch = ((4 * threads + 1) * CHUNK + TILE) * 4 if tiers.executor == "host" else 0  # of the executor
        assert held["host"] == sum(slabs) + scratch, case
        files = [*folder.glob("*.states"), *folder.glob("*.frozen")] if folder.is_dir() else []
        assert held["disk"] == sum(file.stat().st_size for file in files), case


@pytest.mark.parametrize("given", SETTINGS[:4])
def test_bytes_of_every_place_are_those_planned(tmp_path, given):
    check_bytes(tmp_path, given, 1024)


@pytest.mark.long
@pytest.mark.parametrize("bucket", [1024, 1 << 18])
def test_bytes_of_every_place_are_those_planned_for_all_pairs(tmp_path, bucket):
    for number, given in enumerate(SETTINGS):
        check_bytes(tmp_path / str(number), given, bucket)
        gc.collect()


def test_bytes_of_a_parameter_are_those_of_the_formulas(tmp_path):
    """12 on the host, 10 with a split master, 6 with bf16 moments; on a disk 12, 12 and 8, twice."""
    found = {}
    for master, moments in (("fp32", "fp32"), ("split", "fp32"), ("split", "bf16")):
        for place in ("host", "disk"):
            offload = {"optimizer": place, "moments": moments, "directory": tmp_path / f"{master}{moments}"}
            engine = zero3d.Engine(nn.Linear(64, 256, bias=False), stage=2, master=master, offload=offload)
            (row,) = (row for row in engine.memory if (row.category, row.place) == ("optimizer", place))
            found[master, moments, place] = row.measured / (64 * 256)
    assert list(found.values()) == [12, 24, 10, 24, 6, 16]


# --- after the first step -------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("place", "stage"), [
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("disk, device updates", 1), ("all on host", 3), ("host", 2), ("part on host", 0),
    )),
    ("all on disk", 3),
])  # fmt: skip
def test_after_the_first_step_nothing_is_allocated_for_tiers(tmp_path, place, stage):
    case = Case(stage=stage, master="split")
    with buckets_of(2048), ExitStack() as stack:
        engine = engine_of(case, away(place, tmp_path))
        arenas = engine._parts.tiers.arenas | {"device": engine.arena}

        def flushed(number):
            step(engine, case, number)
            engine.optimizer.flush()
            held = {(name, c): arenas[name].live(c) for name in arenas for c in (*arenas[name]._live, *TRANSIENT)}
            return held, {key: arenas[key[0]].peak(key[1]) for key in held}

        flushed(0)
        flushed(1)
        refused = AssertionError("made after the first step")
        for made in (HostSlab, Ring):
            stack.enter_context(mock.patch.object(made, "__init__", side_effect=refused))
        stack.enter_context(mock.patch("torch.Stream", side_effect=refused))
        stack.enter_context(mock.patch("mmap.mmap", side_effect=refused))
        found = [flushed(number) for number in (2, 3, 7)]  # every way of waiting
        assert all(each == found[0] for each in found)
        gc.collect()
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        flushed(8)
        first, _ = tracemalloc.get_traced_memory()
        for number in (9, 10, 11, 12):
            flushed(number)
        gc.collect()
        last, _ = tracemalloc.get_traced_memory()
        assert last < first + 100_000


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "stage"), [(RESIDENT, 2), ("host", 2), ("host, device updates", 0), ("disk", 1), ("all on disk", 3)]
)
def test_memory_of_the_process_is_what_is_planned_and_little_more(alone, tmp_path, place, stage):
    accounted, most, *found = alone(grown, place, stage, str(tmp_path))
    print(
        f"{place}: {accounted / 1e6:.1f} MB accounted, {found[-1] / 1e6:.1f} MB held, {most / 1e6:.1f} MB with freed ones"
    )
    assert max(found[1:]) - found[1] < 5e6
    assert found[-1] < 1.05 * accounted + 20e6
    assert most < 2 * accounted + 100e6


def grown(place, stage, folder):
    """Bytes on the accounts of device and host, and those that the process has more after each of some steps.

    Without what C's allocator keeps of memory that was freed; first the most with that.
    """
    import psutil

    trim = ctypes.CDLL(None).malloc_trim

    def held():
        trim(0)
        return process.memory_info().rss

    process = psutil.Process()
    zero3d.Engine(build("net"), stage=2, loss=sum_of).train_batch(given(0))
    model = build("net", width=768, layers=4)
    before = held() - sum(p.nbytes for p in model.parameters())
    engine = zero3d.Engine(model, stage=stage, optimizer=adamw, loss=sum_of, offload=away(place, folder))
    found, most = [], 0
    for number in range(8):
        engine.train_batch(given(number))
        most = max(most, process.memory_info().rss - before)
        found.append(held() - before)
    return sum(row.peak for row in engine.memory if row.place != "disk"), most, *found


# --- odd models -----------------------------------------------------------------------------------


def given(number):
    return [{"ids": batch(number), "factor": torch.tensor(1.0)}]


class Odd(nn.Module):
    """Parameters of one element, one that is longer than a bucket, a frozen module, buffers, a parameter without use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(61, 24)
        self.scale = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.long = nn.Linear(24, 600)
        self.head = nn.Linear(600, 61)

    def forward(self, ids):
        x = self.embed(ids) * self.scale + self.scalar
        for block in self.blocks:
            x = x + block(x)
        self.calls += 1
        return self.head(torch.relu(self.long(self.frozen(x) * self.calls.to(x.dtype))))


class Many(nn.Module):
    """Tensors of 1 to 5 elements."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(61, 5)
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(1 + i % 5)) for i in range(count))
        self.head = nn.Linear(5, 61)

    def forward(self, ids):
        return self.head(self.embed(ids) + torch.stack([shift.sum() for shift in self.shifts]).sum())


def run(make, place, folder, stage, bucket, **options):
    with buckets_of(bucket), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small units are mostly padding
        engine = zero3d.Engine(
            make(), stage=stage, precision="bf16", optimizer=adamw, loss=sum_of, offload=away(place, folder), **options
        )
        losses = [float(engine.train_batch(given(number), wait=False)) for number in range(2)]
        found = losses, engine.fingerprint(), bits(engine.module.state_dict().values()) if stage < 3 else ""
        assert not unplanned(engine)
        return found


EMPTY = [{"match": "nothing.of.this.name", "lr": 1.0}, {"match": "*bias", "lr": 3e-2}]


@pytest.mark.parametrize(("place", "stage", "master"), [
    ("all on disk", 3, "split"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("host", 0, "split"), ("disk, device updates", 2, "fp32"), ("all on host", 3, "fp32"),
    )),
])  # fmt: skip
def test_odd_parameters_and_empty_groups_have_the_bits_of_states_on_the_device(tmp_path, place, stage, master):
    options = {"master": master, "param_groups": EMPTY}
    small, large = 512, 1 << 18  # buckets
    wanted = run(Odd, RESIDENT, None, stage, large, **options)
    for where, bucket in ((place, small), (place, large), (RESIDENT, small))[: 3 if master == "split" else 2]:
        assert run(Odd, where, tmp_path, stage, bucket, **options) == wanted, (where, bucket)


@pytest.mark.long
@pytest.mark.parametrize("count", [120, 5000])
@pytest.mark.parametrize(("place", "stage"), [("host", 2), ("all on disk", 3)])
def test_many_small_tensors_have_the_bits_of_states_on_the_device(tmp_path, place, stage, count):
    found = [run(partial(Many, count), where, tmp_path, stage, 1 << 14) for where in (RESIDENT, place)]
    assert found[1] == found[0]


class Long(nn.Module):
    """An embedding that is longer than a CPU's bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(61, 4500), nn.Linear(4500, 61)

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.long  # than a small bucket: Odd's of a run with that
def test_a_parameter_longer_than_a_bucket_of_a_cpu(tmp_path):
    places = (RESIDENT, "host", "disk, device updates")
    found = [run(Long, place, tmp_path / place, 2, 1 << 18, master="split") for place in places]
    assert found[1:] == [found[0]] * 2


# --- odd models on ranks --------------------------------------------------------------------------


def on_ranks(folder):
    """Odd models at every dp: shards that are nothing but padding, and tied weights."""
    found = []
    for make, stage in ((Odd, 1), (Odd, 3), (lambda: build("tied", width=24), 3)):
        runs = [
            run(make, place, folder, stage, 256) for place in (RESIDENT, "host", "disk" if stage < 3 else "all on disk")
        ]
        found.append(runs[1:] == [runs[0]] * 2)
    return found


@pytest.mark.parametrize("dp", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_ranks_whose_shards_are_padding_have_the_bits_of_states_on_the_device(ranks, tmp_path, dp):
    assert ranks(dp, on_ranks, str(tmp_path)) == [[True] * 3] * dp
