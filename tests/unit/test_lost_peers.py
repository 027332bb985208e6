"""Errors of a lost peer are known by their type, gloo's by their words; other errors stay what they are."""

import threading

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from zero3d.distributed import axis
from zero3d.distributed.axis import Axis
from zero3d.errors import OrderError, Zero3dError
from zero3d.watchdog.heartbeat import Heartbeat


def raised_of(error, unit="head", heartbeat=None):
    """What an axis makes of an error of its groups."""

    def fail():
        raise error

    try:
        Axis("dp", 1, 2, heartbeat=heartbeat).call("all_gather", unit, fail)
    except Exception as found:
        return found


LATE = [
    DistStoreError("Socket"),
    RuntimeError("Timed out waiting 3000ms for recv operation"),
    RuntimeError("Wait timeout"),
]
LOST = [
    DistNetworkError("failed to recv, got 0 bytes"),
    RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4242"),
    RuntimeError("Connection reset"),
]
OTHERS = [
    RuntimeError("shape '[2]' is invalid for input of size 3"), ValueError("a peer that timed out"),
    torch.OutOfMemoryError("CUDA out of memory: the connection of a peer was closed"),
    NotImplementedError("peer access, timeout"),
]  # fmt: skip


@pytest.mark.parametrize("error", LATE, ids=str)
def test_a_peer_that_never_came(error, monkeypatch):
    monkeypatch.setattr(axis, "AT_ONCE", 0.0)
    found = raised_of(error)
    assert type(found) is OrderError
    assert "rank 1 of axis dp waited 0.0 s in all_gather of unit 'head' and no peer came" in str(found)
    assert found.__cause__ is error


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_peer_that_went_away(error):
    found = raised_of(error)
    assert type(found) is Zero3dError
    assert "in all_gather of unit 'head' when a peer went away: look at the first rank" in str(found)
    assert str(error).removeprefix("[pair.cc:547] ") in str(found)
    assert found.__cause__ is error


def test_a_rank_that_has_not_waited_itself_does_not_say_so():
    said = str(raised_of(LATE[1]))
    assert said.startswith("rank 1 of axis dp began all_gather of unit 'head' after a peer had given up waiting: ranks")


def test_a_call_that_not_all_ranks_make_is_named(monkeypatch):
    monkeypatch.setattr(axis, "AT_ONCE", 0.0)
    heartbeat = Heartbeat(None)
    with heartbeat.phase("save"):
        said = str(raised_of(LATE[1], "-", heartbeat))
    assert "waited 0.0 s in all_gather, in phase save, and no peer came: not all ranks have begun this phase" in said
    assert "units" not in said
    assert "phase" not in str(raised_of(LATE[1], "-", heartbeat))


def test_what_gloo_says_beside_the_reason_is_left_out():
    error = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40878. This is "
        "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting. GLHF!"
    )
    assert str(raised_of(error)).endswith(
        "look at the first rank that failed. (Connection closed by peer [127.0.0.1]:40878.)"
    )


NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with
NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed."""


@pytest.mark.parametrize(("message", "reason"), [
    (f"{NCCL}\nLast error:\nCuda failure 2 'out of memory'", "(Cuda failure 2 'out of memory')"),
    (NCCL, "ncclUnhandledCudaError: Call to CUDA function failed.)"),
])  # fmt: skip
def test_a_backend_s_own_reason_is_told_which_may_be_another_than_a_lost_peer(message, reason):
    found = raised_of(DistBackendError(message))
    assert type(found) is Zero3dError
    assert "of unit 'head' when the backend (such as NCCL) failed or a peer went away: look at the first" in str(found)
    assert str(found).endswith(reason)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_stay_what_they_are(error):
    assert raised_of(error) is error


class Silent:
    """A store that does not answer, as behind a cut link, where torch waits until TCP gives up."""

    def __init__(self):
        self.asked, self.mended = 0, threading.Event()

    def check(self, keys):
        self.asked += 1
        self.mended.wait()
        return False


@pytest.fixture
def silent(monkeypatch):
    """The default store, which answers when the test is over."""
    store = Silent()
    monkeypatch.setattr(axis, "_get_default_store", lambda: store)
    monkeypatch.setattr(axis, "ANSWER", 0.05)
    yield store
    store.mended.set()


def test_a_store_that_does_not_answer_is_asked_once_and_holds_no_error_up(silent):
    """A second question would wait behind the first."""
    for _ in range(2):
        assert "when a peer went away: look at the first rank" in str(raised_of(LOST[1]))
        axis.leave_note("a rank has failed")
        axis.say_ended()
    assert silent.asked == 1


def test_the_store_of_new_groups_is_asked_while_an_earlier_one_still_owes_an_answer(silent, monkeypatch):
    assert axis.read_note() == ""
    new = HashStore()
    monkeypatch.setattr(axis, "_get_default_store", lambda: new)
    monkeypatch.setattr(axis, "ANSWER", 60.0)
    axis.leave_note("rank 0 has no memory left")
    assert str(raised_of(LOST[1])).startswith("rank 0 has no memory left (rank 1 of axis dp waited ")
    assert silent.asked == 1


def test_a_store_that_has_answered_since_is_asked_again(silent):
    assert axis.read_note() == ""
    silent.mended.set()
    axis._unanswered[silent].join()
    assert axis.read_note() == ""
    assert silent.asked == 2
