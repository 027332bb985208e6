"""Tables of the campaign on a card, from results/gpu*.json: what held, speed beside FSDP2, offload beside resident."""

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
    "optimizers": "Muon and AdamW with moments of 8 bits: stage 3 has the bits of stage 0",
    "experts": "a mixture of experts in grouped products: likewise",
    "bases": "adapters on bases of nf4, int8 and fp8: the bits of the decoded base",
    "weights": "a stream of weights: the bits of an export",
    "sequence": "two ranks over gloo share packed sequences out: losses of one process, 1e-4; also by flex attention",
    "offload.bits": "states at every place: the bits of resident where the card updates, 5e-3 where the host does",
    "edges": "gradient penalty, hidden outputs, recomputed statistics, freezing: stage 3 as stage 0",
    "loops": "transformers' Trainer and Accelerate in bf16: stage 3, on one process trained as 2, as stage 0",
    "largest": "two steps of the largest Llama of which the planner says that it fits: its bytes, 2 %",
    "train": "`zero3d train`, export, `--resume=auto`, memory by consumer",
}
CALLED = {
    "plain": "plain PyTorch", "zero3d-0": "zero3d stage 0", "zero3d-3": "zero3d stage 3",
    "zero3d-cast-3": "zero3d stage 3, weights cast", "fsdp2-reshard": "FSDP2, reshard",
}  # fmt: skip
TURNS = {
    "turns.8k": "8,192 tokens", "turns.8k-compiled": "8,192 tokens, compiled",
    "turns.16k": "16,384 tokens", "turns.16k-compiled": "16,384 tokens, compiled",
}  # fmt: skip
WAYS = {
    "resident": "all on the card", "device": "optimizer on the host, updated by the card",
    "host": "optimizer on the host, updated there", "gradients": "gradients there, too",
    "params": "optimizer and parameters on the host, updated by the card",
}  # fmt: skip
IN_SHORT = (
    "In short: this Llama of {parameters} M parameters on {ranks} CPU ranks, with one micro-batch a step and "
    "PyTorch {torch}, takes {cast_peak} of FSDP2's memory at a step's peak, {cast_rest} between steps and "
    "{cast_process} of process memory with `zero.weights=cast`, and {kept_peak}, {kept_rest} and {kept_process} "
    "with weights kept. On the one GPU, with one rank and PyTorch {card_torch}, stage 3 allocated {allocated} and "
    "reserved {reserved} ([the card](#on-a-gpu)); that was before gradients and weights came and went, and has "
    "not been measured since."
)
FILES = ("gpu", "gpu-features", "gpu-offload", "gpu-largest", "gpu-turns")  # the oldest first


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Return the card of each call and what it found, by part, the oldest first."""
    return [(card(result), result["parts"]) for name in FILES for result in results(name)]


def card(result: dict[str, Any]) -> str:
    """Return the name of a call's card without its maker's and its memory: "H100"."""
    name: str = result["card"]
    return name.split()[1]


def parts() -> dict[str, Any]:
    """Return what every part found when it ran last."""
    return {name: found for _, call in calls() for name, found in call.items()}


def outcomes() -> str:
    """Return what held, and what is wrong where it did not."""
    rows = []
    for name, what in SHOWN.items():
        found = parts()[name]
        wrong = "; ".join(f"{case}: {why}" for case, why in found["failed"].items())
        rows.append([name, what, found["outcome"] + (f": {wrong}" if wrong else "")])
    return table(["part", "what", "outcome"], rows)


def speed() -> str:
    """Return tokens/s and memory of each way to train, in turns in one process, by tokens of a step."""
    rows = []
    for name, setting in TURNS.items():
        found = parts()[name]["ran"]
        peer = found["fsdp2-reshard"]
        for way, called in CALLED.items():
            if way not in found:  # a way that was not there yet
                continue
            ran = found[way]
            rate = ran["tokens_per_s"]
            told = f"{rate:,.0f}", f"{rate / peer['tokens_per_s']:.3f}x", f"{ran['mfu']:.1%}"
            peaks = [f"{ran[key]:.1f} ({ran[key] / peer[key]:.2f}x)" for key in ("peak_gib", "peak_reserved_gib")]
            rows.append([setting, called, *told, *peaks])
    head = ["a step", "", "tokens/s", "of FSDP2", "MFU", "GiB allocated (of FSDP2)", "GiB reserved (of FSDP2)"]
    return table(head, rows)


def memory_in_short(words: str) -> str:
    """Return in a sentence how much memory stage 3 takes beside FSDP2, on CPU ranks and on the card.

    words  with places for what is filled in
    """
    [run] = [run for run in results("engines-memory") if run["arguments"]["timeline"]]
    ratio = {(row["kind"], row["ours"]): row["ratio"] for row in run["ratios"]}
    card_ratios = {
        key: [parts()[name]["ran"]["zero3d-3"][key] / parts()[name]["ran"]["fsdp2-reshard"][key] for name in TURNS]
        for key in ("peak_gib", "peak_reserved_gib")
    }
    filled = {
        "parameters": f"{run['parameters'] / 1e6:.0f}",
        "ranks": run["arguments"]["ranks"],
        "torch": run["torch"].partition("+")[0],
        "card_torch": load("gpu-turns")["torch"].partition("+")[0],
        "allocated": _least_most(card_ratios["peak_gib"]),
        "reserved": _least_most(card_ratios["peak_reserved_gib"]),
    }
    for name, variant in (("kept", "zero3d-3"), ("cast", "zero3d-cast-3")):
        for moment, kind in (("peak", "peak of a step"), ("rest", "at rest"), ("process", "process memory")):
            filled[f"{name}_{moment}"] = f"{ratio[kind, variant]:.2f}x"
    return words.format(**filled)


def _least_most(ratios: list[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}x"


def products() -> str:
    """Return tokens/s with linear layers in bf16 and in fp8, blocks compiled."""
    found = parts()["fp8"]["ran"]
    rows = []
    for name in ("bf16", "fp8"):
        rate, peak = found[name]["tokens_per_s"], found[name]["peak_gib"]
        rows.append([name, f"{rate:,.0f}", f"{rate / found['bf16']['tokens_per_s']:.3f}x", f"{peak:.1f}"])
    return table(["linear layers", "tokens/s", "of bf16", "peak GiB"], rows)


def offload() -> str:
    """Return tokens/s by where the states are, for a small and two large steps, beside resident in the same call."""
    sizes = (8192, 131072, 262144)
    rows = []
    for name, called in WAYS.items():
        on, call = next(
            (on, call) for on, call in reversed(calls()) if f"offload.{name}" in call and "offload.resident" in call
        )
        found, resident = call[f"offload.{name}"]["ran"], call["offload.resident"]["ran"]
        cells = [called, on]
        for size in (f"{size} tokens a step" for size in sizes):
            row = found.get(size)
            of = f"{row['tokens_per_s'] / resident[size]['tokens_per_s']:.2f}x" if row else ""
            cells.append(f"{row['tokens_per_s']:,.0f} ({of})" if row else "")
        peaks = [ran["peak_gib"] for what, ran in found.items() if what.startswith("utilisation")]
        rows.append([*cells, f"{max(peaks):.1f}"])
    return table(["states", "card", *(f"{size:,} tokens a step, tokens/s" for size in sizes), "peak GiB"], rows)


def ceilings() -> str:
    """Return what the machine gives."""
    ran = parts()["ceilings"]["ran"]
    return table(["ceiling", ""], [[what, f"{value:,.1f}"] for what, value in ran.items() if what != "shape"])


def of_card() -> str:
    """Return where the figures are from."""
    machine = results("gpu")[0]
    where = f"{machine['cpus']} cores, torch {machine['torch']}, NCCL {machine['nccl']}"
    told = "; ".join(
        f"`{name}.json`, {card(results(name)[0])}, commit {load(name)['commit']}, {load(name)['date']}"
        for name in FILES
    )
    return f"({where}; in `benchmarks/results`, of which a later file replaces what an earlier one has: {told}.)"


GPU: dict[str, Callable[[], str]] = {
    "memory-in-short": lambda: memory_in_short(IN_SHORT),
    "gpu-parts": outcomes, "gpu-speed": speed, "gpu-fp8": products, "gpu-offload": offload,
    "gpu-ceilings": ceilings, "gpu-card": of_card,
}  # fmt: skip
