"""One step of each stage on a fake group of 64 ranks under FakeTensorMode: no data, the same accounting."""

import warnings

import pytest
import torch
import torch.distributed as dist
from models import adamw, build, loss_of, planned_bytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.zero.tokens import count_gathers


@pytest.fixture
def world_of_64():
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "model", "master"), [
    (3, "llama", "split"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (2, "tied", "fp32"), (0, "net", "fp32"), (1, "llama", "fp32"), (3, "llama", "fp32"), (0, "tied", "split"),
    )),
])  # fmt: skip
def test_one_step_of_each_stage(world_of_64, stage, model, master):
    with FakeTensorMode():
        engine = zero3d.Engine(build(model), stage=stage, precision="bf16", optimizer=adamw, master=master)
        engine.gathers.events = []
        ids = torch.randint(0, 60, (2, 9))
        engine.backward(loss_of(engine, ids))
        assert engine.step().applied.numel() == 1
    assert engine.dp.size == 64
    planned = planned_bytes(engine)
    for category, wanted in zip(("parameters", "gradients", "optimizer"), planned, strict=True):
        assert engine.arena.held(category) == wanted
    moved = step_traffic(stage, engine.traffic_units, 64, count_gathers(engine.gathers.events))
    measured = {(e.op, e.unit): tuple(e[3:]) for e in engine.traffic if e.op != "broadcast"}
    assert measured == {key: tuple(value) for key, value in moved.items()}


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (7, 0)])
def test_a_thousand_ranks_of_a_small_model_are_warned_of_its_padding_once(rank, told):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=1000, store=FakeStore())
    try:
        with warnings.catch_warnings(record=True) as caught, FakeTensorMode():
            engine = zero3d.Engine(build("net"), stage=3, precision="bf16", optimizer=adamw)
            engine.backward(loss_of(engine, torch.randint(0, 60, (2, 9))))
        texts = [str(entry.message) for entry in caught if "padding: " in str(entry.message)]
        assert len(texts) == told
        assert all("dp=1000 cuts" in text for text in texts)
        memory = {entry.category: entry for entry in engine.memory}
        assert memory["padding"].planned == memory["padding"].measured
    finally:
        dist.destroy_process_group()
