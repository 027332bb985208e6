"""Bytes that a step moves between memory and a cache: what follows one another on the same numbers does so in groups."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zero3d
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import cast_scratch
from zero3d.precision import cast_all
from zero3d.zero.optimizer import unscaled_norms

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from instruments.traffic import Stack, Traffic, step_bytes

MB = 1 << 20


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"precision": "fp32"}, {"unscale and norm": 8, "clip": 8, "update": 28}),
        ({"precision": "bf16"}, {"unscale and norm": 8, "clip": 8, "update": 28, "cast": 6}),
        ({"precision": "bf16", "master": "split"}, {"unscale and norm": 8, "clip": 8, "update in halves": 28}),
    ],
    ids=["fp32", "bf16", "split"],
)
def test_a_step_moves_so_many_bytes_a_parameter(options, parts):
    model = Stack(blocks=16, hidden=384)
    numel = sum(p.numel() for p in model.parameters())
    engine = zero3d.Engine(model, clip_norm=1e-6, units=["layers.*"], **options)
    moved = step_bytes(engine, 6 * MB, torch.randn(4, 384))
    assert round(moved.total / numel) == sum(parts.values())


class Calls(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.of[function] += 1
        return function(*arguments, **(named or {}))


def test_the_cast_on_an_accelerator_takes_few_launches():
    """Two for a group, each of which runs ten times as long as it takes to launch."""
    numel = 1 << 26
    with Calls() as calls:
        cast_all(
            [(torch.empty(numel, device="meta"), torch.empty(numel, dtype=torch.bfloat16, device="meta"))],
            torch.empty(cast_scratch(numel, "cuda"), device="meta"),
        )
    assert calls.of[torch.ops.aten.maximum.out] == calls.of[torch.ops.aten._foreach_copy_.default] == 4


@pytest.mark.parametrize(("room", "bytes_"), [(1 << 16, 8), (1 << 30, 12)])
def test_a_norm_finds_in_the_cache_what_its_group_has_unscaled(room, bytes_):
    grads = [(0, type("Owned", (), {"order": 0, "name": ""}), torch.randn(1 << 14)) for _ in range(64)]
    wanted = [torch.linalg.vector_norm(grad * 0.3) for *_, grad in grads]
    with Traffic(MB) as moved:
        found = unscaled_norms(grads, 0.3, room)
    assert all(torch.equal(one.norm, norm) for one, norm in zip(found, wanted, strict=True))
    assert round(moved.total / (64 << 14)) == bytes_


@pytest.mark.parametrize(("add", "bytes_"), [(False, 8 * 2 + 4), (True, 8 * 2 + 4 + 4)])
def test_a_sum_of_8_terms_reads_each_of_them_once(add, bytes_):
    terms = [torch.randn(1 << 20).bfloat16() for _ in range(8)]
    shard = torch.full((1 << 20,), 0.3)
    wanted = terms[0].float()
    for term in terms[1:]:
        wanted = wanted + term
    wanted = shard + wanted if add else wanted
    comm = Comm(Axis("dp", 3, 8), Arena(torch.device("cpu")), Ledger())
    with Traffic(3 * MB) as moved:
        comm._sum(terms, shard, add)
    assert torch.equal(shard, wanted)
    assert round(moved.total / (1 << 20)) == bytes_
