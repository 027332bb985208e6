"""The benchmark of the host's update: its ways do the same, and it says what it left out."""

import argparse
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from offloading import rate
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


def test_the_rate_is_of_the_same_update_as_torchs_on_the_same_memory(monkeypatch):
    monkeypatch.setattr(rate, "PIECE", 4096)
    found = []
    with closing(HostExecutor(2, Arena(torch.device("cpu"), "host"))) as executor:
        for way in ("torch", "plain"):
            ways = rate._ways(executor, 3 * 4096)
            bucket = ways["plain"].args[0]
            ways[way]()
            found.append(bucket)
    for ours, theirs in zip(found[1][2:5], found[0][2:5], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(found[0].master, found[1].master)


def test_the_rate_is_measured_of_more_than_the_caches_hold(monkeypatch):
    monkeypatch.setattr(rate, "PIECE", 4096)
    monkeypatch.setattr(rate, "last_cache", lambda: 1 << 16)
    result = rate.measure(argparse.Namespace(gigabytes=1e-6, rounds=1, threads=1))
    assert result["elements"] == 4 * (1 << 16) // 16
    assert result["rows"]["2 threads: split"]["of torch, CPU"] > 0
    assert [target["what"] for target in result["targets"]] == ["1 thread", "2 threads"]
