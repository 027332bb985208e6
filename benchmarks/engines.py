"""Step time and memory of zero3d's stages beside FSDP2, DDP, DeepSpeed and plain PyTorch.

    python benchmarks/engines.py --engines zero3d,fsdp2,ddp,plain --stages 0,1,2,3 --ranks 2 --json out.json
    python benchmarks/engines.py --engines zero3d,deepspeed       (pip install 'zero3d[bench]')
    python benchmarks/engines.py --engines zero3d --stages 2,3 --exact both

Like for like. All variants train the same model from the same weights on the same batches with
the same dtypes, optimizer and clipping (`peers.py`, `deepspeed_peer.py`); their losses must agree.
For times they take turns step by step, one thread per rank: after a barrier one variant takes one
step, and a step's time is that of the slowest rank. They live in the same processes, each stage of
DeepSpeed in its own, which sleep until it is their turn (`turns.py`, `crews.py`). The order changes
from round to round so that every variant follows every other equally often (`turn_order`). Two
rounds are warm-up. Process memory is measured apart, each variant alone in fresh processes
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
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed_peer import installed, private_extensions
from memory import measure_memory, merge
from model import Shape, build_gpt
from ranks import Start, positive, run_ranks
from report import agreement, compare, show, variant_names
from turns import prepare, time_variants

ENGINES = ("zero3d", "fsdp2", "ddp", "plain", "deepspeed")
DEFAULT_ENGINES = ("zero3d", "fsdp2", "ddp", "plain")  # DeepSpeed is an extra


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = "cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu"
    start = Start(arguments.ranks, "nccl" if device == "cuda" else "gloo", device, arguments.malloc)
    names = variant_names(arguments.engines, arguments.stages, arguments.exact)
    with private_extensions():
        variants = time_variants(start, arguments, names)
        if arguments.memory_steps:
            for name in names:
                chosen = run_ranks(start, memory_of, arguments, name, False)
                exact = run_ranks(replace(start, malloc="map"), memory_of, arguments, name, True)
                variants[name]["memory"] = merge(chosen, exact)
    result = {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed") if "deepspeed" in arguments.engines else None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in build_gpt(arguments.model).parameters()),
        "arguments": {**vars(arguments), "model": vars(arguments.model), "json": str(arguments.json)},
        "variants": variants,
        "ratios": compare(arguments.ranks, arguments.precision, variants),
        "losses": agreement(arguments.ranks, arguments.precision, variants),
    }
    print(headline(result))
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=choices(ENGINES), default=list(DEFAULT_ENGINES), metavar=",".join(ENGINES))
    parser.add_argument("--stages", type=choices((0, 1, 2, 3)), default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--model", type=shape, default=Shape(), metavar="layers=8,d=512,vocab=8192")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--rounds", type=positive, default=12, help="counted steps of every variant")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--reduce-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--exact", choices=("off", "on", "both"), default="off", help="zero3d's exact mode beside it")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--memory-steps", type=int, default=3, help="steps per variant for memory; 0: not measured")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    arguments = parser.parse_args(argv)
    if arguments.precision == "fp32" and arguments.reduce_dtype == "bf16":
        parser.error("--precision fp32 cannot reduce in bf16: leave --reduce-dtype out")
    if arguments.exact != "off" and arguments.precision != "fp32" and arguments.reduce_dtype != "fp32":
        parser.error("--exact sums in fp32: leave --reduce-dtype out")
    if arguments.memory_steps < 0:
        parser.error(f"--memory-steps {arguments.memory_steps} is negative: 0 leaves memory out")
    if "deepspeed" in arguments.engines and not installed():
        parser.error("--engines deepspeed needs DeepSpeed: pip install 'zero3d[bench]'")
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


def shape(text: str) -> Shape:
    """An argparse type."""
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def memory_of(device: torch.device, arguments: argparse.Namespace, name: str, exact: bool) -> dict[str, Any]:
    """Bytes of one variant, the only one in its processes."""
    setting, data = prepare(device, arguments)
    return measure_memory(name, setting, data, arguments.memory_steps, exact)


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
