"""A gradient that is missing on one rank alone, in each block and on each rank: never a wait, never another step.

On gloo messages have names, and a wrong order hangs late or never; NCCL has one order for each communicator. Weights
after all steps are those of one process that has the batches of all ranks.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from campaign.account import Account, Place
from ranks import run_ranks
from torch import Tensor, nn

from node.launches import FAULTS, last_line, start_of
from zero3d import Engine, Mesh
from zero3d.distributed.unit_order import AHEAD

BLOCKS, WIDTH, ROWS, RATE = 10, 96, 3, 1e-5
assert BLOCKS > 2 * AHEAD + 2, "so that ranks would wait for each other"
NEAR = 1e-9  # of a weight, in float64
WAYS: dict[str, dict[str, Any]] = {
    "two communicators": {"communicators": 2},
    "one communicator": {"communicators": 1},
    "weights on the host": {"offload": {"optimizer": "host", "params": "host"}},
}


class Block(nn.Module):
    """Two experts behind what stands for attention; with `hole` the second one has no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.hole = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attn(x))
        first, second = self.experts
        x = x + torch.tanh(first(x))
        return x if self.hole else x + torch.tanh(second(x))


class Net(nn.Module):
    """Blocks, one of which may have a hole; the mean of squares of its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.entrance = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, hole: int | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.hole = number == hole
        x = self.entrance(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def holes(place: Place, account: Account) -> None:
    """Train through every hole in each way; a launch that does not end has said which hole it was in."""
    matrix = [(rank, block) for block in range(BLOCKS) for rank in range(place.ranks)]
    # Ranks that have hung leave the other ways their time; on the CPU they take longer to start than to train.
    launches = [list(WAYS)] if place.on_cpu else [[way] for way in WAYS]
    for ways in launches:
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder) / "at"
            at.write_text("no step was begun")
            try:
                apart = run_ranks(start_of(place, len(launches)), all_trained, ways, matrix, str(at))
            except FAULTS as error:
                account.ran(", ".join(ways), {"at": at.read_text()}, f"{last_line(error)}: {at.read_text()}")
                continue
        for way in ways:
            wrong = "" if apart[way] <= NEAR else f"weights are {apart[way]:.1e} off those of one process"
            account.ran(way, {"holes": len(matrix), "apart": apart[way]}, wrong)


def all_trained(device: torch.device, ways: list[str], matrix: list[tuple[int, int]], at: str) -> dict[str, float]:
    """On a rank: train in each way; how far weights are from one process's."""
    return {way: trained(device, way, matrix, at) for way in ways}


def trained(device: torch.device, way: str, matrix: list[tuple[int, int]], at: str) -> float:
    """On a rank: a step for each (rank, block) with a hole, stage 3; how far weights are from one process's."""
    mesh = Mesh(device=device)
    net = Net().double()
    alone = copy.deepcopy(net).to(device)
    engine = Engine(
        net.to(device), stage=3, mesh=mesh, precision="fp64", optimizer=sgd, clip_norm=None,
        units=[Block], **WAYS[way],
    )  # fmt: skip
    optimizer = sgd(alone.parameters())
    for step, (owner, block) in enumerate(matrix):
        if mesh.rank == 0:
            Path(at).write_text(f"{way}, step {step}: block {block} has a hole on rank {owner}")
        engine.backward(engine(rows_of(step, mesh.rank, device), block if mesh.rank == owner else None))
        assert engine.step().applied
        for rank in range(mesh.world):
            (alone(rows_of(step, rank, device), block if rank == owner else None) / mesh.world).backward()
        optimizer.step()
        optimizer.zero_grad()
    with engine.full_params():
        pairs = zip(engine.module.parameters(), alone.parameters(), strict=True)
        apart = max(float((found - due).abs().max()) for found, due in pairs)
    engine.close()
    return apart


def rows_of(step: int, rank: int, device: torch.device) -> Tensor:
    """Return a rank's rows of a step, the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).double().to(device)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Make the optimizer of the engine and of the process beside it."""
    return torch.optim.SGD(params, lr=RATE)
