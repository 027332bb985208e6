"""Step time of Muon and of AdamW with moments in 8 bits, beside AdamW and torch's own Muon over FSDP2.

    python benchmarks/optimizers.py --ranks 2 --rounds 9 --json out.json

    adamw-S, muon-S, adamw8bit-S   zero3d.Engine at stage S, 1 and 3
    fsdp2-muon   fully_shard on the same modules; torch.optim.Muon on gathered gradients and whole copies of the
                 matrices, from which every rank takes its shards again; AdamW on the rest
    alone        Newton-Schulz of all matrices, one by one, on every rank at once

The model of model.py in bf16 over fp32 masters, clipped at 1.0 (peers.py), in the same processes turn by turn; a step's
seconds are the slowest rank's. zero3d's losses and those of fsdp2-muon must be near. Targets: a step of Muon takes at
most 1.10x of AdamW's and the time of `alone` over the number of ranks; it takes at most as long as fsdp2-muon's. The
exit code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from model import Shape, batch, build_gpt
from peers import CLIP, Fsdp2, Setting, Zero3d, shared_mesh
from ranks import Start, command_line, over_ranks, positive, run_ranks, synchronize
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_norm_
from turns import WARM_UP, turn_order

from zero3d import Engine
from zero3d.optim import adamw8bit, muon
from zero3d.optim.newton_schulz import COEFFICIENTS, EPS, orthogonalize

STAGES, PEER, ALONE = (1, 3), "fsdp2-muon", "alone"
RULES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True),
    "muon": lambda: muon(lr=3e-4),
    "adamw8bit": lambda: adamw8bit(3e-4, weight_decay=0.1),
}
NAMES = (*(f"{rule}-{stage}" for stage in STAGES for rule in RULES), PEER)
TARGET = 1.10


class Own(Zero3d):
    """zero3d's engine with an optimizer of RULES."""

    def __init__(self, setting: Setting, name: str) -> None:
        rule, _, stage = name.rpartition("-")
        self.engine = Engine(
            setting.build(), stage=int(stage), mesh=shared_mesh(setting.device), precision=setting.precision,
            clip_norm=CLIP, optimizer=RULES[rule](),
        )  # fmt: skip


class Fsdp2Muon(Fsdp2):
    """FSDP2 whose matrices are gathered for torch's Muon."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, reshard=True)
        named = dict(self.module.named_parameters())
        self.matrices = {name: p for name, p in named.items() if is_matrix(name, p)}
        self.whole = {
            name: [nn.Parameter(part.detach().clone()) for part in parts(name, p.full_tensor())]  # type: ignore[attr-defined]
            for name, p in self.matrices.items()
        }
        self.muon = torch.optim.Muon(
            [part for each in self.whole.values() for part in each], lr=3e-4, adjust_lr_fn="match_rms_adamw"
        )
        rest = [p for name, p in named.items() if name not in self.matrices]
        self.adamw = torch.optim.AdamW(rest, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def update(self) -> None:
        clip_grad_norm_(self.module.parameters(), CLIP)
        for name, p in self.matrices.items():
            grad: Any = p.grad
            for own, part in zip(self.whole[name], parts(name, grad.full_tensor()), strict=True):
                own.grad = part
        self.adamw.step()
        self.muon.step()
        with torch.no_grad():
            for name, p in self.matrices.items():
                sharded: Any = p
                joined = torch.cat([own.detach() for own in self.whole[name]])
                shard = distribute_tensor(joined, sharded.device_mesh, sharded.placements, src_data_rank=None)
                sharded.to_local().copy_(shard.to_local())
        for p in self.module.parameters():
            p.grad = None


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon takes a parameter of model.GPT."""
    return name.startswith("blocks.") and p.dim() == 2


def parts(name: str, whole: Tensor) -> Sequence[Tensor]:
    """Return the matrices that a parameter of model.GPT is fused of."""
    return whole.chunk(3) if name.endswith("qkv.weight") else (whole,)


class Alone:
    """Newton-Schulz of all matrices of the model."""

    def __init__(self, setting: Setting) -> None:
        named = setting.build().to(setting.device).named_parameters()
        self.matrices = [part.detach() for name, p in named if is_matrix(name, p) for part in parts(name, p)]

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        for matrix in self.matrices:
            orthogonalize(matrix, COEFFICIENTS, 5, EPS)
        return torch.zeros(())


def build(name: str, setting: Setting) -> Any:
    """A variant by its name."""
    return {PEER: Fsdp2Muon, ALONE: Alone}.get(name, partial(Own, name=name))(setting)


def timed(device: torch.device, arguments: argparse.Namespace) -> Any:
    """By variant: seconds of each counted step of the slowest rank, and the losses of all steps."""
    setting = Setting(partial(build_gpt, arguments.model), device)
    names = [*NAMES, ALONE]
    variants = {name: build(name, setting) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + arguments.rounds):
        seed = turn * dist.get_world_size() + dist.get_rank()
        tokens = batch(seed, arguments.micro_batch, arguments.seq, arguments.model.vocab, device)
        for name in (names[i] for i in turn_order(len(names), turn)):
            dist.barrier()
            synchronize(device)
            begun = time.perf_counter()
            loss = variants[name].step(*tokens)
            synchronize(device)
            seconds[name].append(time.perf_counter() - begun)
            losses[name].append(float(loss))
    return {name: over_ranks(times[WARM_UP:], dist.ReduceOp.MAX, device) for name, times in seconds.items()}, losses


def bound(middle: dict[str, float], stage: int, ranks: int) -> float:
    """Seconds that a step of Muon may take."""
    return TARGET * middle[f"adamw-{stage}"] + middle[ALONE] / ranks


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Shape.parse, default=Shape(), help="such as layers=8,d=512,vocab=8192")
    parser.add_argument("--micro-batch", type=positive, default=4)
    parser.add_argument("--seq", type=positive, default=256)
    arguments = parser.parse_args(argv)
    seconds, losses = run_ranks(Start(arguments.ranks), timed, arguments)
    params = sum(p.numel() for p in build_gpt(arguments.model).parameters())
    kept = {**vars(arguments), "json": None, "model": vars(arguments.model)}
    result = {
        "torch": torch.__version__, "arguments": kept, "params": params, "seconds": seconds, "losses": losses,
    }  # fmt: skip
    print(show(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'variant':<14}{'median s':>10}{'min s':>9}{'last loss':>11}"]
    middle = {name: median(times) for name, times in result["seconds"].items()}
    for name, times in result["seconds"].items():
        lines.append(f"{name:<14}{middle[name]:>10.3f}{min(times):>9.3f}{result['losses'][name][-1]:>11.5f}")
    for stage in STAGES:
        own, limit = middle[f"muon-{stage}"], bound(middle, stage, result["arguments"]["ranks"])
        lines.append(f"stage {stage}: muon {own:.3f} s, target <= {limit:.3f} s: {own / limit:.3f}x")
        lines.append(f"stage {stage}: muon / {PEER}: {own / middle[PEER]:.3f}x (target <= 1.00x)")
        lines.append(
            f"stage {stage}: adamw8bit / adamw: {middle[f'adamw8bit-{stage}'] / middle[f'adamw-{stage}']:.3f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
