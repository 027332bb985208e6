"""Memory that a step makes and drops beside what an engine holds: portions of updates, and formulas that bound it."""

from itertools import accumulate, product
from math import ceil

import pytest
import torch
from buckets import buckets_of
from models import batch, build, loss_of

import zero3d
from zero3d.sim.live import StorageTracker
from zero3d.spec.optimizer import TEMPORARIES
from zero3d.zero.updates import in_portions, temporaries_of, updates_together

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
            with StorageTracker() as live:
                for unit in engine.units:
                    live.leave_out(unit.weights.shard_or_full, unit.gradients.owned)
                live.leave_out(*(flat for *_, flat in engine.optimizer.flat_states()))
                engine.step()
        optimizer = engine.optimizer.torch
        sizes = [piece.numel() for piece in optimizer.param_groups[0]["params"]]
        numbers = 4 * 4 * len(sizes)  # norms, counts of steps
        return (
            most_alive(live) - numbers,
            4 * temporaries_of(optimizer, optimizer.param_groups[0], sizes, CPU),
            sum(sizes),
        )


def test_a_step_of_an_engine_makes_a_portion_and_not_a_value_of_every_parameter():
    portion, bound, elements = alive_in_step(1024)
    at_once, all_, _ = alive_in_step(elements)
    assert portion <= bound < all_ / 4
    assert all_ == 4 * elements
    assert all_ / 2 < at_once <= all_
