"""Step time and memory of zero3d's stages beside FSDP2, DDP, DeepSpeed and plain PyTorch.

    python benchmarks/engines.py --engines zero3d,fsdp2,ddp,plain --stages 0,1,2,3 --ranks 2 --json out.json
    python benchmarks/engines.py --engines zero3d,deepspeed       (pip install 'zero3d[bench]')
    python benchmarks/engines.py --engines zero3d --stages 2,3 --exact both
    python benchmarks/engines.py --engines zero3d,fsdp2 --stages 3 --rounds 0 --accumulate 4 --lora 8     (memory alone)

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
Where nothing is timed, losses are those of the last step whose memory was measured.

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
from memory import measure_memory, merge, warm_up
from model import Shape
from ranks import Start, positive, run_ranks
from report import agreement, compare, show, variant_names
from turns import FAMILIES, build, prepare, time_variants

ENGINES = ("zero3d", "fsdp2", "ddp", "plain", "deepspeed")
ACCUMULATING = ("zero3d", "fsdp2")  # that take micro-batches, recomputation and adapters
TINY = Shape(layers=2, d=64, vocab=64)
DEFAULT_ENGINES = ("zero3d", "fsdp2", "ddp", "plain")  # DeepSpeed is an extra


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = "cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu"
    start = Start(arguments.ranks, "nccl" if device == "cuda" else "gloo", device, arguments.malloc)
    names = variant_names(arguments.engines, arguments.stages, arguments.exact, arguments.weights, arguments.autocast)
    with private_extensions():
        variants = time_variants(start, arguments, names) if arguments.rounds else {name: {} for name in names}
        if arguments.memory_steps:
            for name in names:
                chosen = run_ranks(start, memory_of, arguments, name, False)
                exact = run_ranks(replace(start, malloc="map"), memory_of, arguments, name, True)
                memory = merge(chosen, exact)
                variants[name] = {"loss": memory.pop("loss"), **variants[name], "memory": memory}
    result = {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed") if "deepspeed" in arguments.engines else None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in build(arguments).parameters()),
        "arguments": {**vars(arguments), "model": vars(arguments.model), "json": str(arguments.json)},
        "variants": variants,
        "ratios": compare(arguments.ranks, arguments.precision, variants, arguments.accumulate),
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
    parser.add_argument("--family", choices=tuple(FAMILIES), default="gpt", help="what the model is")
    parser.add_argument("--micro-batch", type=positive, default=4, help="sequences per rank")
    parser.add_argument("--seq", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--accumulate", type=positive, default=1, help="micro-batches of a step")
    parser.add_argument("--recompute", action="store_true", help="recompute blocks in backward")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone; 0: all weights")
    parser.add_argument("--rounds", type=int, default=12, help="counted steps of every variant; 0: none is timed")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--reduce-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--exact", choices=("off", "on", "both"), default="off", help="zero3d's exact mode beside it")
    parser.add_argument("--autocast", choices=("off", "on", "both"), default="off", help="forwards in torch.autocast")
    parser.add_argument("--weights", choices=("kept", "cast", "both"), default="kept", help="16-bit ones at stage 3")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")
    parser.add_argument("--memory-steps", type=int, default=3, help="steps per variant for memory; 0: not measured")
    parser.add_argument("--timeline", action="store_true", help="memory at each point of a step, of zero3d and FSDP2")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    arguments = parser.parse_args(argv)
    if arguments.precision == "fp32" and arguments.reduce_dtype == "bf16":
        parser.error("--precision fp32 cannot reduce in bf16: leave --reduce-dtype out")
    if arguments.exact != "off" and arguments.precision != "fp32" and arguments.reduce_dtype != "fp32":
        parser.error("--exact sums in fp32: leave --reduce-dtype out")
    if arguments.autocast != "off" and arguments.precision == "fp32":
        parser.error("--autocast computes in 16 bits: leave --precision fp32 out")
    if arguments.weights != "kept" and (3 not in arguments.stages or arguments.precision == "fp32"):
        parser.error(f"--weights {arguments.weights} is for 16-bit weights at stage 3: leave it out")
    for name, left_out in (("memory_steps", "memory"), ("rounds", "times"), ("lora", "adapters")):
        if (number := getattr(arguments, name)) < 0:
            parser.error(f"--{name.replace('_', '-')} {number} is negative: 0 leaves {left_out} out")
    if not (arguments.rounds or arguments.memory_steps):
        parser.error("--rounds 0 --memory-steps 0 measures nothing: leave one of them out")
    if arguments.accumulate > 1 or arguments.recompute or arguments.lora:
        others = [name for name in arguments.engines if name not in ACCUMULATING]
        if others:
            parser.error(
                f"--accumulate, --recompute and --lora are for {' and '.join(ACCUMULATING)}, not for {others[0]}: pass "
                f"--engines {','.join(ACCUMULATING)}"
            )
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
    warm_up(name, *prepare(device, argparse.Namespace(**{**vars(arguments), "model": TINY, "seq": 16})))
    return measure_memory(
        name, *prepare(device, arguments), arguments.memory_steps, exact, exact and arguments.timeline
    )


def headline(result: dict[str, Any]) -> str:
    """What was run, in one line."""
    a = result["arguments"]
    lora = f", adapters of rank {a['lora']}" if a["lora"] else ""
    recomputed = ", blocks recomputed" if a["recompute"] else ""
    return (
        f"{a['family']} of {result['parameters'] / 1e6:.1f}M parameters{lora}{recomputed}, {a['ranks']} ranks on "
        f"{result['device']}, {a['precision']}, reduced in {a['reduce_dtype']}, {a['accumulate']} x {a['micro_batch']} "
        f"x {a['seq']} tokens per rank, {a['rounds']} rounds, malloc {a['malloc']}, torch {result['torch']}"
    )


if __name__ == "__main__":
    sys.exit(main())
