"""Step time and collectives of zero3d on all three axes, beside FSDP2 + torch's tensor parallel + torch's pipelining.

    python benchmarks/mesh.py --pp 2 --dp 2 --tp 2 --json out.json       8 processes
    python benchmarks/mesh.py --pp 1 --dp 1 --tp 2 --qkv separate        tensor parallel alone, 2 processes

    zero3d-S   zero3d.Engine at ZeRO stage S on Mesh(pp, dp, tp), `engine.train_batch`
    fsdp2      as in pipeline.py, its parts under `parallelize_module` (below) before fully_shard
    dtensor    tensor parallel alone (pp = dp = 1): plain PyTorch under `parallelize_module`; bf16 weights, fp32
               masters and gradients, clip and fused AdamW over local tensors

    module             zero3d             torch
    embedding          embedding_rowwise  RowwiseParallel, common ids
    qkv                packed_colwise:3   ColwiseParallel; rows sorted by rank first, q, k and v of its heads
    q, k, v            colwise            ColwiseParallel (--qkv separate, as in most models: three matrices)
    attention_out,
    down               rowwise            RowwiseParallel
    up                 colwise            ColwiseParallel
    head               colwise            ColwiseParallel
    loss               cross_entropy      F.cross_entropy under loss_parallel

Neither side ever joins logits. Everything else as in pipeline.py; the losses must agree. Collectives are those
of activations over the tp axis in one step, most of any rank: in zero3d what `engine.traffic` has of that axis
but for the exchange of the norm, in torch the functional ones, which only DTensor uses.
Targets: a step <= 0.90x of fsdp2's, alone <= 0.95x of dtensor's with fewer collectives. The exit code is 0
whether they are met or not.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from dtensor_peers import DTensorTp, Fsdp2Tp, build
from pipeline import Lm, Zero3d, data, options, timed
from ranks import Start, over_ranks, run_ranks
from torch import Tensor

from zero3d import Mesh
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.vocabulary import cross_entropy

TARGETS = {"fsdp2": 0.90, "dtensor": 0.95}
OWN_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.heads": "divided",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}
QKV_PLAN = {
    "fused": {"blocks.*.qkv": "packed_colwise:3"},
    "separate": {f"blocks.*.qkv.{name}": "colwise" for name in "qkv"},
}


class Zero3dTp(Zero3d):
    """zero3d's engine on the whole mesh, with the vocabulary-parallel loss."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace, stage: int) -> None:
        super().__init__(mesh, arguments, stage, tp_plan=OWN_PLAN | QKV_PLAN[arguments.qkv])
        self.channel = Channel(mesh.axis("tp"), self.engine.traffic)

    def build(self, arguments: argparse.Namespace) -> Lm:
        return build(arguments)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, self.channel, num_items_in_batch=1)

    def count(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Collectives of activations in one step."""
        self.engine.traffic.reset()
        self.step(micro_batches)
        rows = [entry for entry in self.engine.traffic if entry.axis == "tp" and entry.op != "exchange"]  # the norm
        return sum(entry.calls for entry in rows)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = [peer_of(arguments), *(f"zero3d-{stage}" for stage in arguments.stages)]
    start = Start(arguments.pp * arguments.dp * arguments.tp)
    seconds, losses, collectives = run_ranks(start, take_turns, arguments, names)
    result = {
        "torch": torch.__version__, "arguments": {**vars(arguments), "model": vars(arguments.model), "json": None},
        "seconds": seconds, "losses": losses, "collectives": collectives,
    }  # fmt: skip
    print(show(result, names[0]))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def peer_of(arguments: argparse.Namespace) -> str:
    return "dtensor" if arguments.pp == arguments.dp == 1 else "fsdp2"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = options(__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--qkv", choices=tuple(QKV_PLAN), default="fused", help="one matrix, or three")
    arguments = parser.parse_args(argv)
    if min(arguments.tp, arguments.pp, arguments.dp) < 2 and not arguments.pp == arguments.dp == 1 < arguments.tp:
        parser.error("--pp, --dp and --tp from 2, or --pp 1 --dp 1 and --tp from 2")
    if min(arguments.micro_batches, arguments.rounds) < 1:
        parser.error("--micro-batches and --rounds from 1")
    return arguments


def take_turns(device: torch.device, arguments: argparse.Namespace, names: list[str]) -> Any:
    """By variant: seconds of the slowest rank, the loss of the last timed step, and collectives of one more."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # returned a view: nobody writes into it
    mesh = Mesh(pp=arguments.pp, dp=arguments.dp, tp=arguments.tp, device=device)
    variants = {name: make(name, mesh, arguments) for name in names}
    seconds, losses = timed(variants, mesh, arguments)
    counts = {name: variant.count(data(arguments, mesh, 0)) for name, variant in variants.items()}
    most = over_ranks([float(n) for n in counts.values()], dist.ReduceOp.MAX, device)
    return seconds, losses, dict(zip(names, map(int, most), strict=True))


def make(name: str, mesh: Mesh, arguments: argparse.Namespace) -> Any:
    if name.startswith("zero3d-"):
        return Zero3dTp(mesh, arguments, int(name[-1]))
    return Fsdp2Tp(mesh, arguments) if name == "fsdp2" else DTensorTp(mesh, arguments)


def show(result: dict[str, Any], peer: str) -> str:
    """The result as text."""
    base = median(result["seconds"][peer])
    lines = [f"{'variant':<10}{'median s':>10}{'min s':>9}{'x ' + peer:>11}{'collectives':>13}{'loss':>10}"]
    for name, times in result["seconds"].items():
        lines.append(
            f"{name:<10}{median(times):>10.3f}{min(times):>9.3f}{median(times) / base:>11.3f}"
            f"{result['collectives'][name]:>13}{result['losses'][name]:>10.5f}"
        )
    lines.append(f"target: a step <= {TARGETS[peer]:.2f}x of {peer}'s; collectives: of activations over tp in one step")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
