"""A host read waits for the device no longer than its peers may take, and says what this rank was in."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zero3d.blueprint.policy import Policy
from zero3d.config import load
from zero3d.distributed import axis as axis_module, collectives
from zero3d.distributed.axis import Axis, messages
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.errors import OrderError, Zero3dError
from zero3d.memory.arena import Arena
from zero3d.spec.sections import Spec
from zero3d.train.evaluations import Evaluations

CPU, DEVICE = torch.device("cpu"), torch.device("meta")  # a device without kernels: what is copied is stubbed


class OnDevice:
    """Numbers of which only a copy that does not wait can be had."""

    device = DEVICE

    def __init__(self, values):
        self.values = values
        self.nbytes, self.dtype, self.shape = values.nbytes, values.dtype, values.shape

    def flatten(self):
        return self.values.flatten()


@pytest.fixture
def event(monkeypatch):
    """The events of all copies: each is there at the look that `event.looks` counts down to."""

    class Event:
        looks, made = 0, 0

        def __init__(self, device):
            assert device == DEVICE
            type(self).made += 1

        def record(self):
            self.left = type(self).looks

        def query(self):
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr("zero3d.memory.arena.LOOK", 0.0)
    return Event


@pytest.mark.parametrize("looks", [0, 3])
def test_numbers_come_through_memory_that_is_used_again(event, looks):
    event.looks, arena = looks, Arena(DEVICE)
    values = torch.tensor([[1.5, 2.0]], dtype=torch.float64), torch.tensor([True]), torch.tensor([[3], [4]])
    found = [arena.on_host(OnDevice(one), patience=60.0) for one in values]
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))  # and are not written over
    assert event.made == 3
    pinned = arena._pinned
    arena.on_host(OnDevice(values[0]), patience=60.0)
    assert arena._pinned is pinned


def test_the_host_that_waits_looks_until_the_device_is_there_or_an_error_ends_it(event):
    event.looks, arena, looked = 3, Arena(DEVICE), []
    arena.on_host(OnDevice(torch.ones(1)), 60.0, lambda: looked.append("look"))
    assert len(looked) == 3

    def find():
        raise OrderError("ranks do not run the same units")

    with pytest.raises(OrderError, match="the same units"):
        arena.on_host(OnDevice(torch.ones(1)), 60.0, find)


def test_what_is_on_the_host_is_read_at_once(event):
    values = torch.ones(2)
    assert Arena(CPU).on_host(values, patience=0.0) is values
    assert event.made == 0


def comm_that_waits(ledger):
    axis = Axis("dp", 3, 8, device=DEVICE, patience=0.0)
    return Comm(axis, Arena(DEVICE), ledger)


def test_a_device_that_never_gets_there_is_an_error_with_rank_unit_and_operation(event):
    event.looks, ledger = 10**9, Ledger()
    ledger.record("all_gather", "dp", "layers.7", 1, 4)
    ledger.record("reduce_scatter", "dp", "layers.3", 1, 4)
    ledger.record("all_reduce", "tp", "layers.3.mlp", 1, 4)
    with pytest.raises(OrderError) as error:
        comm_that_waits(ledger).read(OnDevice(torch.ones(1)), [1.0])
    said = "rank 3 of axis dp waited 0.0 s for its device, where the last to begin were "
    said += (
        "reduce_scatter of unit 'layers.3' on axis dp, all_reduce of unit 'layers.3.mlp' on axis tp and no peer came"
    )
    assert str(error.value).startswith(said)


def test_it_quotes_the_note_of_the_rank_that_failed(event, monkeypatch):
    event.looks = 10**9
    monkeypatch.setattr(axis_module, "_note", lambda: ("DataError: no such file", 2, 1))
    with pytest.raises(
        Zero3dError, match=r"DataError: no such file \(rank 3 of axis dp waited .* no peer came; rank 1 failed\."
    ) as error:
        comm_that_waits(Ledger()).read(OnDevice(torch.ones(1)), [1.0])
    assert error.value.exit_code == 2


def test_a_dry_run_assumes_what_it_cannot_read():
    comm = Comm(Axis("dp", 0, 1), Arena(CPU), Ledger())
    with FakeTensorMode():
        assert comm.read(torch.ones(2), [7.0, 8.0]) == [7.0, 8.0]
    assert comm.read(torch.tensor([1, 2]), [7, 8]) == [1, 2]


def test_the_mean_of_the_held_out_part_is_read_with_patience_too(event):
    event.looks = 10**9
    mean = SimpleNamespace(view=lambda *shape: OnDevice(torch.ones(shape)))
    engine = SimpleNamespace(
        evaluate=lambda batches: mean,
        mesh=SimpleNamespace(degrees=SimpleNamespace(rows=1), row=0),
        world=comm_that_waits(Ledger()),
        policy=Policy.of(Spec()),
    )
    evaluations = Evaluations(load({}), engine, None, 1, dict)
    with pytest.raises(OrderError, match="for its device, where the last to begin"):
        evaluations.held_out([])


# --- where numbers travel -----------------------------------------------------------------------


@pytest.fixture
def on(monkeypatch):
    """on(backend, device) -> a Comm of two ranks, and the (operation, device) of all that it sends."""

    def made(backend, device):
        sent = []

        class Recording:
            name = "recording"

            def exchange(self, call, values):
                sent.append((call.op, values.device))
                return torch.stack([values, values])

        monkeypatch.setattr(axis_module, "backends_of", lambda group: {device.type: backend})
        monkeypatch.setattr(collectives, "open_algorithm", lambda *_: Recording())
        monkeypatch.setattr(axis_module.dist, "broadcast", lambda t, **_: sent.append(("broadcast", t.device)))
        monkeypatch.setattr(axis_module.dist, "P2POp", lambda op, t, **_: sent.append((op.__name__, t.device)))
        monkeypatch.setattr(axis_module.dist, "batch_isend_irecv", lambda calls: [])
        monkeypatch.setattr(Arena, "on_host", lambda self, values, patience, look: torch.zeros(values.shape))
        monkeypatch.setattr(Tensor, "copy_", lambda into, other: into)
        monkeypatch.setattr(Tensor, "pin_memory", lambda t: t)
        monkeypatch.setattr(Tensor, "to", lambda t, to, **_: t if t.device == to else torch.zeros(t.shape, device=to))
        return Comm(Axis("dp", 0, 2, gathers="g", reductions="g", device=device), Arena(device), Ledger()), sent

    return made


@pytest.mark.parametrize(("backend", "device", "place"), [
    ("nccl", DEVICE, DEVICE), ("xccl", DEVICE, DEVICE), ("gloo", DEVICE, CPU), ("gloo", CPU, CPU),
])  # fmt: skip
@pytest.mark.parametrize("given", [CPU, DEVICE])
def test_what_is_sent_goes_to_where_the_group_computes_and_comes_back(on, backend, device, place, given):
    comm, sent = on(backend, device)
    values = torch.zeros(3, device=given)
    assert comm.exchange(values).device == given
    comm.broadcast(values, "unit")
    assert comm.trade(values, 1, "unit").device == given
    messages(comm._axis, "send", "hidden", {1: values}, {})
    assert sent == [(name, place) for name in ("exchange", "broadcast", "isend", "irecv", "isend")]


def test_numbers_that_ranks_wait_long_for_go_through_the_store_and_are_counted(on):
    comm, sent = on("nccl", DEVICE)
    assert comm.patient is comm
    met = []
    comm._axis.meet = lambda values: met.append(values.device) or torch.stack([values, values])
    assert comm.patient.exchange(torch.ones(3)).tolist() == [[0.0] * 3] * 2  # read as `on` has it
    assert comm.exchange(torch.ones(3)).device == CPU
    assert (met, sent) == ([CPU], [("exchange", DEVICE)])
    assert [(entry.op, entry.calls, entry.elements) for entry in comm._ledger] == [("exchange", 2, 6)]
