"""Errors of a lost peer are known by their type, gloo's by their words; other errors stay what they are."""

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from zero3d.distributed.axis import Axis
from zero3d.errors import OrderError, Zero3dError


def raised_of(error):
    """What an axis makes of an error of its groups."""

    def fail():
        raise error

    try:
        Axis("dp", 1, 2).call("all_gather", "head", fail)
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
def test_a_peer_that_never_came(error):
    found = raised_of(error)
    assert type(found) is OrderError
    assert "rank 1 of axis dp waited 0.0 s in all_gather of unit 'head' and no peer came" in str(found)
    assert found.__cause__ is error


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_peer_that_went_away(error):
    found = raised_of(error)
    assert type(found) is Zero3dError
    assert "in all_gather of unit 'head' when a peer went away: look at the first rank" in str(found)
    assert str(error) in str(found)
    assert found.__cause__ is error


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
