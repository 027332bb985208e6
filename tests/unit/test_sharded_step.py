"""The step's own rules, on one process: whose orders are compared, what is clipped, how much is under way."""

from types import SimpleNamespace

import pytest
import torch
from models import batch, bits, build, loss_of

import zero3d
from zero3d.zero.exact.optimizer import ExactOptimizer
from zero3d.zero.optimizer import ShardedOptimizer, pipeline
from zero3d.zero.stages import WINDOW


def exchanged(kind, dp_differences, other_row):
    """Weight of the first of two rows of dp ranks, and whether orders agree: dp ranks differ by so much, a row found that."""
    comm = SimpleNamespace(
        size=2, order_values=lambda: [7.0, 9.0],
        exchange=lambda mine: torch.stack([mine, mine + torch.tensor(dp_differences, dtype=torch.float64)]),
    )  # fmt: skip
    model_group = SimpleNamespace(
        alone=False, exchange=lambda row: torch.stack([row, torch.tensor(other_row, dtype=torch.float64)]),
        count_once=lambda rows: rows[:1],
    )  # fmt: skip
    given = SimpleNamespace(
        _comm=comm, _replica=model_group, _arena=SimpleNamespace(device=torch.device("cpu")),
        _leaves=SimpleNamespace(total=torch.sum),
    )  # fmt: skip
    weight = torch.tensor([3.0], dtype=torch.float64) if kind is ExactOptimizer else 3.0
    total, in_order = kind._exchange(given, weight)
    return float(total), bool(in_order)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ExactOptimizer])
def test_orders_of_gathers_and_of_reductions_are_compared_on_all_ranks(kind):
    assert exchanged(kind, [2.0, 0.0, 0.0], [4.0, 0.0]) == (3.0 + 5.0, True)
    assert exchanged(kind, [0.0, 1.0, 0.0], [4.0, 0.0]) == (6.0, False)
    assert exchanged(kind, [0.0, 0.0, 1.0], [4.0, 0.0]) == (6.0, False)
    assert exchanged(kind, [0.0, 0.0, 0.0], [4.0, 1.0]) == (6.0, False)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ExactOptimizer])
def test_what_one_dp_rank_finds_uneven_over_tp_is_the_norm_of_all(kind):
    for partials, wanted in (([2.0, -5.0, 3.0], -5.0), ([-2.0, 1.0, 3.0], -2.0), ([2.0, 3.0, 6.0], 7.0)):
        given = SimpleNamespace(
            shard_grads=lambda: iter(()), _segment_grads=lambda: iter(()), _units=[],
            _replica=SimpleNamespace(norm=lambda *_: torch.zeros(()), norms=lambda *_: torch.zeros(1)),
            _comm=SimpleNamespace(size=3, exchange=lambda _, found=partials: torch.tensor(found).double()[:, None]),
        )  # fmt: skip
        assert float(kind._norm(given)) == wanted


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


def test_at_most_a_window_of_collectives_is_under_way_and_all_are_waited_for_in_order():
    log = []

    class Started:
        def __init__(self, name):
            log.append(f"start {name}")
            self.wait = lambda: log.append(f"wait {name}")

    assert WINDOW == 2
    pipeline(lambda name=name: Started(name) for name in "abcd")
    assert log == [
        "start a", "start b", "wait a", "start c", "wait b", "start d", "wait c", "wait d",
    ]  # fmt: skip
