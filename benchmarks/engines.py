"""Step time and memory of zero3d's stages beside FSDP2, DDP and plain PyTorch.

    python benchmarks/engines.py --engines zero3d,fsdp2,ddp,plain --stages 0,1,2,3 --ranks 2 --json out.json

Like for like. All variants train the same model from the same weights on the same batches with
the same dtypes, optimizer and clipping (`peers.py`); their losses must agree. For times they live
in the same processes, one thread per rank, and take turns step by step: after a barrier one
variant takes one step, and a step's time is that of the slowest rank. The order changes from
round to round so that every variant follows every other equally often (`turn_order`). Two rounds
are warm-up. Process memory is measured apart, each variant alone in fresh processes
(`memory.py`). Without a card for every rank all runs on the CPU over gloo, else over NCCL.

On the CPU glibc gives large freed blocks back to the system at once and pays page faults to get
them again, which would drown the engines in the allocator's noise. With `--malloc keep`, the
default, every process raises glibc's thresholds at its start as zero3d's own workers do, all
variants alike; `--malloc default` leaves glibc alone. Process memory is measured under the same
choice; what is alive at once is measured in a further pass, undisturbed by what malloc keeps.

Targets are listed in `report.py`; the exit code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import Data, measure_memory, merge
from model import Shape, batch, build_gpt
from peers import Setting, build_variant
from ranks import Start, over_ranks, run_ranks, synchronize
from report import agreement, compare, show, variant_names

ENGINES = ("zero3d", "fsdp2", "ddp", "plain")
WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = "cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu"
    start = Start(arguments.ranks, "nccl" if device == "cuda" else "gloo", device, arguments.malloc)
    names = variant_names(arguments.engines, arguments.stages)
    variants: dict[str, dict[str, Any]] = run_ranks(start, time_variants, arguments, names)
    if arguments.memory_steps:
        for name in names:
            chosen = run_ranks(start, memory_of, arguments, name, False)
            exact = run_ranks(replace(start, malloc="map"), memory_of, arguments, name, True)
            variants[name]["memory"] = merge(chosen, exact)
    result = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in build_gpt(arguments.model).parameters()),
        "arguments": {**vars(arguments), "model": vars(arguments.model), "json": str(arguments.json)},
        "variants": variants,
        "ratios": compare(arguments.ranks, variants),
        "losses": agreement(arguments.ranks, variants),
    }
    print(headline(result))
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=choices(ENGINES), default=list(ENGINES), metavar=",".join(ENGINES))
    parser.add_argument("--stages", type=choices((0, 1, 2, 3)), default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--model", type=shape, default=Shape(), metavar="layers=8,d=512,vocab=8192")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=positive, default=12, help="counted steps of every variant")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--reduce-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--memory-steps", type=int, default=3, help="steps per variant for memory; 0: not measured")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    arguments = parser.parse_args(argv)
    if arguments.precision == "fp32" and arguments.reduce_dtype == "bf16":
        parser.error("--precision fp32 cannot reduce in bf16: leave --reduce-dtype out")
    if arguments.memory_steps < 0:
        parser.error(f"--memory-steps {arguments.memory_steps} is negative: 0 leaves memory out")
    return arguments


def choices(allowed: Sequence[Any]) -> Any:
    """An argparse type: a comma-separated list of some of these."""
    by_text = {str(choice): choice for choice in allowed}

    def parse_list(text: str) -> list[Any]:
        unknown = [part for part in text.split(",") if part not in by_text]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(by_text)}")
        return [by_text[part] for part in dict.fromkeys(text.split(","))]

    return parse_list


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def shape(text: str) -> Shape:
    """An argparse type."""
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- on every rank ------------------------------------------------------------------------------


def time_variants(device: torch.device, arguments: argparse.Namespace, names: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds of every counted step and the loss after the last, by variant."""
    setting, data = prepare(device, arguments)
    variants = {name: build_variant(name, setting) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + arguments.rounds):
        tokens = data(turn)
        for index in turn_order(len(names), turn):
            name = names[index]
            dist.barrier()
            synchronize(device)
            begun = time.perf_counter()
            variants[name].step(*tokens)
            synchronize(device)
            seconds[name].append(time.perf_counter() - begun)
    out = {}
    for name, variant in variants.items():
        slowest = over_ranks(seconds[name], dist.ReduceOp.MAX, device)[WARM_UP:]
        loss = float(variant.evaluate(*data(0)))
        mean = over_ranks([loss], dist.ReduceOp.SUM, device)[0] / arguments.ranks
        out[name] = {"min": min(slowest), "median": median(slowest), "times": slowest, "loss": mean}
    return out


def memory_of(device: torch.device, arguments: argparse.Namespace, name: str, exact: bool) -> dict[str, Any]:
    """Bytes of one variant, the only one in its processes."""
    setting, data = prepare(device, arguments)
    return measure_memory(name, setting, data, arguments.memory_steps, exact)


def prepare(device: torch.device, arguments: argparse.Namespace) -> tuple[Setting, Data]:
    """What every variant is built from, and the batch of each step on this rank."""
    setting = Setting(partial(build_gpt, arguments.model), device, arguments.precision, arguments.reduce_dtype)

    def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = step * dist.get_world_size() + dist.get_rank()
        return batch(seed, arguments.micro_batch, arguments.seq, arguments.model.vocab, device)

    return setting, data


def turn_order(count: int, turn: int) -> list[int]:
    """Who goes when: a Williams design, in which each follows each other equally often.

    0, n-1, 1, n-2, ... shifted by one every round; for odd n every other cycle runs backwards.

    >>> [turn_order(4, turn) for turn in range(4)]
    [[0, 3, 1, 2], [1, 0, 2, 3], [2, 1, 3, 0], [3, 2, 0, 1]]
    """
    zigzag = [position // 2 if position % 2 == 0 else count - 1 - position // 2 for position in range(count)]
    order = [(index + turn) % count for index in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order


def headline(result: dict[str, Any]) -> str:
    """What was run, in one line."""
    a = result["arguments"]
    return (
        f"{result['parameters'] / 1e6:.1f}M parameters, {a['ranks']} ranks on {result['device']}, {a['precision']}, "
        f"reduced in {a['reduce_dtype']}, {a['micro_batch']} x {a['seq']} tokens per rank, {a['rounds']} rounds, "
        f"malloc {a['malloc']}, torch {result['torch']}"
    )


if __name__ == "__main__":
    sys.exit(main())
