"""What only a machine with a GPU can show about zero3d, in one run.

    parity   1 rank, fp32: losses and gradient norms of stages 0-3 on the card equal those on the CPU
    nccl     1 rank: NCCL's in-place collectives are right; bf16 losses of stages 0-3 equal a plain loop's
    shared   2 ranks on one card over gloo, fp32: every stage equals 1 process with the same global batch
    streams  stage 3: every gather is issued before compute joins it and joined before it is freed, some
             run ahead, and the losses are those of stage 0, which has no side stream to get wrong
    memory   what CUDA's allocator holds after a step is what `engine.memory` planned
    speed    only with --minutes: tokens/s and MFU of a 1B Llama shape beside plain PyTorch and FSDP2

    python benchmarks/gpu_check.py --minutes 6 --json out.json

Every check runs in fresh processes (workers in `gpu_workers.py`, speed in `llama.py`); one that
fails, hangs or crashes is reported and the next one runs. Exit code: 0 all passed, 1 some failed,
2 no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_workers import STAGES, Curve, Run, device_memory, native_collectives, stage_curves, stream_log
from llama import compare_speed
from model import Shape
from ranks import Start, run_ranks

FP32_TOLERANCE = 1e-4  # relative, over a few steps of Adam
BF16_TOLERANCE = 5e-3
MEMORY_SLACK = 0.01  # of the plan, and 2 MiB: the allocator rounds every block up
TIMEOUT_S = 300.0
CARD = "cuda:0"

CPU = Start(1, "gloo", "cpu", "default", TIMEOUT_S)
NCCL = Start(1, "nccl", CARD, "default", TIMEOUT_S)
TWO_ON_ONE_CARD = Start(2, "gloo", CARD, "default", TIMEOUT_S)

SMALL = Run(Shape(layers=2, d=128, vocab=512), batch=8, seq=64, steps=4)
MIDDLE = Run(Shape(layers=4, d=512, vocab=8192), batch=8, seq=256, steps=4)


class CheckFailed(Exception):
    """A check ran and found something wrong; `detail` holds the numbers."""

    def __init__(self, message: str, detail: Any) -> None:
        super().__init__(message)
        self.detail = detail


class Check(NamedTuple):
    """`run(arguments)` returns what it measured, or raises."""

    name: str
    run: Callable[[argparse.Namespace], Any]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and torch sees none: nothing was checked.", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal runs give equal bits
    wanted = [check for check in CHECKS if check.name in arguments.only]
    if not arguments.minutes:
        wanted = [check for check in wanted if check.name != "speed"]
    results = []
    for check in wanted:
        results.append(attempt(check, arguments))
        report(results[-1])
        if arguments.json:
            save(arguments.json, results)
    return 0 if all(result["passed"] for result in results) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="time for the speed comparison; 0 leaves it out")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, metavar=",".join(names))
    parser.add_argument("--peak-tflops", type=float, help="the card's dense bf16 peak, if it is not a known one")
    parser.add_argument("--json", type=Path, help="file for everything measured; rewritten after every check")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]!r} is no check: pass some of {', '.join(names)}")
    if arguments.minutes < 0:
        parser.error(f"--minutes {arguments.minutes:g} is negative")
    return arguments


def attempt(check: Check, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one check; whatever happens becomes a result."""
    begun = time.monotonic()
    outcome: dict[str, Any]
    try:
        outcome = {"passed": True, "detail": check.run(arguments)}
    except CheckFailed as failure:
        outcome = {"passed": False, "error": str(failure), "detail": failure.detail}
    except Exception as error:  # noqa: BLE001 - a check may die of anything, and the others still have to run
        outcome = {"passed": False, "error": f"{type(error).__name__}: {error}", "detail": None}
    return {"name": check.name, "seconds": round(time.monotonic() - begun, 1), **outcome}


def report(result: dict[str, Any]) -> None:
    """One check as text."""
    print(f"{'passed' if result['passed'] else 'FAILED'}  {result['name']}  ({result['seconds']:.1f} s)")
    if "error" in result:
        print("    " + result["error"].strip().replace("\n", "\n    "))
    if isinstance(result["detail"], dict):
        for key, value in result["detail"].items():
            print(f"    {key}: {value}")
    sys.stdout.flush()


def save(path: Path, results: list[dict[str, Any]]) -> None:
    """Everything so far, as JSON."""
    card = torch.cuda.get_device_properties(0)
    machine = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "card": card.name,
        "card_bytes": card.total_memory,
        "cpus": os.cpu_count(),
    }
    path.write_text(json.dumps({**machine, "checks": results}, indent=1) + "\n")


# --- checks -------------------------------------------------------------------------------------


def check_parity(_: argparse.Namespace) -> dict[str, float]:
    """Card against CPU."""
    reference = run_ranks(CPU, stage_curves, SMALL)
    return compare_curves(run_ranks(NCCL, stage_curves, SMALL), reference, FP32_TOLERANCE)


def check_nccl(_: argparse.Namespace) -> dict[str, Any]:
    """One rank whose process group is NCCL."""
    faults = run_ranks(NCCL, native_collectives)
    if faults:
        raise CheckFailed("NCCL's collectives as zero3d calls them: " + "; ".join(faults), faults)
    curves = run_ranks(NCCL, stage_curves, MIDDLE._replace(precision="bf16", plain=True))
    plain = curves.pop("plain")
    return compare_curves(curves, dict.fromkeys(curves, plain), BF16_TOLERANCE)


def check_shared(_: argparse.Namespace) -> dict[str, float]:
    """Two ranks on one card against one process."""
    reference = run_ranks(NCCL, stage_curves, SMALL)
    return compare_curves(run_ranks(TWO_ON_ONE_CARD, stage_curves, SMALL), reference, FP32_TOLERANCE)


def check_streams(_: argparse.Namespace) -> dict[str, Any]:
    """Order on the side streams, and what they computed."""
    found = run_ranks(NCCL, stream_log, MIDDLE)
    detail = {key: found[key] for key in ("events", "ahead", "difference", "identical")}
    if found["faults"]:
        raise CheckFailed(f"{len(found['faults'])} events out of order, first: {found['faults'][0]}", found)
    if not found["ahead"]:
        raise CheckFailed("no gather ran ahead of the unit in use: there is no prefetch", detail)
    if not found["difference"] <= FP32_TOLERANCE:  # NaN must fail too
        raise CheckFailed(f"stage 3 is {found['difference']:.2e} off stage 0: released or read too early", detail)
    return detail


def check_memory(_: argparse.Namespace) -> dict[str, Any]:
    """CUDA's account against the engine's plan."""
    rows = {f"stage {stage}": run_ranks(NCCL, device_memory, MIDDLE, stage) for stage in STAGES}
    for name, row in rows.items():
        allowed = MEMORY_SLACK * row["planned"] + (2 << 20)
        if row["arena"] != row["planned"]:
            raise CheckFailed(f"{name}: the arena holds {row['arena']} bytes, {row['planned']} were planned", rows)
        if abs(row["allocated"] - row["planned"]) > allowed:
            raise CheckFailed(f"{name}: CUDA holds {row['allocated']} bytes, {row['planned']} were planned", rows)
    return rows


def check_speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s and MFU; fails only when a variant cannot be measured."""
    rows = compare_speed(CARD, arguments.minutes * 60, arguments.peak_tflops)
    broken = [name for name, row in rows.items() if "error" in row]
    if broken:
        raise CheckFailed(f"not measured: {', '.join(broken)}", rows)
    return rows


def compare_curves(found: dict[str, Curve], reference: dict[str, Curve], tolerance: float) -> dict[str, float]:
    """Largest relative difference of losses and norms by stage."""
    differences = {name: difference(curve, reference[name]) for name, curve in found.items()}
    wrong = [name for name, value in differences.items() if not value <= tolerance]  # NaN is wrong
    if wrong:
        detail = {"differences": differences, "found": found, "reference": reference}
        raise CheckFailed(f"{', '.join(wrong)}: differ by more than {tolerance:g}", detail)
    return differences


def difference(a: Curve, b: Curve) -> float:
    """Largest relative difference; NaN when either has one."""
    pairs = [*zip(a["losses"], b["losses"], strict=True), *zip(a["norms"], b["norms"], strict=True)]
    values = [abs(x - y) / max(abs(y), 1e-30) for x, y in pairs]
    return max(values) if all(value == value for value in values) else float("nan")


CHECKS = (
    Check("parity", check_parity),
    Check("nccl", check_nccl),
    Check("shared", check_shared),
    Check("streams", check_streams),
    Check("memory", check_memory),
    Check("speed", check_speed),
)


if __name__ == "__main__":
    sys.exit(main())
