"""Two ranks that do not do the same: a parameter of one block gets no gradient on one of them, in one step.

    blocks x [ x + tanh(first(x)) + tanh(second(x)) ]       second is left out where there is the hole

as where an expert has no tokens, or a branch is not taken. Stage 3 with a prefetch needs more than 2 WINDOW + 2 blocks
to show all that it can do wrong. `expected` is what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3d
from instruments import groups, rendezvous

DEPTH, WIDTH, STEPS = 10, 80, 2  # so wide that both ranks own a part of each block


class Hole(NamedTuple):
    """Which block's second half has no gradient, on which rank, in which steps."""

    block: int
    rank: int = 0
    steps: tuple[int, ...] = tuple(range(STEPS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x if self.skips else x + torch.tanh(self.second(x))


class Chain(nn.Module):
    """Blocks behind each other, and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UnevenBlock(nn.Module):
    """A block whose weights, `inner` wide, are used so many times."""

    def __init__(self, inner: int, times: int) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.down(torch.relu(self.up(x)))
        return x


class Uneven(Chain):
    """Two blocks with little to gather and much to compute, then one with much to gather; three times."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(UnevenBlock(*((1024, 1) if place % 3 == 2 else (64, 8))) for place in range(9))


class Tokens(nn.Module):
    """Blocks between an embedding and a head of the same weights, which the ends of a pipeline share."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows_of(step: int, rank: int, count: int = 2) -> Tensor:
    """Return a rank's inputs in a step, in fp64."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=made)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def loss_of(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return model(rows).square().mean()


def _set(model: nn.Module, hole: Hole | None, rank: int, step: int) -> None:
    for place, block in enumerate(model.blocks):
        block.skips = hole is not None and (place, rank) == (hole.block, hole.rank) and step in hole.steps


class Outcome(NamedTuple):
    """What ranks asked of their groups, where all stood still, what ended them, and the parameters of each."""

    logs: groups.Logs
    stuck: list[str]
    errors: list[BaseException]
    parameters: list[list[Tensor]]

    def equals(self, wanted: list[Tensor]) -> bool:
        """Return whether all ranks have these parameters, up to rounding in fp64."""
        pairs = [] if self.errors else [p for found in self.parameters for p in zip(found, wanted, strict=True)]
        return bool(pairs) and all(bool(((a - b).abs() <= 1e-9 * (1.0 + b.abs())).all()) for a, b in pairs)


def run(
    hole: Hole | None, depth: int = DEPTH, world: int = 2, steps: int = STEPS, device: str = "cpu", **options: Any
) -> Outcome:
    """Train on threads, all on one device, or on the CPU with streams that stand for one's; `options`: the engine's."""
    models = [Chain(depth) for _ in range(world)]
    stuck: list[str] = []
    errors: list[BaseException] = []

    def case() -> list[Tensor]:
        mesh = zero3d.Mesh(dp=world, device=device)
        chosen = {"stage": 3, "precision": "fp64", "units": [Block], "optimizer": sgd, "clip_norm": None} | options
        engine = zero3d.Engine(models[mesh.rank], mesh=mesh, **chosen)
        for step in range(steps):
            rendezvous.mark()
            _set(engine.module, hole, mesh.rank, step)
            engine.backward(loss_of(engine, rows_of(step, mesh.rank).to(mesh.device)))
            engine.step()
        rendezvous.mark()
        with engine.full_params():
            return [p.detach().clone().cpu() for p in engine.module.parameters()]

    with rendezvous.labelled(), groups.on_streams() if device == "cpu" else nullcontext():
        parameters, logs = groups.on_threads(world, case, torch.device(device).type, stuck, errors)
    return Outcome(logs, stuck, errors, parameters)


def expected(hole: Hole | None, depth: int = DEPTH, world: int = 2, steps: int = STEPS) -> list[Tensor]:
    """Return the parameters of one process that computes what all ranks do."""
    model = Chain(depth).double()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(world):
            _set(model, hole, rank, step)
            (loss_of(model, rows_of(step, rank)) / world).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def run_pipeline(
    stages: int = 2, micro_batches: int = 3, schedule: str = "gpipe", plant: Callable[[], Any] = nullcontext
) -> Outcome:
    """Train a pipeline on threads, whose ranks send each other hidden states of one size."""
    models = [Tokens(2 * stages) for _ in range(stages)]
    stuck: list[str] = []
    errors: list[BaseException] = []

    def squares(output: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, float]:
        return output.square().sum(), float(len(output))

    def case() -> list[Tensor]:
        mesh = zero3d.Mesh(pp=stages)
        engine = zero3d.Engine(
            models[mesh.rank], mesh=mesh, stage=2, precision="fp64", optimizer=sgd, clip_norm=None,
            accumulate=micro_batches, schedule=schedule, loss=squares, blocks="blocks",
        )  # fmt: skip
        for step in range(STEPS):
            ids = torch.arange(step, step + 8).view(2, 4)
            engine.train_batch([{"input_ids": ids + 8 * place} for place in range(micro_batches)], wait=False)
        return []

    with rendezvous.labelled(), plant(), groups.on_streams():  # a fault knows of no labels
        parameters, logs = groups.on_threads(stages, case, stuck=stuck, errors=errors)
    return Outcome(logs, stuck, errors, parameters)


def run_beside_callers_groups(world: int = 4) -> Outcome:
    """Train on two axes in a program that has made groups of some ranks before, of both kinds."""
    models = [Chain(2) for _ in range(world)]
    stuck: list[str] = []
    errors: list[BaseException] = []

    def case() -> list[Tensor]:
        dist.new_group([0, 1])
        if dist.get_rank() in (0, 1):
            dist.new_group([0, 1], use_local_synchronization=True)
        mesh = zero3d.Mesh(dp=world, shard=world // 2)
        engine = zero3d.Engine(
            models[mesh.rank], mesh=mesh, stage=3, precision="fp64", units=[Block], optimizer=sgd, clip_norm=None
        )
        engine.backward(loss_of(engine, rows_of(0, mesh.rank)))
        engine.step()
        with engine.full_params():
            return [p.detach().clone() for p in engine.module.parameters()]

    with rendezvous.labelled(), groups.on_streams():
        parameters, logs = groups.on_threads(world, case, stuck=stuck, errors=errors)
    return Outcome(logs, stuck, errors, parameters)
