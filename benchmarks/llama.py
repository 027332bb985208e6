"""Tokens/s and model FLOP/s utilisation (MFU) of a 1B Llama shape on one card, in bf16.

Like for like: the same weights, tokens, dtypes, optimizer and clip (`peers.py`), no activation
recomputation, no compilation. A step's time includes its update. MFU counts 6 FLOPs per parameter
and token (the embedding's lookup apart) plus 12 x layers x hidden x length for attention
(Chowdhery et al., "PaLM" (2022), appendix B), over the card's dense bf16 peak if that is known;
beside it, over a matrix product measured now.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from model import batch
from peers import Variant
from ranks import synchronize
from torch import Tensor, nn

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


def measure_speed(
    device: torch.device, variant: Variant, seconds: float, shape: dict[str, Any], size: int, length: int
) -> dict[str, Any]:
    """Time a variant's steps for `seconds`, at least five after three to warm up; losses of the first and last."""
    deadline = time.monotonic() + seconds
    times: list[float] = []
    losses: list[Tensor] = []
    while len(losses) < WARM_UP + FEWEST or time.monotonic() < deadline:
        tokens = batch(len(losses), size, length, shape["vocab_size"], device)
        synchronize(device)
        begun = time.perf_counter()
        losses.append(variant.step(*tokens))
        synchronize(device)
        times.append(time.perf_counter() - begun)
    counted = times[WARM_UP:]
    return {
        "tokens_per_s": size * length / median(counted),
        "median_s": median(counted),
        "min_s": min(counted),
        "steps": len(counted),
        "first_loss": float(losses[0]),
        "loss": float(losses[-1]),
    }


def utilisation(
    device: torch.device, row: dict[str, Any], shape: dict[str, Any], length: int, peak_tflops: float | None
) -> dict[str, float | None]:
    """Return model TFLOP/s against the card's peak and against a matrix product measured now; peak memory."""
    flops = row["tokens_per_s"] * flops_per_token(shape, length)
    if device.type != "cuda":
        return {"model_tflops": flops / 1e12}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    known = peak_tflops or next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    product = matmul_tflops(device)
    return {
        "model_tflops": flops / 1e12,
        "mfu": flops / 1e12 / known if known else None,
        "matmul_tflops": product,
        "of_matmul": flops / 1e12 / product,
        "peak_gib": allocated / 2**30,
        "peak_reserved_gib": reserved / 2**30,
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
