"""A step's launches: an engine has about as many as FSDP2, and what it reads of the device it reads at once."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, build, loss_of
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import zero3d
from zero3d.distributed.axis import Axis, Call
from zero3d.distributed.collectives import Comm
from zero3d.watchdog.heartbeat import Heartbeat
from zero3d.zero.optimizer import multiply, piece_norms

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from instruments.dispatches import Dispatches, Step, count
from instruments.step_seconds import Rank, show


@pytest.fixture(scope="module")
def stage3():
    return count("stage3")


def test_a_step_of_32_blocks_is_27_launches(stage3):
    step = stage3.step.by_name
    assert step.total() == 27
    assert step["c10d::_allgather_base_"] == 2  # weight with orders, norms
    single = (
        "linalg_vector_norm",
        "_foreach_norm",
        "_foreach_mul_",
        "_foreach_copy_",
        "maximum",
        "cat",
        "_fused_adamw_",
    )
    assert {name: step[f"aten::{name}"] for name in single} == dict.fromkeys(single, 1) | {"linalg_vector_norm": 2}


def test_gathers_copy_nothing_and_reductions_copy_once(stage3):
    """Forward: a gather a unit; backward: one again a block, one copy of all gradients and an exchange a unit."""
    forward, backward = stage3.forward.by_name, stage3.backward.by_name
    assert "aten::copy_" not in forward
    assert backward["aten::_foreach_copy_"] == 32 + 3
    assert backward["c10d::alltoall_base_"] == 32 + 3
    assert backward["c10d::_reduce_scatter_base_"] == 0


def test_terms_of_8_ranks_are_added_up_in_8_launches_a_unit(stage3):
    """The first is copied, seven are added to it: in rank order, and nothing else of a backward is copied."""
    backward = stage3.backward.by_name
    assert (backward["aten::copy_"], backward["aten::add_"]) == (32 + 3, 7 * (32 + 3))


@pytest.mark.long
def test_all_phases_but_the_sums_of_terms_are_fewer_launches_than_fsdp2_s(stage3):
    """On NCCL its sums are the backend's, of 4 bytes a gradient for 2."""
    assert stage3.total - 8 * (32 + 3) <= count("fsdp2").total


@pytest.mark.long
def test_the_seconds_and_own_calls_of_a_step_are_told_by_phase():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        rank = Rank(torch.device("cpu"), ["stage3"], 1)
        rank.warm_up()
        calls, seconds = rank.calls("stage3"), rank.seconds("stage3")
    finally:
        dist.destroy_process_group()
    assert len(calls) == len(Step._fields)
    assert min(calls) > 50
    assert [len(step) for step in seconds] == [len(Step._fields)] * len(seconds)
    row = {"seconds": [*seconds[0], sum(seconds[0])], "calls": [*calls, sum(calls)]}
    told = show({"stage3": {"here": row, "ratio": {"seconds": [1.0] * 4}}})
    assert f"{sum(calls):,}" in told.splitlines()[-2]


def test_what_guards_a_collective_is_one_function_and_two_of_the_heartbeat():
    """A step makes several hundred of them on the host: what each enters is what they cost."""
    entered = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(Path(zero3d.__file__).parent)):
            entered.append(frame.f_code.co_name)

    call = Call(Axis("dp", 0, 2, heartbeat=Heartbeat(None)), None, "all_gather", "a", 1)
    call.run(int)  # names are packed once
    sys.setprofile(note)
    try:
        call.run(int)
    finally:
        sys.setprofile(None)
    assert entered == ["run", "enter", "leave"]


def counted(engine, run):
    with Dispatches() as seen:
        run(engine)
    return seen.by_name


@pytest.mark.parametrize("stage", [0, 3])
def test_off_the_boundary_a_step_launches_nothing(stage):
    engine = zero3d.Engine(build("net"), stage=stage, precision="bf16", optimizer=adamw, accumulate=3)
    for turn in range(6):
        engine.backward(loss_of(engine, batch(turn)))
        found = counted(engine, lambda engine: engine.step())
        assert bool(found) == (turn % 3 == 2 or turn == 0), found  # the first makes the constants


class Reads(TorchDispatchMode):
    """Counts numbers that are taken off the device one at a time: float(), bool(), item()."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_step_reads_the_device_once(monkeypatch, precision):
    read = []
    real = Comm.read
    monkeypatch.setattr(Comm, "read", lambda comm, *given: (read.append(given[0]), real(comm, *given))[1])
    options = {"precision": precision, "optimizer": adamw, "loss": lambda out, _: (out.sum(), torch.tensor(3))}
    engine = zero3d.Engine(build("net"), stage=2, **options)
    besides = torch.tensor([5.0, 7.0], dtype=torch.float64)
    for turn in range(3):
        read.clear()
        with Reads() as one_by_one:
            loss = engine.train_batch([batch(turn), batch(turn + 1)], lambda: besides)
        assert (len(read), one_by_one.count) == (1, 0)
        result, figures = engine.last_step, engine.figures
        assert figures.besides == [float(loss), 5.0, 7.0]
        assert figures[:4] == (True, float(result.grad_norm), 1.0, float(result.lr))


def test_multi_tensor_norms_and_scaling_have_the_bits_of_single_ones():
    """On the CPU, where contract 1 is bitwise against single norms and products; all sizes of vector tails."""
    for dtype in (torch.float32, torch.float64):
        grads = [torch.randn(size, dtype=dtype) * 10.0 ** (size % 7 - 3) for size in (*range(1, 70), 4097)]
        owned = type("Owned", (), {"order": 0, "name": ""})
        for grad, of in zip(grads, piece_norms([(0, owned, grad) for grad in grads]), strict=True):
            assert torch.equal(of.norm, torch.linalg.vector_norm(grad))
        for factor in (1 / 3, torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 7, dtype=dtype)):
            scaled = [grad.clone() for grad in grads]
            multiply(scaled, factor)
            assert all(torch.equal(one, grad.clone().mul_(factor)) for one, grad in zip(scaled, grads, strict=True))
