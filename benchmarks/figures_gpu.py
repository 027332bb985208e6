"""Tables of the campaign on a card, from results/gpu.json: what held, speed beside FSDP2, offload beside resident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures_measured import results, table
from recorded import load

SHOWN = {
    "ceilings": "copies of pinned memory, the card's memory, a matrix product",
    "parity": "stages 0 to 3 in fp32 against a plain loop on the CPU: 1e-4",
    "nccl": "collectives of one rank through NCCL; stages 0 to 3, fp32 and bf16, accumulated: equal bits",
    "streams.late": "gathers, reductions, compute late in turns; fresh memory filled with NaN: equal bits",
    "streams.sanitizer": "CUDA's sanitizer of torch: accesses in no order",
    "syncs": "operations that wait for the card in forward, backward and step",
    "memory": "bytes of states beside the formula; 200 steps of varying lengths",
    "bits.deterministic": "repeated trainings with `make_deterministic`: equal bits",
    "bits.default": "the same without: a finding",
    "shared": "two ranks over gloo on one card against one process: 1e-4",
    "edges": "gradient penalty, hidden outputs, recomputed statistics, freezing: stage 3 as stage 0",
    "loops": "transformers' Trainer and Accelerate in bf16: stage 3, on one process trained as 2, as stage 0",
    "train": "`zero3d train`, export, `--resume=auto`, memory by consumer",
}
CALLED = {
    "plain": "plain PyTorch", "zero3d-0": "zero3d stage 0", "zero3d-3": "zero3d stage 3",
    "fsdp2-reshard": "FSDP2, reshard",
}  # fmt: skip
WAYS = {
    "resident": "all on the card", "device": "optimizer on the host, updated by the card",
    "host": "optimizer on the host, updated there", "gradients": "gradients there, too",
    "params": "optimizer and parameters on the host, updated by the card",
}  # fmt: skip


def parts() -> dict[str, Any]:
    """Return what every part found."""
    return {name: found for result in results("gpu") for name, found in result["parts"].items()}


def outcomes() -> str:
    """Return what held, and what is wrong where it did not."""
    rows = []
    for name, what in SHOWN.items():
        found = parts()[name]
        wrong = "; ".join(f"{case}: {why}" for case, why in found["failed"].items())
        rows.append([name, what, found["outcome"] + (f": {wrong}" if wrong else "")])
    return table(["part", "what", "outcome"], rows)


def speed() -> str:
    """Return tokens/s of each way to train, and what the card did meanwhile."""
    found = {name: parts()[f"speed.{name}"]["ran"] for name in CALLED}
    peer = found["fsdp2-reshard"]["speed"]["tokens_per_s"]
    rows = []
    for name, called in CALLED.items():
        ran = found[name]
        rate, used, device = ran["speed"]["tokens_per_s"], ran["utilisation"], ran["device"]
        rows.append(
            [
                called, f"{rate:,.0f}", f"{rate / peer:.3f}x", f"{used['mfu']:.1%}", f"{device['kernels']:,.0f}",
                f"{device['idle_ms']:.1f} of {device['step_ms']:.1f} ms", f"{used['peak_gib']:.1f}",
            ]
        )  # fmt: skip
    return table(["", "tokens/s", "of FSDP2", "MFU", "kernels a step", "idle of a step", "peak GiB"], rows)


def offload() -> str:
    """Return tokens/s by where the states are, for a small and a large step."""
    found = {name: parts()[f"offload.{name}"]["ran"] for name in WAYS}
    sizes = ("8192 tokens a step", "131072 tokens a step")
    rows = []
    for name, called in WAYS.items():
        cells = [called]
        for size in sizes:
            row = found[name].get(size)
            of = "" if row is None else f"{row['tokens_per_s'] / found['resident'][size]['tokens_per_s']:.2f}x"
            cells.append(f"{row['tokens_per_s']:,.0f} ({of})" if row else f"{parts()[f'offload.{name}']['outcome']}")
        peaks = [ran["peak_gib"] for what, ran in found[name].items() if what.startswith("utilisation")]
        rows.append([*cells, f"{max(peaks):.1f}"])
    return table(
        ["states", *(size.replace("tokens a step", "tokens a step, tokens/s") for size in sizes), "peak GiB"], rows
    )


def ceilings() -> str:
    """Return what the machine gives."""
    ran = parts()["ceilings"]["ran"]
    return table(["ceiling", ""], [[what, f"{value:,.1f}"] for what, value in ran.items() if what != "shape"])


def of_card() -> str:
    """Return where the figures are from, in one line."""
    machine, file = results("gpu")[0], load("gpu")
    where = f"{machine['card']}, {machine['cpus']} cores, torch {machine['torch']}, NCCL {machine['nccl']}"
    return f"(`benchmarks/results/gpu.json`: commit {file['commit']}, {file['date']}, {where}.)"


GPU: dict[str, Callable[[], str]] = {
    "gpu-parts": outcomes, "gpu-speed": speed, "gpu-offload": offload, "gpu-ceilings": ceilings, "gpu-card": of_card,
}  # fmt: skip
