"""What only a machine with a GPU can show about zero3d, in three calls of at most ten minutes.

    python benchmarks/gpu_check.py --json out.json             on the card
    python benchmarks/gpu_check.py --json out.json --resume    what an earlier call has not finished
    python benchmarks/gpu_check.py --device cpu --json out.json    gloo and the CPU in their place

Every part (the table `PARTS` below) runs in a fresh process with a limit of its own; one that fails, hangs or
crashes is reported and the next one runs. The file is valid JSON at any moment and holds what the running part
has found so far. The last lines are figures that have a goal. On the CPU the same code trains smaller shapes, which
the file states, and what needs a card is skipped with a reason. Exit code: 0 all parts hold, 1 some do not, 2 no such
device, bad input, or a package that all parts need.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from campaign.account import Place
from campaign.calls import Call, Part, machine, run_all
from campaign.record import Record

CALL_S = {"cuda": 595.0, "cpu": 595.0}  # of a call with the default --minutes
HF = ("transformers",)
SPEED = ("plain", "zero3d-0", "zero3d-3", "fsdp2-reshard")
OFFLOAD = (
    ("resident", 28, "8 + 4 to build 1.1e9 + 4 steps x 0.15 + 3 x 2.2 + 2 x 4.4"),
    ("host", 41, "8 + 6 to build and pin 14 GB + 4 steps x 1.5 + 3 x 3.3 + 2 x 5.5"),
    ("device", 41, "8 + 6 to build and pin 14 GB + 4 steps x 1.5 + 3 x 3.3 + 2 x 5.5"),
    ("gradients", 64, "8 + 6 to build and pin 18 GB + 4 steps x 2.8 + 3 x 6 + 2 x 10"),
    ("params", 44, "8 + 6 to build and pin 16 GB + 4 steps x 1.7 + 3 x 3.5 + 2 x 6"),
    ("activations", 25, "8 + 6 to build and pin 2 GB + 4 steps x 0.2 + 3 x 2.9"),
    ("disk", 65, "8 + 15 to build and write 14 GB + 4 steps x 6 + 3 x 6"),
)
TURNS = (
    ("8k", 52, "8 + 10 turns x (4 to build 1.1e9 + 3 steps to warm up x 0.15)"),
    ("16k", 57, "8 + 10 turns x (4 to build 1.1e9 + 3 steps to warm up x 0.3)"),
    ("8k-compiled", 94, "8 + 5 turns x 4 to build 1.1e9 + 26 to compile a block + 4 x 10 to find it compiled"),
    ("16k-compiled", 99, "8 + 5 turns x 5 to build 1.1e9 + 26 to compile a block + 4 x 10 to find it compiled"),
)
SPEED_MINUTES = (
    1.2  # 18 s for each of four: 2 to 4 s a turn, 15 steps and more of 8,192 tokens at 0.4 of an H200's peak
)
CPU_LIMIT_S, CPU_SPEED_S = 90.0, 2.0


# A process takes about 8 s before its first kernel: 3 s to import torch and zero3d, 2 s for the CUDA context and
# libraries, 3 s for NCCL's first communicator. A training of the middle GPT takes about 0.5 s with its engine.
PARTS = (
    Part("ceilings", "campaign.ceilings:ceilings", 25, 12, "8 + 24 copies of 1 GiB x 0.04 + pinning 2 GiB"),
    Part("parity", "campaign.numbers:parity", 28, 11, "8 + 5 trainings of the small GPT x 0.5"),
    Part("nccl", "campaign.loopback:nccl", 50, 38, "8 + 4 communicators x 1 + 52 trainings x 0.5"),
    Part("streams.late", "campaign.streams:late", 50, 25, "8 + 18 trainings x 0.5 + 16 of them x 0.8 asleep"),
    Part("streams.sanitizer", "campaign.streams:sanitizer", 45, 32, "8 + 8 trainings x 3 steps x 5,000 calls x 0.2 ms"),
    Part("syncs", "campaign.host:syncs", 28, 11, "8 + 4 trainings of 3 steps x 0.7"),
    Part("memory", "campaign.holdings:memory", 60, 30, "8 + 4 trainings x 1 + 200 steps x 0.04 + 24 lengths x 0.4"),
    Part("bits.deterministic", "campaign.numbers:deterministic", 28, 12, "8 + 8 trainings x 0.5"),
    Part("bits.default", "campaign.numbers:default", 28, 12, "8 + 8 trainings x 0.5"),
    Part("shared", "campaign.numbers:shared", 40, 22, "3 + 8 for two ranks + 9 trainings x 1.2: gloo by the host"),
    Part("threads", "campaign.threads:threads", 40, 16, "8 + 6 trainings on 2 to 8 threads x 1.3"),
    Part("edges", "campaign.edges:edges", 25, 12, "8 + 8 trainings x 0.5"),
    Part(
        "loops",
        "campaign.edges:loops",
        40,
        18,
        "8 + 5 for Trainer and Accelerate + 4 trainings x 1",
        needs=(*HF, "accelerate"),
    ),
    Part("optimizers", "campaign.features:optimizers", 30, 13, "8 + 4 trainings x 1.2"),
    Part("experts", "campaign.features:experts", 30, 14, "8 + 3 for transformers + 2 trainings x 1.5", needs=HF),
    Part(
        "bases",
        "campaign.features:bases",
        45,
        22,
        "8 + 6 for transformers and PEFT + 8 trainings x 1",
        needs=(*HF, "peft"),
    ),
    Part("weights", "campaign.features:weights", 30, 13, "8 + 3 for transformers + 2", needs=HF),
    Part(
        "sequence",
        "campaign.features:sequence",
        80,
        45,
        "3 + 10 for two ranks + 3 trainings x 2 + 20 to compile masks and attention",
        needs=HF,
    ),
    Part(
        "hybrids",
        "campaign.hybrids:hybrids",
        105,
        60,
        "8 + 3 for transformers + 5 types x 2 dtypes x 3 to compile kernels + 2 x (5 to build + 4 to compile)",
        timed=True,
        needs=HF,
    ),
    Part(
        "train",
        "campaign.command:train",
        60,
        45,
        "2 commands x (3 for the launcher + 8 + 11 for data and export)",
        needs=(*HF, "rich"),
    ),
    Part(
        "step",
        "campaign.host:step",
        40,
        20,
        "4 + 32 blocks on the CPU: 6 to build, 3 steps x 3",
        on_host=True,
        needs=HF,
    ),
    *(
        Part(f"turns.{name}", "campaign.turns:turns", 1.8 * planned, planned, why, timed=True)
        for name, planned, why in TURNS
    ),
    *(
        Part(f"speed.{name}", "campaign.speed:speed", 30, 19, "8 + 4 to build 1.1e9 + 2 + 5 to profile")
        for name in SPEED
    ),
    Part(
        "fp8",
        "campaign.features:fp8",
        120,
        60,
        "8 + 2 x (5 to build 1.1e9 + 15 to compile a block)",
        timed=True,
        needs=("torchao",),
    ),
    Part("offload.bits", "campaign.tiers:bits", 32, 15, "8 + 8 trainings x 0.8"),
    *(Part(f"offload.{name}", "campaign.tiers:offload", 1.4 * planned, planned, why) for name, planned, why in OFFLOAD),
    Part("largest", "campaign.largest:largest", 150, 90, "8 + 25 to build 11e9 + 30 to pin 130 GB + 2 steps x 13"),
)


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    begun = time.monotonic()
    arguments = parse(argv, parts)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check needs a CUDA device and torch sees none: nothing was checked. Pass --device cpu to run what "
            "the CPU can stand in for.",
            file=sys.stderr,
        )
        return 2
    try:
        record = Record(arguments.json, machine(arguments.device), arguments.resume)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    wanted = chosen(parts, arguments)
    places = {part.name: place_of(part, wanted, arguments) for part in wanted}
    lasts = max(CALL_S[arguments.device], sum(place.limit_s for place in places.values()) if longer(arguments) else 0)
    return run_all(wanted, places, record, Call(begun, lasts, arguments.resume))


def parse(argv: Sequence[str] | None, parts: Sequence[Part] = PARTS) -> argparse.Namespace:
    """Return the command line; bad input exits with code 2."""
    names = list(dict.fromkeys(name for part in parts for name in (part.name.partition(".")[0], part.name)))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the parts run")
    parser.add_argument(
        "--minutes", type=float, help=f"time for the comparison of speed (default {SPEED_MINUTES:g}); 0 leaves it out"
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, metavar="PART,...", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--peak-tflops", type=float, help="the card's dense bf16 peak, if it is not a known one")
    parser.add_argument("--json", type=Path, help="file for everything measured; valid at any moment")
    parser.add_argument("--resume", action="store_true", help="leave out parts that have a result in that file")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]!r} is no part: pass some of {', '.join(names)}")
    if arguments.minutes is not None and not 0 <= arguments.minutes < float("inf"):
        parser.error(f"--minutes {arguments.minutes:g} is no time: pass 0 or more")
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes on from a file: pass --json FILE, too")
    return arguments


def chosen(parts: Sequence[Part], arguments: argparse.Namespace) -> list[Part]:
    """Return the parts that were asked for, by name or by what stands before its dot."""
    named = [part for part in parts if {part.name, part.name.partition(".")[0]} & set(arguments.only)]
    return [part for part in named if not part.timed or arguments.minutes != 0]


def longer(arguments: argparse.Namespace) -> bool:
    """Return whether more time was asked for than a call has by itself."""
    return arguments.minutes is not None and arguments.minutes > SPEED_MINUTES


def place_of(part: Part, wanted: Sequence[Part], arguments: argparse.Namespace) -> Place:
    """Return where and how long a part runs; timed ones share --minutes."""
    on_cpu = arguments.device == "cpu"
    share = 0.0
    if part.timed:
        sharing = sum(other.timed for other in wanted)
        given = arguments.minutes if arguments.minutes is not None or not on_cpu else CPU_SPEED_S / 60 * sharing
        share = 60 * (SPEED_MINUTES if given is None else given) / sharing
    limit = CPU_LIMIT_S if on_cpu else part.limit_s
    return Place(part.name, "cpu" if on_cpu or part.on_host else "cuda:0", limit + share, share, arguments.peak_tflops)


if __name__ == "__main__":
    sys.exit(main())
