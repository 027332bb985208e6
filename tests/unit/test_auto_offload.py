"""What `auto` in offload becomes for an engine: by the bytes that it will hold, alike on all ranks."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, build, loss_of

import zero3d
from zero3d.blueprint.auto import (
    LINK,
    MEMORY,
    MeasuredRates,
    Need,
    Rates,
    Room,
    choose_by_measure,
    choose_executor,
    gradients_short_of,
)
from zero3d.blueprint.policy import Policy
from zero3d.engine import auto_offload, foundation
from zero3d.engine.auto_offload import bytes_needed, decide_executor, room_of
from zero3d.engine.foundation import update_threads
from zero3d.offload.host_adam import scratch_bytes
from zero3d.offload.states import StateKinds
from zero3d.optim import muon
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import MOMENTS
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero

GB = 10**9


def engine_of(offload=None, **options):
    return zero3d.Engine(build("net"), **({"precision": "bf16", "optimizer": adamw, "offload": offload} | options))


def with_room(monkeypatch, room):
    monkeypatch.setattr(auto_offload, "room_of", lambda mesh, offload: room)


# --- place --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"stage": 0}, {"stage": 1, "accumulate": 2}, {"stage": 2}, {"stage": 3}, {"stage": 3, "master": "split"},
    {"stage": 3, "precision": "fp32"}, {"stage": 2, "exact": True},
])  # fmt: skip
def test_what_an_engine_needs_is_what_it_then_holds(options):
    engine = engine_of(**options)
    need = bytes_needed(engine._parts)
    planned = {entry.category: entry.planned for entry in engine.memory}
    held = {"optimizer": need.states, "parameters": need.others["weights"], "gradients": need.others["gradients"]}
    assert held == {category: planned[category] for category in held}
    assert need.record <= need.states
    assert need.passing >= 3 * need.record


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "AdamW": adamw,
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Muon": muon(lr=0.02),
}


def need_of(engine):
    return bytes_needed(engine._parts)


def held_states(name, stage, precision):
    """Bytes of optimizer states that an engine needs before its first step, and has planned and holds after it."""
    engine = zero3d.Engine(build("net"), stage=stage, precision=precision, optimizer=OPTIMIZERS[name])
    need = need_of(engine)
    engine.backward(loss_of(engine, batch(0)))
    assert engine.step().applied
    (held,) = (entry for entry in engine.memory if entry.category == "optimizer")
    assert held.planned == held.measured
    return need.states, held.planned


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (3, "fp32")])
def test_states_are_counted_as_each_optimizer_has_them(name, stage, precision):
    need, held = held_states(name, stage, precision)
    assert need == held


@pytest.mark.parametrize("name", ["Muon", "amsgrad"])
def test_states_are_counted_as_each_rank_has_them(ranks, name):
    for need, held in ranks(2, held_states, name, 2, "bf16"):
        assert need == held


def engine_with_experts(stage, experts):
    """An engine whose two ranks share experts out, and what it needs beside records."""
    engine = zero3d.Engine(
        build("qwen3_moe"),
        stage=stage,
        mesh=zero3d.Mesh(dp=2, ep=2),
        experts=experts,
        precision="bf16",
        optimizer=adamw,
    )
    return engine, bytes_needed(engine._parts).instants["backward"]


def gradients_with_experts(stage, experts):
    """Bytes of gradients that it needs, and has planned."""
    engine, others = engine_with_experts(stage, experts)
    (held,) = (entry for entry in engine.memory if entry.category == "gradients")
    return others["gradients"], held.planned


def buckets_with_experts(experts):
    """Bytes of gradients on their way that it needs, and those of experts' largest unit from all ranks' tokens."""
    engine, others = engine_with_experts(2, experts)
    units = [unit for unit in engine.units if "experts" in unit.name]
    return others["gradients of units"], max(unit.sources * unit.layout.total * unit.dtype.itemsize for unit in units)


def test_gradients_of_experts_that_come_from_several_ranks_have_buckets_and_others_of_one_rank_have_none(ranks):
    for (apart, unit), (together, _) in zip(
        ranks(2, buckets_with_experts, "exact"), ranks(2, buckets_with_experts, "fast"), strict=True
    ):
        assert apart == together + 2 * unit  # of two blocks at a hand-over


@pytest.mark.parametrize("experts", ["exact", "fast"])
def test_gradients_of_experts_are_counted_for_every_rank_whose_tokens_came(ranks, experts):
    for need, held in ranks(2, gradients_with_experts, 1, experts):
        assert need == held


def test_an_optimizer_of_fewer_states_does_not_leave_and_one_of_more_does(monkeypatch):
    """There is room for two moments of each parameter, beside fp32 masters, and not for three; and for what Muon has."""
    for fits, leaves in (("AdamW", "amsgrad"), ("Muon", "AdamW"), ("momentum", "AdamW"), ("SGD", "momentum")):
        need = need_of(engine_of(optimizer=OPTIMIZERS[fits]))
        with_room(monkeypatch, Room(need.states + sum(need.others.values()) + 1, GB, False))
        found = [
            engine_of({"optimizer": "auto", "executor": "device"}, optimizer=OPTIMIZERS[name]).offload.optimizer
            for name in (fits, leaves)
        ]
        assert found == ["none", "host"], (fits, leaves)


def test_records_of_an_optimizer_of_two_kinds_are_as_long_as_the_longest():
    need = {name: need_of(engine_of(optimizer=OPTIMIZERS[name])).record for name in OPTIMIZERS}
    assert need["SGD"] < need["momentum"] <= need["Muon"] <= need["AdamW"] < need["amsgrad"]
    assert need["amsgrad"] * 3 == need["AdamW"] * 4 == need["SGD"] * 12


def test_what_is_off_the_device_anyway_is_not_counted():
    engine = engine_of({"params": "host", "gradients": "host", "optimizer": "host", "executor": "host"})
    need = bytes_needed(engine._parts)
    assert (need.others["weights"], need.others["gradients"], need.passing) == (0, 0, 0)


def test_where_there_is_room_nothing_leaves(tmp_path):
    for given in (None, {"optimizer": "auto"}, {"optimizer": "auto", "directory": tmp_path, "executor": "host"}):
        engine = engine_of(given)
        assert (engine.offload.optimizer, engine.offload.fraction, engine.offload.executor) == ("none", 1.0, "device")
        assert len(engine.offload_why) == (given is not None)
    assert "nothing leaves it" in engine.offload_why[0]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_leaves_and_says_so(monkeypatch):
    base = parts({"optimizer": "auto", "executor": "host"})
    for without in ("host", "disk"):
        room = room_for(base, 0.25)
        with_room(monkeypatch, room if without == "host" else room._replace(host=None, folder=True))
        offload, why = place_of(base)
        assert offload == Offload(without, fraction=0.25, executor="host")
        assert why[0].startswith(f"offload.optimizer=auto: {without}, fraction 0.25: a rank needs optimizer")


def place_of(base):
    """The settings that a choice becomes, and why."""
    chosen, why = auto_offload.decide_place(base)
    return chosen.options.offload, why


def room_for(base, leaves):
    """Room on the device for all but this share of the optimizer's states."""
    need = bytes_needed(base)
    return Room(int(need.states * (1 - leaves)) + sum(need.others.values()) + 1, GB, False)


def parts(given):
    """What an engine of these settings chooses by."""
    engine = engine_of()
    base = engine._parts
    base = auto_offload.replace(base, options=auto_offload.replace(base.options, offload=Offload.of(given)))
    return base


def test_what_has_no_place_is_refused_before_the_model_is_touched(monkeypatch):
    model = build("net")
    before = [p.detach().clone() for p in model.parameters()]
    with_room(monkeypatch, Room(50_000, None, False))
    with pytest.raises(zero3d.OutOfBudget, match=r"offload\.optimizer=auto: a rank needs optimizer states"):
        zero3d.Engine(model, precision="fp32", offload={"optimizer": "auto"})
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    zero3d.Engine(model, precision="fp32")


def chosen_by_ranks():
    base = parts({"optimizer": "auto", "executor": "host"})
    room = room_for(base, (0.125, 0.5)[dist.get_rank()])
    auto_offload.room_of = lambda mesh, offload: room
    try:
        offload, why = place_of(base)
    finally:
        auto_offload.room_of = room_of
    return offload.optimizer, offload.fraction, why


def test_gradients_leave_where_the_device_has_no_room_for_them():
    need = Need(1000, 100, 30, {"backward": {"weights": 200, "gradients": 400}})
    assert gradients_short_of(need, Room(700, 10**6, folder=False), 1.0) == -70
    assert gradients_short_of(need, Room(700, 10**6, folder=False), 0.5) == 430


def test_gradients_and_updates_stay_where_no_states_leave():
    offload = engine_of({"optimizer": "auto", "gradients": "host", "executor": "host"}, stage=2).offload
    assert (offload.optimizer, offload.gradients, offload.executor) == ("none", "device", "device")


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_stay_on_a_device_that_is_the_host(stage):
    engine = engine_of({"optimizer": "host"}, stage=stage)
    assert engine.offload.gradients == "device"


def test_all_ranks_choose_what_the_one_with_the_least_room_must_have(ranks):
    first, second = ranks(2, chosen_by_ranks)
    assert first == second
    assert first[:2] == ("host", 0.5)


@pytest.mark.parametrize(("local", "budget", "share"), [(None, None, 2), (4, None, 4), (4, "8GB", 4)])
def test_a_rank_has_what_is_free_on_its_device_and_its_share_of_the_host(monkeypatch, local, budget, share):
    mesh = SimpleNamespace(device=torch.device("cuda", 0), local_world=local, world=2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (76 * GB, 96 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GB)  # of which 4 GB are free
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    asked = []

    def measured(ranks, limit):
        asked.append((ranks, limit))
        return SimpleNamespace(nbytes=7 * GB)

    monkeypatch.setattr(auto_offload, "host_budget", measured)
    assert room_of(mesh, Offload(host_budget=budget)) == Room(76 * GB, 7 * GB, False, share)
    mesh.device = torch.device("cpu")
    assert room_of(mesh, Offload(host_budget=budget, directory="there")) == Room(7 * GB, None, True, share)
    assert asked == [(share, None if budget is None else 8 * GB)] * 2


# --- threads ------------------------------------------------------------------------------------


def threads_of_rank(pinned, cores=8):
    """How many threads update on the host of a rank that has 8 cores: by itself, or together with the other ranks.

    cores: those that a quota leaves of them.
    """
    first = 8 * dist.get_rank() if pinned else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(first, first + 8)))
        patch.setattr(foundation, "usable_cores", lambda: cores)
        return update_threads(parts({"optimizer": "host"}))


@pytest.mark.parametrize(("pinned", "cores", "threads"), [(False, 8, 4), (True, 8, 8), (False, 5, 2), (False, 1, 1)])
def test_ranks_share_the_cores_that_they_have_in_common(ranks, pinned, cores, threads):
    assert ranks(2, threads_of_rank, pinned, cores) == [threads, threads]


@pytest.mark.parametrize(("asked", "threads"), [("1", 8), ("", 8), ("3", 3), ("6,2", 6), ("many", 8)])
def test_more_than_one_thread_may_be_asked_for(monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of_rank(pinned=False) == threads


def test_an_engine_updates_with_the_threads_of_its_rank(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    engine = engine_of({"optimizer": "host"})
    assert engine.offload.executor == "host"
    assert engine._parts.tiers.arenas["host"].live("wire") == scratch_bytes(3)


# --- executor -----------------------------------------------------------------------------------


class Alone:
    """Stands for a world of ranks that have measured the same."""

    def exchange(self, values):
        return values[None]

    def read(self, values, assumed):
        return values.tolist()


RATES = MeasuredRates(25e9, 24e9, 40e9, 2e9)  # 12 bytes of states take 0.6 ns on the device, 0.74 on the host


def kinds_of(kind, fused=True):
    """An optimizer of this class that keeps two moments in fp32."""
    return StateKinds(kind, fused, dict.fromkeys(MOMENTS, torch.float32), [])


def chosen(device, on_host=True, split=False, rates=RATES, **offload):
    """Who updates on this kind of device, in bf16, and why."""
    base = SimpleNamespace(
        policy=Policy.of(Spec(Zero(master="split" if split else "fp32"))),
        axes=SimpleNamespace(arena=SimpleNamespace(device=torch.device(device)), world=Alone()),
        options=SimpleNamespace(offload=Offload(**{"optimizer": "host"} | offload)),
        mesh=SimpleNamespace(on_cpu=device == "cpu", local_world=4, world=8, device=torch.device("cpu")),
        precision=SimpleNamespace(dtype=torch.bfloat16),
    )
    return decide_executor(base, kinds_of(torch.optim.AdamW, on_host), lambda: rates)


def test_on_a_cpu_the_host_updates_what_it_has_the_bits_of():
    name, why = chosen("cpu")
    assert (name, why.startswith("offload.executor=auto: host: the device is a CPU")) == ("host", True)
    name, why = chosen("cpu", on_host=False)
    assert (name, why.startswith("offload.executor=auto: device: the host can update only torch's fused")) == (
        "device",
        True,
    )


@pytest.mark.parametrize(("offload", "width"), [
    ({}, 12), ({"split": True}, 10), ({"split": True, "moments": "bf16"}, 6), ({"moments": "bf16"}, 8),
])  # fmt: skip
def test_on_an_accelerator_what_was_measured_chooses(offload, width):
    by = choose_by_measure(width * GB, GB, RATES)
    assert chosen("cuda", **offload) == (by.name, f"offload.executor=auto: {by.name}: {by.why}")
    assert chosen("cuda", on_host=False, **offload).name == "device"
    assert chosen("cuda", rates=RATES._replace(adam=1e8), **offload).name == "device"
    assert chosen("cuda", rates=RATES._replace(adam=1e11, both=1e10), **offload).name == "host"


@pytest.mark.parametrize("width", [12])
def test_of_states_on_a_disk_data_sheets_choose_so_that_a_restart_does_the_same(width):
    by = choose_executor(width * GB, GB, Rates(LINK, MEMORY / 4))
    offload = {"optimizer": "disk", "directory": "there", "rates": None}
    assert chosen("cuda", **offload) == (by.name, f"offload.executor=auto: {by.name}: {by.why}")
    assert chosen("cuda", on_host=False, **offload).name == "device"


def test_the_line_of_a_choice_has_the_figures():
    assert chosen("cuda").why == (
        "offload.executor=auto: device: measured: link down 25.00 GB/s, up 24.00 GB/s, both at once 40.00 GB/s; Adam 2,000 M "
        "parameters/s: 1,000,000,000 parameters take 0.6 s a step on the device, 0.743 s on the host"
    )


def slowest():
    base = parts({"optimizer": "host"})
    rates = MeasuredRates(*[(3.0, 8.0, 5.0, 1.0), (4.0, 7.0, 6.0, 2.0)][dist.get_rank()])
    return tuple(auto_offload._slowest(base, rates))


def test_all_ranks_choose_by_the_slowest_rates_of_any(ranks):
    assert ranks(2, slowest) == [(3.0, 7.0, 5.0, 1.0)] * 2


def test_an_executor_that_was_asked_for_stays_and_none_is_needed_for_what_stays():
    for asked in ("device", "host"):
        assert chosen("cpu", executor=asked) == (asked, "")
        assert chosen("cpu", executor=asked, optimizer="none") == ("device", "")
    assert chosen("cpu", on_host=False, executor="device") == ("device", "")


def test_a_class_of_ones_own_is_not_torchs_of_the_same_name():
    own = type("AdamW", (torch.optim.AdamW,), {})
    assert (kinds_of(torch.optim.AdamW).on_host, kinds_of(own).on_host) == (True, False)


def test_an_executor_that_was_asked_for_is_refused_where_the_host_has_not_the_bits():
    with pytest.raises(zero3d.ConfigError) as refused:
        chosen("cpu", on_host=False, executor="host")
    assert str(refused.value) == (
        "offload.executor=host works with torch's fused Adam and AdamW and fp32 moments, and the optimizer is "
        "AdamW(fused=False), whose states are exp_avg (float32), exp_avg_sq (float32): pass one of them with "
        "fused=True, without amsgrad and not in fp64, or offload.executor=device."
    )


@pytest.mark.parametrize(("optimizer", "executor"), [
    (adamw, "host"), (lambda params: torch.optim.AdamW(params), "device"), (lambda params: torch.optim.SGD(params), "device"),
])  # fmt: skip
def test_an_engine_says_who_updates_its_records_and_why(optimizer, executor):
    engine = engine_of({"optimizer": "host"}, optimizer=optimizer)
    assert engine.offload == Offload("host", gradients="device", executor=executor)
    assert [line.partition(": ")[0] for line in engine.offload_why] == ["offload.executor=auto"]
    assert engine_of({"optimizer": "host", "executor": "device"}, optimizer=optimizer).offload_why == ()


def test_what_auto_puts_on_a_disk_is_there(monkeypatch, tmp_path):
    given = {"optimizer": "auto", "directory": tmp_path}
    with_room(monkeypatch, room_for(parts(given), 0.25)._replace(host=None, folder=True))
    engine = engine_of(given)
    assert engine.offload.optimizer == "disk"
    assert len(engine.offload_why) == 2
    held = {entry.place: entry.measured for entry in engine.memory if entry.category == "optimizer"}
    assert held["disk"] > 0
    assert (tmp_path / "rank-00000.states").stat().st_size >= held["disk"]


def test_weights_that_are_on_the_device_are_room_for_what_takes_them_over(monkeypatch):
    with_room(monkeypatch, Room(1000, 7 * GB, False))
    arena = SimpleNamespace(device=torch.device("meta"))
    there, elsewhere = (torch.nn.Parameter(torch.empty(100, device=device)) for device in ("meta", "cpu"))
    specs = [SimpleNamespace(params={"a": there, "tied": there}), SimpleNamespace(params={"b": elsewhere})]
    base = SimpleNamespace(
        axes=SimpleNamespace(arena=arena), mesh=None, options=SimpleNamespace(offload=None), specs=specs
    )
    assert auto_offload._room_for(base).device == 1000 + 400
