"""The benchmark of the host's update: its ways do the same, and it says what it left out."""

import argparse
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from offloading.update import FORMS, RULE, Whole, bucket_of, measure

from zero3d.memory.arena import Arena
from zero3d.offload.host_adam import BucketPiece, HostExecutor


@pytest.mark.parametrize("name", FORMS)
def test_chunks_and_whole_tensors_have_the_same_bits(name):
    one, other = (bucket_of(FORMS[name], 5000) for _ in range(2))
    pieces = [BucketPiece(0, 3001, RULE), BucketPiece(3008, 5000, RULE)]
    with closing(HostExecutor(2, Arena(torch.device("cpu"), "host"), chunk=512)) as executor:
        executor.update(one, pieces, 2)
    Whole(other, pieces)()
    for ours, theirs in zip(one[:5], other[:5], strict=True):
        assert torch.equal(ours[3008:], theirs[3008:])
        assert torch.equal(ours[:3001], theirs[:3001])


def test_every_form_is_measured_with_one_thread_and_with_two_beside_a_copy():
    before = torch.get_num_threads()
    result = measure(argparse.Namespace(gigabytes=1e-4, rounds=1, threads=before))
    assert torch.get_num_threads() == before
    assert [target["what"] for target in result["targets"]] == [
        f"{form}, {threads}" for threads in ("1 thread", "2 threads") for form in FORMS
    ]
    for name in FORMS:
        assert result["rows"][f"{name}, 2 threads: copy"]["of a copy"] == 1
        assert result["rows"][f"{name}, 2 threads: chunks"]["GB/s"] > 0
    assert "fp32 master, 1 thread: DeepSpeed" in result["rows"]
