"""Ranks that agree, as threads: one error on all of them, whoever fails, and texts as they were."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.errors import CheckpointError, DataError, RankError

SIZE = 3


class Threads:
    """What `agree` needs of a Comm, for a rank that is a thread."""

    device = torch.device("cpu")

    def __init__(self, rank, table, barrier):
        self.rank, self._table, self._barrier = rank, table, barrier

    def exchange(self, values):
        self._table[self.rank] = values.clone()
        self._barrier.wait()
        found = torch.stack(list(self._table))  # gathers are of one length on all ranks, or this fails
        self._barrier.wait()
        return found


def on_ranks(call):
    """`call(comm)` on every rank: what it returned or raised."""
    table, barrier = [torch.zeros(0)] * SIZE, Barrier(SIZE, timeout=10)

    def run(rank):
        try:
            return call(Threads(rank, table, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


def agreed(*errors):
    """What ranks return or raise where each of them raises its error, if it has one."""

    def action(rank):
        if errors[rank] is not None:
            raise errors[rank]
        return rank

    return on_ranks(lambda comm: agree(comm, lambda: action(comm.rank)))


def test_where_none_fails_every_rank_has_its_own_result():
    assert agreed(None, None, None) == [0, 1, 2]


def test_of_several_failures_the_first_rank_s_is_raised_on_all():
    mine = DataError("the first")
    first, failing, also = agreed(None, mine, CheckpointError("the second"))
    assert failing is mine
    assert failing.from_rank is None
    for rank in (first, also):
        assert (type(rank), str(rank), rank.from_rank, rank.exit_code) == (DataError, "the first", 1, 2)
    assert str(also.__cause__) == "the second"  # its own failure is not lost


def test_only_errors_of_this_project_are_raised_by_name_elsewhere():
    """`errors` holds other names, too: those it imports, functions, constants."""
    for name in ("errno", "short", "OF_PATHS", "annotations"):
        other, failing, _ = agreed(None, type(name, (Exception,), {})("x"), None)
        assert type(failing).__name__ == name
        assert (type(other), str(other), other.exit_code) == (RankError, f"rank 1 failed: {name}: x", 1)


def test_a_long_message_is_cut_before_it_travels():
    long = "x" * 100_000
    other, failing, _ = agreed(None, DataError(long), None)
    assert str(failing) == long
    assert 100 < len(str(other)) < 10_000


def test_an_error_of_the_system_keeps_its_cause_and_code():
    full = OSError(28, "No space left on device")
    _, failing, other = agreed(None, full, None)
    assert isinstance(failing, CheckpointError)
    assert failing.__cause__ is full
    assert str(failing) == str(other) == "rank 1 failed: OSError: [Errno 28] No space left on device"
    assert (failing.exit_code, other.exit_code) == (1, 1)


@pytest.mark.parametrize("texts", [
    ("a", "bcd", ""), ("", "", ""), ("\N{SNOWMAN}", "ab ", " \0"), ("\N{SNOWMAN}" * 3, "x" * 3, "\N{GRINNING FACE}"),
])  # fmt: skip
def test_texts_of_any_length_and_language_arrive_as_they_were(texts):
    assert on_ranks(lambda comm: exchange_texts(comm, texts[comm.rank])) == [list(texts)] * SIZE
