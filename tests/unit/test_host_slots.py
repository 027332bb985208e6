"""Inputs of recomputed blocks that are kept on the host: the same bits, and memory that does not grow."""

import gc
import random
import sys
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
from deep import deep, recomputed
from models import batch, bits, loss_of
from tensors import tiny

import zero3d
from zero3d.activations import host_slots as module
from zero3d.activations.host_slots import HostSlots, SlotSet
from zero3d.activations.kept_inputs import KeptInputs
from zero3d.memory.arena import Arena
from zero3d.memory.budget import Bound, HostBudget

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import Operations, alone_in, lonely_mesh
from test_ring import Streams

HOST = {"activations": "host"}


def run(name, policy, offload=None, steps=3, **options):
    """Losses, norms and weights of a few steps."""
    engine = zero3d.Engine(
        recomputed(deep(name), policy), precision="fp32", clip_norm=0.5, offload=offload, accumulate=2, **options
    )
    torch.manual_seed(0)
    found = []
    for step in range(steps):
        for m in range(2):
            loss = loss_of(engine, batch(10 * step + m))
            engine.backward(loss)
            found.append(float(loss.detach()))
        found.append(float(engine.step().grad_norm))
    with engine.full_params():
        return found, bits(engine.module.parameters()), engine


OFTEN = [("llama", "every:2", 3)]
CASES = list(product(("llama", "gpt2"), ("full", "every:2", "selective"), (0, 1, 2, 3)))


@pytest.mark.parametrize(("name", "policy", "stage"), [
    *OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in CASES if case not in OFTEN)
])  # fmt: skip
def test_inputs_on_the_host_change_no_bit(poison, name, policy, stage):
    wanted, weights, _ = run(name, policy, stage=stage)
    found, same, engine = run(name, policy, HOST, stage=stage)
    assert found == wanted
    assert same == weights
    slots = {"full": 5, "every:2": 3, "selective": 5}[policy]
    assert engine.kept_inputs.slots.footing == (slots * 4096, 3 * 2 * 9 * 32 * 4)


# --- slots ----------------------------------------------------------------------------------------


def budget_of(nbytes):
    return HostBudget((Bound(nbytes, "for a test"),), 1)


def slots_of(a_pass=3, nbytes=10**9):
    return HostSlots(Arena(torch.device("cpu")), a_pass, budget_of(nbytes))


def values(number, elements=1000):
    return torch.arange(elements, dtype=torch.float32) + number


def one_pass(slots, count, order, elements=1000):
    kept = {number: slots.put(values(number, elements)) for number in range(count)}
    for number in order:
        slot = kept.pop(number)
        assert torch.equal(slots.get(slot, elements, torch.float32), values(number, elements))
        slots.let_go(slot)


ORDERS = {
    "reverse": [5, 4, 3, 2, 1, 0], "two micro-batches": [2, 1, 0, 5, 4, 3], "any": [3, 0, 5, 1, 4, 2],
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_inputs_come_back_in_any_order_and_after_a_pass_nothing_is_allocated(monkeypatch, order):
    slots = slots_of()
    one_pass(slots, 6, order)
    first = slots.footing
    assert first == (6 * 4096, 3 * 4000)
    made = []
    monkeypatch.setattr(module, "HostSlab", lambda *_: made.append("slab"))
    monkeypatch.setattr(module, "Ring", lambda *_: made.append("ring"))
    for _ in range(4):
        one_pass(slots, 6, order)
    assert (slots.footing, made) == (first, [])


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_what_is_needed_next_is_on_its_way(monkeypatch, order):
    """From the second pass on in whatever order, in the first one in reverse."""
    slots, on_the_way, found = slots_of(), set(), []
    ahead = SlotSet.ahead
    monkeypatch.setattr(SlotSet, "ahead", lambda self, index: (on_the_way.add(index), ahead(self, index)))
    for _ in range(2):
        kept = {number: slots.put(values(number)) for number in range(6)}
        for number in order:
            slot = kept.pop(number)
            found.append(slot.index in on_the_way)
            slots.get(slot, 1000, torch.float32)
            on_the_way.discard(slot.index)
            slots.let_go(slot)
        del slot
    if order == ORDERS["reverse"]:
        assert found[:6] == [False, *[True] * 5]
    assert found[6:] == [True] * 6


def test_slots_of_a_dropped_graph_are_used_again_while_they_are_still_under_way():
    slots = slots_of()
    for turn in range(20):
        kept = [slots.put(values(turn + number, 1000 - 10 * turn)) for number in range(6)]
        for number in (5, 4, 3)[: turn % 3]:
            found = slots.get(kept[number], 1000 - 10 * turn, torch.float32)
            assert torch.equal(found, values(turn + number, 1000 - 10 * turn))
            slots.let_go(kept[number])
        del kept
    assert slots.footing.host == 6 * 4096


def test_longer_inputs_and_more_of_them_are_given_memory_which_is_said():
    slots = slots_of()
    one_pass(slots, 3, [2, 1, 0])
    with pytest.warns(UserWarning, match=r"grows from 12.29 kB to 24.58 kB \(6 slots of 4.00 kB\): more than 3 are"):
        one_pass(slots, 5, [4, 3, 2, 1, 0])
    with pytest.warns(
        UserWarning, match=r"from 24.58 kB to 49.15 kB \(6 slots of 8.00 kB\): one of 8.00 kB came, long"
    ):
        one_pass(slots, 3, [2, 1, 0], elements=2000)
    assert slots.footing == (6 * 8192, 3 * 8000)
    one_pass(slots, 6, ORDERS["any"], elements=700)  # shorter ones fit


def test_a_longer_input_amid_a_pass_leaves_those_before_it_in_their_place():
    arena = Arena(torch.device("cpu"))
    slots = HostSlots(arena, 2, budget_of(10**9))
    short, long = slots.put(values(1)), slots.put(values(2, 3000))
    assert slots.footing == (2 * 4096 + 2 * 12288, 3 * 16000)
    assert torch.equal(slots.get(long, 3000, torch.float32), values(2, 3000))
    slots.let_go(long)
    assert torch.equal(slots.get(short, 1000, torch.float32), values(1))
    slots.let_go(short)
    del short, long
    one_pass(slots, 2, [1, 0])
    assert slots.footing == (2 * 12288, 3 * 12000)
    assert arena.live("wire") == 3 * 12000


def test_too_much_for_the_host_is_refused_with_the_arithmetic():
    slots = slots_of(nbytes=30_000)
    slots.others = 10_000
    with pytest.raises(zero3d.OutOfBudget) as refused:
        kept = [slots.put(values(number)) for number in range(4)]
        del kept
    assert str(refused.value) == (
        "offload.activations=host: inputs of recomputed blocks take 24.58 kB of the host's memory (12.29 kB so far and "
        "3 more of 4.00 kB) beside 10.00 kB of its states, and a rank may take 30.00 kB: 30.00 kB for a test. Type a "
        "smaller train.micro_batch or data.length, activations=every:4 (fewer inputs), "
        "mesh.partition_activations=true (with mesh.tp above 1), or offload.activations=none."
    )


@pytest.mark.parametrize("without", [None, "arrived", "used", "gone"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_on_an_accelerator_no_stream_touches_what_another_is_at(monkeypatch, order, without):
    streams = Streams(monkeypatch, without)
    slots = HostSlots(Arena(torch.device("meta")), 3, budget_of(10**9))
    with Operations(streams.model):
        for _ in range(3):
            kept = {number: slots.put(torch.empty(1000 - number, device="meta")) for number in range(6)}
            for number in order:
                slot = kept.pop(number)
                slots.get(slot, 1000 - number, torch.float32).clone()
                slots.let_go(slot)
            del slot
            for _ in range(4):  # whose graphs are dropped
                slots.put(torch.empty(900, device="meta"))
    assert streams.made["streams"] == 2
    assert bool(streams.model.races) == (without is not None)


@pytest.mark.parametrize(("in_flight", "inputs"), [
    (2, 1), (4, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in product((1, 2, 4), (1, 2, 3))
                      if case not in ((2, 1), (4, 3))),
])  # fmt: skip
@pytest.mark.parametrize("without", [None, "gone"])
def test_on_an_accelerator_a_1f1b_pipeline_reads_inputs_that_have_been_written(monkeypatch, without, in_flight, inputs):
    """A forward takes a buffer whose input is still on its way down, and a backward wants that input next."""
    streams = Streams(monkeypatch, without)
    slots = HostSlots(Arena(torch.device("meta")), inputs, budget_of(10**9))
    with Operations(streams.model):
        for _ in range(3):
            kept = []
            for _ in range(8):
                kept.append([slots.put(torch.empty(1000, device="meta")) for _ in range(inputs)])
                if len(kept) == in_flight:
                    backward(slots, kept.pop(0))
            while kept:
                backward(slots, kept.pop(0))
    assert bool(streams.model.races) == (without is not None)


def backward(slots, micro_batch):
    while micro_batch:
        slot = micro_batch.pop()
        slots.get(slot, 1000, torch.float32).clone()
        slots.let_go(slot)


def on_the_stand_in(order):
    """Whether three passes on a device with memory of its own give back what they were given."""
    from instruments.accelerator import register

    device = register()
    slots, same = HostSlots(Arena(device), 3, budget_of(10**9)), []
    for turn in range(3):
        kept = {number: slots.put(values(10 * turn + number).to(device)) for number in range(6)}
        for number in order:
            slot = kept.pop(number)
            found = slots.get(slot, 1000, torch.float32).clone()
            slots.let_go(slot)
            same.append(torch.equal(found.cpu(), values(10 * turn + number)))
        del slot
    return same


@pytest.mark.long
def test_on_a_device_with_memory_of_its_own(alone):
    assert alone(on_the_stand_in, ORDERS["two micro-batches"]) == [True] * 18


# --- engines --------------------------------------------------------------------------------------


def test_buffers_do_not_grow_with_the_model():
    """ZeRO's C_B: of a model four times as deep the ring is the same, and slots are four times as many."""
    found = {}
    for layers in (2, 8):
        engine = zero3d.Engine(recomputed(deep("llama", layers), "full"), precision="fp32", stage=3, offload=HOST)
        loss = loss_of(engine, batch(0))
        found[layers] = engine.kept_inputs.slots.footing
        engine.arena.reset_peaks()
        engine.backward(loss)
        engine.step()
        found[layers, "wire"] = engine.arena.peak("wire")
    assert found[2].device == found[8].device
    assert found[2, "wire"] == found[8, "wire"]
    assert found[8].host == 4 * found[2].host


class Recording(Arena):
    """Notes what is lent: category and bytes."""

    def __init__(self, *place):
        super().__init__(*place)
        self.lent = set()

    def borrow(self, category, elements, dtype):
        self.lent.add((category, elements * dtype.itemsize))
        return super().borrow(category, elements, dtype)

    def fill(self, category, buffer, used=None):
        self.lent.add((category, buffer.numel() * buffer.dtype.itemsize))
        super().fill(category, buffer, used)


def after_lengths(lengths, **options):
    """Blocks that the arena has lent, and what it and the host hold in the end."""
    mesh = zero3d.Mesh()
    mesh.make_arena = Recording
    made = {"precision": "bf16", "stage": 3, "offload": HOST, "mesh": mesh} | options
    engine = zero3d.Engine(recomputed(deep("llama"), "full"), **made)
    for step, length in enumerate(lengths):
        engine.backward(loss_of(engine, batch(step, length=length)))
        engine.step()
    return engine.arena.lent, [(entry.category, entry.place, entry.measured) for entry in engine.memory]


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.long)])
def test_memory_is_not_cut_up_by_steps_of_varying_lengths(count):
    """ZeRO's M_D: blocks have the few sizes that one step of the longest has, and none is left over."""
    draw = random.Random(0)
    lengths = [40, *(draw.randint(2, 40) for _ in range(count))]
    assert after_lengths(lengths) == after_lengths(lengths[:1])


def test_inputs_that_do_not_fill_their_memory_stay_as_they_are():
    kept = KeptInputs(None, slots_of())
    base = torch.randn(4, 6, 8)
    for dense in (base, base.transpose(0, 2), base[1:3], base[:, :1][:1]):
        found = kept.keep(dense, "block")
        back = found.restore(found.taken())
        assert torch.equal(back, dense)
        assert back.stride() == dense.stride()
        assert back.requires_grad
    for sparse in (base[:, ::2], base[..., :4], base[:1].expand(4, 6, 8), base[:0]):
        assert kept.keep(sparse, "block") is None


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.long), True])
def test_blocks_that_hugging_face_recomputes(poison, reentrant):
    def run(offload):
        model = deep("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        engine = zero3d.Engine(model, stage=3, precision="fp32", offload=offload)
        torch.manual_seed(0)
        for step in range(2):
            engine.backward(loss_of(engine, batch(step)))
            engine.step()
        with engine.full_params():
            return bits(model.parameters()), engine

    wanted, _ = run(None)
    found, engine = run(HOST)
    assert found == wanted
    assert engine.kept_inputs.slots.footing.host == 5 * 4096


def test_beside_states_and_weights_on_the_host(poison):
    def run(offload):
        engine = zero3d.Engine(recomputed(deep("llama"), "full"), stage=3, precision="bf16", offload=offload)
        torch.manual_seed(0)
        for step in range(3):
            engine.backward(loss_of(engine, batch(step)))
            engine.step()
        return engine.fingerprint(), {(entry.category, entry.place) for entry in engine.memory}

    plain, _ = run(None)
    found, places = run({"optimizer": "host", "params": "host", "activations": "host"})
    assert found == plain
    assert {("optimizer", "host"), ("parameters", "host"), ("activations", "host")} <= places


def test_a_budget_that_is_too_small_is_an_error_of_the_first_forward():
    offload = {"activations": "host", "host_budget": "8kB"}
    engine = zero3d.Engine(recomputed(deep("llama"), "full"), precision="fp32", offload=offload)
    with pytest.raises(
        zero3d.OutOfBudget, match=r"take 20.48 kB .* a rank may take 8.00 kB: 8.00 kB offload.host_budget"
    ):
        engine(batch(0))


def test_an_engine_that_is_dropped_takes_its_threads_with_it():
    before = set(threading.enumerate())
    engine = zero3d.Engine(recomputed(deep("llama"), "full"), precision="fp32", offload=HOST)
    engine.backward(loss_of(engine, batch(0)))
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del engine
    gc.collect()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


REFUSED = {
    "nothing recomputed": (
        lambda: zero3d.Engine(deep("llama"), precision="fp32", offload=HOST),
        "offload.activations=host is about the inputs of recomputed blocks, and none is recomputed: type activations: "
        "full in a file, or zero3d.activations.recompute(model, 'full') before zero3d.Engine, or leave it out.",
    ),
    "tp 1": (
        lambda: zero3d.Engine(recomputed(deep("llama"), "full"), precision="fp32", partition_activations=True),
        "partition_activations=True cuts the inputs of recomputed blocks over tp, and tp is 1: type tp=2 or more, "
        "offload.activations=host to keep them on the host, or leave it out.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_elsewhere_is_refused(case):
    build, words = REFUSED[case]
    with pytest.raises(zero3d.ConfigError) as refused:
        build()
    assert str(refused.value) == words


def test_over_tp_without_recomputation_and_with_slices_of_sequences():
    with alone_in(2):
        made = {"precision": "fp32", "mesh": lonely_mesh(tp=2), "partition_activations": True}
        with pytest.raises(zero3d.ConfigError, match="partition_activations is about the inputs of recomputed blocks"):
            zero3d.Engine(tiny("llama"), **made)
        by_torch = tiny("llama")
        by_torch.gradient_checkpointing_enable()
        with pytest.raises(zero3d.ConfigError, match="this model's gradient_checkpointing has torch recompute them"):
            zero3d.Engine(by_torch, **made)
        with pytest.warns(
            UserWarning, match="sequence_parallel already cuts the hidden states between blocks over tp"
        ) as at:
            engine = zero3d.Engine(recomputed(tiny("llama"), "full"), sequence_parallel=True, **made)
        assert engine.kept_inputs is None
        assert [warning.filename for warning in at if "sequence_parallel" in str(warning.message)] == [__file__]
