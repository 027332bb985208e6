"""Tokens/s and model FLOP/s utilisation (MFU) of a 1B Llama shape on one card, in bf16.

Like for like: the same weights, tokens, dtypes, optimizer and clip (`peers.py`), no activation
recomputation, no compilation. Every variant has the card to itself, one after the other; a step's
time includes its update. MFU counts 6 FLOPs per parameter and token (the embedding's lookup
apart) plus 12 x layers x hidden x length for attention (Chowdhery et al., "PaLM" (2022), appendix
B), over the card's dense bf16 peak if that is known; beside it, over a matrix product measured now.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from model import batch
from peers import Setting, build_variant
from ranks import Start, run_ranks, synchronize
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException

VARIANTS = ("plain", "zero3d-0", "zero3d-3", "fsdp2-noreshard", "fsdp2-reshard")
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
BATCH, LENGTH = 4, 2048
WARM_UP, FEWEST = 3, 5
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}  # dense bf16, SXM


class Llama(nn.Module):
    """A Hugging Face Llama whose call returns the mean loss."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(**shape))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids [B, T], targets [B, T] -> mean loss (fp32)."""
        logits = self.inner(input_ids=ids, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compare_speed(card: str, seconds: float, peak_tflops: float | None) -> dict[str, dict[str, Any]]:
    """All variants in about `seconds`; one that fails has an "error" and nothing else."""
    share = seconds / len(VARIANTS)
    start = Start(1, "nccl", card, "default", timeout_s=share + 300)
    rows: dict[str, dict[str, Any]] = {}
    for name in VARIANTS:
        try:
            rows[name] = run_ranks(start, measure_speed, name, share, peak_tflops, SHAPE, BATCH, LENGTH)
        except (ProcessException, TimeoutError) as error:  # out of memory on a small card, for one
            rows[name] = {"error": str(error).strip().splitlines()[-1]}
    for name, row in rows.items():
        if "error" not in row and "error" not in rows["plain"]:
            rows[name]["of_plain"] = row["tokens_per_s"] / rows["plain"]["tokens_per_s"]
    return rows


def measure_speed(
    device: torch.device,
    name: str,
    seconds: float,
    peak_tflops: float | None,
    shape: dict[str, Any],
    size: int,
    length: int,
) -> dict[str, Any]:
    """One variant alone: median step within `seconds`, construction included, at least five steps."""
    deadline = time.monotonic() + seconds
    variant = build_variant(name, Setting(lambda: _build(device, shape), device))
    times: list[float] = []
    loss = torch.tensor(float("nan"))
    step = 0
    while step < WARM_UP + FEWEST or time.monotonic() < deadline:
        tokens = batch(step, size, length, shape["vocab_size"], device)
        synchronize(device)
        begun = time.perf_counter()
        loss = variant.step(*tokens)
        synchronize(device)
        if step >= WARM_UP:
            times.append(time.perf_counter() - begun)
        step += 1
    rate = size * length / median(times)
    flops = rate * flops_per_token(shape, length)
    return {
        "tokens_per_s": rate,
        "median_s": median(times),
        "min_s": min(times),
        "steps": len(times),
        "loss": float(loss),
        **utilisation(device, flops, peak_tflops),
    }


def utilisation(device: torch.device, flops: float, peak_tflops: float | None) -> dict[str, float | None]:
    """Model TFLOP/s against the card's peak and against a matrix product measured now; peak memory."""
    if device.type != "cuda":
        return {"model_tflops": flops / 1e12}
    held = torch.cuda.max_memory_allocated(device)
    name = torch.cuda.get_device_name(device)
    known = peak_tflops or next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    product = matmul_tflops(device)
    return {
        "model_tflops": flops / 1e12,
        "mfu": flops / 1e12 / known if known else None,
        "matmul_tflops": product,
        "of_matmul": flops / 1e12 / product,
        "peak_gib": held / 2**30,
    }


def flops_per_token(shape: dict[str, Any], length: int) -> float:
    """Forward and backward of one token."""
    with torch.device("meta"):
        model = Llama(shape)
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    multiplied = sum(p.numel() for p in model.parameters()) - looked_up
    return 6.0 * multiplied + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length


def matmul_tflops(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """What a large bf16 matrix product reaches on this card."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize(device)
    return 2 * size**3 * repeats / (time.perf_counter() - begun) / 1e12


def _build(device: torch.device, shape: dict[str, Any]) -> nn.Module:
    """On the device at once: a 1B model takes long to fill on the CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(shape)
