"""Memory that a step makes and drops beside what an engine holds: portions of updates, and formulas that bound it."""

import sys
from functools import partial
from itertools import accumulate, product
from math import ceil
from pathlib import Path
from unittest import mock

import pytest
import torch
from buckets import buckets_of
from meshes import micro_batches
from models import adamw, batch, build, loss_of
from tensors import tiny

import zero3d
from zero3d.account.transients import master_scratch
from zero3d.engine.auto_offload import bytes_needed
from zero3d.memory.budget import HostBudget
from zero3d.memory.scratch import update_bucket, update_scratch
from zero3d.offload.states import StateKinds
from zero3d.optim import adamw8bit, muon
from zero3d.optim.owners import WIRE
from zero3d.spec.optimizer import TEMPORARIES, temporary_elements
from zero3d.tools.plan.memory import IN_STEP
from zero3d.tools.sim.live import StorageTracker
from zero3d.zero.param_groups import OptimizerChoice
from zero3d.zero.updates import in_portions, temporaries_of, updates_together

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from instruments.traffic import Stack

SLACK = 300_000  # bytes of a process that comes and goes beside tensors: pages, numbers, Python's objects

SIZES, ROOM = (4096, 1024, 2048, 4096, 512, 512), 6000
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPTIONS = {
    "Adam": ({}, {"amsgrad": True}), "AdamW": ({}, {"amsgrad": True}), "RMSprop": ({}, {"centered": True, "momentum": 0.9}),
    "NAdam": ({}, {"decoupled_weight_decay": True}), "RAdam": ({}, {"decoupled_weight_decay": True}),
    "SGD": ({}, {"momentum": 0.9, "nesterov": True}),
}  # fmt: skip
OF_CAPTURABLE = ("Adamax", "NAdam")  # whose multi-tensor calls make one value more where a graph may capture them


def most_alive(live):
    """The most bytes at once of what was made inside."""
    return max(accumulate(size for size, _ in live.events), default=0)


def pieces_of(sizes):
    torch.manual_seed(0)
    pieces = [torch.randn(size) for size in sizes]
    for piece in pieces:
        piece.grad = torch.randn_like(piece)
    return pieces


def made_and_dropped(optimizer, pieces, room):
    """The most bytes that steps make and drop, once there are states."""
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    most = 0
    for _ in range(7):  # RAdam begins with its own rule at the sixth
        with StorageTracker() as live:
            live.leave_out(*pieces, *(piece.grad for piece in pieces), *states)
            with in_portions(optimizer, room):
                optimizer.step()
        most = max(most, most_alive(live))
    return most


CASES = [
    pytest.param(kind, together, marks=() if kind in ("AdamW", "Adagrad") and together else pytest.mark.long)
    for kind, together in product(TEMPORARIES, (True, False))
]


@pytest.mark.parametrize(("kind", "together"), CASES)
def test_steps_of_torchs_optimizers_make_no_more_than_the_formula_says(kind, together, monkeypatch):
    monkeypatch.setattr("zero3d.zero.updates.update_bucket", lambda device: ROOM)
    found, bounds = [], set()
    for options, decay, maximize in product(OPTIONS.get(kind, ({},)), (0, 0.1), (False, True)):
        given = (
            options | {"maximize": maximize, "foreach": together} | ({} if kind == "Rprop" else {"weight_decay": decay})
        )
        pieces = pieces_of(SIZES)
        optimizer = getattr(torch.optim, kind)(pieces, **given)
        found.append(made_and_dropped(optimizer, pieces, ROOM))
        bounds.add(4 * temporaries_of(optimizer, optimizer.param_groups[0], SIZES, CPU))
    (bound,) = bounds
    rate = TEMPORARIES[kind].together if together else TEMPORARIES[kind].alone
    assert bound == 4 * rate * (ROOM if together else 4096)
    assert max(found) <= bound + 4 * 2 * len(SIZES)  # numbers of each tensor
    least = rate - (together and kind in OF_CAPTURABLE)
    assert ceil(max(found) / (4 * (5120 if together else 4096))) >= least  # the longest portion: 4096 and 1024


def test_fused_kernels_make_nothing_of_an_element():
    pieces = pieces_of(SIZES)
    optimizer = torch.optim.AdamW(pieces, fused=True)
    assert temporaries_of(optimizer, optimizer.param_groups[0], SIZES, CUDA) == 0
    assert made_and_dropped(optimizer, pieces, ROOM) <= 4 * 2 * len(SIZES)


@pytest.mark.parametrize(("options", "values"), [({}, 4), ({"foreach": True}, 1), ({"fused": True}, 0)])
def test_what_an_optimizer_makes_of_an_element_is_known_before_there_are_units(options, values):
    choice = OptimizerChoice({}, 2, lambda pieces: torch.optim.AdamW([p for group in pieces for p in group], **options))
    assert StateKinds.of(choice, torch.float32, "fp32", CPU).temporaries == values


class Own(torch.optim.AdamW):
    """An optimizer of a user's, which may count its steps where nobody looks."""


@pytest.mark.parametrize(("kind", "options", "device", "together"), [
    (torch.optim.AdamW, {}, CUDA, True),
    (torch.optim.AdamW, {}, CPU, False),
    (torch.optim.AdamW, {"foreach": True}, CPU, True),
    (torch.optim.AdamW, {"foreach": False}, CUDA, False),
    (torch.optim.AdamW, {"fused": True}, CUDA, False),
    (Own, {}, CUDA, False),
])  # fmt: skip
def test_what_makes_multi_tensor_calls_is_updated_in_portions(kind, options, device, together):
    optimizer = kind(pieces_of([16]), **options)
    assert updates_together(optimizer, optimizer.param_groups[0], device) == together


def test_an_optimizer_in_portions_is_the_same_behind_its_step_and_steps_once():
    pieces = pieces_of(SIZES)
    optimizer = torch.optim.AdamW([{"params": pieces[:4]}, {"params": pieces[4:], "lr": 0.5}], foreach=True)
    groups, inside, calls = optimizer.param_groups, [], []
    optimizer.register_step_post_hook(
        lambda *_: calls.append([len(group["params"]) for group in optimizer.param_groups])
    )
    with in_portions(optimizer, ROOM):
        inside = [(group["lr"], [p.numel() for p in group["params"]]) for group in optimizer.param_groups]
        optimizer.step()
    assert inside == [(1e-3, [4096, 1024]), (1e-3, [2048]), (1e-3, [4096]), (0.5, [512, 512])]
    assert calls == [[2, 1, 1, 2]]
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [4, 2]
    with pytest.raises(ZeroDivisionError), in_portions(optimizer, ROOM):
        raise ZeroDivisionError
    assert optimizer.param_groups is groups


def tracked(engine, work):
    """The most bytes that work makes and drops beside what the engine holds."""
    held = [tensor for unit in engine.units for tensor in (unit.weights.shard_or_full, unit.gradients.owned)]
    held += [flat for *_, flat in engine.optimizer.flat_states()]
    with StorageTracker() as live:
        live.leave_out(*held)
        work()
    return most_alive(live)


def alive_in_step(room):
    """The most bytes that a step of an engine makes and drops, what its formula says, and its elements."""
    torch.manual_seed(0)
    with buckets_of(room):
        engine = zero3d.Engine(
            build("net"), stage=2, precision="fp32", clip_norm=1.0,
            optimizer=lambda groups: torch.optim.AdamW(groups, foreach=True),
        )  # fmt: skip
        for step in range(2):
            engine.backward(loss_of(engine, batch(step)))
            found = tracked(engine, engine.step)
        optimizer = engine.optimizer.torch
        sizes = [piece.numel() for piece in optimizer.param_groups[0]["params"]]
        bound = 4 * temporaries_of(optimizer, optimizer.param_groups[0], sizes, CPU)
        return found - 4 * 4 * len(sizes), bound, sum(sizes)  # apart from norms, and counts of steps


def test_a_step_of_an_engine_makes_a_portion_and_not_a_value_of_every_parameter():
    portion, bound, elements = alive_in_step(1024)
    at_once, all_, _ = alive_in_step(elements)
    assert portion <= bound < all_ / 4
    assert all_ == 4 * elements
    assert all_ / 2 < at_once <= all_


def alive_in_muon(case, batches):
    """The most bytes that Muon makes of matrices in a step on this rank, and what its formula says."""
    if case == "tp":
        model, mesh = tiny("llama", intermediate_size=96), zero3d.Mesh(tp=2)
    else:
        model, mesh = tiny("gpt2"), zero3d.Mesh()  # with fused matrices
    stage = 3 if case == "tp" else case
    engine = zero3d.Engine(model, mesh=mesh, stage=stage, precision="bf16", clip_norm=0.5, optimizer=muon(lr=0.02))
    orthogonal, found = engine.optimizer.orthogonal, []
    (exchange,) = orthogonal._exchanges
    exchange._batches = batches
    engine.optimizer.orthogonal = lambda: found.append(tracked(engine, orthogonal))
    for number in range(2):
        engine.train_batch(micro_batches(number, 1))
    tp = engine.mesh.place.tp
    return max(found), WIRE * exchange.owners.working(exchange.comm.rank, batches, engine.mesh.tp, tp)


def muon_in_ways():
    return {way: alive_in_muon(*way) for way in ((0, False), (3, False), (3, True), ("tp", True))}


def test_matrices_take_what_their_formula_says(ranks):
    for of_rank in ranks(2, muon_in_ways):
        for way, (made, bound) in of_rank.items():
            assert 0.85 * bound <= made <= bound + 64, way


def test_moments_in_8_bits_take_what_their_formula_says(monkeypatch):
    room = 2048
    monkeypatch.setattr("zero3d.optim.eight_bit.update_bucket", lambda device: room)
    pieces = pieces_of((5000, 1000, 300, 4096))
    optimizer = adamw8bit()(pieces)
    optimizer.step()
    blocks = [state[key] for state in optimizer.state.values() for key in optimizer.coded]
    counts = [state["step"] for state in optimizer.state.values()]
    with StorageTracker() as live:
        live.leave_out(*pieces, *(piece.grad for piece in pieces), *counts)
        live.leave_out(*(tensor for each in blocks for tensor in (each.codes, each.scales)))
        optimizer.step()
    assert (IN_STEP - 1) * room < most_alive(live) <= IN_STEP * room


OF_A_STEP = {
    "fp32": ({"precision": "fp32"}, adamw, lambda sizes: 0),
    "casts": ({"precision": "bf16"}, adamw, lambda sizes: master_scratch(sum(sizes), "cpu", splits=False)),
    "halves": (
        {"precision": "bf16", "master": "split"}, adamw, lambda sizes: master_scratch(sum(sizes), "cpu", splits=True),
    ),
    "multi-tensor calls": (
        {"precision": "fp32"}, partial(torch.optim.AdamW, foreach=True),
        lambda sizes: 4 * temporary_elements("AdamW", True, sizes, update_bucket("cpu")),
    ),
    "tensor by tensor": (
        {"precision": "fp32"}, partial(torch.optim.Adagrad, weight_decay=0.1),
        lambda sizes: 4 * temporary_elements("Adagrad", False, sizes, update_bucket("cpu")),
    ),
    "8 bits": ({"precision": "fp32"}, adamw8bit(), lambda sizes: IN_STEP * update_scratch(sum(sizes), "cpu")),
}  # fmt: skip


@pytest.mark.parametrize("case", ["casts", "halves", "multi-tensor calls", "tensor by tensor"])
def test_auto_counts_what_a_step_takes(case):
    options, optimizer, formula = OF_A_STEP[case]
    engine = zero3d.Engine(Stack(blocks=8, hidden=256), stage=2, optimizer=optimizer, units=["layers.*"], **options)
    counted = bytes_needed(engine._parts).instants["optimizer step"]["scratch"]
    bound = formula([piece.master.numel() for piece in engine.optimizer.pieces])
    assert counted == (4 * update_bucket("cpu") * 3 if case == "tensor by tensor" else bound)


def resident_in_steps():
    """The most memory that the process takes in a step beside what it has before, and formulas; None where nobody says."""
    from memory import gauge
    from ranks import map_tensors

    map_tensors()
    memory, found = gauge(CPU, exact=True), {}
    for case, (options, optimizer, formula) in OF_A_STEP.items():
        engine = zero3d.Engine(
            Stack(blocks=8, hidden=256), stage=2, optimizer=optimizer, clip_norm=1e-3, units=["layers.*"], **options
        )
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 256)).sum())
            memory.reset()
            before = memory.now()
            if memory.peak() > before + SLACK:
                return None  # the system does not let a process begin its peak anew
            engine.step()
        sizes = [piece.master.numel() for piece in engine.optimizer.pieces]
        found[case] = memory.peak() - before, formula(sizes)
    return found


def resident_in_norms():
    """The most memory that the process takes for norms of gradients that wait in 16 bits, and the budget of the host."""
    from memory import gauge
    from ranks import map_tensors

    map_tensors()
    memory, asked = gauge(CPU, exact=True), {}
    check = HostBudget.check
    with mock.patch.object(HostBudget, "check", lambda budget, parts: (asked.update(parts), check(budget, parts))[1]):
        engine = zero3d.Engine(
            Stack(blocks=2, hidden=512), stage=2, optimizer=adamw, units=["layers.*"], precision="bf16",
            offload={"optimizer": "host", "gradients": "host", "gradient_dtype": "bf16"},
        )  # fmt: skip
    measure = engine.optimizer.measure

    def watched(*given):
        memory.reset()
        before = memory.now()
        asked["begins anew"] = memory.peak() <= before + SLACK
        found = measure(*given)
        asked["taken"] = memory.peak() - before
        return found

    engine.optimizer.measure = watched
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 512)).sum())
        engine.step()
    return asked


def test_the_budget_of_the_host_has_room_for_norms_of_gradients_in_16_bits(alone):
    asked = alone(resident_in_norms)
    assert asked["norms of gradients"] == 4 * 512 * 512
    if asked["begins anew"]:
        assert 0.8 * 4 * 512 * 512 <= asked["taken"] <= 4 * 512 * 512 + SLACK


def test_memory_of_the_process_is_what_formulas_say_of_a_step(alone):
    found = alone(resident_in_steps)
    if found is None:
        pytest.skip("the system does not let a process begin its peak anew (/proc/self/clear_refs)")
    for case, (taken, bound) in found.items():
        assert 0.8 * bound - SLACK <= taken <= bound + SLACK, case
