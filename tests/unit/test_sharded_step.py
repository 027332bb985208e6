"""The step's own rules, on one process: whose orders are compared, what is clipped, how much is under way."""

import math
from types import SimpleNamespace

import pytest
import torch
from models import adamw, batch, bits, build, loss_of

import zero3d
from zero3d.memory.arena import Arena
from zero3d.zero.exact.optimizer import ExactOptimizer
from zero3d.zero.model_group import NONE, Norms
from zero3d.zero.optimizer import NO_NORM, ShardedOptimizer


def exchanged(kind, dp_differences, other_row):
    """Weight of the first of two rows of dp ranks, and whether orders agree: dp ranks differ by so much, a row found that.

    A row of ranks finds the hash of what it has decided about the step, which is 5 here, or NaN where orders differ.
    """
    comm = SimpleNamespace(
        size=2, order_values=lambda: [7.0, 9.0], note_step=lambda decided: 5.0,
        exchange=lambda mine: torch.stack([mine, mine + torch.tensor(dp_differences, dtype=torch.float64)]),
    )  # fmt: skip
    model_group = SimpleNamespace(
        alone=False, exchange=lambda row: torch.stack([row, torch.tensor(other_row, dtype=torch.float64)]),
        count_once=lambda rows: rows[:1],
    )  # fmt: skip
    optimizer = object.__new__(kind)
    optimizer._comm, optimizer._model_group, optimizer._arena = comm, model_group, Arena(torch.device("cpu"))
    optimizer._comms = [comm]
    optimizer.clip_norm, optimizer._clipped, optimizer._left_out = None, NO_NORM, 0
    optimizer._summands = SimpleNamespace(total=torch.sum)
    total, in_order = optimizer._exchange(torch.tensor([3.0], dtype=torch.float64))
    return float(total), bool(in_order)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ExactOptimizer])
def test_orders_of_gathers_and_of_reductions_are_compared_on_all_ranks(kind):
    assert exchanged(kind, [2.0, 0.0, 0.0], [4.0, 5.0]) == (3.0 + 5.0, True)
    assert exchanged(kind, [0.0, 1.0, 0.0], [4.0, 5.0]) == (6.0, False)
    assert exchanged(kind, [0.0, 0.0, 1.0], [4.0, 5.0]) == (6.0, False)
    assert exchanged(kind, [0.0, 0.0, 0.0], [4.0, math.nan]) == (6.0, False)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ExactOptimizer])
def test_what_other_stages_have_decided_about_a_step_is_compared(kind):
    assert exchanged(kind, [0.0, 0.0, 0.0], [4.0, 6.0]) == (6.0, False)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ExactOptimizer])
@pytest.mark.parametrize(("partials", "wanted"), [
    ([2.0, 3.0, 6.0], (7.0, True)), ([2.0, NO_NORM, 3.0], (None, False)), ([NO_NORM, 1.0, 3.0], (None, False)),
])  # fmt: skip
def test_one_dp_rank_without_a_norm_is_noticed_by_all(kind, partials, wanted):
    sent = []
    optimizer = object.__new__(kind)
    optimizer._wide, optimizer._ep, optimizer._shards = torch.float32, None, 3
    optimizer._comm = SimpleNamespace(
        exchange=lambda own: (sent.append((own.dtype, own.tolist())), torch.tensor(partials).double()[:, None])[1]
    )
    for uneven, own in ((NONE, 2.5), (4, NO_NORM)):
        norm, even = optimizer._over_dp(Norms(torch.tensor([2.5]), torch.tensor(uneven)))
        assert sent.pop() == (torch.float64, [own])
        assert bool(even) == wanted[1]
        assert wanted[0] is None or float(norm) == wanted[0]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def test_a_norm_below_the_limit_is_left_alone():
    found = []
    for clip in (None, 1e3):
        engine = zero3d.Engine(build("net"), stage=2, precision="fp32", clip_norm=clip, optimizer=sgd)
        for step in range(2):
            engine.backward(loss_of(engine, batch(step)))
            assert engine.step().grad_norm < 100
        with engine.full_params():
            found.append(bits(engine.module.parameters()))
        assert all(owned.master.grad is None for owned in engine.optimizer.pieces)
    assert found[0] == found[1]


def test_a_step_without_targets_on_one_rank_moves_nothing_and_says_so():
    engine = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=sgd)
    before = engine.fingerprint()
    engine.backward(loss_of(engine, batch(0)), weight=0.0)
    assert engine.step().reason == "no targets"
    assert engine.fingerprint() == before


def test_groups_of_adam_may_differ_in_what_they_keep():
    """Its states are made at the start only where no group keeps a maximum, which torch makes at the first step."""
    engine = zero3d.Engine(
        build("net"), stage=2, precision="fp32", optimizer=adamw, param_groups=[{"match": "*norm*", "amsgrad": True}]
    )
    for step in range(2):
        engine.backward(loss_of(engine, batch(step)))
        assert engine.step().applied
    keeps = {
        owned.name
        for owned in engine.optimizer.pieces
        if "max_exp_avg_sq" in engine.optimizer.torch.state[owned.master]
    }
    assert keeps == {owned.name for owned in engine.optimizer.pieces if "norm" in owned.name}
