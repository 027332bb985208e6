"""Step time and memory of zero3d in a pipeline, beside FSDP2 in torch's own pipelining.

    python benchmarks/pipeline.py --pp 2 --dp 2 --schedule 1f1b --micro-batches 8 --json out.json

    zero3d-S   zero3d.Engine at ZeRO stage S on Mesh(pp, dp), `engine.train_batch`
    fsdp2      the same parts of the same model; fully_shard on every block, embedding and head with
               reshard_after_forward=False, torch's PipelineStage and schedule, the global norm over both axes

Like for like: model, cuts, micro-batches, bf16 weights over fp32 masters, fp32 reduction, clip 1.0, fused AdamW;
the losses must agree. All live in the same processes and take turns step by step after a barrier; a
step's time is that of the slowest rank. Two rounds are warm-up. Process memory is measured apart, each
alone in fresh processes. Targets: a step <= 0.90x and process memory <= 1.0x of fsdp2's. The exit code is 0
whether they are met or not.

The bubble is counted, not timed (pipeline/actions.py): of the action list that torch's schedule ran. For gpipe and
1f1b it is (p - 1) / m.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPT, Shape, batch
from peers import CLIP, adamw
from ranks import Start, over_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from zero3d import Engine, Mesh
from zero3d.pipeline.actions import bubble
from zero3d.pipeline.balance import TOKENS
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.split import balance

WARM_UP = 2
TARGETS = {"time": 0.90, "memory": 1.0}


class Lm(GPT):
    """The benchmarks' GPT as a chain from token ids to logits."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(shape: Shape) -> Lm:
    """The same fp32 weights wherever it is called, each a bf16 number."""
    torch.manual_seed(0)
    model = Lm(shape)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


class Variant(Protocol):
    """A model in training."""

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step; the global mean loss before it, on every rank."""
        ...


class Zero3d:
    """zero3d's engine."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace, stage: int, **options: Any) -> None:
        self.engine = Engine(
            self.build(arguments), stage=stage, mesh=mesh, precision="bf16", clip_norm=CLIP, optimizer=adamw,
            accumulate=arguments.micro_batches, schedule=arguments.schedule if mesh.pp > 1 else None,
            loss=lambda logits, b: (self.loss(logits, b["labels"]), float(b["labels"].numel())), **options,
        )  # fmt: skip

    def build(self, arguments: argparse.Namespace) -> Lm:
        return build(arguments.model)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return sum_of_losses(logits, targets)

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        return float(self.engine.train_batch([{"input_ids": x, "labels": y} for x, y in micro_batches]))


class Part(nn.Module):
    """What one pipeline stage of the peer runs."""

    def __init__(self, model: Lm, first: int, stop: int) -> None:
        super().__init__()
        self.embedding = model.embedding if first == 0 else None
        self.blocks = model.blocks[first:stop]
        last = stop == len(model.blocks)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


class Fsdp2:
    """fully_shard and torch.distributed.pipelining."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace) -> None:
        model, axis, schedule = self.build(arguments), mesh.axis("pp"), Schedule.of(arguments.schedule)
        counts = balance(model, axis.size, TOKENS, schedule=schedule.name)
        self.pipeline, self.mesh, self.size = axis, mesh, mesh.dp * mesh.tp
        self.parts, stages = [], []
        for number in schedule.chunks_of(axis.rank, axis.size):
            part = Part(model, sum(counts[:number]), sum(counts[: number + 1]))
            self.shard(part, mesh.torch)
            self.parts.append(part)
            stages.append(PipelineStage(part, number, len(counts), mesh.device, group=axis.gathers))
        self.is_first, self.is_last = stages[0].is_first, any(stage.is_last for stage in stages)
        kind = get_schedule_class(schedule.torch)
        what: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self.targets = 1
        self.schedule = kind(
            what, n_microbatches=arguments.micro_batches, scale_grads=False,
            loss_fn=lambda logits, targets: self.loss(logits, targets) / self.targets,
        )  # fmt: skip
        self.weights = [p for part in self.parts for p in part.parameters()]
        self.optimizer = adamw(self.groups())

    def build(self, arguments: argparse.Namespace) -> Lm:
        return build(arguments.model)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return sum_of_losses(logits, targets)

    def groups(self) -> list[Any]:
        """What the optimizer is given."""
        return self.weights

    def shard(self, part: Part, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        dp = mesh["dp"]
        for module in [part.embedding, *part.blocks, part.head]:
            if module is not None:
                fully_shard(module, mesh=dp, reshard_after_forward=False, mp_policy=policy)
        fully_shard(part, mesh=dp, reshard_after_forward=False, mp_policy=policy)

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        ids, targets = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        self.targets = targets.numel()  # FSDP2 divides by the dp degree
        losses: list[Tensor] = []
        first = (ids,) if self.is_first else ()
        self.schedule.step(*first, target=targets, losses=losses, return_outputs=False)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = torch.tensor([float(sum(losses).detach()) if self.is_last else 0.0], dtype=torch.float64)
        dist.all_reduce(mean)
        return float(mean) / self.size

    def clip(self) -> None:
        """Global norm over the dp and pp axes."""
        grads = [p.grad for p in self.weights if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads).full_tensor() ** 2  # type: ignore[union-attr, attr-defined]
        dist.all_reduce(total, group=self.pipeline.reductions)
        factor = torch.clamp(CLIP / (total.sqrt() + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = ["fsdp2", *(f"zero3d-{stage}" for stage in arguments.stages)]
    start = Start(arguments.pp * arguments.dp)
    seconds, losses, waits = run_ranks(start, take_turns, arguments, names)
    memory = {name: run_ranks(replace(start, malloc="map"), peak_of, arguments, name) for name in names}
    result = {
        "torch": torch.__version__, "arguments": {**vars(arguments), "model": vars(arguments.model), "json": None},
        "seconds": seconds, "losses": losses, "process_bytes": memory, "bubble": waits,
    }  # fmt: skip
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = options(__doc__)
    arguments = parser.parse_args(argv)
    if min(arguments.pp, arguments.dp, arguments.micro_batches, arguments.rounds) < 1 or arguments.pp < 2:
        parser.error("--pp from 2, --dp, --micro-batches and --rounds from 1")
    return arguments


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark with pipeline stages."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"), default="1f1b")
    parser.add_argument("--stages", type=lambda text: [int(s) for s in text.split(",")], default=[2, 3])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences in one")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--model", type=Shape.parse, default=Shape(), metavar="layers=8,d=512,vocab=8192")
    parser.add_argument("--rounds", type=int, default=6, help="counted steps of each")
    parser.add_argument("--json", type=Path)
    return parser


def make(name: str, mesh: Mesh, arguments: argparse.Namespace) -> Variant:
    return Fsdp2(mesh, arguments) if name == "fsdp2" else Zero3d(mesh, arguments, int(name[-1]))


def data(arguments: argparse.Namespace, mesh: Mesh, step: int) -> list[tuple[Tensor, Tensor]]:
    """This replica's micro-batches of one step, equal on all its pipeline stages."""
    a = arguments
    seeds = ((step * a.dp + mesh.place.dp) * a.micro_batches + i for i in range(a.micro_batches))
    return [batch(seed, a.micro_batch, a.seq, a.model.vocab, mesh.device) for seed in seeds]


def take_turns(device: torch.device, arguments: argparse.Namespace, names: list[str]) -> Any:
    """Seconds of the slowest rank by variant, the loss of the last step, and the bubble."""
    mesh = Mesh(pp=arguments.pp, dp=arguments.dp, device=device)
    variants = {name: make(name, mesh, arguments) for name in names}
    seconds, losses = timed(variants, mesh, arguments)
    pipeline = next(v.engine.pipeline for v in variants.values() if isinstance(v, Zero3d))
    assert pipeline is not None
    return seconds, losses, str(bubble(pipeline.recorded_order()))


def timed(variants: Mapping[str, Variant], mesh: Mesh, arguments: argparse.Namespace) -> Any:
    """Seconds of the slowest rank and the loss of the last step, by variant, which take turns step by step."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses = {}
    for turn in range(WARM_UP + arguments.rounds):
        micro_batches = data(arguments, mesh, turn)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begun = time.perf_counter()
            losses[name] = variants[name].step(micro_batches)
            slowest = over_ranks([time.perf_counter() - begun], dist.ReduceOp.MAX, mesh.device)
            seconds[name].append(slowest[0])
    return {name: times[WARM_UP:] for name, times in seconds.items()}, losses


def peak_of(device: torch.device, arguments: argparse.Namespace, name: str) -> float:
    """Most resident bytes of any rank above what it had before the model was built."""
    mesh = Mesh(pp=arguments.pp, dp=arguments.dp, device=device)
    before = psutil.Process().memory_info().rss
    variant = make(name, mesh, arguments)
    Path("/proc/self/clear_refs").write_text("5")
    for step in range(3):
        variant.step(data(arguments, mesh, step))
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return over_ranks([float(peak - before)], dist.ReduceOp.MAX, device)[0]


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    base, memory = result["seconds"]["fsdp2"], result["process_bytes"]
    lines = [f"{'variant':<10}{'median s':>10}{'min s':>9}{'x fsdp2':>9}{'process MiB':>13}{'x fsdp2':>9}{'loss':>10}"]
    for name, times in result["seconds"].items():
        lines.append(
            f"{name:<10}{median(times):>10.3f}{min(times):>9.3f}{median(times) / median(base):>9.3f}"
            f"{memory[name] / 2**20:>13.1f}{memory[name] / memory['fsdp2']:>9.3f}{result['losses'][name]:>10.5f}"
        )
    a = result["arguments"]
    lines.append(f"bubble / work by the action list: {result['bubble']}; (p-1)/m = {a['pp'] - 1}/{a['micro_batches']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
