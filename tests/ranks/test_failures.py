"""Ranks that disagree or die: a named error within the timeout, never a silent exchange, never a signal."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, batch, bits, build, loss_of
from torch import nn

import zero3d
from zero3d.distributed import choice
from zero3d.distributed.axis import Pending
from zero3d.errors import CheckpointError, DataError, MeshError, OrderError

TIMEOUT = 3.0


class TwoPaths(nn.Module):
    """Two units of one size, used in the order the caller says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCAB, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)

    def forward(self, ids, order):
        x = self.embed(ids)
        for side in order:
            x = torch.tanh(getattr(self, side)(x))
        return x


def disagree(orders, native, debug=False):
    """Each rank uses units in its own order in each micro-batch; returns whether weights ever changed hands silently."""
    if native:
        choice.PAIRWISE_MAX_RANKS = 0
    try:
        mesh, own = zero3d.Mesh(dp=2, debug=debug), orders[dist.get_rank()]
        options = {"precision": "fp32", "units": ["left", "right"], "optimizer": None, "accumulate": len(own)}
        engine = zero3d.Engine(TwoPaths(), stage=3, mesh=mesh, **options)
        for number, order in enumerate(2 * own):
            engine.backward(engine(batch(number), order).square().mean())
            engine.step()
        return "applied"
    finally:
        choice.PAIRWISE_MAX_RANKS = 8


CASES = {
    "other order": [[["left", "right"]], [["right", "left"]]],
    "other counts": [[["left", "right"]], [["left", "right", "left", "right"]]],
    "other order, each unit as often": [[["left", "right"], ["right", "left"]], [["right", "left"], ["left", "right"]]],
}


# Messages of pairwise reductions have tags of units: in the last case native ones alone meet another unit's.
@pytest.mark.parametrize(("case", "native"), [
    ("other order", False), ("other order", True), ("other counts", False), ("other counts", True),
    ("other order, each unit as often", True),
])  # fmt: skip
def test_different_orders_raise_order_errors_that_name_operation_and_unit(ranks, case, native):
    answers = ranks(2, disagree, CASES[case], native, group_timeout=TIMEOUT, check=False)
    errors = [error for _, error in answers]
    assert all(result is None for result, _ in answers)
    assert any("OrderError" in error for error in errors)
    for rank, error in enumerate(errors):
        assert f"rank {rank}" in error, error
        assert "of unit '" in error, error


def test_debug_mode_compares_orders_before_every_gather(ranks):
    errors = [
        error for _, error in ranks(2, disagree, CASES["other order"], False, True, group_timeout=TIMEOUT, check=False)
    ]
    assert all("OrderError" in error and "all_gather of unit" in error for error in errors)


class Failing(nn.Module):
    """A block that raises on demand, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.inner = build("net")
        self.fail = None

    def forward(self, ids):
        x = self.inner.embed(ids)
        for i, layer in enumerate(self.inner.layers):
            x = layer(x)
            if i == 1 and self.fail == "forward":
                raise ValueError("asked to fail in forward")
            if i == 1 and self.fail == "backward":
                x.register_hook(self._raise)
        return self.inner.head(self.inner.norm(x))

    @staticmethod
    def _raise(grad):
        raise ValueError("asked to fail in backward")


def fails_everywhere(stage, where, plain):
    rank = dist.get_rank()
    engine = zero3d.Engine(Failing(), stage=stage, precision="bf16")
    engine.module.fail = where
    with pytest.raises(ValueError, match="asked to fail"):
        loss = loss_of(engine, batch(0, rank))
        loss.backward() if plain else engine.backward(loss)
    engine.module.fail = None
    for step in range(2):
        loss_of(engine, batch(step, rank)).backward()
        assert engine.step().applied
    fresh = zero3d.Engine(Failing(), stage=stage, precision="bf16")
    for step in range(2):
        loss_of(fresh, batch(step, rank)).backward()
        fresh.step()
    with engine.full_params(), fresh.full_params():
        same = bits(engine.module.parameters()) == bits(fresh.module.parameters())
    return same, float(engine.arena.live("gathered")), float(engine.arena.live("bucket"))


@pytest.mark.parametrize(("stage", "where", "plain"), [
    (0, "backward", True), (3, "forward", True), (3, "backward", False),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in ((1, "forward", False), (2, "backward", False), (3, "backward", True))),
])  # fmt: skip
def test_an_exception_on_all_ranks_leaves_a_usable_engine(ranks, stage, where, plain):
    for same, gathered, bucket in ranks(2, fails_everywhere, stage, where, plain):
        assert same
        assert (gathered, bucket) == (0, 0)


def test_a_step_whose_last_sums_fail_is_forgotten(monkeypatch):
    """As where a peer is lost at the boundary: nothing of it is in the next step."""
    engine, fresh = (zero3d.Engine(build("net"), stage=2, precision="bf16", accumulate=2) for _ in range(2))
    for part in range(2):
        engine.backward(loss_of(engine, batch(9 + part)))

    def fail():
        raise OrderError("no peer came")

    with monkeypatch.context() as broken:
        broken.setattr(engine.reductions, "catch_up", fail)
        with pytest.raises(OrderError, match="no peer came"):
            engine.step()
    assert (engine.accumulation.count, engine.reductions.pending, engine.arena.live("bucket")) == (0, False, 0)
    for each in (engine, fresh):
        for part in range(2):
            each.backward(loss_of(each, batch(part)))
        assert each.step().applied
    assert engine.fingerprint() == fresh.fingerprint()


def memory_after_gathers():
    """Bytes of a unit's buffer once it is released, after a gather, one of which a peer was lost, and another one."""
    engine = zero3d.Engine(build("net"), stage=3, precision="bf16")
    weights, found = engine.units[0].weights, []

    def lose():
        raise OrderError("no peer came")

    for lost in (False, True, False):
        weights.gather()
        if lost:
            weights._pending_gather.wait()
            weights._pending_gather = Pending(lose)
            with pytest.raises(OrderError):
                weights.release()
        weights.release()
        found.append(weights.full.untyped_storage().nbytes())
    return found, weights.full.nbytes


def test_memory_into_which_peers_may_still_write_is_kept_where_one_of_them_is_lost(ranks):
    for found, whole in ranks(2, memory_after_gathers):
        assert found == [0, whole, 0]


def fails_on_rank_1(stage):
    engine = zero3d.Engine(Failing(), stage=stage, precision="bf16")
    engine.module.fail = "forward" if dist.get_rank() == 1 else None
    engine.backward(loss_of(engine, batch(0)))
    engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_on_one_rank_ends_the_others(ranks, stage):
    (_, waiting), (_, failed) = ranks(2, fails_on_rank_1, stage, group_timeout=TIMEOUT, check=False)
    assert "asked to fail" in failed
    assert "Error" in waiting
    assert "rank 0 of axis dp waited" in waiting


def wrong_world():
    zero3d.Mesh(dp=3)


def test_degrees_that_do_not_multiply_are_refused_with_the_arithmetic(ranks):
    for _, error in ranks(2, wrong_world, check=False):
        assert error == "MeshError: 2 ranks cannot form dp=3 (= 3 ranks): leave dp out and it is 2, or start 3 ranks."


# --- errors that all ranks raise ----------------------------------------------------------------


def made(kind, message, cause=None):
    """An error, of a system's error if that is given by its number."""
    error = kind(message)
    error.__cause__ = None if cause is None else OSError(cause, os.strerror(cause))
    return error


def fail_on_rank_1(*error):
    """What each rank raises where rank 1 fails inside `agree`: its class, what is told, who tells it, its exit code."""
    from zero3d.distributed.agreement import agree
    from zero3d.distributed.collectives import Comm
    from zero3d.distributed.ledger import Ledger
    from zero3d.memory.arena import Arena
    from zero3d.tools.cli.worker import leave_exception

    def action():
        if dist.get_rank() == 1:
            raise made(*error)

    try:
        with zero3d.Mesh().waiting_room() as everyone:
            agree(Comm(everyone, Arena(torch.device("cpu")), Ledger()), action)
    except Exception as raised:
        return type(raised).__name__, str(raised), getattr(raised, "from_rank", None), leave_exception(raised)


@pytest.mark.parametrize(
    ("error", "own", "others", "said", "code"),
    [
        ((DataError, "x: y"), "DataError", "DataError", "x: y", 2),
        ((MeshError, "x: y"), "MeshError", "MeshError", "x: y", 2),
        ((AttributeError, "x: y"), "AttributeError", "RankError", "rank 1 failed: AttributeError: x: y", 1),
        ((PermissionError, "x: y"), "CheckpointError", "CheckpointError", "rank 1 failed: PermissionError: x: y", 1),
        ((CheckpointError, "x: y", errno.ENOSPC), "CheckpointError", "CheckpointError", "x: y", 1),
        ((DataError, "\N{SNOWMAN}\ud800", errno.ENOENT), "DataError", "DataError", "\N{SNOWMAN}\ud800", 2),
    ],
    ids=lambda value: f"{value[0].__name__} {value[2:]}" if isinstance(value, tuple) else "",
)
def test_a_failing_rank_tells_its_own_error_and_all_exit_with_its_code(ranks, error, own, others, said, code):
    first, failing = ranks(2, fail_on_rank_1, *error)
    assert first == (others, said, 1, code)
    assert failing == (own, said if own == others else "x: y", None, code)


def leave(kind):
    """Rank 1 goes away as a worker does, of an error if it has one; what rank 0 says of it, and its exit code."""
    from zero3d.distributed.axis import leave_note
    from zero3d.tools.cli.worker import leave_exception

    axis = zero3d.Mesh(dp=2).data
    dist.barrier(group=axis.reductions)  # gloo connects rank by rank: one that left now would fail the other's start
    if dist.get_rank() == 1:
        code = leave_exception(made(kind, "the reason")) if kind else 1
        leave_note("a consequence")
        return "", code
    raised = None
    while raised is None:  # what rank 1 had sent before may still arrive
        try:
            axis.call("barrier", "-", lambda: dist.barrier(group=axis.gathers))
        except zero3d.Zero3dError as error:
            raised = error
    return str(raised), leave_exception(raised)


@pytest.mark.parametrize(("kind", "code"), [(DataError, 2), (ValueError, 1)])
def test_a_rank_that_loses_a_peer_says_first_why_and_exits_with_its_code(ranks, kind, code):
    (said, own), (_, failed) = ranks(2, leave, kind, group_timeout=TIMEOUT)
    assert said.startswith(f"{kind.__name__}: the reason (rank 0 of axis dp waited ")
    assert said.endswith("; rank 1 failed.)")
    assert own == failed == code


def wait_for_one_that_fails(kind):
    """Rank 1 goes away while the others wait in the store: what they say, and with which code they exit."""
    from zero3d.distributed import waiting
    from zero3d.distributed.collectives import Comm
    from zero3d.distributed.ledger import Ledger
    from zero3d.memory.arena import Arena
    from zero3d.tools.cli.worker import leave_exception

    waiting.LOOK = 0.1
    with zero3d.Mesh().waiting_room() as everyone:
        comm = Comm(everyone, Arena(torch.device("cpu")), Ledger())
        met = comm.exchange(torch.tensor([comm.rank])).tolist()
        assert everyone.gathers is None  # no rank is connected to another
        if comm.rank == 1:
            return met, leave_exception(kind("the reason"))
        with pytest.raises(zero3d.Zero3dError) as error:
            comm.exchange(torch.tensor([comm.rank]))
    return met, str(error.value), leave_exception(error.value)


@pytest.mark.parametrize(("kind", "code"), [(DataError, 2), (ValueError, 1)])
def test_ranks_that_wait_in_the_store_hear_of_one_that_fails(ranks, kind, code):
    first, (met, failed), third = ranks(3, wait_for_one_that_fails, kind, group_timeout=TIMEOUT)
    assert met == [[0], [1], [2]]
    assert failed == code
    for rank, (found, said, own) in ((0, first), (2, third)):
        assert found == met
        assert said.startswith(f"{kind.__name__}: the reason (rank {rank} of axis world waited ")
        assert said.endswith("in exchange and no peer came; rank 1 failed.)")
        assert own == code


def vanish():
    """Rank 1 is gone without a word, as if it had been killed: the exit code of rank 0."""
    from zero3d.tools.cli.worker import leave_exception

    axis = zero3d.Mesh(dp=2).data
    if dist.get_rank() == 0:
        with pytest.raises(zero3d.Zero3dError, match="rank 0 of axis dp waited") as error:
            axis.call("barrier", "-", lambda: dist.barrier(group=axis.gathers))
        return leave_exception(error.value)
    return None


def test_a_rank_whose_peer_died_without_a_word_exits_with_1(ranks):
    assert ranks(2, vanish, group_timeout=TIMEOUT) == [1, None]
